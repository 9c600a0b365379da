"""The running requests as NumPy columns, one row (slot) each, so that a decode step touches no Python object.

Two counters tell a request's progress; both only grow while the request holds its slot:

    scheduled   positions that submitted steps compute
    known       tokens whose value the host has: the prompt, then the sampled tokens

Everything else is derived. A decode is a request whose next position is its newest token:

    to compute      max(known - scheduled, 1), up to `last` (= final length - 1: no step follows that token)
    samples         the step reaches `known`
    in flight       tokens between known and scheduled: used by a later step already, value not on the host yet
    blocks          ceil(scheduled / block_size) table entries

`occupancy` tells the successive requests of a slot apart: it grows when a request leaves, and a result that carries an
old value is dropped.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import I32, Slots
from moeserve.engine.requests import Request


class InputBatch:
    """num_slots rows. `tables[g]` is KV group g's block table; entry 0 is the null block, left of a window."""

    def __init__(self, num_slots: int, max_len: int, groups: tuple[KVGroup, ...]) -> None:
        self.block_size = groups[0].block_size
        max_blocks = -(-max_len // self.block_size)
        self.requests: list[Request | None] = [None] * num_slots
        self.slot_of: dict[int, int] = {}
        self.rid = np.zeros(num_slots, np.int64)
        self.scheduled = np.zeros(num_slots, np.int32)
        self.known = np.zeros(num_slots, np.int32)
        self.last = np.zeros(num_slots, np.int32)
        self.min_known = np.zeros(num_slots, np.int32)  # a stop token counts from this length on
        self.occupancy = np.zeros(num_slots, np.int64)
        self.hashed = np.zeros(num_slots, np.int32)  # leading blocks that the prefix cache has seen
        self.unsent = np.zeros(num_slots, np.bool_)  # none of the request's tokens was sent yet
        self.tokens = np.zeros((num_slots, max_len), "<i4")  # memory is touched only as far as it is used
        self.tables = [np.zeros((num_slots, max_blocks), np.int32) for _ in groups]
        self.passed = [np.zeros(num_slots, np.int32) for _ in groups]  # leading entries given up by the window
        self.stops = StopTable()
        self._free = list(range(num_slots - 1, -1, -1))
        self._by_priority: list[tuple[int, int, int]] = []  # (priority, arrival, slot), first in line first
        self.order: Slots = np.zeros(0, np.intp)  # the slots of _by_priority; replaced, never changed in place

    @property
    def num_running(self) -> int:
        """Slots in use."""
        return len(self.slot_of)

    @property
    def num_free(self) -> int:
        """Slots that `admit` can give."""
        return len(self._free)

    def num_blocks(self, positions: I32) -> I32:
        """Returns the number of blocks that so many positions fill or touch."""
        blocks: I32 = (positions + (self.block_size - 1)) // self.block_size
        return blocks

    def request(self, slot: int) -> Request:
        """Returns the request in an occupied slot."""
        request = self.requests[slot]
        assert request is not None, slot
        return request

    def admit(self, request: Request, num_hit: int) -> int:
        """Gives `request` a slot, which is returned; its first num_hit positions are computed already."""
        slot = self._free.pop()
        self.requests[slot] = request
        self.slot_of[request.rid] = slot
        entry = (*request.order, slot)
        at = bisect_left(self._by_priority, entry)
        self._by_priority.insert(at, entry)
        self.order = np.concatenate((self.order[:at], [slot], self.order[at:]))
        known = len(request.tokens)
        self.tokens[slot, :known] = request.tokens
        self.rid[slot] = request.rid
        self.scheduled[slot] = num_hit
        self.known[slot] = known
        self.last[slot] = request.max_total - 1
        self.min_known[slot] = request.num_prompt + request.sampling.min_tokens
        self.hashed[slot] = num_hit // self.block_size
        self.unsent[slot] = not request.was_sent
        self.stops.add(slot, request.sampling.stop_ids)
        return slot

    def vacate(self, slot: int) -> Request:
        """Frees the slot and returns its request. Results in flight for it will be dropped; blocks are not freed."""
        request = self.request(slot)
        del self.slot_of[request.rid]
        self.requests[slot] = None
        self.occupancy[slot] += 1
        self.stops.remove(slot)
        self._free.append(slot)
        at = bisect_left(self._by_priority, (*request.order, slot))
        del self._by_priority[at]
        self.order = np.concatenate((self.order[:at], self.order[at + 1 :]))
        return request

    def held(self, slot: int) -> list[I32]:
        """Returns, per group, the blocks that the slot holds, in table order."""
        end = -(-int(self.scheduled[slot]) // self.block_size)
        return [t[slot, p[slot] : end] for t, p in zip(self.tables, self.passed, strict=True)]

    def audit(self, num_blocks: int) -> I32:
        """Checks the rows; returns how often the tables name each of num_blocks blocks."""
        running = [(slot, request) for slot, request in enumerate(self.requests) if request is not None]
        busy = [slot for slot, _ in running]
        assert sorted([*busy, *self._free]) == list(range(len(self.requests))), "slots do not add up"
        assert self.slot_of == {int(self.rid[slot]): slot for slot in busy}, "slots and request ids disagree"
        by_priority = sorted((*request.order, slot) for slot, request in running)
        assert by_priority == self._by_priority, "the priorities are wrong"
        assert self.order.tolist() == [entry[-1] for entry in by_priority], "the order is wrong"
        assert (self.scheduled[busy] <= self.last[busy]).all(), "scheduled beyond the last position"
        assert (self.known[busy] <= self.last[busy]).all(), "a complete request still runs"
        held = [blocks for slot in busy for blocks in self.held(slot)]
        return np.bincount(np.concatenate([np.zeros(0, np.int32), *held]), minlength=num_blocks).astype(np.int32)


class StopTable:
    """Stop ids of the running requests. A count per token id finds the few rows whose stop ids are worth a look."""

    def __init__(self) -> None:
        self._ids: dict[int, frozenset[int]] = {}
        self._count = np.zeros(2, np.int32)  # the last entry stays 0 and stands for every larger id

    def add(self, slot: int, ids: tuple[int, ...]) -> None:
        """Sets the stop ids of a slot."""
        if not ids:
            return
        unique = self._ids[slot] = frozenset(ids)
        if (size := max(unique) + 2) > len(self._count):
            self._count = np.concatenate((self._count, np.zeros(size - len(self._count), np.int32)))
        self._count[list(unique)] += 1

    def remove(self, slot: int) -> None:
        """Forgets the stop ids of a slot."""
        if ids := self._ids.pop(slot, None):
            self._count[list(ids)] -= 1

    def hits(self, slots: Slots, tokens: I32) -> list[int]:
        """Returns the rows i where tokens[i] is a stop id of slots[i]."""
        if not self._ids:
            return []
        some = np.flatnonzero(self._count[np.minimum(tokens, len(self._count) - 1)])
        return [i for i in some.tolist() if int(tokens[i]) in self._ids.get(int(slots[i]), ())]
