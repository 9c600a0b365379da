"""The scheduler's requests: the record of one, the waiting queue, and the batch of running ones.

The batch has NumPy columns with one row (slot) per running request, so that a decode step touches
no Python object per request. Two counters are the progress of a request:

    scheduled   positions that are computed, or will be by the steps in flight
    known       tokens whose values the host has: the prompt, then the sampled tokens

Both only grow while the request holds its slot, except that `scheduled` shrinks when drafts are
rejected. The rest follows from them:

    to compute      max(known - scheduled, 1) positions and the drafts, up to `max_scheduled`
    samples         whether the step reaches `known`
                    (of a model that decodes blocks, the end of a block after `known`: decoding.py)
    in flight       positions from known to scheduled: sampled tokens or drafts that a planned step
                    already reads, although the host has no values for them yet
    blocks          ceil(scheduled / block_size) table entries

A request decodes if its next position is that of its newest token. Otherwise it is in prefill.

`generation` distinguishes successive requests in a slot. It is incremented when a request leaves,
so that the scheduler can drop the results of steps that were planned for an earlier request.
"""

import sys
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.blocks import KVGroup
from moeserve.engine.decoding import SINGLE_TOKENS, Decoding
from moeserve.engine.plan import I32, Slots
from moeserve.errors import InvalidRequest
from moeserve.messages import SAMPLE, TASKS, Submit
from moeserve.sampling import TokenSampling


@dataclass(slots=True, eq=False)
class Request:
    """The scheduler's record of a request. While it runs, its progress is in the `InputBatch`."""

    rid: int
    tokens: I32  # the tokens known at the last admission or preemption: prompt, then generated
    num_prompt: int
    # Maximum length, prompt included. The last token is only output: no step computes its position.
    max_total: int
    sampling: TokenSampling
    priority: int  # lower values first
    # Values besides the tokens that make KV blocks differ, such as the cache salt, by name. See
    # `root_of` in engine/kv_cache_manager.py.
    extras: Mapping[str, bytes]
    arrival: int  # sequence number
    task: str = SAMPLE
    num_resets: int = -1  # resets of the prefix cache before the hash chain was begun
    root: bytes = b""  # start of the hash chain, from `root_of`
    hashes: list[bytes] = field(default_factory=list)  # hashes of full blocks, as needed
    num_cached: int | None = None  # prompt tokens found in the cache at the first admission
    was_sent: bool = False  # whether its first token was sent, and num_cached with it
    grammar_ticket: int = 0  # ticket of its prepared grammar; 0: none (engine/preparing.py)
    kv_ticket: int = 0  # ticket of the blocks that a connector fetches for it; 0: none
    uses_connector: bool = True  # False after lost blocks: its prefix is computed, not loaded
    num_scored: int = 1  # prompt positions whose logprobs were sent (position 0 has none)
    # Lengths in blocks at which other requests are likely to branch off, the likeliest first.
    branch_points: tuple[int, ...] = ()

    @property
    def order(self) -> tuple[int, int]:
        """The sort key of waiting and running requests: priority, then arrival."""
        return self.priority, self.arrival


