"""The KV-cache manager: slots, blocks, block tables and the prefix cache of the running requests.

The scheduler decides which requests run. The manager allocates for them. `free` undoes everything
that `admit` and `grow` allocated, and `audit` checks that nothing is lost or held twice.

The prefix cache finds the blocks of a known prompt prefix by a chained hash. Tokens are hashed as
little-endian int32:

    h_0 = sha256(root + tokens of block 0)
    h_i = sha256(h_{i-1} + tokens of block i)

A key is a hash and a KV group. The root is a hash of everything besides tokens that K and V depend
on: the `identity` of the engine (model, numerics) and the `extras` of the request. So keys are
equal in all processes that compute equal K and V. A block is registered as soon as the step that
computes it is planned, because steps run in order.

States of recurrent layers are blocks in a second pool, which reserves the two blocks that every
running request needs. The rest of the pool caches states from which other requests may continue:

- First at a request's branch points: the end of its prompt, and the end of the prefix that it
  shares with an earlier request. Then at further blocks, as room permits.
- When a request passes a state, the state is released as cold (evicted first), unless it is at a
  branch point. The last state that a request has computed is not released as cold, either.
- A lookup finds a state only from the next plan on. Otherwise a row could read a block that another
  row of the same step writes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from moeserve.config import Limits
from moeserve.engine.blocks import STATES_HELD, BlockPool, Key, KVGroup, blocks_needed, longest_hit
from moeserve.engine.connector import KVConnector, When
from moeserve.engine.decoding import Decoding
from moeserve.engine.kv_rule import FULL
from moeserve.engine.plan import I32, BlockDiff, BlockMove, Slots, concatenate
from moeserve.engine.requests import InputBatch, Request
from moeserve.engine.store import HostStore

IN_STORE = -1  # stands in `Hit.blocks` for a block that the connector can load
NOTHING: Mapping[str, bytes] = MappingProxyType({})
_NO_OTHERS: dict[int, I32] = {}
_NO_DIFF = BlockDiff(*(np.zeros(0, np.int32) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class Hit:
    """The cached prefix of a request."""

    num_blocks: int  # length of the prefix
    # For each group, the block of each table entry. 0: the window has passed the entry, so no step
    # reads it. IN_STORE: to be loaded into a new block.
    blocks: tuple[tuple[int, ...], ...]
    branch_point: int = 0  # length that the prefix would have if all states were cached


def root_of(extras: Mapping[str, bytes], num_resets: int = 0) -> bytes:
    """Return the start of a hash chain. Requests share blocks only if their roots are equal.

    extras: values by name, in any order. A name has no NUL. An absent value and an empty value give
    different roots.
    """
    tagged = dict(extras)
    if num_resets:
        tagged["num_resets"] = num_resets.to_bytes(8, "little")
    fields = [
        name.encode() + b"\0" + len(value).to_bytes(8, "little") + value
        for name, value in sorted(tagged.items())
    ]
    return sha256(b"moeserve kv 2\0" + b"".join(fields)).digest()


def chain(parent: bytes, tokens: I32, block_size: int) -> list[bytes]:
    """Return the hashes of the full blocks of `tokens`, which follow the block with hash `parent`.

    tokens: little-endian int32.
    """
    block_bytes = 4 * block_size
    data = tokens.tobytes()
    hashes = []
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        parent = sha256(parent + data[start : start + block_bytes]).digest()
        hashes.append(parent)
    return hashes


@dataclass(frozen=True, slots=True)
class Fetch:
    """The blocks of a request's prefix that a connector has and the device has not."""

    keys: list[Key]
    when: When


class Growth(NamedTuple):
    """The number of new block-table entries of each row, by group."""

    common: I32  # new entries in every group with one KV entry per position
    others: dict[int, I32]  # new entries in the other groups, by number of the group

    def of(self, group: int) -> I32:
        """Return the number of new entries of each row in one group."""
        return self.others.get(group, self.common) if self.others else self.common


