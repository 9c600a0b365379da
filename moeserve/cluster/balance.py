"""Data-parallel load balancing: choose an engine for each request.

The choice considers predicted work, free KV blocks and cached prefixes. It is pure: it does no I/O
and reads no clock. Work is counted in prompt tokens to compute. A token to generate costs as much
as DECODE_COST of them, because each one needs a row in a step of its own.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from moeserve.messages import StepOutput, Submit

DECODE_COST = 8.0
CHUNK = 64  # tokens per step of the prefix table
MAX_PREFIXES = 1 << 15
DEFAULT_NUM_OUTPUT = 128.0  # expected output tokens of a request before any has finished
MEAN_WEIGHT = 0.05  # weight of a finished request in the moving average of output tokens
_TOKEN_BYTES = 4  # of int32 tokens in a Submit


@dataclass(frozen=True, slots=True)
class _Request:
    """The prediction for a request. It is subtracted from the load when the request ends."""

    rank: int
    num_prefill: int  # prompt tokens to compute
    num_decode: float  # tokens to generate
    num_hits: int  # tokens expected in the prefix cache
    num_emitted: int  # tokens already generated when it was sent to this engine
    num_blocks: int


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
    num_reserved: int = 0  # sum of `reserved`
    first_outputs: dict[int, int] = field(default_factory=dict)  # rid -> output of its first token

    @property
    def work(self) -> float:
        """The remaining work, in prompt tokens."""
        return self.prefill + DECODE_COST * self.decode

    @property
    def num_available(self) -> int:
        """The number of free blocks that are not reserved."""
        return self.free_blocks - self.num_reserved

    def add(self, rid: int, request: _Request) -> None:
        """Add a request, and reserve its blocks until its first step."""
        self.live.add(rid)
        self.reserved[rid] = request.num_blocks
        self.num_reserved += request.num_blocks
        self.prefill += request.num_prefill
        self.decode += request.num_decode

    def _unreserve(self, rid: int) -> bool:
        """Free a request's reservation. Return whether it had one."""
        num_blocks = self.reserved.pop(rid, 0)
        self.num_reserved -= num_blocks
        return num_blocks > 0

    def count_output(self, num_sampled: int, min_expected: float) -> None:
        """Count a step's output.

        num_sampled: rows that sampled a token.
        min_expected: the smallest number of tokens to expect of each running request.
        """
        self.num_outputs += 1
        self.decode = max(self.decode - num_sampled, min_expected * len(self.live))

    def count_prefill(self, num_tokens: int, free_blocks: int) -> None:
        """Count prompt tokens that a step computed."""
        self.free_blocks = free_blocks
        self.prefill -= num_tokens

    def count_first_token(self, rid: int, num_unexpected_hits: int) -> None:
        """Count the first token of a request.

        num_unexpected_hits: cached tokens beyond the predicted ones.
        """
        if self._unreserve(rid):
            self.first_outputs[rid] = self.num_outputs
            self.prefill -= num_unexpected_hits

    def correct_prefill(self) -> None:
        """Remove the error that wrong predictions have left in `prefill`."""
        self.prefill = max(0.0, self.prefill) if self.reserved else 0.0

    def remove(self, rid: int, request: _Request, min_expected: float) -> int | None:
        """Remove a request. Return how many tokens it generated, or None if it had not begun."""
        self.live.discard(rid)
        num_emitted = None
        if self._unreserve(rid):
            self.prefill = max(0.0, self.prefill - request.num_prefill)
            self.decode -= request.num_decode
        else:
            num_emitted = self.num_outputs - self.first_outputs.pop(rid) + 1
            self.decode -= max(request.num_decode - num_emitted, min_expected)
        self.decode = max(self.decode, 0.0) if self.live else 0.0
        return num_emitted


