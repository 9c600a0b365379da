"""Data-parallel load balancing: choose an engine for each request.

The choice considers predicted work, free KV blocks and cached prefixes. It is pure: it does no I/O
and reads no clock. Work is counted in prompt tokens to compute. A token to generate costs as much
as DECODE_COST prompt tokens, because it needs a row in a step of its own.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from moeserve.messages import StepOutput, Submit

DECODE_COST = 8.0
CHUNK = 64  # tokens; prefixes whose length is a multiple of it are remembered
MAX_PREFIXES = 1 << 15  # remembered prefixes
DEFAULT_NUM_OUTPUT = 128.0  # expected output tokens of a request before any has finished
MEAN_WEIGHT = 0.05  # weight of a finished request in the moving average of output tokens
_TOKEN_BYTES = 4  # of int32 tokens in a Submit


@dataclass(frozen=True, slots=True)
class _Request:
    """The prediction for a request. It is subtracted from the load when the request ends."""

    rank: int  # of its engine
    prefill_tokens: int  # prompt tokens to compute
    decode_tokens: float  # tokens to generate
    num_hits: int  # tokens expected in the prefix cache
    num_emitted: int  # tokens already generated when it was sent to this engine
    num_blocks: int  # KV blocks of its tokens so far


@dataclass(slots=True)
class Load:
    """The predicted load of one engine."""

    block_size: int
    num_free_blocks: int  # KV blocks, after its last step
    prefill_tokens: float = 0.0  # prompt tokens to compute
    decode_tokens: float = 0.0  # tokens to generate
    num_outputs: int = 0  # step outputs so far
    live_rids: set[int] = field(default_factory=set)
    # KV blocks of the requests that wait for their first token. The engine may not have allocated
    # them yet, so they are still counted as free.
    reserved_blocks: dict[int, int] = field(default_factory=dict)  # by rid
    num_reserved_blocks: int = 0  # sum of `reserved_blocks`
    # `num_outputs` at the first token of each request that has one, by rid.
    first_outputs: dict[int, int] = field(default_factory=dict)

    @property
    def work(self) -> float:
        """The remaining work, in prompt tokens."""
        return self.prefill_tokens + DECODE_COST * self.decode_tokens

    @property
    def num_available_blocks(self) -> int:
        """The number of free KV blocks that are not reserved."""
        return self.num_free_blocks - self.num_reserved_blocks

    def add(self, rid: int, request: _Request) -> None:
        """Add a request, and reserve its blocks until its first token."""
        self.live_rids.add(rid)
        self.reserved_blocks[rid] = request.num_blocks
        self.num_reserved_blocks += request.num_blocks
        self.prefill_tokens += request.prefill_tokens
        self.decode_tokens += request.decode_tokens

    def _unreserve(self, rid: int) -> bool:
        """Free a request's reservation. Return whether it had one."""
        num_blocks = self.reserved_blocks.pop(rid, 0)
        self.num_reserved_blocks -= num_blocks
        return num_blocks > 0

    def count_output(self, num_sampled: int, min_expected: float) -> None:
        """Count a step's output.

        num_sampled: rows that sampled a token.
        min_expected: the smallest number of tokens to expect of each running request.
        """
        self.num_outputs += 1
        min_tokens = min_expected * len(self.live_rids)
        self.decode_tokens = max(self.decode_tokens - num_sampled, min_tokens)

    def count_step(self, num_prompt_tokens: int, num_free_blocks: int) -> None:
        """Count the prompt tokens that a step computed, and note the free blocks after it."""
        self.num_free_blocks = num_free_blocks
        self.prefill_tokens -= num_prompt_tokens

    def count_first_token(self, rid: int, num_unexpected_hits: int) -> None:
        """Count the first token of a request.

        num_unexpected_hits: cached tokens beyond the predicted ones.
        """
        if self._unreserve(rid):
            self.first_outputs[rid] = self.num_outputs
            self.prefill_tokens -= num_unexpected_hits

    def correct_prefill(self) -> None:
        """Remove the error that wrong predictions have left in `prefill_tokens`."""
        # If no request waits for its first token, no prompt is left to compute.
        self.prefill_tokens = max(0.0, self.prefill_tokens) if self.reserved_blocks else 0.0

    def remove(self, rid: int, request: _Request, min_expected: float) -> int | None:
        """Remove a request, and the part of its prediction that is still counted.

        Return how many tokens it generated, or None if it has no first token yet.
        """
        self.live_rids.discard(rid)
        num_emitted = None
        if self._unreserve(rid):
            self.prefill_tokens = max(0.0, self.prefill_tokens - request.prefill_tokens)
            self.decode_tokens -= request.decode_tokens
        else:
            # One token in each output since its first one.
            num_emitted = self.num_outputs - self.first_outputs.pop(rid) + 1
            self.decode_tokens -= max(request.decode_tokens - num_emitted, min_expected)
        self.decode_tokens = max(self.decode_tokens, 0.0) if self.live_rids else 0.0
        return num_emitted


