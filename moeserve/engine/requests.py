"""Requests: the scheduler's record of one, the queue of those that wait, and the batch of those
that run.

The batch has NumPy columns, one row (slot) per running request, so that a decode step touches no
Python object. Two counters tell a request's progress; both only grow while the request holds its
slot:

    scheduled   positions that submitted steps compute
    known       tokens whose value the host has: the prompt, then the sampled tokens

Everything else is derived. A decode is a request whose next position is its newest token:

    to compute      max(known - scheduled, 1) and drafts, up to `last` (final length - 1)
    samples         the step reaches `known`
    in flight       tokens between known and scheduled: a later step uses them already, and the
                    host does not have their values yet; positions of wrong drafts are given back
                    when the result comes
    blocks          ceil(scheduled / block_size) table entries

`occupancy` tells the successive requests of a slot apart: it grows when a request leaves, and a
result that carries an old value is dropped.
"""

import sys
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import I32, Slots
from moeserve.errors import InvalidRequest
from moeserve.messages import SAMPLE, TASKS, Submit
from moeserve.sampling import TokenSampling


@dataclass(slots=True, eq=False)
class Request:
    """A request's facts, in a slot or not. Its progress lives in `InputBatch` while it runs.

    tokens: those known at the last admission or preemption: the prompt, then generated ones.
    max_total: length at which the request ends, prompt included; no step follows the token at
    max_total - 1.
    """

    rid: int
    tokens: I32
    num_prompt: int
    max_total: int
    sampling: TokenSampling
    priority: int
    extras: Mapping[str, bytes]  # what K/V depend on beside tokens, by name; see `root_of`
    arrival: int
    task: str = SAMPLE
    num_resets: int = -1  # resets of the prefix cache before the hash chain began
    root: bytes = b""  # start of the chain
    hashes: list[bytes] = field(default_factory=list)  # chain over full blocks, as far as needed
    num_cached: int | None = None  # prompt tokens found in the cache at the first admission
    was_sent: bool = False  # its first token was sent, and num_cached with it
    grammar_ticket: int = 0  # of its prepared grammar; 0: it has none
    kv_ticket: int = 0  # of the blocks that a connector fetched for it; 0: none
    uses_connector: bool = True  # False after a loss: its prefix is computed, not loaded again
    num_scored: int = 1  # prompt positions whose logprobs were sent (position 0 has none)
    borders: tuple[
        int, ...
    ] = ()  # numbers of leading blocks behind which others may well go on, most likely ones first

    @property
    def order(self) -> tuple[int, int]:
        """Place in line: priority, then arrival. Smaller values go first."""
        return self.priority, self.arrival


def request_of(msg: Submit, arrival: int, max_model_len: int, vocab_size: int) -> Request:
    """Makes a Request of a Submit. Raises InvalidRequest for a number out of its range.

    The front end has checked all of this with better messages: this protects the engine and its
    other requests.
    """
    if len(msg.tokens) % 4:
        raise InvalidRequest(f"tokens has {len(msg.tokens)} bytes, not a whole number of int32")
    tokens = np.frombuffer(msg.tokens, "<i4")
    sampling = msg.sampling
    num_emitted = len(tokens) - msg.num_prompt
    for name, values, low, high in (
        ("the number of tokens", [len(tokens)], 1, max_model_len - 1),
        ("num_prompt", [msg.num_prompt], 1, len(tokens)),
        ("token ids", [int(tokens.min(initial=0)), int(tokens.max(initial=0))], 0, vocab_size - 1),
        ("stop ids", sampling.stop_ids, 0, vocab_size - 1),
        ("max_tokens", [sampling.max_tokens], num_emitted + 1, sys.maxsize),
    ):
        if wrong := [value for value in values if not low <= value <= high]:
            raise InvalidRequest(f"{name} must lie in {low}..{high}, got {wrong[0]}")
    if msg.task not in TASKS:
        raise InvalidRequest(f"task must be one of {', '.join(TASKS)}, got {msg.task!r}")
    return Request(
        rid=msg.rid,
        tokens=tokens,
        num_prompt=msg.num_prompt,
        max_total=min(msg.num_prompt + sampling.max_tokens, max_model_len),
        sampling=sampling,
        priority=msg.priority,
        extras={"salt": msg.salt.encode()} if msg.salt else {},
        arrival=arrival,
        task=msg.task,
    )


class WaitingQueue:
    """Waiting requests by priority, then arrival. Any of them can be removed."""

    def __init__(self) -> None:
        self._queue: list[Request] = []
        self._by_rid: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, rid: int) -> bool:
        return rid in self._by_rid

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    @property
    def head(self) -> Request | None:
        """The next request to admit."""
        return self._queue[0] if self._queue else None

    def push(self, request: Request) -> None:
        """Adds a request at its place in line."""
        insort(self._queue, request, key=lambda r: r.order)
        self._by_rid[request.rid] = request

    def pop(self) -> Request:
        """Removes and returns the head."""
        request = self._queue.pop(0)
        del self._by_rid[request.rid]
        return request

    def remove(self, rid: int) -> Request:
        """Removes and returns a request by its id."""
        request = self._by_rid.pop(rid)
        del self._queue[bisect_left(self._queue, request.order, key=lambda r: r.order)]
        return request


