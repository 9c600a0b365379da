"""Hash chains, hits and their limits."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest

from moeserve.cluster.assemble import kv_identity
from moeserve.engine.blocks import BlockPool, KVGroup, groups_of
from moeserve.engine.kv_cache_manager import IN_STORE, KVCacheManager, chain, root_of
from moeserve.engine.kv_rule import KVRule
from moeserve.engine.requests import Request, request_of
from moeserve.messages import Ready
from tests.engine.harness import limits_of, submit_of

FULL = groups_of((KVRule(),), 4)
STATES = groups_of((KVRule(), KVRule(tile=2)), 4)


def request(prompt: list[int], **fields: object) -> Request:
    return request_of(submit_of(1, prompt, **fields), 0, 64, 1000)  # type: ignore[arg-type]


def manager_of(groups: tuple[KVGroup, ...] = FULL, **limits: int | bool) -> KVCacheManager:
    return KVCacheManager(limits_of(**limits), groups)


def admitted(manager: KVCacheManager, owner: Request) -> int:
    """Admits a request and schedules its whole prompt; returns its slot."""
    slots = np.array([manager.admit(owner, manager.match(owner))], np.intp)
    start = manager.batch.scheduled[slots]
    end = np.array([len(owner.tokens)], np.int32)
    manager.grow(slots, start, manager.growth(start, end))
    manager.batch.scheduled[slots] = end
    return int(slots[0])


def computed(manager: KVCacheManager, prompt: list[int], **fields: object) -> list[list[int]]:
    """Computes a prompt, and lets go of its blocks; returns the full ones per group."""
    slot = admitted(manager, request(prompt, **fields))
    blocks = [table[slot, : len(prompt) // 4].tolist() for table in manager.batch.tables]
    manager.free(slot)
    manager.pop_changes()
    return blocks


def lose(pool: BlockPool, tokens: list[int], g: int, i: int) -> None:
    """Evicts one idle block, out of turn."""
    block = pool.find((chain(root_of({}), np.array(tokens, np.int32), 4)[i], g))
    assert block is not None
    pool._idle.move_to_end(block, last=False)
    pool._evict(1)


def test_the_hash_is_sha256_over_little_endian_tokens() -> None:
    first = hashlib.sha256(root_of({}) + np.arange(4, dtype="<i4").tobytes()).digest()
    second = hashlib.sha256(first + np.arange(4, 8, dtype="<i4").tobytes()).digest()
    assert chain(root_of({}), np.arange(11, dtype=np.int32), 4) == [first, second]


def test_roots_differ_by_salt_and_epoch() -> None:
    roots = [
        root_of({}),
        root_of({"salt": b"a"}),
        root_of({"salt": b"b"}),
        root_of({"salt": b""}),
        root_of({}, 1),
        root_of({"salt": b"a"}, 1),
        root_of({"adapter": b"a"}),
        root_of({"adapter": b"a", "salt": b"b"}),
        root_of({"adapter": b"b", "salt": b"a"}),
        root_of({"salt": b"a" + b"weights\0" + bytes(8)}),
        root_of({"salt": b"a", "weights": b""}),
    ]
    assert len(set(roots)) == len(roots)
    assert root_of({"salt": b"b", "adapter": b"a"}) == roots[7], "the order of names means nothing"


def test_keys_are_the_same_in_every_process() -> None:
    """Tiers and peers find blocks by them. A change makes everything that is kept worthless."""
    root = root_of({"salt": b"s", "model": b"m"}, 3)
    assert root.hex() == "af31cb08f3b50da72d2188b66baf8efa32f6bb3462cc5e9d0c52276fe2e61325"
    assert (
        chain(root, np.arange(4, dtype=np.int32), 4)[0].hex()
        == "f8d2775981cd59ed94f63b70a7b23cfae79256e23a6392e215be025630cde10b"
    )


def test_engines_of_different_models_share_no_key() -> None:
    prompt = list(range(9))
    owners = []
    for identity in ({"model": b"a"}, {"model": b"b"}, {"model": b"a"}):
        owner = request(prompt, salt="s")
        KVCacheManager(limits_of(), FULL, identity=identity).match(owner)
        owners.append(owner.hashes)
    assert owners[0] == owners[2] != owners[1]


@pytest.mark.parametrize(
    ("length", "hit"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (20, 3)]
)
def test_a_hit_never_covers_the_last_token(length: int, hit: int) -> None:
    manager = manager_of()
    tokens = list(range(20))
    (blocks,) = computed(manager, tokens[:12])
    found = manager.match(request(tokens[:length]))
    assert found.num_blocks == hit
    assert list(found.blocks[0]) == blocks[:hit]


def test_tenants_with_different_salts_share_nothing() -> None:
    manager = manager_of()
    computed(manager, list(range(12)), salt="a")
    assert manager.match(request(list(range(12)), salt="b")).num_blocks == 0
    assert manager.match(request(list(range(12)))).num_blocks == 0
    assert manager.match(request(list(range(12)), salt="a")).num_blocks == 2


def test_equal_blocks_after_different_beginnings_differ() -> None:
    manager = manager_of()
    computed(manager, [1, 1, 1, 1, 5, 5, 5, 5])
    assert manager.match(request([2, 2, 2, 2, 5, 5, 5, 5, 0])).num_blocks == 0


def test_prompt_logprobs_compute_every_position() -> None:
    manager = manager_of()
    computed(manager, list(range(12)))
    assert manager.match(request(list(range(12)), prompt_logprobs=0)).num_blocks == 0


def test_disabled_it_neither_hashes_nor_finds() -> None:
    manager = manager_of(enable_prefix_caching=False)
    owner = request(list(range(12)))
    manager.free(admitted(manager, owner))
    assert manager.match(owner).num_blocks == 0
    assert (owner.hashes, manager.pool.num_cached) == ([], 0)


def test_reset_separates_before_from_after() -> None:
    manager = manager_of()
    running = admitted(manager, request(list(range(12))))
    manager.reset_prefix_cache()
    manager.free(running)  # registers blocks that were computed before
    assert manager.match(request(list(range(12)))).num_blocks == 0
    computed(manager, list(range(12)))
    assert manager.match(request(list(range(12)))).num_blocks == 2


def test_a_request_that_waited_through_a_reset_finds_nothing_from_before() -> None:
    manager = manager_of(groups_of((KVRule(4),), 4))
    running = request(list(range(12)))
    waiting = request(list(range(12)))
    slots = np.array([admitted(manager, running)], np.intp)
    assert manager.match(waiting).num_blocks == 0
    manager.batch.scheduled[slots] = 4
    manager.register(slots)
    manager.reset_prefix_cache()
    manager.batch.scheduled[slots] = 12
    manager.register(slots)  # made of what was computed before
    assert manager.match(waiting).num_blocks == 0
    assert manager.match(running).num_blocks == 0


def test_window_groups_need_only_their_tail_and_all_groups_agree() -> None:
    manager = manager_of(groups_of((KVRule(), KVRule(6), KVRule(3)), 4))
    tokens = list(range(20))
    full, six, three = computed(manager, tokens)
    # Block 3 of the window of 6 is gone: 4 blocks are out, and 3 blocks need blocks 1 and 2 of that
    # group.
    lose(manager.pool, tokens, 1, 3)
    found = manager.match(request(tokens))
    assert found.num_blocks == 3
    assert found.blocks == (tuple(full[:3]), (0, six[1], six[2]), (0, 0, three[2]))


def test_groups_shrink_a_hit_until_all_agree() -> None:
    """The first window allows 4 blocks, the second then only 2, and that again is too much for the
    first.
    """
    manager = manager_of(groups_of((KVRule(6), KVRule(11)), 4))
    tokens = list(range(24))
    computed(manager, tokens)
    for g, kept in ((0, {0, 2, 3}), (1, {0, 1})):
        for i in set(range(6)) - kept:
            lose(manager.pool, tokens, g, i)
    assert manager.match(request(tokens)).num_blocks == 1


def test_evicted_blocks_are_found_in_the_store_and_loaded() -> None:
    manager = manager_of(num_blocks=4, num_store_blocks=4)
    (blocks,) = computed(manager, list(range(12)))
    manager.pool.release(manager.pool.allocate(2))  # evicts two of the three
    stored = {move.connector_entry: move.block for move in manager.pop_changes()[1]}
    follower = request(list(range(12)))
    hit = manager.match(follower)
    assert hit.blocks == ((blocks[0], IN_STORE),)
    slot = manager.admit(follower, hit)
    _, _, (load,) = manager.pop_changes()
    assert stored[load.connector_entry] == blocks[1]
    assert manager.batch.tables[0][slot, :2].tolist() == [blocks[0], load.block]
    assert manager.pool.find((follower.hashes[1], 0)) == load.block


# ---- states of recurrent layers


def states_of(manager: KVCacheManager, slot: int) -> list[int]:
    """The table entries that have a state."""
    return np.flatnonzero(manager.batch.tables[1][slot]).tolist()


@pytest.mark.parametrize(
    ("spare", "entries"),
    [
        (0, [6]),
        (1, [5, 6]),  # the end of the prompt's full blocks
        (2, [3, 5, 6]),
        (3, [1, 3, 5, 6]),
        (9, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_states_beyond_the_needed_are_at_borders_then_evenly_spread(
    spare: int, entries: list[int]
) -> None:
    manager = manager_of(STATES, num_states=9 + spare)
    assert states_of(manager, admitted(manager, request(list(range(26))))) == entries


def test_a_hit_ends_where_a_state_is_and_the_next_like_it_finds_all() -> None:
    """The second request shares 5 blocks with the first, which left a state at the end of its 8;
    the third shares as much with the second."""
    manager = manager_of(STATES, num_states=9 + 1)
    stem = list(range(20))
    computed(manager, [*stem, *range(30, 43)])
    hit = manager.match(request([*stem, *range(50, 63)]))
    assert (hit.num_blocks, hit.branch_point) == (0, 5)
    computed(manager, [*stem, *range(50, 63)])
    hit = manager.match(request([*stem, *range(70, 83)]))
    assert (hit.num_blocks, hit.branch_point) == (5, 5)
    assert len(hit.blocks[0]) == 5
    assert hit.blocks[1][:4] == (0, 0, 0, 0) != hit.blocks[1][4]


def test_passed_states_are_cold_unless_they_are_at_a_border() -> None:
    manager = manager_of(STATES, num_states=9 + 20)
    slot = admitted(manager, request(list(range(26)), max_tokens=20))
    manager.register(np.array([slot], np.intp))
    manager.release_passed(
        np.array([slot], np.intp), np.array([26], np.int32), np.array([9], np.int32)
    )
    pool = manager.pools[1]
    assert states_of(manager, slot) == [6]
    assert len(pool._cold) == 5
    assert len(pool._idle) == 1
    manager.free(slot)
    manager.audit()
    assert pool.num_free == pool.num_blocks - 1


def test_a_state_is_not_found_in_the_plan_that_computes_it() -> None:
    manager = manager_of(STATES, num_states=40)
    first = request(list(range(13)))
    second = request(list(range(13)))
    slots = np.array([manager.admit(first, manager.match(first))], np.intp)
    start = np.zeros(1, np.int32)
    end = np.full(1, 13, np.int32)
    manager.grow(slots, start, manager.growth(start, end))
    manager.batch.scheduled[slots] = end
    manager.register(slots)
    assert (manager.match(second).num_blocks, manager.match(second).branch_point) == (0, 3)
    manager.pop_changes()
    assert manager.match(second).num_blocks == 3


def test_evicted_states_are_loaded_from_their_own_store_and_cold_ones_are_gone() -> None:
    manager = manager_of(STATES, num_states=9 + 20, num_store_states=30)
    slot = admitted(manager, request(list(range(26))))
    manager.register(np.array([slot], np.intp))
    manager.release_passed(
        np.array([slot], np.intp), np.array([26], np.int32), np.array([9], np.int32)
    )
    manager.free(slot)
    pool = manager.pools[1]
    pool.release(pool.allocate(pool.num_free))
    moves = manager.pop_changes()[1]
    assert [move.pool_index for move in moves] == [1]
    follower = request(list(range(26)))
    hit = manager.match(follower)
    assert (hit.num_blocks, hit.blocks[1][-1]) == (6, IN_STORE)
    manager.admit(follower, hit)
    (load,) = manager.pop_changes()[2]
    assert (load.pool_index, load.connector_entry) == (1, moves[0].connector_entry)
    manager.audit()


def test_the_identity_of_an_engine_is_what_its_bits_depend_on() -> None:
    ready = Ready(
        pid=1, architecture="A", dtype="float32", device="cpu", vocab_size=9, max_model_len=9,
        max_num_seqs=1, num_blocks=2, block_size=1, eos_token_ids=(), num_params=0,
        num_active_params=0, weight_bytes=0, startup_s=0.0, checkpoint="abc",
        numerics={"torch": "2", "kernels": "native"},
    )  # fmt: skip
    replace = msgspec.structs.replace
    same = replace(ready, pid=2, startup_s=3.0, numerics={"kernels": "native", "torch": "2"})
    assert kv_identity(ready) == kv_identity(same)
    for other in (
        replace(ready, checkpoint="abd"),
        replace(ready, dtype="bfloat16"),
        replace(ready, numerics={"torch": "3", "kernels": "native"}),
    ):
        assert kv_identity(other) != kv_identity(ready)
