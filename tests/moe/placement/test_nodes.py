"""Placements on several machines: router groups stay on one, or an expert's replicas go to
different ones.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.cluster.rebalancing import FleetExperts
from moeserve.config import ParallelConfig
from moeserve.messages import ExpertLoad
from moeserve.moe.placement.placement import Nodes, Placement
from moeserve.moe.placement.rebalance import MoveThresholds, Rebalancer
from moeserve.moe.placement.solve import balance, count_fetched, rank_loads, rescaled, solve
from moeserve.ops.rules import RouterRule
from tests.specs import make_spec

Case = tuple[np.ndarray, Placement, Nodes]


@st.composite
def cases(draw: st.DrawFn, grouped: bool) -> Case:
    """A load with ties and zeros, and the first placement on 2 to 4 nodes of 1 to 3 ranks."""
    number = draw(st.integers(2, 4))
    ranks = draw(st.integers(1, 3))
    layers = draw(st.integers(1, 3))
    groups = number * draw(st.integers(1, 3)) if grouped else 1
    experts = groups * draw(st.integers(1, 4)) if grouped else draw(st.integers(number * ranks, 24))
    redundant = draw(st.integers(0, 16 if grouped else experts))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    load = np.floor(rng.pareto(draw(st.sampled_from([0.5, 1.0, 3.0])), (layers, experts)) * 9)
    nodes = Nodes(number, groups, min_balance=0)
    return load, Placement.initial(layers, experts, number * ranks, redundant, nodes), nodes


def on_nodes(placement: Placement, number: int) -> np.ndarray:
    """Return how many slots of each node have each expert, [L, N, E]."""
    out = np.zeros((placement.num_layers, number, placement.num_experts), int)
    for layer in range(placement.num_layers):
        for rank in range(placement.num_ranks):
            for expert in placement.local_experts(layer, rank):
                out[layer, rank * number // placement.num_ranks, expert] += 1
    return out


def assert_groups_stay(placement: Placement, nodes: Nodes) -> None:
    lies_LNE = on_nodes(placement, nodes.num_nodes) > 0
    lies_LNGs = lies_LNE.reshape(*lies_LNE.shape[:2], nodes.num_groups, -1)
    assert (lies_LNGs.all(3) == lies_LNGs.any(3)).all(), "a group lies in pieces"
    assert (lies_LNGs.all(3).sum(1) == 1).all(), "a group lies on several nodes"
    assert (lies_LNGs.all(3).sum(2) == nodes.num_groups // nodes.num_nodes).all(), (
        "a node has more groups than another"
    )


def assert_replicas_spread(placement: Placement, nodes: Nodes) -> None:
    """Check that each expert with two replicas survives the loss of any node.

    With these counts, more is impossible.
    """
    on_LNE = on_nodes(placement, nodes.num_nodes)
    counts_LE = on_LNE.sum(1)
    assert (counts_LE == placement.counts()).all()
    left_LNE = counts_LE[:, None] - on_LNE
    assert ((left_LNE > 0) == (counts_LE > 1)[:, None] | (on_LNE == 0)).all()


@settings(max_examples=200, deadline=None)
@given(cases(grouped=True))
def test_groups_stay_on_their_node(case: Case) -> None:
    load, start, nodes = case
    new = solve(load, start, 1, nodes)
    for placement in (start, new, rescaled(new, start.num_ranks * 2, 0, 2, load, nodes)):
        assert_groups_stay(placement, nodes)
    assert (rank_loads(load, new).max(1) <= rank_loads(load, start).max(1) + 1e-6).all()
    assert (solve(load, start, 1, nodes).experts_LS == new.experts_LS).all()


@settings(max_examples=200, deadline=None)
@given(cases(grouped=False))
def test_a_lost_node_takes_no_replicated_expert_along(case: Case) -> None:
    load, start, nodes = case
    new = solve(load, start, 1, nodes)
    for placement in (
        start,
        new,
        rescaled(new, start.num_ranks * 2, start.num_experts, 2, load, nodes),
    ):
        assert_replicas_spread(placement, nodes)
    assert (rank_loads(load, new).max(1) <= rank_loads(load, start).max(1) + 1e-6).all()


def least_peak(load_G: np.ndarray, number: int) -> float:
    """The fullest node's load under the best of all ways to share groups evenly."""
    each = len(load_G) // number
    if number == 1:
        return float(load_G.sum())
    rest = range(1, len(load_G))
    ways = []
    for others in combinations(rest, each - 1):  # what lies together with the first group
        left = np.array([load_G[group] for group in rest if group not in others])
        ways.append(max(load_G[0] + sum(load_G[list(others)]), least_peak(left, number - 1)))
    return float(min(ways))