def request_of(msg: Submit, arrival: int, max_model_len: int, vocab_size: int) -> Request:
    """Create the Request of a Submit. Raises InvalidRequest if a number is out of range.

    The front end has checked the same, with better messages. These checks protect the engine and
    its other requests.
    """
    if len(msg.tokens) % 4:
        raise InvalidRequest(f"tokens has {len(msg.tokens)} bytes, not a whole number of int32")
    tokens = np.frombuffer(msg.tokens, "<i4")
    sampling = msg.sampling
    num_generated = len(tokens) - msg.num_prompt  # more than 0 for a resumed request
    for name, values, low, high in (
        ("the number of tokens", [len(tokens)], 1, max_model_len - 1),
        ("num_prompt", [msg.num_prompt], 1, len(tokens)),
        ("token ids", [int(tokens.min(initial=0)), int(tokens.max(initial=0))], 0, vocab_size - 1),
        ("stop ids", sampling.stop_ids, 0, vocab_size - 1),
        ("max_tokens", [sampling.max_tokens], num_generated + 1, sys.maxsize),
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
    """The waiting requests, sorted by priority, then arrival. Any of them can be removed."""

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
        """Add a request in its order."""
        insort(self._queue, request, key=lambda r: r.order)
        self._by_rid[request.rid] = request

    def pop(self) -> Request:
        """Remove and return the head."""
        request = self._queue.pop(0)
        del self._by_rid[request.rid]
        return request

    def remove(self, rid: int) -> Request:
        """Remove and return a request by its id."""
        request = self._by_rid.pop(rid)
        del self._queue[bisect_left(self._queue, request.order, key=lambda r: r.order)]
        return request


class InputBatch:
    """The running requests, in columns with one row per slot.

    `tables[g]` is the block table of KV group g. Entries that the attention window has passed are
    0, the null block.
    """

    def __init__(
        self,
        num_slots: int,
        max_len: int,
        groups: tuple[KVGroup, ...],
        decoding: Decoding = SINGLE_TOKENS,
    ) -> None:
        self.decoding = decoding
        self.block_size = groups[0].block_size
        self._groups = groups
        max_blocks = -(-max_len // self.block_size)
        self.requests: list[Request | None] = [None] * num_slots
        self.slot_of: dict[int, int] = {}  # by request id
        self.rid = np.zeros(num_slots, np.int64)
        self.scheduled = np.zeros(num_slots, np.int32)  # positions in plans so far
        self.known = np.zeros(num_slots, np.int32)  # tokens whose ids are known
        self.max_total = np.zeros(num_slots, np.int32)  # length at which the request ends
        # Most positions that may be scheduled: the last token of a request is only output.
        self.max_scheduled = np.zeros(num_slots, np.int32)
        self.min_known = np.zeros(num_slots, np.int32)  # length from which stop tokens count
        self.generation = np.zeros(num_slots, np.int64)  # requests that have left the slot
        # Leading blocks that are registered in the prefix cache.
        self.num_registered = np.zeros(num_slots, np.int32)
        self.is_unsent = np.zeros(num_slots, np.bool_)  # no token of the request was sent yet
        self.speculates = np.zeros(num_slots, np.bool_)
        self.num_drafts = np.zeros(num_slots, np.int32)  # drafts for the next step to verify
        # The operating system allocates the pages of this large array only when they are written.
        self.tokens = np.zeros((num_slots, max_len), "<i4")
        self.tables = [np.zeros((num_slots, max_blocks), np.int32) for _ in groups]
        # Leading entries that the window has passed. Their blocks were released.
        self.num_passed = [np.zeros(num_slots, np.int32) for _ in groups]
        self.stops = StopTable()
        self._free = list(range(num_slots - 1, -1, -1))
        self._by_priority: list[tuple[int, int, int]] = []  # sorted (priority, arrival, slot)
        # The slots of _by_priority. The array is replaced, never changed in place.
        self.order: Slots = np.zeros(0, np.intp)

    @property
    def num_running(self) -> int:
        """The number of slots in use."""
        return len(self.slot_of)

    @property
    def num_free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def request(self, slot: int) -> Request:
        """Return the request in an occupied slot."""
        request = self.requests[slot]
        assert request is not None, slot
        return request

    def admit(self, request: Request, num_hit: int) -> int:
        """Put a request in a free slot and return the slot.

        num_hit: leading positions that are computed already, because the prefix cache has them.
        """
        slot = self._free.pop()
        self.requests[slot] = request
        self.slot_of[request.rid] = slot
        entry = (*request.order, slot)
        place = bisect_left(self._by_priority, entry)
        self._by_priority.insert(place, entry)
        self.order = np.concatenate((self.order[:place], [slot], self.order[place:]))
        known = len(request.tokens)
        self.tokens[slot, :known] = request.tokens
        self.rid[slot] = request.rid
        self.scheduled[slot] = num_hit
        self.known[slot] = known
        self.max_total[slot] = request.max_total
        self.max_scheduled[slot] = self.decoding.goal(request.max_total - 1)
        self.min_known[slot] = request.num_prompt + request.sampling.min_tokens
        self.num_registered[slot] = num_hit // self.block_size
        self.is_unsent[slot] = not request.was_sent
        self.speculates[slot] = request.sampling.speculate
        self.stops.add(slot, request.sampling.stop_ids)
        return slot

    def vacate(self, slot: int) -> Request:
        """Free a slot, but not its blocks, and return its request.

        The scheduler will drop results in flight for this request.
        """
        request = self.request(slot)
        del self.slot_of[request.rid]
        self.requests[slot] = None
        self.generation[slot] += 1
        self.num_drafts[slot] = 0
        self.stops.remove(slot)
        self._free.append(slot)
        place = bisect_left(self._by_priority, (*request.order, slot))
        del self._by_priority[place]
        self.order = np.concatenate((self.order[:place], self.order[place + 1 :]))
        return request

    def held(self, slot: int) -> list[I32]:
        """Return, for each group, the blocks that a slot holds, in table order."""
        scheduled = int(self.scheduled[slot])
        held = []
        for group, table, num_passed in zip(
            self._groups, self.tables, self.num_passed, strict=True
        ):
            blocks = table[slot, num_passed[slot] : group.num_blocks(scheduled)]
            # A group with states keeps states at some entries only. The entries between them are 0.
            held.append(blocks[blocks > 0] if group.has_states else blocks)
        return held

    def audit(self, num_blocks: Sequence[int]) -> list[I32]:
        """Check the rows, and return the reference counts of blocks according to the tables.

        num_blocks: the number of blocks of each pool. The result has one array per pool.
        """
        running = [
            (slot, request) for slot, request in enumerate(self.requests) if request is not None
        ]
        used_slots = [slot for slot, _ in running]
        assert sorted([*used_slots, *self._free]) == list(range(len(self.requests))), (
            "slots do not add up"
        )
        assert self.slot_of == {int(self.rid[slot]): slot for slot in used_slots}, (
            "slots and request ids disagree"
        )
        by_priority = sorted((*request.order, slot) for slot, request in running)
        assert by_priority == self._by_priority, "the priorities are wrong"
        assert self.order.tolist() == [entry[-1] for entry in by_priority], "the order is wrong"
        assert (self.scheduled[used_slots] <= self.max_scheduled[used_slots]).all(), (
            "scheduled beyond the last position"
        )
        is_complete = self.known[used_slots] >= self.max_total[used_slots]
        assert not is_complete.any(), "a complete request still runs"
        counts = [np.zeros(number, np.int32) for number in num_blocks]
        for slot in used_slots:
            for group, blocks in zip(self._groups, self.held(slot), strict=True):
                np.add.at(counts[group.pool_index], blocks, 1)
        return counts


class StopTable:
    """The stop ids of the running requests.

    A reference count per token id rules out most rows at once, so that few sets have to be checked.
    """

    def __init__(self) -> None:
        self._ids: dict[int, frozenset[int]] = {}  # by slot
        # By token id; the last entry stays 0, for all larger ids.
        self._num_slots_of = np.zeros(2, np.int32)

    def add(self, slot: int, ids: tuple[int, ...]) -> None:
        """Set the stop ids of a slot."""
        if not ids:
            return
        unique = self._ids[slot] = frozenset(ids)
        if (size := max(unique) + 2) > len(self._num_slots_of):
            self._num_slots_of = np.concatenate(
                (self._num_slots_of, np.zeros(size - len(self._num_slots_of), np.int32))
            )
        self._num_slots_of[list(unique)] += 1

    def remove(self, slot: int) -> None:
        """Remove the stop ids of a slot."""
        if ids := self._ids.pop(slot, None):
            self._num_slots_of[list(ids)] -= 1

    def hits(self, slots: Slots, tokens: I32) -> list[int]:
        """Return the rows i in which tokens[i] is a stop id of slots[i]."""
        if not self._ids:
            return []
        candidates = np.flatnonzero(
            self._num_slots_of[np.minimum(tokens, len(self._num_slots_of) - 1)]
        )
        return [
            i for i in candidates.tolist() if int(tokens[i]) in self._ids.get(int(slots[i]), ())
        ]


def fit_to_budget(
    slots: Slots, start: I32, count: I32, budget: int, decoding: Decoding = SINGLE_TOKENS
) -> tuple[Slots, I32, I32]:
    """Reduce counts to a token budget, and drop rows without tokens.

    Rows are in priority order.

    Short rows are served first, so that a long prompt does not stall the requests that decode. The
    rest of the budget goes to the other rows in order.

    counts [5, 1, 5, 1] with budget 8 -> [5, 1, 1, 1]
    """
    is_short: NDArray[np.bool_] = (count > 0) & (count <= decoding.short)
    short_count = np.where(is_short, count, 0)
    is_short &= np.cumsum(short_count) <= budget
    short_count = np.where(is_short, count, 0)
    remaining = budget - int(short_count.sum())
    long_count = np.where(count > decoding.short, count, 0)
    long_count = np.clip(remaining - (np.cumsum(long_count) - long_count), 0, long_count)
    count = np.where(is_short, short_count, long_count).astype(np.int32)
    kept = np.flatnonzero(count)
    return slots[kept], start[kept], count[kept]
