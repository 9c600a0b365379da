"""The KV-cache manager: slots, blocks, table entries and cached prefixes of the running requests.
The scheduler decides which requests get them.

`free` undoes everything that `admit` and `grow` took, and `audit` checks that nothing is lost or
held twice.

The prefix cache finds blocks of equal prompt beginnings by a chained hash per full block and KV
group: h_0 = sha256(root + tokens of block 0), h_i = sha256(h_{i-1} + tokens of block i); tokens as
little-endian int32. The root hashes everything besides tokens that K/V depend on: `identity`, which
all requests of an engine have in common (the model, its numerics), and what a request adds
(`Request.extras`). So keys are the same in every process that computes the same K/V. A block may be
registered as soon as the step that computes it is submitted, because steps run in order.

States of recurrent layers are blocks of a pool of their own, which always has the two that every
request needs. What that leaves holds states where other requests may go on: first at a request's
borders, the ends of its prompt and of what it shares with an earlier one, then at further blocks. A
request that has passed a state gives it up as cold unless it is at a border; the last one that it
computed is kept as well. A state is found from the next plan on, so that no row reads what another
row of its step writes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from moeserve.config import Limits
from moeserve.engine.blocks import STATES_HELD, BlockPool, Key, KVGroup, blocks_needed, longest_hit
from moeserve.engine.connector import KVConnector, When
from moeserve.engine.kv_rule import FULL
from moeserve.engine.plan import I32, BlockDiff, BlockMove, Slots
from moeserve.engine.requests import InputBatch, Request
from moeserve.engine.store import HostStore

T = TypeVar("T", bound=np.generic)
IN_STORE = -1
NOTHING: Mapping[str, bytes] = MappingProxyType({})
_NONE: dict[int, I32] = {}
_NO_DIFF = BlockDiff(*(np.zeros(0, np.int32) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class Hit:
    """The cached beginning of a request: blocks[g][i] for the first num_blocks blocks of group g.

    A block of 0 was passed by the window and is never read; IN_STORE is near, and is to be loaded
    into a new block. border: the blocks that would be found if all their states were cached.
    """

    num_blocks: int
    blocks: tuple[tuple[int, ...], ...]
    border: int = 0


def root_of(extras: Mapping[str, bytes], num_resets: int = 0) -> bytes:
    """Return the start of a hash chain. Requests share blocks only below equal roots.

    extras: values by name, in any order. A name has no NUL; an absent value is not an empty one.
    """
    tagged = dict(extras)
    if num_resets:
        tagged["num_resets"] = num_resets.to_bytes(8, "little")
    parts = [
        name.encode() + b"\0" + len(value).to_bytes(8, "little") + value
        for name, value in sorted(tagged.items())
    ]
    return sha256(b"moeserve kv 2\0" + b"".join(parts)).digest()


def chain(parent: bytes, tokens: I32, block_size: int) -> list[bytes]:
    """Returns the hashes of the full blocks of `tokens` (little-endian int32), which follow the
    block `parent`.
    """
    step = 4 * block_size
    data = tokens.tobytes()
    hashes = []
    for at in range(0, len(data) - step + 1, step):
        parent = sha256(parent + data[at : at + step]).digest()
        hashes.append(parent)
    return hashes


@dataclass(frozen=True, slots=True)
class Fetch:
    """What a connector has of a request's prefix beyond the device's blocks."""

    keys: list[Key]
    when: When


class Growth(NamedTuple):
    """New block-table entries of some rows: `plain` in each group with an entry for each position,
    `others[g]` in group g.
    """

    plain: I32
    others: dict[int, I32]

    def of(self, group: int) -> I32:
        """Return the number of new entries of each row in one group."""
        return self.others.get(group, self.plain) if self.others else self.plain


class KVCacheManager:
    """The input batch, the block pool and the prefix cache with the connector behind it, kept
    consistent.

    Changes that the runner must repeat on the device are collected until `take_changes`, once per
    plan: new table entries, and blocks to save by the connector (`stores`) and to load (`loads`).

    connector: None for a host store, if the limits have room for one.
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
        self._plain = KVGroup(FULL, limits.block_size, ())
        self._others = [g for g, group in enumerate(groups) if not group.rule.counts_positions]
        self._num_plain = self.num_kv_groups - len(self._others)  # pools of states are apart
        sizes = [(limits.num_blocks, limits.num_store_blocks)]
        if self.num_kv_groups < len(groups):
            sizes.append((limits.num_states, limits.num_store_states))
        if connector is None and any(stored for _, stored in sizes):
            connector = HostStore([stored for _, stored in sizes], [group.pool for group in groups])
        self.connector = connector if limits.enable_prefix_caching else None
        self.pools = [
            BlockPool(number, None if self.connector is None else partial(self._evicted, pool))
            for pool, (number, _) in enumerate(sizes)
        ]
        self._reserved_states = STATES_HELD * limits.max_num_seqs
        self.batch = InputBatch(limits.max_num_seqs, limits.max_model_len, groups)
        self.chunk = min(limits.prefill_chunk, limits.max_num_batched_tokens)
        self._block_size = limits.block_size
        self._caches_prefixes = limits.enable_prefix_caching
        self._num_resets = 0
        self._identity = identity
        self._moves_out: list[BlockMove] = []
        self._loads: list[BlockMove] = []
        self._entries: list[list[tuple[I32, I32, I32]]] = [
            [] for _ in groups
        ]  # slots, indices, blocks
        self._new_states: set[int] = set()  # taken since the last plan

    @property
    def pool(self) -> BlockPool:
        """The pool of blocks with an entry per token."""
        return self.pools[0]

    # ---- the prefix cache

    def match(self, request: Request) -> Hit:
        """Returns the longest cached beginning of a waiting request, its last token excepted. Takes
        no references yet.

        The hash chain begins here, again after a reset. A request that runs during a reset keeps
        its old hashes, which no later request has.
        """
        limit = self._hash_prefix(request)
        if not limit:
            return Hit(0, ((),) * len(self.groups))
        border = self._common_hit(
            request, limit, [g for g, group in enumerate(self.groups) if not group.has_states]
        )
        length = (
            self._common_hit(request, border, range(len(self.groups)))
            if len(self.pools) > 1
            else border
        )
        blocks = []
        for g, group in enumerate(self.groups):
            first = int(group.rule.first_live(length * self._block_size)) // self._block_size
            end = min(length, int(group.num_blocks(length * self._block_size)))
            found = [self._find(request, (key, g)) for key in request.hashes[first:end]]
            present = (block for block in found if block is not None)
            blocks.append((*(0,) * first, *present, *(0,) * (length - end)))
        return Hit(length, tuple(blocks), border)

    def _hash_prefix(self, request: Request) -> int:
        """Hash the blocks of a waiting request that may be cached. Return their number."""
        if not self._caches_prefixes:
            return 0
        if request.num_resets != self._num_resets:
            request.num_resets = self._num_resets
            request.root = root_of({**self._identity, **request.extras}, self._num_resets)
            request.hashes.clear()
        if request.sampling.prompt_logprobs is not None:  # these need all positions
            return 0
        limit = (len(request.tokens) - 1) // self._block_size
        self._extend(request, request.tokens, limit)
        return limit

    def fetchable(self, request: Request) -> Fetch:
        """Return the blocks that a connector could fetch for a request, beyond the device's own.

        Full groups decide how long the prefix can be, and the others need its end only.
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
            pool = self.pools[group.pool]
            while first < length and pool.find((request.hashes[first], g)) is not None:
                first += 1
            needed = min(length, int(group.num_blocks(length * self._block_size)))
            wanted = [(key, g) for key in request.hashes[first:needed]]
            if not wanted:
                continue
            number, when = connector.lookup(wanted)
            if when is When.LATER:
                keys += wanted[:number]
            if number or when is When.ASK_AGAIN:
                answers.add(when)
            is_short = number < len(wanted) and when is not When.ASK_AGAIN
            if group.rule.is_full and is_short:
                length = first + number
        for when in (When.ASK_AGAIN, When.LATER):
            if when in answers:
                return Fetch(keys, when)
        return Fetch(keys, When.NOW)

    def _common_hit(self, request: Request, limit: int, numbers: Iterable[int]) -> int:
        """Returns the longest hit that the groups of these numbers share."""
        length = limit
        before = -1
        for g in numbers:
            if self.groups[g].rule.is_full:
                length = longest_hit(self.groups[g], self._finder(request, g), length)
        # A shorter hit stays good for full groups but not for others: repeat these until they all
        # agree.
        while length != before:
            before = length
            for g in numbers:
                if not self.groups[g].rule.is_full:
                    length = longest_hit(self.groups[g], self._finder(request, g), length)
        return length

    def register(self, slots: Slots) -> None:
        """Makes blocks findable in the prefix cache that are full and scheduled and whose tokens
        are known.
        """
        if not self._caches_prefixes:
            return
        batch = self.batch
        full = np.minimum(batch.scheduled[slots], batch.known[slots]) // self._block_size
        hashed = batch.hashed[slots]
        some = np.flatnonzero(full > hashed)
        if not len(some):
            return
        batch.hashed[slots] = np.maximum(full, hashed)
        rows = zip(slots[some].tolist(), hashed[some].tolist(), full[some].tolist(), strict=True)
        for slot, first, end in rows:
            request = batch.request(slot)
            self._extend(request, batch.tokens[slot], end)
            for g, table in enumerate(batch.tables):
                last = end
                if g in self._others:
                    last = min(end, int(self.groups[g].num_blocks(end * self._block_size)))
                for i, block in enumerate(table[slot, first:last].tolist(), first):
                    if block:  # the window has not passed it
                        self.pools[self.groups[g].pool].cache(block, (request.hashes[i], g))

    def reset_prefix_cache(self) -> None:
        """Drops everything: later requests find nothing that was computed until now."""
        self._num_resets += 1
        self.discard_cache()

    def discard_cache(self) -> None:
        """Drop every cached block. Unlike a reset, this lets blocks of running requests be cached
        again later.
        """
        for pool in self.pools:
            pool.forget()
        if self.connector is not None:
            self.connector.clear()

    def _extend(self, request: Request, tokens: I32, num_blocks: int) -> None:
        hashes = request.hashes
        start = len(hashes) * self._block_size
        parent = hashes[-1] if hashes else request.root
        hashes.extend(
            chain(parent, tokens[start : num_blocks * self._block_size], self._block_size)
        )

    def _finder(self, request: Request, g: int) -> Callable[[int], bool]:
        return lambda i: self._find(request, (request.hashes[i], g)) is not None

    def _find(self, request: Request, key: Key) -> int | None:
        pool = self.groups[key[1]].pool
        block = self.pools[pool].find(key)
        if pool and block in self._new_states:
            return None
        if block is None and self.connector is not None and request.uses_connector:
            found = self.connector.lookup((key,))
            if found.number and found.when is When.NOW:
                return IN_STORE
        return block

    # ---- one request

    def admit(self, request: Request, hit: Hit) -> int:
        """Gives the request a slot, which is returned, and the blocks of its cache hit."""
        batch = self.batch
        tables = [np.array(blocks, np.int32) for blocks in hit.blocks]
        self._claim(request, tables)
        ends = (request.num_prompt - 1) // self._block_size, request.num_prompt // self._block_size
        request.borders = tuple(dict.fromkeys((hit.border, *ends, hit.num_blocks)))
        num_hit = hit.num_blocks * self._block_size
        slot = batch.admit(request, num_hit)
        indices = np.arange(hit.num_blocks, dtype=np.int32)
        for g, entries in enumerate(tables):
            batch.tables[g][slot, : hit.num_blocks] = entries
            batch.passed[g][slot] = int(self.groups[g].rule.first_live(num_hit)) // self._block_size
            if hit.num_blocks:
                self._entries[g].append((np.full(hit.num_blocks, slot, np.int32), indices, entries))
        return slot

    def _claim(self, request: Request, tables: list[I32]) -> None:
        """Takes references to the blocks of a hit; writes new ones over IN_STORE and loads them."""
        absent: list[tuple[int, int, int]] = []
        for g, table in enumerate(tables):
            pool = self.pools[self.groups[g].pool]
            for i, block in enumerate(table.tolist()):
                if block > 0:
                    pool.touch(block)
                elif block == IN_STORE:
                    assert self.connector is not None
                    absent.append((g, i, self.connector.load((request.hashes[i], g))))
        for g, i, host_block in absent:
            number = self.groups[g].pool
            block = int(self.pools[number].take(1)[0])
            tables[g][i] = block
            self.pools[number].cache(block, (request.hashes[i], g))
            self._loads.append(BlockMove(block, host_block, number))

    def free(self, slot: int) -> Request:
        """Takes back the slot and its blocks and returns the request. Results in flight for it will
        be dropped.
        """
        self.register(np.array([slot], np.intp))
        batch = self.batch
        for g, (group, blocks) in enumerate(zip(self.groups, batch.held(slot), strict=True)):
            if group.has_states:
                end = int(group.num_blocks(int(batch.scheduled[slot])))
                self._release_states(
                    g, slot, end, (*batch.request(slot).borders, int(batch.hashed[slot]))
                )
            else:
                self.pool.release(blocks)
        return batch.vacate(slot)

    # ---- many rows at once

    def growth(self, start: I32, end: I32) -> Growth:
        """Return the table entries that rows need to go from position start[i] to end[i]."""
        size = self._block_size
        plain: I32 = (end + (size - 1)) // size - (start + (size - 1)) // size
        if not self._others:
            return Growth(plain, _NONE)
        others = {
            g: self.groups[g].num_blocks(end) - self.groups[g].num_blocks(start)
            for g in self._others
        }
        return Growth(plain, others)

    def num_taken(self, growth: Growth) -> int:
        """Return how many blocks of the pool these entries take."""
        taken = int(growth.plain.sum()) * self._num_plain
        for new in growth.others.values():
            taken += int(new.sum())
        return taken

    def grow(self, slots: Slots, start: I32, growth: Growth) -> None:
        """Append blocks to the tables of slots[i], which hold the positions before start[i]."""
        plain = self._new_entries(self._plain, slots, start, growth.plain)
        if plain is None and not growth.others:
            return
        for g, table in enumerate(self.batch.tables):
            new = plain
            if g in growth.others:
                new = self._new_entries(self.groups[g], slots, start, growth.others[g])
            if new is None:
                continue
            rows, rows_i32, indices, count = new
            has_states = self.groups[g].has_states
            blocks = (
                self._take_states(rows, indices, count)
                if has_states
                else self.pool.take(len(indices))
            )
            table[rows, indices] = blocks
            self._entries[g].append((rows_i32, indices, blocks))

    def _new_entries(
        self, group: KVGroup, slots: Slots, start: I32, new: I32
    ) -> tuple[Slots, I32, I32, I32] | None:
        """Return slot (of both types) and index of each new entry, and how many each row has."""
        some = np.flatnonzero(new)
        if not len(some):
            return None
        count = new[some]
        rows = np.repeat(slots[some], count)
        offset = np.repeat(group.num_blocks(start[some]) - (np.cumsum(count) - count), count)
        indices = (offset + np.arange(int(count.sum()))).astype(np.int32)
        return rows, rows.astype(np.int32), indices, count

    def _take_states(self, rows: Slots, indices: I32, count: I32) -> I32:
        """Returns blocks for the table entries indices[i] of slots rows[i]; of the n-th row there
        are count[n].

        The last of each row needs one. Beyond those that requests may need, one each goes to
        borders, then to further entries, evenly spread, as far as nothing but cold states is lost.
        All others get the null block.
        """
        pool = self.pools[1]
        last = np.cumsum(count) - 1
        taken = np.zeros(len(indices), np.bool_)
        taken[last] = True
        room = pool.num_free - self._reserved_states
        if self._caches_prefixes and len(indices) > len(count) and room > 0:
            borders = []
            for first, end in zip((last - count + 1).tolist(), last.tolist(), strict=True):
                if first < end:
                    offset = first - int(indices[first]) - 1
                    at = (
                        border + offset for border in self.batch.request(int(rows[first])).borders
                    )
                    borders += [i for i in at if first <= i < end]
            taken[borders[:room]] = True
            room = min(room, pool.num_spare - len(count)) - len(borders)
            others = len(indices) - int(taken.sum())
            step = 1
            while others // step > max(room, 0):
                step *= 2
            taken[np.flatnonzero(~taken & ((indices + 1) % step == 0))[: max(room, 0)]] = True
        blocks = np.zeros(len(indices), np.int32)
        blocks[taken] = pool.take(int(taken.sum()))
        self._new_states.update(blocks[taken].tolist())
        return blocks

    def _release_states(self, g: int, slot: int, end: int, kept: tuple[int, ...]) -> None:
        """Gives up the states of a slot's entries before `end`; those behind so many blocks as are
        in `kept` not as cold."""
        first = int(self.batch.passed[g][slot])
        blocks = self.batch.tables[g][slot, first:end].copy()
        is_kept = np.isin(np.arange(first + 1, end + 1), kept)
        for cold in (True, False):
            self.pools[1].release(blocks[(blocks > 0) & (is_kept != cold)], cold=cold)

    def release_passed(self, slots: Slots, start: I32, count: I32) -> None:
        """Gives up blocks that no position from start[i] on can see; the null block takes their
        table entries. Of a group with states, the last full block stays until count[i] positions
        need another one, if there is room."""
        batch = self.batch
        for g, group in enumerate(self.groups):
            if group.rule.is_full:
                continue
            passed = batch.passed[g]
            live = group.rule.first_live(start) // self._block_size
            if group.has_states and self.pools[1].num_free > self._reserved_states:
                grows = group.num_blocks(start + count) > group.num_blocks(start)
                live = np.where(grows, live, start // self._block_size - 1)
            for i in np.flatnonzero(live > passed[slots]).tolist():
                slot = int(slots[i])
                first = int(passed[slots[i]])
                end = int(live[i])
                row = batch.tables[g][slot]
                if group.has_states:
                    self._release_states(g, slot, end, batch.request(slot).borders)
                else:
                    self.pool.release(row[first:end].copy())
                row[first:end] = 0
                passed[slot] = end
                rows = np.full(end - first, slot, np.int32)
                nulls = np.zeros(end - first, np.int32)
                self._entries[g].append((rows, np.arange(first, end, dtype=np.int32), nulls))

    def give_back(self, slots: Slots, end: I32, kept: I32) -> None:
        """Gives up the blocks of positions kept[i] .. end[i] - 1 of slots[i], which a later step
        computes again.
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

    # ---- room

    def peak_blocks(self, num_tokens: int) -> int:
        """Returns the most blocks that a request of this many tokens holds at once."""
        return sum(
            blocks_needed(group, num_tokens, self.chunk)
            for group in self.groups
            if not group.has_states
        )

    def num_exclusive(self, slot: int) -> int:
        """Returns how many blocks would be free without the request in this slot."""
        held = zip(self.groups, self.batch.held(slot), strict=True)
        return sum(
            self.pool.num_exclusive(blocks) for group, blocks in held if not group.has_states
        )

    def cost(self, request: Request, hit: Hit) -> int:
        """Return the blocks that the request takes until all its known tokens are computed."""
        tables = (
            blocks
            for group, blocks in zip(self.groups, hit.blocks, strict=True)
            if not group.has_states
        )
        found = [block for blocks in tables for block in blocks if block > 0]
        return self.peak_blocks(len(request.tokens)) - self.pool.num_shared(found)

    def promised(self, slots: Slots) -> int:
        """Returns the free blocks that these rows still take until all their known tokens are
        computed.
        """
        batch = self.batch
        known = batch.known[slots]
        scheduled = batch.scheduled[slots]
        growth = self.growth(scheduled, known)
        total = 0
        for g, group in enumerate(self.groups):
            if not group.has_states:
                rest = np.maximum(growth.of(g), 0)
                total += int(np.minimum(rest, blocks_needed(group, 2**31, self.chunk)).sum())
        return total

    # ---- the plan

    def take_changes(
        self,
    ) -> tuple[tuple[BlockDiff, ...], tuple[BlockMove, ...], tuple[BlockMove, ...]]:
        """Returns the table entries, stores and loads since the last call, and ends the plan's
        leases.
        """
        diffs = tuple(
            BlockDiff(*concatenate(parts)) if parts else _NO_DIFF for parts in self._entries
        )
        stores = tuple(self._moves_out)
        loads = tuple(self._loads)
        self._entries = [[] for _ in self.groups]
        self._moves_out = []
        self._loads = []
        self._new_states.clear()
        if self.connector is not None:
            self.connector.end_plan()
        return diffs, stores, loads

    def audit(self) -> None:
        """Raises AssertionError unless slots, tables, pool, cache and connector agree."""
        holds = self.batch.audit([pool.num_blocks for pool in self.pools])
        for pool, held in zip(self.pools, holds, strict=True):
            pool.audit()
            pool.check_holds(held)
        if self.connector is not None:
            self.connector.audit()

    def _evicted(self, pool: int, key: Key, block: int) -> None:
        assert self.connector is not None
        host_block = self.connector.save(key)
        if host_block is not None:
            self._moves_out.append(BlockMove(block, host_block, pool))


def concatenate(parts: list[tuple[NDArray[T], I32, I32]]) -> tuple[NDArray[T], I32, I32]:
    """Concatenates triples of arrays column by column, without a copy for a single one."""
    if len(parts) == 1:
        return parts[0]
    first, second, third = zip(*parts, strict=True)
    return np.concatenate(first), np.concatenate(second), np.concatenate(third)