class Balancer:
    """Chooses an engine for each request. Step outputs correct its predictions.

    `choose` compares lists with one entry per engine (`_costs` and `_num_available_blocks`).
    Entries of engines in `_stale_ranks` are updated before they are read, so a choice among
    hundreds of engines takes microseconds.
    """

    def __init__(self) -> None:
        self.loads: dict[int, Load] = {}  # by the engine's rank
        self._ranks: list[int] = []
        self._index_of: dict[int, int] = {}  # rank -> index in the lists
        self._costs: list[tuple[float, int]] = []  # (work, number of requests)
        self._num_available_blocks: list[int] = []
        self._stale_ranks: set[int] = set()
        self._requests: dict[int, _Request] = {}  # by rid
        # LRU: hash of a prefix -> bit mask of the engines that have seen it.
        self._prefixes: OrderedDict[int, int] = OrderedDict()
        self._mean_num_output = DEFAULT_NUM_OUTPUT  # moving average of output tokens

    def add_engine(self, rank: int, block_size: int, num_blocks: int) -> None:
        """Add an idle engine. Do nothing if it is known already."""
        if rank not in self.loads:
            # One of the blocks is the null block, which is never allocated.
            self.loads[rank] = Load(block_size, num_free_blocks=num_blocks - 1)
            self._rebuild_lists()

    def remove_engine(self, rank: int) -> tuple[int, ...]:
        """Remove an engine and its prefixes. Return the ids of its requests, oldest first."""
        load = self.loads.pop(rank, None)
        rids = tuple(sorted(load.live_rids)) if load is not None else ()
        for rid in rids:
            del self._requests[rid]
        self._rebuild_lists()
        other_engines = ~(1 << rank)
        self._prefixes = OrderedDict(
            (key, rest) for key, mask in self._prefixes.items() if (rest := mask & other_engines)
        )
        return rids

    def _rebuild_lists(self) -> None:
        self._ranks = sorted(self.loads)
        self._index_of = {rank: index for index, rank in enumerate(self._ranks)}
        self._costs = [(0.0, 0)] * len(self.loads)
        self._num_available_blocks = [0] * len(self.loads)
        self._stale_ranks = set(self.loads)

    def rank_of(self, rid: int) -> int | None:
        """Return the engine that has this request, or None."""
        request = self._requests.get(rid)
        return request.rank if request is not None else None

    def choose(self, request: Submit, allowed_ranks: Collection[int]) -> int:
        """Return the engine with the least work, if possible one with room for the KV blocks.

        Cached tokens of the request count as negative work. Ties go to the engine with the fewest
        requests, then to the lowest rank.

        allowed_ranks: engines to choose from. At least one must have been added.
        """
        num_tokens = len(request.tokens) // _TOKEN_BYTES
        block_size = next(iter(self.loads.values())).block_size  # all engines have the same
        num_blocks = -(-num_tokens // block_size)
        for rank in self._stale_ranks:
            load = self.loads[rank]
            index = self._index_of[rank]
            self._costs[index] = (load.work, len(load.live_rids))
            self._num_available_blocks[index] = load.num_available_blocks
        self._stale_ranks.clear()
        costs = self._costs
        if hits := self._hits_by_rank(request):
            costs = [
                (work - hits.get(rank, 0), num_requests)
                for rank, (work, num_requests) in zip(self._ranks, costs, strict=True)
            ]
        best = costs.index(min(costs))
        available = self._num_available_blocks
        if len(allowed_ranks) < len(costs) or available[best] < num_blocks:
            allowed = [index for index, rank in enumerate(self._ranks) if rank in allowed_ranks]
            fitting = [index for index in allowed if available[index] >= num_blocks]
            best = min(fitting or allowed, key=costs.__getitem__)
        return self._ranks[best]

    def assign(self, request: Submit, rank: int) -> None:
        """Count a request as sent to this engine."""
        load = self.loads[rank]
        num_tokens = len(request.tokens) // _TOKEN_BYTES
        num_emitted = num_tokens - request.num_prompt
        num_hits = self._hits_by_rank(request).get(rank, 0)
        num_left = min(
            request.sampling.max_tokens - num_emitted,
            max(self._mean_num_output - num_emitted, self._min_expected),
        )
        predicted = _Request(
            rank=rank,
            prefill_tokens=num_tokens - num_hits,
            decode_tokens=max(1.0, num_left),
            num_hits=num_hits,
            num_emitted=num_emitted,
            num_blocks=-(-num_tokens // load.block_size),
        )
        self._requests[request.rid] = predicted
        load.add(request.rid, predicted)
        self._stale_ranks.add(rank)
        self._add_prefixes(request, rank)

    def on_step_output(self, rank: int, out: StepOutput) -> None:
        """Correct the predictions for an engine with the output of one of its steps."""
        record = out.record
        self.on_step(
            rank,
            num_sampled=len(out.finish),
            num_tokens=record.num_tokens if record else None,
            num_free_blocks=record.num_free_blocks if record else 0,
            cached=out.cached,
        )

    def on_step(
        self,
        rank: int,
        *,
        num_sampled: int,
        num_tokens: int | None,
        num_free_blocks: int,
        cached: dict[int, int],
    ) -> None:
        """Correct the predictions for an engine, like `on_step_output`.

        Args:
            rank: the engine.
            num_sampled: rows that sampled a token.
            num_tokens: all tokens of the step, None if they are unknown.
            num_free_blocks: KV blocks after the step; ignored if `num_tokens` is None.
            cached: cached prompt tokens of the requests that got their first token, by rid.
        """
        load = self.loads.get(rank)
        if load is None:
            return
        self._stale_ranks.add(rank)
        load.count_output(num_sampled, self._min_expected)
        if num_tokens is not None:
            # Rows whose requests had begun before have one token each. The rest are of prompts.
            num_decoded = num_sampled - len(cached)
            load.count_step(num_tokens - num_decoded, num_free_blocks)
        for rid, num_cached in cached.items():
            request = self._requests.get(rid)
            if request is not None:
                load.count_first_token(rid, num_cached - request.num_hits)
        load.correct_prefill()

    def remove_request(self, rid: int) -> None:
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

    def _hits_by_rank(self, request: Submit) -> dict[int, int]:
        """Return the number of leading tokens that each engine has seen, where there are any."""
        hits: dict[int, int] = {}
        seen_by = -1  # bit mask of the engines that have seen all chunks so far; -1: all bits
        num_chunks = 0
        for key in _prefix_keys(request):
            still_seen_by = seen_by & self._prefixes.get(key, 0)
            if num_chunks:  # engines that have seen the chunks before this one, but not this one
                _set_hits(hits, seen_by & ~still_seen_by, num_chunks * CHUNK)
            seen_by = still_seen_by
            num_chunks += 1
            if not seen_by:
                break
        if seen_by > 0:  # -1 if the request has no chunk
            _set_hits(hits, seen_by, num_chunks * CHUNK)
        return hits

    def _add_prefixes(self, request: Submit, rank: int) -> None:
        engine_bit = 1 << rank
        for key in _prefix_keys(request):
            self._prefixes[key] = self._prefixes.get(key, 0) | engine_bit
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)


def _set_hits(hits: dict[int, int], engine_mask: int, num_tokens: int) -> None:
    """Set the hits of all engines in a bit mask."""
    while engine_mask:
        rank = engine_mask.bit_length() - 1
        hits[rank] = num_tokens
        engine_mask ^= 1 << rank


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
