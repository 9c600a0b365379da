"""How steps are split into micro-batches, and why any split is safe.

No row reads what a later row writes.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import MAX_UNEVENNESS, StepPlan, best_split
from tests.engine.fake_model import VOCAB
from tests.engine.harness import FULL, HYBRID, WINDOWS, Harness, limits_of, submit_of


@pytest.mark.parametrize(
    ("counts", "split_at"),
    [
        ([1], 0),
        ([2], 1),
        ([100], 50),
        ([1, 1, 1, 1], 2),
        ([1, 1, 1], 1),
        ([3, 90, 3], 48),
        ([57, 43], 57),
        ([58, 42], 50),
        ([42, 58], 50),
        ([43, 57], 43),
    ],
)
def test_examples(counts: list[int], split_at: int) -> None:
    assert best_split(np.array(counts, np.int32)) == split_at


@pytest.mark.parametrize(
    ("counts", "split_at"),
    [
        ([1], 0),
        ([100], 0),
        ([1, 1], 1),
        ([30, 70], 30),
        ([3, 90, 3], 0),
        ([20, 80], 0),
        ([40, 20, 40], 40),
    ],
)
def test_rows_of_models_with_states_stay_whole(counts: list[int], split_at: int) -> None:
    assert best_split(np.array(counts, np.int32), whole=True) == split_at


def test_halves_are_even_and_requests_whole_where_that_allows() -> None:
    rng = np.random.default_rng(0)
    for _ in range(2000):
        counts = rng.integers(1, rng.integers(2, 200), rng.integers(1, 12)).astype(np.int32)
        total = int(counts.sum())
        split_at = best_split(counts)
        if total < 2:
            assert split_at == 0
            continue
        assert 0 < split_at < total
        ends = np.cumsum(counts)[:-1].tolist()
        unevenness = [abs(2 * end - total) for end in ends]
        if split_at in ends:
            assert abs(2 * split_at - total) == min(unevenness)
        else:
            assert split_at == total // 2
            assert not unevenness or min(unevenness) > MAX_UNEVENNESS * total


class Watching(Harness):
    """Follows the block tables and notes which rows read what another row of their step writes."""

    def __init__(self, groups: tuple[KVGroup, ...], rng: random.Random) -> None:
        super().__init__(limits_of(max_num_seqs=8, max_num_batched_tokens=60), groups, rng)
        self.tables: list[dict[tuple[int, int], int]] = [{} for _ in groups]
        self.behind = 0  # rows that read what an earlier one writes
        self.ahead = 0

    def _check(self, plan: StepPlan) -> None:
        super()._check(plan)
        size = self.limits.block_size
        for group, (diff, table) in enumerate(zip(plan.diffs, self.tables, strict=True)):
            for slot, index, block in zip(diff.slots_N, diff.indices_N, diff.blocks_N, strict=True):
                table[int(slot), int(index)] = int(block)
            reads = []
            writes = []
            for slot, start, count in zip(
                plan.slots_R.tolist(), plan.starts_R.tolist(), plan.counts_R.tolist(), strict=True
            ):
                first = int(self.groups[group].rule.first_live(start)) // size
                reads.append(
                    {table[slot, index] for index in range(first, -(-start // size))} - {0}
                )
                writes.append(
                    {
                        table[slot, index]
                        for index in range(start // size, -(-(start + count) // size))
                    }
                )
            for reader, read in enumerate(reads):
                for writer, written in enumerate(writes):
                    if reader != writer and read & written:
                        self.behind += writer < reader
                        self.ahead += writer > reader


@pytest.mark.parametrize("groups", [FULL, HYBRID, WINDOWS], ids=["full", "hybrid", "windows"])
def test_a_reader_comes_after_its_writer(groups: tuple[KVGroup, ...]) -> None:
    """A request may find the blocks of one that was admitted in the same step. Its row is a later
    one, so the split can only put it into the same micro-batch, or into the one whose attention
    comes second in each layer."""
    rng = random.Random(0)
    harness = Watching(groups, rng)
    for rid in range(0, 90, 3):
        stem = [rng.randrange(20, VOCAB) for _ in range(rng.randint(8, 20))]
        for alike in range(3):
            tail = [rng.randrange(20, VOCAB) for _ in range(rng.randint(1, 6))]
            harness.submit(submit_of(rid + alike, stem + tail, priority=rng.choice([0, 0, -1])))
        for _ in range(rng.randint(4, 16)):
            harness.step()
    harness.run()
    assert harness.ahead == 0
    assert harness.behind > 5, "the traffic never made the case"
