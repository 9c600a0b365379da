"""Hash chains, hits and their limits."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from moeserve.engine.blocks import BlockPool, groups_of
from moeserve.engine.kv_cache_manager import IN_STORE, PrefixCache, chain, root_of
from moeserve.engine.requests import Request, request_of
from moeserve.engine.store import HostStore
from tests.engine.harness import submit_of

FULL = groups_of((None,), 4)


def request(prompt: list[int], **fields: object) -> Request:
    return request_of(submit_of(1, prompt, **fields), 0, 1000, 1000)  # type: ignore[arg-type]


def computed(cache: PrefixCache, pool: BlockPool, prompt: list[int], **fields: object) -> list[list[int]]:
    """Registers and lets go of all full blocks of a prompt; returns them per group."""
    owner = request(prompt, **fields)
    groups = len(cache._groups)
    blocks = [pool.take(len(prompt) // 4) for _ in range(groups)]
    cache.register(owner, owner.tokens, [b.tolist() for b in blocks], 0)
    for group in blocks:
        pool.release(group)
    return [b.tolist() for b in blocks]


def lose(pool: BlockPool, tokens: list[int], g: int, i: int) -> None:
    """Evicts one idle block, out of turn."""
    block = pool.find((chain(root_of(""), np.array(tokens, np.int32), 4)[i], g))
    assert block is not None
    pool._idle.move_to_end(block, last=False)
    pool._evict(1)


def test_the_hash_is_sha256_over_little_endian_tokens() -> None:
    first = hashlib.sha256(root_of("") + np.arange(4, dtype="<i4").tobytes()).digest()
    second = hashlib.sha256(first + np.arange(4, 8, dtype="<i4").tobytes()).digest()
    assert chain(root_of(""), np.arange(11, dtype=np.int32), 4) == [first, second]


def test_roots_differ_by_salt_and_epoch() -> None:
    roots = {root_of(""), root_of("a"), root_of("b"), root_of("", 1), root_of("a", 1), root_of("\0a")}
    assert len(roots) == 6


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (20, 3)])
def test_a_hit_never_covers_the_last_token(length: int, hit: int) -> None:
    pool = BlockPool(20)
    cache = PrefixCache(pool, FULL)
    tokens = list(range(20))
    (blocks,) = computed(cache, pool, tokens[:12])
    found = cache.match(request(tokens[:length]))
    assert found.num_blocks == hit
    assert list(found.blocks[0]) == blocks[:hit]


def test_tenants_with_different_salts_share_nothing() -> None:
    pool = BlockPool(20)
    cache = PrefixCache(pool, FULL)
    computed(cache, pool, list(range(12)), salt="a")
    assert cache.match(request(list(range(12)), salt="b")).num_blocks == 0
    assert cache.match(request(list(range(12)))).num_blocks == 0
    assert cache.match(request(list(range(12)), salt="a")).num_blocks == 2


def test_equal_blocks_after_different_beginnings_differ() -> None:
    pool = BlockPool(20)
    cache = PrefixCache(pool, FULL)
    computed(cache, pool, [1, 1, 1, 1, 5, 5, 5, 5])
    assert cache.match(request([2, 2, 2, 2, 5, 5, 5, 5, 0])).num_blocks == 0


def test_prompt_logprobs_compute_every_position() -> None:
    pool = BlockPool(20)
    cache = PrefixCache(pool, FULL)
    computed(cache, pool, list(range(12)))
    assert cache.match(request(list(range(12)), prompt_logprobs=0)).num_blocks == 0


def test_disabled_it_neither_hashes_nor_finds() -> None:
    pool = BlockPool(20)
    cache = PrefixCache(pool, FULL, enabled=False)
    owner = request(list(range(12)))
    cache.register(owner, owner.tokens, [pool.take(3).tolist()], 0)
    assert cache.match(owner).num_blocks == 0
    assert (owner.hashes, pool.num_cached) == ([], 0)


def test_reset_separates_before_from_after() -> None:
    pool = BlockPool(20)
    cache = PrefixCache(pool, FULL)
    before = request(list(range(12)))
    cache.match(before)  # its chain is fixed now, as a running request's is
    cache.reset()
    blocks = pool.take(3)
    cache.register(before, before.tokens, [blocks.tolist()], 0)
    assert cache.match(request(list(range(12)))).num_blocks == 0
    pool.release(blocks)
    computed(cache, pool, list(range(12)))
    assert cache.match(request(list(range(12)))).num_blocks == 2


def test_a_request_that_waited_through_a_reset_finds_nothing_from_before() -> None:
    pool = BlockPool(20)
    cache = PrefixCache(pool, groups_of((4,), 4))
    running, waiting = request(list(range(12))), request(list(range(12)))
    for one in (running, waiting):
        assert cache.match(one).num_blocks == 0
    blocks = pool.take(2).tolist()
    cache.register(running, running.tokens, [blocks[:1]], 0)
    cache.reset()
    cache.register(running, running.tokens, [blocks[1:]], 1)  # made of what was computed before
    assert cache.match(waiting).num_blocks == 0
    assert cache.match(running).num_blocks == 0


def test_window_groups_need_only_their_tail_and_all_groups_agree() -> None:
    groups = groups_of((None, 6, 3), 4)
    pool = BlockPool(40)
    cache = PrefixCache(pool, groups)
    tokens = list(range(20))
    full, six, three = computed(cache, pool, tokens)
    # Block 3 of the window of 6 is gone: 4 blocks are out, and 3 blocks need blocks 1 and 2 of that group.
    lose(pool, tokens, 1, 3)
    found = cache.match(request(tokens))
    assert found.num_blocks == 3
    assert found.blocks == (tuple(full[:3]), (0, six[1], six[2]), (0, 0, three[2]))


def test_groups_shrink_a_hit_until_all_agree() -> None:
    """The first window allows 4 blocks, the second then only 2, and that again is too much for the first."""
    groups = groups_of((6, 11), 4)
    pool = BlockPool(60)
    cache = PrefixCache(pool, groups)
    tokens = list(range(24))
    computed(cache, pool, tokens)
    for g, kept in ((0, {0, 2, 3}), (1, {0, 1})):
        for i in set(range(6)) - kept:
            lose(pool, tokens, g, i)
    assert cache.match(request(tokens)).num_blocks == 1


def test_evicted_blocks_are_found_in_the_store_and_loaded() -> None:
    store = HostStore(4)
    host_blocks = {}

    def evicted(key: tuple[bytes, int], block: int) -> None:
        host_blocks[store.store(key)] = block

    pool = BlockPool(4, evicted)
    cache = PrefixCache(pool, FULL, store)
    (blocks,) = computed(cache, pool, list(range(12)))
    pool.release(pool.take(2))  # evicts two of the three
    store.release()
    follower = request(list(range(12)))
    hit = cache.match(follower)
    assert hit.blocks == ((blocks[0], IN_STORE),)
    tables, loads = cache.claim(follower, hit)
    assert [host_blocks[move.host_block] for move in loads] == [blocks[1]]
    assert tables[0].tolist() == [blocks[0], loads[0].block]
    assert pool.find((follower.hashes[1], 0)) == loads[0].block
