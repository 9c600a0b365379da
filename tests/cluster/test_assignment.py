"""Engines over machines: new ones go where there are fewest, and what that means for those that
share a machine.
"""

from __future__ import annotations

import pytest

from moeserve.cluster.assignment import assign_new_engines, initial_machines, num_equal_nodes
from moeserve.cluster.order import role_of
from moeserve.config import ParallelConfig


@pytest.mark.parametrize(
    ("num_new", "engines_on", "machines"),
    [
        (4, {0: 0, 1: 0}, [0, 0, 1, 1]),
        (3, {0: 0, 1: 0}, [0, 0, 1]),
        (2, {0: 2, 1: 2}, [0, 1]),
        (1, {0: 2, 1: 2, 2: 1}, [2]),
        (3, {0: 3, 2: 0}, [2, 2, 2]),
        (2, {0: 5}, [0, 0]),
        (0, {0: 1, 1: 1}, []),
    ],
)
def test_new_engines_go_to_the_machines_with_the_fewest(
    num_new: int, engines_on: dict[int, int], machines: list[int]
) -> None:
    assert assign_new_engines(num_new, engines_on) == machines


@pytest.mark.parametrize(("dp", "nnodes"), [(4, 2), (5, 2), (7, 3), (3, 3)])
def test_a_server_starts_with_engines_side_by_side_and_no_machine_without(
    dp: int, nnodes: int
) -> None:
    machines = initial_machines(ParallelConfig(dp=dp, nnodes=nnodes))
    assert machines == sorted(machines)
    counts = [machines.count(machine) for machine in range(nnodes)]
    assert sum(counts) == dp
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("machines", "number"),
    [
        ([0, 0, 1, 1], 2),
        ([0], 1),
        ([0, 1, 2], 3),
        ([0, 0, 1], 1),
        ([0, 1, 0, 1], 1),
        ([0, 2, 2], 1),
        ([0, 2], 2),
    ],
)
def test_shares_are_equal_where_each_machine_has_as_many_one_after_the_other(
    machines: list[int], number: int
) -> None:
    assert num_equal_nodes(machines) == number


@pytest.mark.parametrize("together", [True, False])
def test_ranks_know_who_shares_their_machine(together: bool) -> None:
    machines = [0, 0, 0, 1, 1]
    worlds = [
        role_of(ParallelConfig(tp=2), rank, machines, None, is_one_group=together).world
        for rank in range(5)
    ]
    assert [world.ranks_on_host for world in worlds] == [6, 6, 6, 4, 4]
    assert [world.host_rank for world in worlds] == [0, 2, 4, 0, 2]
    assert [world.rank for world in worlds] == ([0, 2, 4, 6, 8] if together else [0] * 5)