class Balancer:
    """Chooses an engine for each request. Step outputs correct its predictions.

    `choose` compares lists with one entry per engine (`_costs` and `_num_available`). Entries of
    engines in `_stale_ranks` are updated before they are read, so a choice among hundreds of
    engines takes microseconds.
    """

    def __init__(self) -> None:
        self.loads: dict[int, Load] = {}
        self._ranks: list[int] = []
        self._index: dict[int, int] = {}  # rank -> index in the lists
        self._costs: list[tuple[float, int]] = []  # (work, number of requests)
        self._num_available: list[int] = []  # free KV blocks that are not reserved
        self._stale_ranks: set[int] = set()
        self._requests: dict[int, _Request] = {}
        # LRU: hash of a prefix -> bit mask of the engines that have seen it.
        self._prefixes: OrderedDict[int, int] = OrderedDict()
        self._mean_num_output = DEFAULT_NUM_OUTPUT  # moving average of output tokens

    def open(self, rank: int, block_size: int, num_blocks: int) -> None:
        """Add an idle engine. Do nothing if it is known already."""
        if rank not in self.loads:
            self.loads[rank] = Load(block_size, num_blocks - 1)
            self._rebuild_lists()

    def close(self, rank: int) -> tuple[int, ...]:
        """Remove an engine and its prefixes. Return its requests, oldest first."""
        load = self.loads.pop(rank, None)
        rids = tuple(sorted(load.live)) if load is not None else ()
        for rid in rids:
            del self._requests[rid]
        self._rebuild_lists()
        others = ~(1 << rank)
        self._prefixes = OrderedDict(
            (key, rest) for key, mask in self._prefixes.items() if (rest := mask & others)
        )
        return rids

    def _rebuild_lists(self) -> None:
        self._ranks = sorted(self.loads)
        self._index = {rank: index for index, rank in enumerate(self._ranks)}
        self._costs = [(0.0, 0)] * len(self.loads)
        self._num_available = [0] * len(self.loads)
        self._stale_ranks = set(self.loads)

    def rank_of(self, rid: int) -> int | None:
        """Return the engine that has this request, or None."""
        request = self._requests.get(rid)
        return request.rank if request is not None else None

    def choose(self, request: Submit, among: Collection[int]) -> int:
        """Return the engine with the least work, if possible one with room for the KV blocks.

        Cached tokens of the request count as negative work. Ties go to the engine with the fewest
        requests, then to the lowest rank. `among` must contain at least one open engine.
        """
        num_tokens = len(request.tokens) // _TOKEN_BYTES
        num_blocks = -(-num_tokens // next(iter(self.loads.values())).block_size)
        for rank in self._stale_ranks:
            load = self.loads[rank]
            index = self._index[rank]
            self._costs[index] = (load.work, len(load.live))
            self._num_available[index] = load.num_available
        self._stale_ranks.clear()
        costs = self._costs
        if hits := self._hits(request):
            costs = [
                (work - hits.get(rank, 0), live)
                for rank, (work, live) in zip(self._ranks, costs, strict=True)
            ]
        best = costs.index(min(costs))
        if len(among) < len(costs) or self._num_available[best] < num_blocks:
            allowed = [index for index, rank in enumerate(self._ranks) if rank in among]
            fitting = [index for index in allowed if self._num_available[index] >= num_blocks]
            best = min(fitting or allowed, key=costs.__getitem__)
        return self._ranks[best]

    def assign(self, request: Submit, rank: int) -> None:
        """Count a request as sent to this engine."""
        load = self.loads[rank]
        num_tokens = len(request.tokens) // _TOKEN_BYTES
        num_emitted = num_tokens - request.num_prompt
        num_hits = self._hits(request).get(rank, 0)
        num_left = min(
            request.sampling.max_tokens - num_emitted,
            max(self._mean_num_output - num_emitted, self._min_expected),
        )
        predicted = _Request(
            rank=rank,
            num_prefill=num_tokens - num_hits,
            num_decode=max(1.0, num_left),
            num_hits=num_hits,
            num_emitted=num_emitted,
            num_blocks=-(-num_tokens // load.block_size),
        )
        self._requests[request.rid] = predicted
        load.add(request.rid, predicted)
        self._stale_ranks.add(rank)
        self._add_prefixes(request, rank)

    def note(self, rank: int, out: StepOutput) -> None:
        """Correct the predictions for an engine with the output of one of its steps."""
        record = out.record
        self.stepped(
            rank,
            rows=len(out.finish),
            tokens=record.num_tokens if record else None,
            free_blocks=record.num_free_blocks if record else 0,
            cached=out.cached,
        )

    def stepped(
        self, rank: int, rows: int, tokens: int | None, free_blocks: int, cached: dict[int, int]
    ) -> None:
        """Correct the predictions for an engine, like `note`.

        Args:
            rows: rows that sampled a token.
            tokens: all tokens of the step, None if they are unknown.
            free_blocks: KV blocks after the step.
            cached: requests that got their first token, with their cached prompt tokens.
        """
        load = self.loads.get(rank)
        if load is None:
            return
        self._stale_ranks.add(rank)
        load.count_output(rows, self._min_expected)
        if tokens is not None:
            num_decoded = rows - len(cached)  # one token each of requests that had begun before
            load.count_prefill(tokens - num_decoded, free_blocks)
        for rid, num_cached in cached.items():
            request = self._requests.get(rid)
            if request is not None:
                load.count_first_token(rid, num_cached - request.num_hits)
        load.correct_prefill()

    def end(self, rid: int) -> None:
        """Remove a request that finished, was refused or was aborted."""
        request = self._requests.pop(rid, None)
        if request is None:
            return
        self._stale_ranks.add(request.rank)
        num_emitted = self.loads[request.rank].remove(rid, request, self._min_expected)
        if num_emitted is not None:  # a request that never began says nothing about output lengths
            num_output = request.num_emitted + num_emitted
            self._mean_num_output += MEAN_WEIGHT * (num_output - self._mean_num_output)

    @property
    def _min_expected(self) -> float:
        """The smallest number of tokens to expect of a request, however many it has generated."""
        return max(1.0, self._mean_num_output / 4)

    def _hits(self, request: Submit) -> dict[int, int]:
        """Return the number of leading tokens that each engine has seen, where there are any."""
        hits: dict[int, int] = {}
        seen_by = -1  # bit mask of the engines that have seen all chunks so far
        num_chunks = 0
        for key in _prefix_keys(request):
            still_seen_by = seen_by & self._prefixes.get(key, 0)
            _set_hits(hits, seen_by & ~still_seen_by if num_chunks else 0, num_chunks * CHUNK)
            seen_by = still_seen_by
            num_chunks += 1
            if not seen_by:
                break
        _set_hits(hits, max(seen_by, 0), num_chunks * CHUNK)
        return hits

    def _add_prefixes(self, request: Submit, rank: int) -> None:
        for key in _prefix_keys(request):
            self._prefixes[key] = self._prefixes.get(key, 0) | 1 << rank
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)


def _set_hits(hits: dict[int, int], engines: int, num_tokens: int) -> None:
    """Set the hits of all engines in a bit mask."""
    while engines:
        rank = engines.bit_length() - 1
        hits[rank] = num_tokens
        engines ^= 1 << rank


def _prefix_keys(request: Submit) -> Iterator[int]:
    """Yield a key for each CHUNK of tokens; a key identifies all tokens up to the end of its chunk.

    Python salts the hash of bytes per process, so clients cannot construct collisions.
    """
    key = hash(request.salt)
    chunk_bytes = CHUNK * _TOKEN_BYTES
    # Omit a chunk that reaches the end of the prompt, because the last token is always computed.
    for start in range(0, len(request.tokens) - chunk_bytes, chunk_bytes):
        key = hash((key, request.tokens[start : start + chunk_bytes]))
        yield key
