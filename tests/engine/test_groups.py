"""The functions of a KV group and its rule against brute force."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moeserve.engine.blocks import KVGroup, blocks_needed, groups_of, longest_hit
from moeserve.engine.kv_rule import KVRule

FULL = KVRule()


def group_of(rule: KVRule, block_size: int) -> KVGroup:
    return groups_of((rule,), block_size)[0]


def seen(rule: KVRule, position: int) -> range:
    if rule.chunk:
        return range(position // rule.chunk * rule.chunk, position + 1)
    return range(position + 1)[-rule.window :] if rule.window else range(position + 1)


def rules(*lengths: int) -> list[KVRule]:
    return [FULL, *(KVRule(window=n) for n in lengths), *(KVRule(chunk=n) for n in lengths)]


@pytest.mark.parametrize("rule", rules(1, 2, 3, 4, 5, 8, 9))
def test_first_live_is_the_oldest_that_any_later_position_sees(rule: KVRule) -> None:
    oldest = [min(min(seen(rule, p)) for p in range(position, 40)) for position in range(30)]
    assert [rule.first_live(position) for position in range(30)] == oldest
    assert rule.first_live(np.arange(30)).tolist() == oldest


@pytest.mark.parametrize("rule", rules(1, 2, 4, 5, 9, 16, 17))
@pytest.mark.parametrize("chunk", [1, 3, 4, 11])
@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_blocks_needed_covers_every_step_of_every_request(
    rule: KVRule, chunk: int, block_size: int
) -> None:
    group = group_of(rule, block_size)
    for num_tokens in (1, 7, 40):
        bound = blocks_needed(group, num_tokens, chunk)
        most = 0
        for start in range(num_tokens):  # chunks may begin anywhere: budgets split them
            end = min(start + chunk, num_tokens)
            touched = {p // block_size for q in range(start, end) for p in seen(rule, q)}
            most = max(most, len(touched))
        assert most <= bound
        if rule.is_full or (rule.window and num_tokens > 3 * (rule.window + chunk)):
            assert bound <= most + 1, "no more than one block of slack"


def test_longest_hit_equals_trying_every_length() -> None:
    rng = random.Random(1)
    for _ in range(500):
        group = group_of(rng.choice(rules(1, 2, 4, 5, 9, 13)), 4)
        cached = [rng.random() < 0.7 for _ in range(rng.randrange(12))]

        def good(n: int, group: KVGroup = group, cached: list[bool] = cached) -> bool:
            return all(cached[p // 4] for p in seen(group.rule, n * 4)[:-1])

        best = max(n for n in range(len(cached) + 1) if good(n))
        assert longest_hit(group, cached.__getitem__, len(cached)) == best


def test_longest_hit_examples() -> None:
    full = group_of(FULL, 4)
    window = group_of(KVRule(6), 4)
    cached = [True, False, True, True, False]
    assert longest_hit(full, cached.__getitem__, 5) == 1
    assert longest_hit(window, cached.__getitem__, 5) == 4  # token 16 sees 11..15: blocks 2 and 3
    assert longest_hit(window, cached.__getitem__, 3) == 1  # token 12 would need blocks 1 and 2
