"""Random traffic against a plain replay: whatever the scheduler does, each request gets its own
tokens.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from moeserve.engine.blocks import STATES_HELD
from tests.engine.harness import (
    ALL_KINDS,
    FIRST,
    FULL,
    HYBRID,
    STATES,
    UNEVEN,
    WINDOWS,
    Harness,
    limits_of,
    random_traffic,
)

GROUPS = {
    "full": FULL,
    "hybrid": HYBRID,
    "windows": WINDOWS,
    "states": STATES,
    "all kinds": ALL_KINDS,
    "first": FIRST,
    "uneven": UNEVEN,
}
WITH_STATES = "states", "all kinds", "first", "uneven"


CASES = [(groups, seed) for groups in GROUPS for seed in range(2 if groups in WITH_STATES else 5)]


@pytest.mark.parametrize(("depth", "num_drafts"), [(1, 0), (2, 0), (3, 0), (1, 3), (2, 1), (2, 3)])
@pytest.mark.parametrize("num_store_blocks", [0, 30])
@pytest.mark.parametrize(("groups", "seed"), CASES)
def test_random_traffic_equals_plain_replay(
    groups: str, num_store_blocks: int, depth: int, num_drafts: int, seed: int
) -> None:
    rng = random.Random(f"{groups} {num_store_blocks} {depth} {seed}")
    budget = rng.choice([3, 8, 24, 100])
    slots = rng.choice([1, 3, 6])
    limits = limits_of(
        max_num_seqs=slots,
        num_blocks=(18 if groups in ("full", "states") else 36) + rng.choice([0, 5, 30]),
        num_states=STATES_HELD * slots + 1 + rng.choice([0, 1, 5, 30]),
        num_store_states=num_store_blocks // 3,
        depth=depth,
        num_store_blocks=num_store_blocks,
        max_num_batched_tokens=budget,
        prefill_chunk=rng.choice([1, 5, budget]),
        watermark_blocks=rng.choice([0, 2]),
        num_drafts=num_drafts,
    )
    harness = Harness(limits, GROUPS[groups], rng)
    random_traffic(harness, rng, 25)
    harness.check_answers()
    if budget >= 24 and limits.prefill_chunk > 1:
        assert (harness.num_drafts > 0) == (harness.num_right > 0) == (num_drafts > 0)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("tears", [0.0, 0.1])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("groups", "seed"), CASES)
def test_blocks_that_come_late_in_part_or_torn_change_no_token(
    groups: str, late: bool, tears: float, num_drafts: int, seed: int
) -> None:
    rng = random.Random(f"{groups} {late} {tears} {seed}")
    budget = rng.choice([8, 24, 100])
    slots = rng.choice([1, 3, 6])
    limits = limits_of(
        max_num_seqs=slots,
        num_blocks=(18 if groups in ("full", "states") else 36) + rng.choice([0, 5]),
        num_states=STATES_HELD * slots + 1 + rng.choice([1, 5, 30]),
        num_store_states=20,
        depth=rng.choice([1, 2, 3]),
        num_store_blocks=60,
        max_num_batched_tokens=budget,
        prefill_chunk=rng.choice([5, budget]),
        num_drafts=num_drafts,
    )
    harness = Harness(limits, GROUPS[groups], rng, late=late)
    harness.runner.tears = tears
    random_traffic(harness, rng, 40, resets=rng.choice([0, 0.01]))
    harness.check_answers()


def test_traffic_has_late_blocks_and_torn_ones() -> None:
    """The test above would prove nothing without them."""
    seen: Counter[str] = Counter()
    for seed in range(3):
        rng = random.Random(seed)
        limits = limits_of(num_blocks=18, num_store_blocks=60)
        harness = Harness(limits, FULL, rng, late=True)
        assert harness.connector is not None
        harness.connector.chance = 0.8
        harness.runner.tears = 0.3
        random_traffic(harness, rng, 150, resets=0)
        harness.check_answers()
        seen.update(begun=harness.connector.num_begun, loaded=harness.connector.num_loaded)
        seen.update(torn=harness.runner.num_torn)
    assert min(seen["begun"], seen["loaded"], seen["torn"]) >= 3, seen