def zipf(layers: int, experts: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    share = np.arange(1, experts + 1) ** -1.0
    return np.stack(
        [rng.multinomial(50_000, rng.permutation(share) / share.sum()) for _ in range(layers)]
    ).astype(float)


@pytest.mark.parametrize(("number", "ranks", "redundant"), [(2, 8, 16), (4, 8, 32), (8, 64, 64)])
def test_nodes_cost_no_more_than_they_must(number: int, ranks: int, redundant: int) -> None:
    load = zipf(6, 256)

    def solved(nodes: Nodes) -> tuple[Placement, np.ndarray]:
        placement = solve(load, Placement.initial(6, 256, ranks, redundant, nodes), 1, nodes)
        return placement, rank_loads(load, placement)

    (_, flat), (_, spread), (placement, grouped) = (
        solved(Nodes()),
        solved(Nodes(number)),
        solved(Nodes(number, 8, min_balance=0)),
    )
    assert (balance(spread) >= balance(flat) - 0.02).all()
    peaks = grouped.reshape(6, number, -1).sum(2).max(1)
    best = np.array([least_peak(row, number) for row in load.reshape(6, 8, 32).sum(2)])
    assert (peaks <= best + 0.03 * load.sum(1) / number).all()
    for layer, node in np.ndindex(6, number):  # each node alone, as if there were no others
        theirs = load[[layer]][:, on_nodes(placement, number)[layer, node] > 0]
        alone = solve(
            theirs, Placement.initial(1, theirs.shape[1], ranks // number, redundant // number), 1
        )
        here = grouped[layer].reshape(number, -1)[node]
        assert here.max() <= 1.03 * rank_loads(theirs, alone).max()


def test_groups_are_packed_as_evenly_as_they_can_be() -> None:
    load = np.repeat(
        [[8.0, 7.0, 2.0, 1.0]], 4, axis=1
    )  # 4 groups of 4 experts; in order, node 0 would have 60 of 72
    nodes = Nodes(2, 4)
    new = solve(load, Placement.initial(1, 16, 4, 0, nodes), 1, nodes)
    assert rank_loads(load, new).reshape(2, 2).sum(1).tolist() == [36.0, 36.0]


def test_one_node_and_odd_numbers_are_as_without_nodes() -> None:
    rng = np.random.default_rng(3)
    load = np.floor(rng.pareto(1.0, (3, 24)) * 9)
    for nodes in (
        Nodes(1, 8),
        Nodes(4, 8),
        Nodes(5),
    ):  # 6 ranks on 4 or 5 nodes do not come out even
        start = Placement.initial(3, 24, 6, 6, nodes)
        assert (start.experts_LS == Placement.initial(3, 24, 6, 6).experts_LS).all()
        assert (solve(load, start, 1, nodes).experts_LS == solve(load, start, 1).experts_LS).all()
    assert Nodes(3, 8).for_ranks(6) == Nodes(
        3
    )  # 8 groups are not shared evenly by 3 nodes: replicas spread


def test_the_same_load_again_moves_no_group() -> None:
    rng = np.random.default_rng(5)
    load = zipf(4, 64)
    nodes = Nodes(2, 8, min_balance=0)
    first = solve(load, Placement.initial(4, 64, 8, 16, nodes), 1, nodes)
    again = solve(load * rng.normal(1, 0.02, load.shape), first, 2, nodes)
    assert count_fetched(first, again).sum() < 0.2 * first.experts_LS.size
    assert ((on_nodes(first, 2) > 0) == (on_nodes(again, 2) > 0)).all()


def test_the_rebalancer_keeps_groups_on_their_nodes() -> None:
    nodes = Nodes(2, 4, min_balance=0)
    start = Placement.initial(2, 16, 4, 4, nodes)
    one = Rebalancer(start, 1, thresholds=MoveThresholds(), nodes=nodes)
    counts = np.tile((16_000 / np.arange(1, 17)).astype("<i8"), (2, 1))
    one.note(ExpertLoad(counts=counts.tobytes(), num_layers=2, version=0), 0.0)
    new = one.propose(1.0)
    assert new is not None
    assert_groups_stay(new, nodes)
    assert_groups_stay(one.next_rescaled(8, 0), nodes)


def test_groups_leave_their_nodes_where_these_would_be_too_uneven() -> None:
    even = np.repeat([8.0, 7.0, 2.0, 1.0], 4)
    uneven = np.repeat([9.0, 1.0, 1.0, 1.0], 4)
    load = np.stack([even, uneven])
    nodes = Nodes(2, 4)
    new = solve(load, Placement.initial(2, 16, 4, 0, nodes), 1, nodes)
    kept = Placement(1, 4, 16, new.experts_LS[:1])
    assert_groups_stay(kept, nodes)
    assert balance(rank_loads(load, new).reshape(2, 2, 2).sum(2)).tolist() == [1.0, 1.0]
    back = solve(load[::-1], new, 2, nodes)
    assert balance(rank_loads(load[::-1], back)).min() > 0.9


@pytest.mark.parametrize(("kept", "groups"), [(2, 4), (4, 1)])
def test_a_fleet_takes_groups_and_machines_from_model_and_settings(kept: int, groups: int) -> None:
    """Groups of which a token gets all mean nothing to a node."""
    plain = make_spec(
        moe_layers=(True, True),
        vocab_size=8,
        hidden_size=4,
        num_experts=16,
        experts_per_token=2,
        expert_size=4,
    )
    assert plain.moe is not None
    block = replace(plain.moe, router=RouterRule(groups=4, kept_groups=kept))
    spec = replace(
        plain, layers=tuple(replace(layer, feed_forward=block) for layer in plain.layers)
    )
    experts = FleetExperts.of(spec, ParallelConfig(dp=4, nnodes=2, redundant_experts=4))
    start = Placement.initial(2, 16, 4, 4, Nodes(2, groups))
    assert (
        Placement.from_table(experts.placement_table).experts_LS.tolist()
        == start.experts_LS.tolist()
    )
    counts = np.tile((16_000 / np.arange(1, 17)).astype("<i8"), (2, 1))
    experts.add_load(ExpertLoad(counts=counts.tobytes(), num_layers=2, version=0))
    new = experts.rescaled_placement([0, 1, -1, -1, 2, 3, -1, -1], 2)
    assert new.num_ranks == 8
    assert_replicas_spread(new, Nodes(2))
