"""The KV-cache manager: slots, blocks, table entries and cached prefixes of the running requests. The scheduler decides
which requests get them.

`free` undoes everything that `admit` and `grow` took, and `audit` checks that nothing is lost or held twice.
"""

from __future__ import annotations

import numpy as np

from moeserve.config import Limits
from moeserve.engine.blocks import BlockPool, Key, KVGroup, blocks_needed, first_live_token
from moeserve.engine.input_batch import InputBatch
from moeserve.engine.plan import I32, BlockChanges, BlockMove, Slots
from moeserve.engine.prefix_cache import Hit, PrefixCache
from moeserve.engine.requests import Request
from moeserve.engine.store import HostStore


class KVCacheManager:
    """The input batch, the block pool and the prefix cache, kept consistent.

    Changes that the runner must repeat on the device are collected until `take_changes`, once per plan.
    """

    def __init__(self, limits: Limits, groups: tuple[KVGroup, ...], store: HostStore | None) -> None:
        self.groups = groups
        self.store = store
        self.pool = BlockPool(limits.num_blocks, self._evicted if store is not None else None)
        self.cache = PrefixCache(self.pool, groups, store, limits.enable_prefix_caching)
        self.batch = InputBatch(limits.max_num_seqs, limits.max_model_len, groups)
        self.chunk = min(limits.prefill_chunk, limits.max_num_batched_tokens)
        self._block_size = limits.block_size
        self._changes = BlockChanges([[] for _ in groups])

    # ---- one request

    def admit(self, request: Request, hit: Hit) -> int:
        """Gives the request a slot, which is returned, and the blocks of its cache hit."""
        batch = self.batch
        tables, loads = self.cache.claim(request, hit)
        num_hit = hit.num_blocks * self._block_size
        slot = batch.admit(request, num_hit)
        indices = np.arange(hit.num_blocks, dtype=np.int32)
        for g, entries in enumerate(tables):
            batch.tables[g][slot, : hit.num_blocks] = entries
            batch.passed[g][slot] = first_live_token(self.groups[g], num_hit) // self._block_size
            if hit.num_blocks:
                self._changes.set_entries(g, np.full(hit.num_blocks, slot, np.int32), indices, entries)
        self._changes.loads.extend(loads)
        return slot

    def free(self, slot: int) -> Request:
        """Takes back the slot and its blocks and returns the request. Results in flight for it will be dropped."""
        self.register(np.array([slot], np.intp))
        for blocks in self.batch.held(slot):
            self.pool.release(blocks)
        return self.batch.vacate(slot)

    def known_tokens(self, slot: int) -> I32:
        """Returns a copy of the tokens of a slot whose values the host has."""
        return self.batch.tokens[slot, : self.batch.known[slot]].copy()

    # ---- many rows at once

    def grow(self, slots: Slots, start: I32, new: I32) -> None:
        """Appends new[i] blocks per group to the table of slots[i], whose entries end at position start[i]."""
        some = np.flatnonzero(new)
        if not len(some):
            return
        count = new[some]
        total = int(count.sum())
        rows = np.repeat(slots[some], count)
        offset = np.repeat(self.batch.num_blocks(start[some]) - (np.cumsum(count) - count), count)
        indices = (offset + np.arange(total)).astype(np.int32)
        rows_i32 = rows.astype(np.int32)
        for g, table in enumerate(self.batch.tables):
            blocks = self.pool.take(total)
            table[rows, indices] = blocks
            self._changes.set_entries(g, rows_i32, indices, blocks)

    def release_passed(self, slots: Slots, start: I32) -> None:
        """Gives up blocks that no position from start[i] on can see; the null block takes their table entries."""
        batch = self.batch
        for g, group in enumerate(self.groups):
            if group.window is None:
                continue
            passed = batch.passed[g]
            live = np.maximum(start - (group.window - 1), 0) // self._block_size
            for i in np.flatnonzero(live > passed[slots]).tolist():
                slot, first, end = int(slots[i]), int(passed[slots[i]]), int(live[i])
                row = batch.tables[g][slot]
                self.pool.release(row[first:end].copy())
                row[first:end] = 0
                passed[slot] = end
                rows, nulls = np.full(end - first, slot, np.int32), np.zeros(end - first, np.int32)
                self._changes.set_entries(g, rows, np.arange(first, end, dtype=np.int32), nulls)

    def register(self, slots: Slots) -> None:
        """Makes blocks findable in the prefix cache that are full and scheduled and whose tokens are known."""
        batch = self.batch
        full = np.minimum(batch.scheduled[slots], batch.known[slots]) // self._block_size
        hashed = batch.hashed[slots]
        some = np.flatnonzero(full > hashed)
        if not len(some):
            return
        batch.hashed[slots] = np.maximum(full, hashed)
        rows = zip(slots[some].tolist(), hashed[some].tolist(), full[some].tolist(), strict=True)
        for slot, first, end in rows:
            blocks = [table[slot, first:end].tolist() for table in batch.tables]
            self.cache.register(batch.request(slot), batch.tokens[slot], blocks, first)

    # ---- room

    def peak_blocks(self, num_tokens: int) -> int:
        """Returns the most blocks that a request of this many tokens holds at once."""
        return sum(blocks_needed(group, num_tokens, self.chunk) for group in self.groups)

    def cost(self, request: Request, hit: Hit) -> int:
        """Returns the free blocks that the request takes until all its known tokens are computed."""
        found = [block for blocks in hit.blocks for block in blocks if block > 0]
        return self.peak_blocks(len(request.tokens)) - self.pool.num_shared(found)

    def promised(self, slots: Slots) -> int:
        """Returns the free blocks that these rows still take until all their known tokens are computed."""
        batch = self.batch
        known, scheduled = batch.known[slots], batch.scheduled[slots]
        rest = np.maximum(batch.num_blocks(known) - batch.num_blocks(scheduled), 0)
        caps = (blocks_needed(group, 2**31, self.chunk) for group in self.groups)
        return sum(int(np.minimum(rest, cap).sum()) for cap in caps)

    # ---- the plan

    def take_changes(self) -> BlockChanges:
        """Returns the changes since the last call, and ends the store's leases: the plan is complete."""
        changes, self._changes = self._changes, BlockChanges([[] for _ in self.groups])
        if self.store is not None:
            self.store.release()
        return changes

    def audit(self) -> None:
        """Raises AssertionError unless slots, tables, pool, cache and store agree."""
        self.pool.audit()
        self.pool.check_holds(self.batch.audit(self.pool.num_blocks))
        if self.store is not None:
            self.store.audit()

    def _evicted(self, key: Key, block: int) -> None:
        assert self.store is not None
        host_block = self.store.store(key)
        if host_block is not None:
            self._changes.stores.append(BlockMove(block, host_block))
