"""The requests of a fleet: the engine that each goes to, and those that wait for an engine.

`Balancer` chooses by predicted work, room for K/V, and the prefixes that an engine has seen. It is
pure: messages in, a rank out. Work is counted in prompt tokens to compute; a token to generate
costs as much as DECODE_COST of them, because it takes a row of a step of its own. `Traffic` sends
the requests to the engines that it chooses.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moeserve.errors import Overloaded
from moeserve.messages import Abort, StepOutput, Submit

if TYPE_CHECKING:
    from moeserve.cluster.engine_handle import EngineHandle

DECODE_COST = 8.0
CHUNK = 64  # tokens per step of the prefix table
MAX_PREFIXES = 1 << 15
FIRST_MEAN = 128.0  # tokens that a request generates, before any has ended
RETRY_S = 0.05  # for requests whose engine did not read its messages
_TOKEN_BYTES = 4


@dataclass(slots=True)
class _Request:
    rank: int
    prefill: int  # predicted, so that it can be taken back
    decode: float
    hits: int  # tokens expected in the prefix cache
    emitted: int  # when it came to this engine
    first_step: int = -1  # of its engine's outputs, the one with its first token here


@dataclass(slots=True)
class Load:
    """The predicted load of one engine, in tokens. free_blocks: KV blocks, as its last step left
    them.
    """

    block_size: int
    free_blocks: int
    prefill: float = 0.0
    decode: float = 0.0
    num_outputs: int = 0
    live: set[int] = field(default_factory=set)
    unstarted: dict[int, int] = field(default_factory=dict)  # rid -> blocks that it will take
    promised: int = 0  # their sum

    @property
    def work(self) -> float:
        """All that is left to do, in prompt tokens."""
        return self.prefill + DECODE_COST * self.decode

    def promise(self, rid: int, blocks: int) -> None:
        """Sets blocks aside for a request until its first step."""
        self.unstarted[rid] = blocks
        self.promised += blocks

    def started(self, rid: int) -> bool:
        """Takes a request's promise back; returns False if there was none."""
        blocks = self.unstarted.pop(rid, 0)
        self.promised -= blocks
        return blocks > 0

    @property
    def room(self) -> int:
        """Number of free blocks that are not set aside."""
        return self.free_blocks - self.promised


