"""The running requests as NumPy the input batch, one row (slot) each, so that a decode step touches no Python object.

Two counters tell a request's progress; both only grow while it holds its slot:

    scheduled   positions that submitted steps compute
    known       tokens whose value the host has: prompt, then settled tokens

Everything else is derived. A decode is a request whose next position is its newest token:

    to compute      max(known - scheduled, 1), as far as last (= its final length - 1: no step follows that token)
    samples         the step reaches known
    in flight       tokens between known and scheduled: computed upon already, value still on its way
    blocks          ceil(scheduled / block_size) table entries

`occupancy` tells the tenants of a slot apart: whoever leaves bumps it, and a result with an old one is dropped.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.groups import KVGroup
from moeserve.engine.plan import I32
from moeserve.engine.requests import Request

Slots = NDArray[np.intp]


class InputBatch:
    """num_slots rows. `tables[g]` is KV group g's block table; null entries are blocks passed by a window."""

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
        self.unsent = np.zeros(num_slots, np.bool_)  # none of its tokens was sent yet
        self.tokens = np.zeros((num_slots, max_len), "<i4")  # memory is touched only as far as it is used
        self.tables = [np.zeros((num_slots, max_blocks), np.int32) for _ in groups]
        self.passed = [np.zeros(num_slots, np.int32) for _ in groups]  # leading entries given up by the window
        self._free = list(range(num_slots - 1, -1, -1))
        self._ranked: list[tuple[int, int, int]] = []  # (priority, arrival, slot), best first
        self.order: Slots = np.zeros(0, np.intp)  # the slots of _ranked; replaced, never changed in place

    @property
    def num_running(self) -> int:
        return len(self.slot_of)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_blocks(self, positions: I32) -> I32:
        """Blocks that this many positions fill or touch."""
        blocks: I32 = (positions + (self.block_size - 1)) // self.block_size
        return blocks

    def request(self, slot: int) -> Request:
        request = self.requests[slot]
        assert request is not None, slot
        return request

    def admit(self, request: Request, num_hit: int) -> int:
        """Gives `request` a slot; its first num_hit positions are computed already."""
        slot = self._free.pop()
        self.requests[slot] = request
        self.slot_of[request.rid] = slot
        entry = (*request.rank, slot)
        at = bisect_left(self._ranked, entry)
        self._ranked.insert(at, entry)
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
        return slot

    def vacate(self, slot: int) -> Request:
        """Frees the slot; results still on their way to this tenant will be dropped. Blocks are the caller's."""
        request = self.request(slot)
        del self.slot_of[request.rid]
        self.requests[slot] = None
        self.occupancy[slot] += 1
        self._free.append(slot)
        at = bisect_left(self._ranked, (*request.rank, slot))
        del self._ranked[at]
        self.order = np.concatenate((self.order[:at], self.order[at + 1 :]))
        return request

    def held(self, slot: int) -> list[I32]:
        """Per group the blocks that the slot holds, in table order."""
        end = -(-int(self.scheduled[slot]) // self.block_size)
        return [t[slot, p[slot] : end] for t, p in zip(self.tables, self.passed, strict=True)]

    def audit(self, num_blocks: int) -> I32:
        """Checks the rows; returns how often the tables name each of num_blocks blocks."""
        busy = [slot for slot, _ in self._running()]
        assert sorted([*busy, *self._free]) == list(range(len(self.requests))), "slots do not add up"
        assert self.slot_of == {int(self.rid[slot]): slot for slot in busy}, "slots and request ids disagree"
        ranked = sorted((*request.rank, slot) for slot, request in self._running())
        assert ranked == self._ranked, "the ranks are wrong"
        assert self.order.tolist() == [entry[-1] for entry in ranked], "the order is wrong"
        assert (self.scheduled[busy] <= self.last[busy]).all(), "scheduled beyond the last position"
        assert (self.known[busy] <= self.last[busy]).all(), "a complete request still runs"
        held = [blocks for slot in busy for blocks in self.held(slot)]
        return np.bincount(np.concatenate([np.zeros(0, np.int32), *held]), minlength=num_blocks).astype(np.int32)

    def _running(self) -> list[tuple[int, Request]]:
        return [(slot, request) for slot, request in enumerate(self.requests) if request is not None]
