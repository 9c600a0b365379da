"""The requests of a fleet: the engine that each goes to, and those that wait for an engine.

`Balancer` chooses by predicted work, room for K/V, and the prefixes that an engine has seen. It is pure: messages in, a
rank out. Work is counted in prompt tokens to compute; a token to generate costs as much as DECODE_COST of them, because
it takes a row of a step of its own. `Traffic` sends the requests to the engines that it chooses.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moeserve.errors import Overloaded
from moeserve.messages import Abort, Ready, StepOutput, Submit

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
    """The predicted load of one engine, in tokens. free_blocks: KV blocks, as its last step left them."""

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
    """Chooses an engine for each request from predictions, which step outputs correct. Engines are known by rank."""

    def __init__(self) -> None:
        self.loads: dict[int, Load] = {}
        self._requests: dict[int, _Request] = {}
        self._prefixes: OrderedDict[int, int] = OrderedDict()  # hash of a prefix -> bit mask of engines
        self._mean = FIRST_MEAN

    def open(self, rank: int, ready: Ready) -> None:
        """Adds an empty engine; a known one stays as it is."""
        if rank not in self.loads:
            self.loads[rank] = Load(ready.block_size, ready.num_blocks - 1)

    def close(self, rank: int) -> tuple[int, ...]:
        """Removes an engine with its cached prefixes, and its requests, which are returned: oldest first."""
        load = self.loads.pop(rank, None)
        rids = tuple(sorted(load.live)) if load is not None else ()
        for rid in rids:
            del self._requests[rid]
        keep = ~(1 << rank)
        self._prefixes = OrderedDict((key, rest) for key, mask in self._prefixes.items() if (rest := mask & keep))
        return rids

    def rank_of(self, rid: int) -> int | None:
        """Returns the engine that has this request, if one has it."""
        request = self._requests.get(rid)
        return request.rank if request is not None else None

    def choose(self, request: Submit, among: Collection[int]) -> int:
        """Returns the engine on which this request adds to the least work, if possible one with room for its K/V.

        Ties go to the fewest requests, then to the lowest rank. `among` holds at least one open engine.
        """
        num_tokens = len(request.tokens) // _TOKEN_BYTES
        roomy = [rank for rank in among if self.loads[rank].room >= -(-num_tokens // self.loads[rank].block_size)]
        hits = self._hits(request, roomy or among)

        def cost(rank: int) -> tuple[float, int, int]:
            """Returns the engine's work with this request, and the tie breakers."""
            load = self.loads[rank]
            return load.work + num_tokens - hits.get(rank, 0), len(load.live), rank

        return min(roomy or among, key=cost)

    def assign(self, request: Submit, rank: int) -> None:
        """Counts a request as sent to this engine."""
        load = self.loads[rank]
        num_tokens = len(request.tokens) // _TOKEN_BYTES
        emitted = num_tokens - request.num_prompt
        hits = self._hits(request, (rank,)).get(rank, 0)
        left = min(request.sampling.max_tokens - emitted, max(self._mean - emitted, self._least))
        blocks = -(-num_tokens // load.block_size)
        self._requests[request.rid] = _Request(rank, num_tokens - hits, max(1.0, left), hits, emitted)
        load.live.add(request.rid)
        load.promise(request.rid, blocks)
        load.prefill += num_tokens - hits
        load.decode += max(1.0, left)
        self._remember(request, rank)

    def note(self, rank: int, out: StepOutput) -> None:
        """Corrects the predictions for an engine by the output of one of its steps."""
        load = self.loads.get(rank)
        if load is None:
            return
        load.num_outputs += 1
        load.decode = max(load.decode - len(out.finish), self._least * len(load.live))
        if out.record is not None:
            load.free_blocks = out.record.num_free_blocks
            load.prefill -= out.record.num_tokens - (len(out.finish) - len(out.cached))
        for rid, num_cached in out.cached.items():
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

    def _hits(self, request: Submit, among: Collection[int]) -> dict[int, int]:
        """Returns how many tokens at the beginning of the request each engine has seen before."""
        hits: dict[int, int] = {}
        wanted = sum(1 << rank for rank in among)
        for number, key in enumerate(_prefix_keys(request), 1):
            wanted &= self._prefixes.get(key, 0)
            if not wanted:
                break
            for rank in among:
                if wanted >> rank & 1:
                    hits[rank] = number * CHUNK
        return hits

    def _remember(self, request: Submit, rank: int) -> None:
        for key in _prefix_keys(request):
            self._prefixes[key] = self._prefixes.get(key, 0) | 1 << rank
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)


def _prefix_keys(request: Submit) -> Iterator[int]:
    """Yields a key for each CHUNK of tokens, which stands for all tokens up to its end.

    Python salts the hash of bytes per process, so that no client can aim at another one's prefix.
    """
    key = hash(request.salt)
    step = CHUNK * _TOKEN_BYTES
    for start in range(0, len(request.tokens) - step, step):  # the last token is computed in any case
        key = hash((key, request.tokens[start : start + step]))
        yield key


class Traffic:
    """Sends requests to engines, and keeps them while none serves. serving: returns those that may get requests."""

    def __init__(self, serving: Callable[[], Sequence[EngineHandle]]) -> None:
        self.balancer = Balancer()
        self._serving = serving
        self._engines: dict[int, EngineHandle] = {}  # that have had requests, by rank
        self.waiting: dict[int, Submit] = {}  # for an engine
        self._retry: asyncio.TimerHandle | None = None

    def submit(self, request: Submit) -> None:
        """Sends a request to the engine that suits it best. Raises Overloaded if that one does not keep up."""
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
        waiting, self.waiting = self.waiting, {}
        for rid, request in waiting.items():
            try:
                self.submit(request)
            except Overloaded:
                self.waiting[rid] = request
        if self.waiting and self._serving():
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self.flush)

    def abort(self, rids: Sequence[int]) -> None:
        """Aborts requests. Raises Overloaded if an engine does not keep up; call again with the same requests then."""
        by_rank: dict[int, list[int]] = {}
        for rid in rids:
            if self.waiting.pop(rid, None) is None and (rank := self.balancer.rank_of(rid)) is not None:
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