class KVCacheManager:
    """Keeps the input batch, the block pools, the prefix cache and the connector consistent.

    The runner has to repeat some changes on the device: new table entries, blocks to save through
    the connector (`stores`) and blocks to load (`loads`). They are collected until `pop_changes`,
    once per plan.

    connector: None for a HostStore, if the limits have room for one.
    identity: the part of the root that all keys share.
    """

    def __init__(
        self,
        limits: Limits,
        groups: tuple[KVGroup, ...],
        connector: KVConnector | None = None,
        identity: Mapping[str, bytes] = NOTHING,
    ) -> None:
        self.groups = groups
        self.num_kv_groups = sum(not group.has_states for group in groups)
        assert self.num_kv_groups >= max(1, len(groups) - 1), groups  # at most one has states
        # Stands for all groups with one KV entry per position, whose tables grow in the same way.
        self._common_group = KVGroup(FULL, limits.block_size, ())
        self._others = [g for g, group in enumerate(groups) if not group.rule.counts_positions]
        self._num_common = self.num_kv_groups - len(self._others)
        sizes = [(limits.num_blocks, limits.num_store_blocks)]
        if self.num_kv_groups < len(groups):
            sizes.append((limits.num_states, limits.num_store_states))
        if connector is None and any(stored for _, stored in sizes):
            connector = HostStore([stored for _, stored in sizes], [g.pool_index for g in groups])
        self.connector = connector if limits.enable_prefix_caching else None
        self.pools = [
            BlockPool(number, None if self.connector is None else partial(self._save_evicted, pool))
            for pool, (number, _) in enumerate(sizes)
        ]
        self._num_reserved_states = STATES_HELD * limits.max_num_seqs
        self.decoding = Decoding(limits.diffusion_block)
        self.batch = InputBatch(limits.max_num_seqs, limits.max_model_len, groups, self.decoding)
        self.chunk = min(limits.prefill_chunk, limits.max_num_batched_tokens)
        self._block_size = limits.block_size
        self._caches_prefixes = limits.enable_prefix_caching
        self._num_resets = 0
        self._identity = identity
        self._stores: list[BlockMove] = []
        self._loads: list[BlockMove] = []
        # New table entries of each group: slots, indices, blocks.
        self._new_entries: list[list[tuple[I32, I32, I32]]] = [[] for _ in groups]
        self._new_states: set[int] = set()  # allocated since the last plan

    @property
    def pool(self) -> BlockPool:
        """The pool of KV blocks, as opposed to states."""
        return self.pools[0]

    # ---- the prefix cache

    def match(self, request: Request) -> Hit:
        """Return the longest cached prefix of a waiting request, without its last token.

        The blocks get no new holder yet. `match` computes the request's hash chain, and computes it
        again after a reset. A request that runs during a reset keeps its old hashes, which no later
        request has.
        """
        max_blocks = self._hash_prefix(request)
        if not max_blocks:
            return Hit(0, ((),) * len(self.groups))
        branch_point = self._common_hit(
            request, max_blocks, [g for g, group in enumerate(self.groups) if not group.has_states]
        )
        length = (
            self._common_hit(request, branch_point, range(len(self.groups)))
            if len(self.pools) > 1
            else branch_point
        )
        blocks = []
        for g, group in enumerate(self.groups):
            first = int(group.rule.first_live(length * self._block_size)) // self._block_size
            end = min(length, int(group.num_blocks(length * self._block_size)))
            lookups = [self._find(request, (key, g)) for key in request.hashes[first:end]]
            present = (block for block in lookups if block is not None)
            blocks.append((*(0,) * first, *present, *(0,) * (length - end)))
        return Hit(length, tuple(blocks), branch_point)

    def _hash_prefix(self, request: Request) -> int:
        """Hash the blocks of a waiting request that may be cached, and return their number."""
        if not self._caches_prefixes:
            return 0
        if request.num_resets != self._num_resets:
            request.num_resets = self._num_resets
            request.root = root_of({**self._identity, **request.extras}, self._num_resets)
            request.hashes.clear()
        if request.sampling.prompt_logprobs is not None:  # they need the logits of all positions
            return 0
        num_blocks = (len(request.tokens) - 1) // self._block_size
        self._extend(request, request.tokens, num_blocks)
        return num_blocks

    def fetchable(self, request: Request) -> Fetch:
        """Return the blocks that a connector could fetch for a request, beyond the device's blocks.

        Full groups determine the length of the prefix; other groups need only the end of it.
        """
        connector = self.connector
        length = self._hash_prefix(request)
        keys: list[Key] = []
        answers: set[When] = set()
        if connector is None or not connector.may_wait or not request.uses_connector:
            return Fetch(keys, When.NOW)
        for g in sorted(range(len(self.groups)), key=lambda g: not self.groups[g].rule.is_full):
            group = self.groups[g]
            first = int(group.rule.first_live(length * self._block_size)) // self._block_size
            pool = self.pools[group.pool_index]
            while first < length and pool.find((request.hashes[first], g)) is not None:
                first += 1
            needed = min(length, int(group.num_blocks(length * self._block_size)))
            missing = [(key, g) for key in request.hashes[first:needed]]
            if not missing:
                continue
            num_found, when = connector.lookup(missing)
            if when is When.LATER:
                keys += missing[:num_found]
            if num_found or when is When.ASK_AGAIN:
                answers.add(when)
            is_short = num_found < len(missing) and when is not When.ASK_AGAIN
            if group.rule.is_full and is_short:
                length = first + num_found
        for when in (When.ASK_AGAIN, When.LATER):
            if when in answers:
                return Fetch(keys, when)
        return Fetch(keys, When.NOW)

    def _common_hit(self, request: Request, max_blocks: int, groups: Iterable[int]) -> int:
        """Return the length of the longest hit that all of these groups (numbers) have."""
        length = max_blocks
        previous_length = -1
        for g in groups:
            if self.groups[g].rule.is_full:
                length = longest_hit(self.groups[g], self._is_cached_in(request, g), length)
        # A shorter hit remains valid for full groups, but not for others. Repeat these until all
        # agree.
        while length != previous_length:
            previous_length = length
            for g in groups:
                if not self.groups[g].rule.is_full:
                    length = longest_hit(self.groups[g], self._is_cached_in(request, g), length)
        return length

    def register(self, slots: Slots) -> None:
        """Add the blocks of these slots to the prefix cache that are full, scheduled, and whose
        tokens are known.
        """
        if not self._caches_prefixes:
            return
        batch = self.batch
        num_full = np.minimum(batch.scheduled[slots], batch.known[slots]) // self._block_size
        num_registered = batch.num_registered[slots]
        rows = np.flatnonzero(num_full > num_registered)
        if not len(rows):
            return
        batch.num_registered[slots] = np.maximum(num_full, num_registered)
        columns = (slots[rows].tolist(), num_registered[rows].tolist(), num_full[rows].tolist())
        for slot, first, end in zip(*columns, strict=True):
            request = batch.request(slot)
            self._extend(request, batch.tokens[slot], end)
            for g, table in enumerate(batch.tables):
                last = end
                if g in self._others:
                    last = min(end, int(self.groups[g].num_blocks(end * self._block_size)))
                for i, block in enumerate(table[slot, first:last].tolist(), first):
                    if block:  # 0: the window has passed this entry
                        self.pools[self.groups[g].pool_index].cache(block, (request.hashes[i], g))

    def reset_prefix_cache(self) -> None:
        """Drop all cached blocks: later requests find no block that was computed before."""
        self._num_resets += 1
        self.discard_cache()

    def discard_cache(self) -> None:
        """Drop all cached blocks, but let blocks of running requests be cached again later."""
        for pool in self.pools:
            pool.drop_keys()
        if self.connector is not None:
            self.connector.clear()

    def _extend(self, request: Request, tokens: I32, num_blocks: int) -> None:
        hashes = request.hashes
        start = len(hashes) * self._block_size
        parent = hashes[-1] if hashes else request.root
        hashes.extend(
            chain(parent, tokens[start : num_blocks * self._block_size], self._block_size)
        )

    def _is_cached_in(self, request: Request, g: int) -> Callable[[int], bool]:
        return lambda i: self._find(request, (request.hashes[i], g)) is not None

    def _find(self, request: Request, key: Key) -> int | None:
        _, g = key
        pool_index = self.groups[g].pool_index
        block = self.pools[pool_index].find(key)
        if pool_index and block in self._new_states:
            return None
        if block is None and self.connector is not None and request.uses_connector:
            num_found, when = self.connector.lookup((key,))
            if num_found and when is When.NOW:
                return IN_STORE
        return block

    # ---- one request

    def admit(self, request: Request, hit: Hit) -> int:
        """Put a request in a free slot, with the blocks of its hit. Return the slot."""
        batch = self.batch
        tables = [np.array(blocks, np.int32) for blocks in hit.blocks]
        self._acquire_hit(request, tables)
        # The end of the prompt, without and with its last token: a hit never has the last token.
        ends = (request.num_prompt - 1) // self._block_size, request.num_prompt // self._block_size
        request.branch_points = tuple(dict.fromkeys((hit.branch_point, *ends, hit.num_blocks)))
        num_hit = hit.num_blocks * self._block_size
        slot = batch.admit(request, num_hit)
        indices = np.arange(hit.num_blocks, dtype=np.int32)
        for g, entries in enumerate(tables):
            batch.tables[g][slot, : hit.num_blocks] = entries
            first_live = int(self.groups[g].rule.first_live(num_hit))
            batch.num_passed[g][slot] = first_live // self._block_size
            if hit.num_blocks:
                self._new_entries[g].append(
                    (np.full(hit.num_blocks, slot, np.int32), indices, entries)
                )
        return slot

    def _acquire_hit(self, request: Request, tables: list[I32]) -> None:
        """Add a holder to the blocks of a hit. Replace IN_STORE by new blocks, to be loaded."""
        to_load: list[tuple[int, int, int]] = []  # group, table index, the connector's entry
        for g, table in enumerate(tables):
            pool = self.pools[self.groups[g].pool_index]
            for i, block in enumerate(table.tolist()):
                if block > 0:
                    pool.touch(block)
                elif block == IN_STORE:
                    assert self.connector is not None
                    to_load.append((g, i, self.connector.load((request.hashes[i], g))))
        # Only now, because an allocation may evict blocks that have no holder yet.
        for g, i, connector_entry in to_load:
            pool_index = self.groups[g].pool_index
            block = int(self.pools[pool_index].allocate(1)[0])
            tables[g][i] = block
            self.pools[pool_index].cache(block, (request.hashes[i], g))
            self._loads.append(BlockMove(block, connector_entry, pool_index))

    def free(self, slot: int) -> Request:
        """Free a slot and its blocks. Return its request, whose results in flight are dropped."""
        self.register(np.array([slot], np.intp))  # blocks that became full since the last plan
        batch = self.batch
        for g, (group, blocks) in enumerate(zip(self.groups, batch.held(slot), strict=True)):
            if group.has_states:
                end = int(group.num_blocks(int(batch.scheduled[slot])))
                kept = (*batch.request(slot).branch_points, int(batch.num_registered[slot]))
                self._release_states(g, slot, end, kept)
            else:
                self.pool.release(blocks)
        return batch.vacate(slot)

    # ---- many rows at once

    def growth(self, start: I32, end: I32) -> Growth:
        """Return the table entries that rows need to advance from position start[i] to end[i]."""
        size = self._block_size
        common: I32 = (end + (size - 1)) // size - (start + (size - 1)) // size
        if not self._others:
            return Growth(common, _NO_OTHERS)
        others = {
            g: self.groups[g].num_blocks(end) - self.groups[g].num_blocks(start)
            for g in self._others
        }
        return Growth(common, others)

    def num_new_blocks(self, growth: Growth) -> int:
        """Return how many blocks of the pool these entries need."""
        num_needed = int(growth.common.sum()) * self._num_common
        for num_new in growth.others.values():
            num_needed += int(num_new.sum())
        return num_needed

    def grow(self, slots: Slots, start: I32, growth: Growth) -> None:
        """Append blocks to the tables of slots[i], which have blocks up to position start[i]."""
        common = self._entries_of(self._common_group, slots, start, growth.common)
        if common is None and not growth.others:
            return
        for g, table in enumerate(self.batch.tables):
            entries = common
            if g in growth.others:
                entries = self._entries_of(self.groups[g], slots, start, growth.others[g])
            if entries is None:
                continue
            slots_N, slots_i32_N, indices_N, count = entries
            blocks_N = (
                self._allocate_states(slots_N, indices_N, count)
                if self.groups[g].has_states
                else self.pool.allocate(len(indices_N))
            )
            table[slots_N, indices_N] = blocks_N
            self._new_entries[g].append((slots_i32_N, indices_N, blocks_N))

    def _entries_of(
        self, group: KVGroup, slots: Slots, start: I32, num_new: I32
    ) -> tuple[Slots, I32, I32, I32] | None:
        """Return the slot (as intp, as int32) and index of each new entry, and the count by row."""
        growing = np.flatnonzero(num_new)
        if not len(growing):
            return None
        count = num_new[growing]
        slots_N = np.repeat(slots[growing], count)
        offset = np.repeat(group.num_blocks(start[growing]) - (np.cumsum(count) - count), count)
        indices_N = (offset + np.arange(int(count.sum()))).astype(np.int32)
        return slots_N, slots_N.astype(np.int32), indices_N, count

    def _allocate_states(self, slots_N: Slots, indices_N: I32, count: I32) -> I32:
        """Return blocks for the table entries indices_N[i] of slots_N[i], row after row.

        The last entry of each row needs a block. If the pool has more than its reserve, entries at
        branch points get a block, too. Then further entries do, evenly spaced, as long as only cold
        states are evicted for them. All other entries get the null block.

        count: the number of entries of each row.
        """
        pool = self.pools[1]
        last = np.cumsum(count) - 1
        is_kept = np.zeros(len(indices_N), np.bool_)
        is_kept[last] = True
        num_available = pool.num_free - self._num_reserved_states
        if self._caches_prefixes and len(indices_N) > len(count) and num_available > 0:
            at_branch_points = []  # indices into indices_N
            for first, end in zip((last - count + 1).tolist(), last.tolist(), strict=True):
                if first < end:
                    # The state at length n is table entry n - 1.
                    offset = first - int(indices_N[first]) - 1
                    request = self.batch.request(int(slots_N[first]))
                    entries = (length + offset for length in request.branch_points)
                    at_branch_points += [i for i in entries if first <= i < end]
            is_kept[at_branch_points[:num_available]] = True
            num_spare = min(num_available, pool.num_spare - len(count))
            num_cold = max(num_spare - len(at_branch_points), 0)
            num_others = len(indices_N) - int(is_kept.sum())
            spacing = 1
            while num_others // spacing > num_cold:
                spacing *= 2
            is_multiple = (indices_N + 1) % spacing == 0
            is_kept[np.flatnonzero(~is_kept & is_multiple)[:num_cold]] = True
        blocks = np.zeros(len(indices_N), np.int32)
        blocks[is_kept] = pool.allocate(int(is_kept.sum()))
        self._new_states.update(blocks[is_kept].tolist())
        return blocks

    def _release_states(self, g: int, slot: int, end: int, kept: tuple[int, ...]) -> None:
        """Release a slot's states before `end`, as cold except at lengths (in blocks) in `kept`."""
        first = int(self.batch.num_passed[g][slot])
        blocks = self.batch.tables[g][slot, first:end].copy()
        is_kept = np.isin(np.arange(first + 1, end + 1), kept)
        for cold in (True, False):
            self.pools[1].release(blocks[(blocks > 0) & (is_kept != cold)], cold=cold)

    def release_passed(self, slots: Slots, start: I32, count: I32) -> None:
        """Release the blocks that no position from start[i] on reads. Set their entries to 0.

        In a group with states, the last full block is kept until count[i] positions need another
        block, if the pool has more than its reserve.
        """
        batch = self.batch
        for g, group in enumerate(self.groups):
            if group.rule.is_full:
                continue
            num_passed = batch.num_passed[g]
            live = group.rule.first_live(start) // self._block_size
            if group.has_states and self.pools[1].num_free > self._num_reserved_states:
                grows = group.num_blocks(start + count) > group.num_blocks(start)
                live = np.where(grows, live, start // self._block_size - 1)
            for i in np.flatnonzero(live > num_passed[slots]).tolist():
                slot = int(slots[i])
                first = int(num_passed[slot])
                end = int(live[i])
                row = batch.tables[g][slot]
                if group.has_states:
                    self._release_states(g, slot, end, batch.request(slot).branch_points)
                else:
                    self.pool.release(row[first:end].copy())
                row[first:end] = 0
                num_passed[slot] = end
                rows = np.full(end - first, slot, np.int32)
                nulls = np.zeros(end - first, np.int32)
                self._new_entries[g].append((rows, np.arange(first, end, dtype=np.int32), nulls))

    def release_rejected(self, slots: Slots, end: I32, kept: I32) -> None:
        """Release the blocks of positions kept[i] .. end[i] - 1 of slots[i], whose drafts were
        rejected. A later step computes these positions again.
        """
        for group, table in zip(self.groups, self.batch.tables, strict=True):
            first = group.num_blocks(kept)
            last = group.num_blocks(end)
            for i in np.flatnonzero(last > first).tolist():
                blocks = table[slots[i], first[i] : last[i]].copy()
                if group.has_states:
                    self.pools[1].release(blocks[blocks > 0], cold=True)
                else:
                    self.pool.release(blocks)

    def unschedule_blocks(self, slots: Slots) -> None:
        """Unschedule the last block of tokens of these slots, so that it is computed again."""
        end = self.batch.scheduled[slots]
        begin = end - self.decoding.block
        self.release_rejected(slots, end, begin)
        self.batch.scheduled[slots] = begin

    # ---- how many blocks requests need

    def peak_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a request of this many tokens holds at once."""
        return sum(
            blocks_needed(group, num_tokens, self.chunk)
            for group in self.groups
            if not group.has_states
        )

    def num_exclusive(self, slot: int) -> int:
        """Return how many blocks only the request in this slot holds."""
        held = zip(self.groups, self.batch.held(slot), strict=True)
        return sum(
            self.pool.num_exclusive(blocks) for group, blocks in held if not group.has_states
        )

    def num_needed(self, request: Request, hit: Hit) -> int:
        """Return how many blocks a waiting request needs until all its known tokens are computed,
        without the blocks of its hit that other requests hold.
        """
        tables = (
            blocks
            for group, blocks in zip(self.groups, hit.blocks, strict=True)
            if not group.has_states
        )
        cached = [block for blocks in tables for block in blocks if block > 0]
        num_positions = self.decoding.goal(len(request.tokens))
        return self.peak_blocks(num_positions) - self.pool.num_shared(cached)

    def num_promised(self, slots: Slots) -> int:
        """Return how many free blocks running requests need to compute their known tokens."""
        batch = self.batch
        growth = self.growth(batch.scheduled[slots], self.decoding.goal(batch.known[slots]))
        total = 0
        for g, group in enumerate(self.groups):
            if not group.has_states:
                num_new = np.maximum(growth.of(g), 0)
                total += int(np.minimum(num_new, blocks_needed(group, 2**31, self.chunk)).sum())
        return total

    # ---- the plan

    def pop_changes(
        self,
    ) -> tuple[tuple[BlockDiff, ...], tuple[BlockMove, ...], tuple[BlockMove, ...]]:
        """Return the new table entries, stores and loads, and end the leases of the plan."""
        diffs = tuple(
            BlockDiff(*concatenate(entries)) if entries else _NO_DIFF
            for entries in self._new_entries
        )
        stores = tuple(self._stores)
        loads = tuple(self._loads)
        self._new_entries = [[] for _ in self.groups]
        self._stores = []
        self._loads = []
        self._new_states.clear()
        if self.connector is not None:
            self.connector.end_plan()
        return diffs, stores, loads

    def audit(self) -> None:
        """Raise AssertionError unless slots, tables, pools, cache and connector agree."""
        ref_counts = self.batch.audit([pool.num_blocks for pool in self.pools])
        for pool, refs in zip(self.pools, ref_counts, strict=True):
            pool.audit()
            pool.check_refs(refs)
        if self.connector is not None:
            self.connector.audit()

    def _save_evicted(self, pool_index: int, key: Key, block: int) -> None:
        assert self.connector is not None
        connector_entry = self.connector.save(key)
        if connector_entry is not None:
            self._stores.append(BlockMove(block, connector_entry, pool_index))
