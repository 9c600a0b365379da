"""The three functions of a KV group against brute force."""

from __future__ import annotations

import random

import pytest

from moeserve.engine.blocks import KVGroup, blocks_needed, first_live_token, groups_of, longest_hit


def group_of(window: int | None, block_size: int) -> KVGroup:
    return groups_of((window,), block_size)[0]


def seen(window: int | None, position: int) -> range:
    return range(position + 1)[-window:] if window else range(position + 1)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 8, 9])
def test_first_live_token_is_the_oldest_that_any_later_position_sees(window: int | None) -> None:
    for position in range(30):
        later = [min(seen(window, p)) for p in range(position, 40)]
        assert first_live_token(group_of(window, 4), position) == min(later)


@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 9, 16, 17])
@pytest.mark.parametrize("chunk", [1, 3, 4, 11])
@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_blocks_needed_covers_every_step_of_every_request(window: int | None, chunk: int, block_size: int) -> None:
    group = group_of(window, block_size)
    for num_tokens in (1, 7, 40):
        bound = blocks_needed(group, num_tokens, chunk)
        most = 0
        for start in range(num_tokens):  # chunks may begin anywhere: budgets split them
            end = min(start + chunk, num_tokens)
            touched = {p // block_size for q in range(start, end) for p in seen(window, q)}
            most = max(most, len(touched))
        assert most <= bound
        if window is None or num_tokens > 3 * (window + chunk):
            assert bound <= most + 1, "no more than one block of slack"


def test_longest_hit_equals_trying_every_length() -> None:
    rng = random.Random(1)
    for _ in range(500):
        group = group_of(rng.choice([None, 1, 2, 4, 5, 9, 13]), 4)
        cached = [rng.random() < 0.7 for _ in range(rng.randrange(12))]

        def good(n: int, group: KVGroup = group, cached: list[bool] = cached) -> bool:
            return all(cached[p // 4] for p in seen(group.window, n * 4)[:-1])

        best = max(n for n in range(len(cached) + 1) if good(n))
        assert longest_hit(group, cached.__getitem__, len(cached)) == best


def test_longest_hit_examples() -> None:
    full, window = group_of(None, 4), group_of(6, 4)
    cached = [True, False, True, True, False]
    assert longest_hit(full, cached.__getitem__, 5) == 1
    assert longest_hit(window, cached.__getitem__, 5) == 4  # token 16 sees 11..15: blocks 2 and 3
    assert longest_hit(window, cached.__getitem__, 3) == 1  # token 12 would need blocks 1 and 2
