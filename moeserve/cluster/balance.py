"""The choice of an engine for each request: predicted work, room for K/V, and known prefixes.

Pure: messages in, a rank out. Work is counted in prompt tokens to compute. A token to generate
costs as much as DECODE_COST of them, because it takes a row of a step of its own.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from moeserve.messages import StepOutput, Submit

DECODE_COST = 8.0
CHUNK = 64  # tokens per step of the prefix table
MAX_PREFIXES = 1 << 15
FIRST_MEAN = 128.0  # tokens that a request generates, before any has ended
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Request:
    """The prediction for a request, which is taken back when it ends."""

    rank: int
    prefill: int  # tokens to compute
    decode: float  # tokens to generate
    hits: int  # tokens expected in the prefix cache
    emitted: int  # tokens that it had when it came to this engine
    blocks: int


@dataclass(slots=True)
class Load:
    """The predicted load of one engine, in tokens."""

    block_size: int
    free_blocks: int  # KV blocks, after its last step
    prefill: float = 0.0
    decode: float = 0.0
    num_outputs: int = 0
    live: set[int] = field(default_factory=set)
    reserved: dict[int, int] = field(default_factory=dict)  # rid -> blocks until its first step
    num_reserved: int = 0  # their sum
    first_outputs: dict[int, int] = field(default_factory=dict)  # rid -> number of the output

    @property
    def work(self) -> float:
        """All that is left to do, in prompt tokens."""
        return self.prefill + DECODE_COST * self.decode

    @property
    def room(self) -> int:
        """Number of free blocks that are not reserved."""
        return self.free_blocks - self.num_reserved

    def add(self, rid: int, request: _Request) -> None:
        """Add a request, and reserve its blocks until its first step."""
        self.live.add(rid)
        self.reserved[rid] = request.blocks
        self.num_reserved += request.blocks
        self.prefill += request.prefill
        self.decode += request.decode

    def _unreserve(self, rid: int) -> bool:
        """Free a request's reservation. Return whether it had one."""
        blocks = self.reserved.pop(rid, 0)
        self.num_reserved -= blocks
        return blocks > 0

    def step(self, rows: int, least: float) -> None:
        """Count an output with so many sampled rows. least: tokens left per request, at least."""
        self.num_outputs += 1
        self.decode = max(self.decode - rows, least * len(self.live))

    def computed(self, tokens: int, free_blocks: int) -> None:
        """Count prompt tokens that a step computed."""
        self.free_blocks = free_blocks
        self.prefill -= tokens

    def start(self, rid: int, unexpected_hits: int) -> None:
        """Note the first token of a request. unexpected_hits: cached tokens more than predicted."""
        if self._unreserve(rid):
            self.first_outputs[rid] = self.num_outputs
            self.prefill -= unexpected_hits

    def settle(self) -> None:
        """Correct what rounding and wrong predictions left of the prefill."""
        self.prefill = max(0.0, self.prefill) if self.reserved else 0.0

    def remove(self, rid: int, request: _Request, least: float) -> int | None:
        """Remove a request. Return how many tokens it generated here, None if it had not begun."""
        self.live.discard(rid)
        emitted = None
        if self._unreserve(rid):
            self.prefill = max(0.0, self.prefill - request.prefill)
            self.decode -= request.decode
        else:
            emitted = self.num_outputs - self.first_outputs.pop(rid) + 1
            self.decode -= max(request.decode - emitted, least)
        self.decode = max(self.decode, 0.0) if self.live else 0.0
        return emitted