class InputBatch:
    """num_slots rows. `tables[g]` is KV group g's block table; entry 0 is the null block, left of a
    window.
    """

    def __init__(self, num_slots: int, max_len: int, groups: tuple[KVGroup, ...]) -> None:
        self.block_size = groups[0].block_size
        self._groups = groups
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
        self.speculates = np.zeros(num_slots, np.bool_)
        self.drafts = np.zeros(
            num_slots, np.int32
        )  # guesses of the next tokens that the next step is to verify
        self.tokens = np.zeros(
            (num_slots, max_len), "<i4"
        )  # memory is touched only as far as it is used
        self.tables = [np.zeros((num_slots, max_blocks), np.int32) for _ in groups]
        self.passed = [
            np.zeros(num_slots, np.int32) for _ in groups
        ]  # leading entries given up by the window
        self.stops = StopTable()
        self._free = list(range(num_slots - 1, -1, -1))
        self._by_priority: list[
            tuple[int, int, int]
        ] = []  # (priority, arrival, slot), first in line first
        self.order: Slots = np.zeros(
            0, np.intp
        )  # the slots of _by_priority; replaced, never changed in place

    @property
    def num_running(self) -> int:
        """Slots in use."""
        return len(self.slot_of)

    @property
    def num_free(self) -> int:
        """Slots that `admit` can give."""
        return len(self._free)

    def request(self, slot: int) -> Request:
        """Returns the request in an occupied slot."""
        request = self.requests[slot]
        assert request is not None, slot
        return request

    def admit(self, request: Request, num_hit: int) -> int:
        """Gives `request` a slot, which is returned; its first num_hit positions are computed
        already.
        """
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
        self.speculates[slot] = request.sampling.speculate
        self.stops.add(slot, request.sampling.stop_ids)
        return slot

    def vacate(self, slot: int) -> Request:
        """Frees the slot and returns its request. Results in flight for it will be dropped; blocks
        are not freed.
        """
        request = self.request(slot)
        del self.slot_of[request.rid]
        self.requests[slot] = None
        self.occupancy[slot] += 1
        self.drafts[slot] = 0
        self.stops.remove(slot)
        self._free.append(slot)
        at = bisect_left(self._by_priority, (*request.order, slot))
        del self._by_priority[at]
        self.order = np.concatenate((self.order[:at], self.order[at + 1 :]))
        return request

    def held(self, slot: int) -> list[I32]:
        """Returns, per group, the blocks that the slot holds, in table order."""
        scheduled = int(self.scheduled[slot])
        held = []
        for group, table, passed in zip(self._groups, self.tables, self.passed, strict=True):
            blocks = table[slot, passed[slot] : group.num_blocks(scheduled)]
            held.append(blocks[blocks > 0] if group.has_states else blocks)
        return held

    def audit(self, num_blocks: Sequence[int]) -> list[I32]:
        """Checks the rows; returns how often the tables name each of num_blocks[p] blocks of every
        pool p.
        """
        running = [
            (slot, request) for slot, request in enumerate(self.requests) if request is not None
        ]
        busy = [slot for slot, _ in running]
        assert sorted([*busy, *self._free]) == list(range(len(self.requests))), (
            "slots do not add up"
        )
        assert self.slot_of == {int(self.rid[slot]): slot for slot in busy}, (
            "slots and request ids disagree"
        )
        by_priority = sorted((*request.order, slot) for slot, request in running)
        assert by_priority == self._by_priority, "the priorities are wrong"
        assert self.order.tolist() == [entry[-1] for entry in by_priority], "the order is wrong"
        assert (self.scheduled[busy] <= self.last[busy]).all(), "scheduled beyond the last position"
        assert (self.known[busy] <= self.last[busy]).all(), "a complete request still runs"
        counts = [np.zeros(number, np.int32) for number in num_blocks]
        for slot in busy:
            for group, blocks in zip(self._groups, self.held(slot), strict=True):
                np.add.at(counts[group.pool], blocks, 1)
        return counts


class StopTable:
    """Stop ids of the running requests. A count per token id finds the few rows whose stop ids are
    worth a look.
    """

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


def share(slots: Slots, start: I32, count: I32, budget: int) -> tuple[Slots, I32, I32]:
    """Cuts counts to a token budget and drops rows that get nothing. Rows come first in line first.

    Rows that need just one token get it, so that no long prompt stalls a stream; then the others in
    order. counts [5, 1, 5, 1] with budget 8 -> [5, 1, 1, 1]
    """
    single: NDArray[np.bool_] = count == 1
    single &= np.cumsum(single) <= budget
    left = budget - int(np.count_nonzero(single))
    several = np.where(count > 1, count, 0)
    several = np.clip(left - (np.cumsum(several) - several), 0, several)
    count = np.where(single, 1, several).astype(np.int32)
    keep = np.flatnonzero(count)
    return slots[keep], start[keep], count[keep]
