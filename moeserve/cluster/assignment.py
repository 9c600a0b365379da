"""The assignment of engines to machines: pure functions over machine numbers."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from moeserve.config import ParallelConfig


def assign_new_engines(num_new: int, engines_on: Mapping[int, int]) -> list[int]:
    """Return the machine of each new engine, in ascending order.

    Each engine goes to the machine with the fewest engines; ties go to the lowest number.

    engines_on: the number of engines that each machine has already.

    assign_new_engines(3, {0: 0, 1: 0}) -> [0, 0, 1]
    """
    counts = dict(engines_on)
    for _ in range(num_new):
        counts[min(counts, key=lambda machine: (counts[machine], machine))] += 1
    return [
        machine for machine in sorted(counts) for _ in range(counts[machine] - engines_on[machine])
    ]


def initial_machines(parallel: ParallelConfig) -> list[int]:
    """Return the machine of each engine at the start of a server."""
    return assign_new_engines(parallel.dp, dict.fromkeys(range(parallel.nnodes), 0))


def num_equal_nodes(machines: Sequence[int]) -> int:
    """Return the number of machines if all have the same number of consecutive engines, else 1.

    machines: the machine of each engine.

    [0, 0, 1, 1] -> 2, [0, 0, 1] -> 1
    """
    run_lengths = [len(list(run)) for _, run in groupby(machines)]
    are_consecutive = len(run_lengths) == len(set(machines))
    are_equal = len(set(run_lengths)) == 1
    return len(run_lengths) if are_consecutive and are_equal else 1