class Balancer:
    """Chooses an engine for each request from predictions, which step outputs correct. Engines are
    known by rank.

    What `choose` compares lies in lists with a place for each engine: work and requests, and room.
    Those of `_stale` engines are written before they are read, so that a choice among hundreds of
    engines takes microseconds.
    """

    def __init__(self) -> None:
        self.loads: dict[int, Load] = {}
        self._ranks: list[int] = []
        self._place: dict[int, int] = {}  # by rank
        self._costs: list[tuple[float, int]] = []
        self._room: list[int] = []
        self._stale: set[int] = set()
        self._requests: dict[int, _Request] = {}
        self._prefixes: OrderedDict[int, int] = (
            OrderedDict()
        )  # hash of a prefix -> bit mask of engines
        self._mean = FIRST_MEAN

    def open(self, rank: int, block_size: int, num_blocks: int) -> None:
        """Adds an empty engine; a known one stays as it is."""
        if rank not in self.loads:
            self.loads[rank] = Load(block_size, num_blocks - 1)
            self._arrange()

    def close(self, rank: int) -> tuple[int, ...]:
        """Removes an engine with its cached prefixes, and its requests, which are returned: oldest
        first.
        """
        load = self.loads.pop(rank, None)
        rids = tuple(sorted(load.live)) if load is not None else ()
        for rid in rids:
            del self._requests[rid]
        self._arrange()
        keep = ~(1 << rank)
        self._prefixes = OrderedDict(
            (key, rest) for key, mask in self._prefixes.items() if (rest := mask & keep)
        )
        return rids

    def _arrange(self) -> None:
        self._ranks = sorted(self.loads)
        self._place = {rank: place for place, rank in enumerate(self._ranks)}
        self._costs = [(0.0, 0)] * len(self.loads)
        self._room = [0] * len(self.loads)
        self._stale = set(self.loads)

    def rank_of(self, rid: int) -> int | None:
        """Returns the engine that has this request, if one has it."""
        request = self._requests.get(rid)
        return request.rank if request is not None else None

    def choose(self, request: Submit, among: Collection[int]) -> int:
        """Returns the engine on which this request adds to the least work, if possible one with
        room for its K/V.

        Ties go to the fewest requests, then to the lowest rank. `among` holds at least one open
        engine.
        """
        num_tokens = len(request.tokens) // _TOKEN_BYTES
        blocks = -(-num_tokens // next(iter(self.loads.values())).block_size)
        for rank in self._stale:
            load = self.loads[rank]
            place = self._place[rank]
            self._costs[place] = (load.work, len(load.live))
            self._room[place] = load.room
        self._stale.clear()
        costs = self._costs
        if hits := self._hits(request):
            costs = [
                (work - hits.get(rank, 0), live)
                for rank, (work, live) in zip(self._ranks, costs, strict=True)
            ]
        best = costs.index(min(costs))
        if len(among) < len(costs) or self._room[best] < blocks:
            allowed = [place for place, rank in enumerate(self._ranks) if rank in among]
            best = min(
                [p for p in allowed if self._room[p] >= blocks] or allowed, key=costs.__getitem__
            )
        return self._ranks[best]

    def assign(self, request: Submit, rank: int) -> None:
        """Counts a request as sent to this engine."""
        load = self.loads[rank]
        num_tokens = len(request.tokens) // _TOKEN_BYTES
        emitted = num_tokens - request.num_prompt
        hits = self._hits(request).get(rank, 0)
        left = min(request.sampling.max_tokens - emitted, max(self._mean - emitted, self._least))
        blocks = -(-num_tokens // load.block_size)
        self._requests[request.rid] = _Request(
            rank, num_tokens - hits, max(1.0, left), hits, emitted
        )
        load.live.add(request.rid)
        load.promise(request.rid, blocks)
        load.prefill += num_tokens - hits
        load.decode += max(1.0, left)
        self._stale.add(rank)
        self._remember(request, rank)

    def note(self, rank: int, out: StepOutput) -> None:
        """Corrects the predictions for an engine by the output of one of its steps."""
        tokens, free = (
            (out.record.num_tokens, out.record.num_free_blocks) if out.record else (None, 0)
        )
        self.stepped(rank, len(out.finish), tokens, free, out.cached)

    def stepped(
        self, rank: int, rows: int, tokens: int | None, free_blocks: int, cached: dict[int, int]
    ) -> None:
        """See `note`: rows that sampled, tokens of the step, and the requests whose first token
        came.
        """
        load = self.loads.get(rank)
        if load is None:
            return
        self._stale.add(rank)
        load.num_outputs += 1
        load.decode = max(load.decode - rows, self._least * len(load.live))
        if tokens is not None:
            load.free_blocks = free_blocks
            load.prefill -= tokens - (rows - len(cached))
        for rid, num_cached in cached.items():
            if (request := self._requests.get(rid)) is not None and load.started(rid):
                request.first_step = load.num_outputs
                load.prefill -= num_cached - request.hits
        load.prefill = max(0.0, load.prefill) if load.unstarted else 0.0

    def end(self, rid: int) -> None:
        """Removes a request that finished, was refused or was aborted."""
        request = self._requests.pop(rid, None)
        if request is None:
            return
        load = self.loads[request.rank]
        self._stale.add(request.rank)
        load.live.discard(rid)
        if load.started(rid):  # aborted early, which says nothing about lengths
            load.prefill = max(0.0, load.prefill - request.prefill)
            load.decode -= request.decode
        else:
            emitted = load.num_outputs - request.first_step + 1
            load.decode -= max(request.decode - emitted, self._least)
            self._mean += 0.05 * (request.emitted + emitted - self._mean)
        load.decode = max(load.decode, 0.0) if load.live else 0.0

    @property
    def _least(self) -> float:
        """The least number of tokens still expected of a request, however many it has generated."""
        return max(1.0, self._mean / 4)

    def _hits(self, request: Submit) -> dict[int, int]:
        """Returns how many tokens at the beginning of the request each engine has seen before, if
        any.
        """
        hits: dict[int, int] = {}
        # the engines that have seen so many chunks, as a bit mask
        seen = -1
        number = 0
        for key in _prefix_keys(request):
            left = seen & self._prefixes.get(key, 0)
            _write(hits, seen & ~left if number else 0, number * CHUNK)
            seen = left
            number = number + 1
            if not seen:
                break
        _write(hits, max(seen, 0), number * CHUNK)
        return hits

    def _remember(self, request: Submit, rank: int) -> None:
        for key in _prefix_keys(request):
            self._prefixes[key] = self._prefixes.get(key, 0) | 1 << rank
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)


def _write(hits: dict[int, int], mask: int, tokens: int) -> None:
    """Sets the hits of all engines in a bit mask."""
    while mask:
        rank = mask.bit_length() - 1
        hits[rank] = tokens
        mask ^= 1 << rank


def _prefix_keys(request: Submit) -> Iterator[int]:
    """Yields a key for each CHUNK of tokens, which stands for all tokens up to its end.

    Python salts the hash of bytes per process, so that no client can aim at another one's prefix.
    """
    key = hash(request.salt)
    step = CHUNK * _TOKEN_BYTES
    for start in range(
        0, len(request.tokens) - step, step
    ):  # the last token is computed in any case
        key = hash((key, request.tokens[start : start + step]))
        yield key


class Traffic:
    """Sends requests to engines, and keeps them while none serves. serving: returns those that may
    get requests.
    """

    def __init__(self, serving: "Callable[[], Sequence[EngineHandle]]") -> None:
        self.balancer = Balancer()
        self._serving = serving
        self._engines: dict[int, EngineHandle] = {}  # that have had requests, by rank
        self.waiting: dict[int, Submit] = {}  # for an engine
        self._retry: asyncio.TimerHandle | None = None

    def submit(self, request: Submit) -> None:
        """Sends a request to the engine that suits it best. Raises Overloaded if that one does not
        keep up.
        """
        engines = {engine.rank: engine for engine in self._serving()}
        if not engines:
            self.waiting[request.rid] = request
            return
        rank = self.balancer.choose(request, engines)
        engine = self._engines[rank] = engines[rank]
        engine.send(request)
        self.balancer.assign(request, rank)

    def flush(self) -> None:
        """Sends the requests that wait, oldest first, as far as engines take them."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        waiting = self.waiting
        self.waiting = {}
        for rid, request in waiting.items():
            try:
                self.submit(request)
            except Overloaded:
                self.waiting[rid] = request
        if self.waiting and self._serving():
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self.flush)

    def abort(self, rids: Sequence[int]) -> None:
        """Aborts requests. Raises Overloaded if an engine does not keep up; call again with the
        same requests then.
        """
        by_rank: dict[int, list[int]] = {}
        for rid in rids:
            if (
                self.waiting.pop(rid, None) is None
                and (rank := self.balancer.rank_of(rid)) is not None
            ):
                by_rank.setdefault(rank, []).append(rid)
        failure: Overloaded | None = None
        for rank, theirs in by_rank.items():
            try:
                self._engines[rank].send(Abort(theirs))
            except Overloaded as error:  # the other engines learn of theirs
                failure = error
        if failure is not None:
            raise failure

    def note(self, rank: int, out: StepOutput) -> None:
        """Takes note of a step of this engine, and of the requests that it finished."""
        self.balancer.note(rank, out)
        if any(out.finish):
            for rid, finish in zip(memoryview(out.rids).cast("q"), out.finish, strict=True):
                if finish:
                    self.balancer.end(rid)
