"""Random traffic against a plain replay: whatever the scheduler does, each request gets its own tokens."""

from __future__ import annotations

import random

import pytest

from tests.engine.harness import FULL, HYBRID, WINDOWS, Harness, limits_of, random_traffic

GROUPS = {"full": FULL, "hybrid": HYBRID, "windows": WINDOWS}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_store_blocks", [0, 30])
@pytest.mark.parametrize("groups", GROUPS)
def test_random_traffic_equals_plain_replay(groups: str, num_store_blocks: int, depth: int, seed: int) -> None:
    rng = random.Random(f"{groups} {num_store_blocks} {depth} {seed}")
    budget = rng.choice([3, 8, 24, 100])
    limits = limits_of(
        max_num_seqs=rng.choice([1, 3, 6]),
        num_blocks=(18 if groups == "full" else 36) + rng.choice([0, 5, 30]),
        depth=depth,
        num_store_blocks=num_store_blocks,
        max_num_batched_tokens=budget,
        prefill_chunk=rng.choice([1, 5, budget]),
        watermark_blocks=rng.choice([0, 2]),
    )
    harness = Harness(limits, GROUPS[groups], rng)
    random_traffic(harness, rng, 25)
    harness.check_answers()