class Balancer:
    """Chooses an engine for each request from predictions, which step outputs correct. Engines are
    known by rank.

    What `choose` compares lies in lists with an entry for each engine: work and requests, and room.
    Those of `_stale` engines are written before they are read, so that a choice among hundreds of
    engines takes microseconds.
    """

    def __init__(self) -> None:
        self.loads: dict[int, Load] = {}
        self._ranks: list[int] = []
        self._index: dict[int, int] = {}  # by rank
        self._costs: list[tuple[float, int]] = []
        self._room: list[int] = []
        self._stale: set[int] = set()
        self._requests: dict[int, _Request] = {}
        self._prefixes: OrderedDict[int, int] = (
            OrderedDict()
        )  # hash of a prefix -> bit mask of engines
        self._mean = FIRST_MEAN

    def open(self, rank: int, block_size: int, num_blocks: int) -> None:
        """Add an empty engine; a known one stays as it is."""
        if rank not in self.loads:
            self.loads[rank] = Load(block_size, num_blocks - 1)
            self._arrange()

    def close(self, rank: int) -> tuple[int, ...]:
        """Remove an engine with its cached prefixes, and its requests, which are returned: oldest
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
        self._index = {rank: index for index, rank in enumerate(self._ranks)}
        self._costs = [(0.0, 0)] * len(self.loads)
        self._room = [0] * len(self.loads)
        self._stale = set(self.loads)

    def rank_of(self, rid: int) -> int | None:
        """Return the engine that has this request, if one has it."""
        request = self._requests.get(rid)
        return request.rank if request is not None else None

    def choose(self, request: Submit, among: Collection[int]) -> int:
        """Return the engine on which this request adds to the least work, if possible one with
        room for its K/V.

        Ties go to the fewest requests, then to the lowest rank. `among` holds at least one open
        engine.
        """
        num_tokens = len(request.tokens) // _TOKEN_BYTES
        blocks = -(-num_tokens // next(iter(self.loads.values())).block_size)
        for rank in self._stale:
            load = self.loads[rank]
            index = self._index[rank]
            self._costs[index] = (load.work, len(load.live))
            self._room[index] = load.room
        self._stale.clear()
        costs = self._costs
        if hits := self._hits(request):
            costs = [
                (work - hits.get(rank, 0), live)
                for rank, (work, live) in zip(self._ranks, costs, strict=True)
            ]
        best = costs.index(min(costs))
        if len(among) < len(costs) or self._room[best] < blocks:
            allowed = [index for index, rank in enumerate(self._ranks) if rank in among]
            best = min(
                [p for p in allowed if self._room[p] >= blocks] or allowed, key=costs.__getitem__
            )
        return self._ranks[best]

    def assign(self, request: Submit, rank: int) -> None:
        """Count a request as sent to this engine."""
        load = self.loads[rank]
        num_tokens = len(request.tokens) // _TOKEN_BYTES
        emitted = num_tokens - request.num_prompt
        hits = self._hits(request).get(rank, 0)
        left = min(request.sampling.max_tokens - emitted, max(self._mean - emitted, self._least))
        blocks = -(-num_tokens // load.block_size)
        predicted = _Request(
            rank=rank,
            prefill=num_tokens - hits,
            decode=max(1.0, left),
            hits=hits,
            emitted=emitted,
            blocks=blocks,
        )
        self._requests[request.rid] = predicted
        load.add(request.rid, predicted)
        self._stale.add(rank)
        self._remember(request, rank)

    def note(self, rank: int, out: StepOutput) -> None:
        """Correct the predictions for an engine by the output of one of its steps."""
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
        load.step(rows, self._least)
        if tokens is not None:
            load.computed(tokens - (rows - len(cached)), free_blocks)
        for rid, num_cached in cached.items():
            request = self._requests.get(rid)
            if request is not None:
                load.start(rid, num_cached - request.hits)
        load.settle()

    def end(self, rid: int) -> None:
        """Remove a request that finished, was refused or was aborted."""
        request = self._requests.pop(rid, None)
        if request is None:
            return
        self._stale.add(request.rank)
        emitted = self.loads[request.rank].remove(rid, request, self._least)
        if emitted is not None:  # one that was aborted early says nothing about lengths
            self._mean += 0.05 * (request.emitted + emitted - self._mean)

    @property
    def _least(self) -> float:
        """The least number of tokens still expected of a request, however many it has generated."""
        return max(1.0, self._mean / 4)

    def _hits(self, request: Submit) -> dict[int, int]:
        """Return how many tokens at the beginning of the request each engine has seen before, if
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
    """Set the hits of all engines in a bit mask."""
    while mask:
        rank = mask.bit_length() - 1
        hits[rank] = tokens
        mask ^= 1 << rank


def _prefix_keys(request: Submit) -> Iterator[int]:
    """Yield a key for each CHUNK of tokens, which stands for all tokens up to its end.

    Python salts the hash of bytes per process, so that no client can aim at another one's prefix.
    """
    key = hash(request.salt)
    step = CHUNK * _TOKEN_BYTES
    for start in range(
        0, len(request.tokens) - step, step
    ):  # the last token is computed in any case
        key = hash((key, request.tokens[start : start + step]))
        yield key
