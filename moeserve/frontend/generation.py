"""A request in the front end, from its validation to its deltas.

`check_request` and `token_sampling` validate and resolve its parameters. `Generation` is the
running request: an async iterator of the deltas of its n sequences. `submission` creates the
message to the engine.
"""

import asyncio
import random
from array import array
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field

import msgspec

from moeserve.errors import ContextLengthExceeded, InvalidRequest
from moeserve.frontend.journal import StreamLog
from moeserve.logits_processors import checked_processors
from moeserve.messages import FinishReason, Logprobs, PromptLogprobs, Ready, StepOutput, Submit
from moeserve.receipts import Receipt
from moeserve.sampling import (
    RANDOM_SEED,
    GrammarSpec,
    LogitParams,
    SamplingParams,
    TokenSampling,
)
from moeserve.text.answer_format import AnswerParser, Part
from moeserve.text.line_limits import LineLimiter, LineLimits
from moeserve.text.stop import StopMatcher
from moeserve.text.tokenizer import Detokenizer, Tokenizer

_SEED_MASK = 2**63 - 1


class Delta(msgspec.Struct, gc=False):
    """New text and tokens of one sequence of a request."""

    index: int  # of the sequence, 0 to n - 1
    # Without stop strings. Empty while a character or a possible stop string is incomplete.
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[Logprobs] = []  # one for each of token_ids, if requested
    finish_reason: str | None = None  # "stop", "length" or "abort", in the last delta
    stop_reason: int | str | None = None  # the stop token or the stop string, in the last delta
    cached_tokens: int | None = None  # in the first delta of a sequence
    num_drafts: int = 0  # verified drafts since the last delta
    num_accepted: int = 0  # accepted drafts since the last delta
    # One for each prompt token, the first of which is None. In the first delta of sequence 0.
    prompt_logprobs: list[Logprobs | None] | None = None
    # The text, parsed by an answer parser. `text` then has the special tokens, too, between marks.
    parts: list[Part] = []
    num_reasoning: int = 0  # how many of token_ids are reasoning
    receipt: Receipt | None = None  # in the last delta, if requested

    def merge(self, later: "Delta") -> None:
        """Merge the next delta of the same sequence into this one."""
        self.text += later.text
        if self.cached_tokens is None:
            self.cached_tokens = later.cached_tokens
        self.append_tokens(later)

    def append_tokens(self, later: "Delta") -> None:
        """Merge the next delta of the same sequence, except for its text and cached_tokens."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.parts += later.parts
        self.num_reasoning += later.num_reasoning
        self.num_drafts += later.num_drafts
        self.num_accepted += later.num_accepted
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.receipt = later.receipt


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's n sequences: its sampling parameters, tokens and text state.

    The generated tokens are kept, so that a new engine can continue for a dead one.
    """

    rid: int
    index: int
    owner: "Generation"
    sampling: TokenSampling
    detokenizer: Detokenizer | None = None
    stop_matcher: StopMatcher | LineLimiter | None = None
    parser: AnswerParser | None = None
    is_reasoning: bool = False  # whether the parser's latest part is reasoning
    tokens: list[int] = field(default_factory=list)  # generated so far
    started_at_s: float | None = None  # when its first step began
    # Digests of logits, if requested. There may be more digests than tokens, because the engine
    # computes a few tokens after a stop string.
    digests: list[bytes] = field(default_factory=list)
    ended: bool = False
    receipt: Receipt | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float = 0.0  # of its latest token

    def advance(self, token: int, finish: int, out: StepOutput) -> Delta:
        """Apply one row of a step output, and return its delta.

        This takes the row's logprobs and drafts out of `out`. A stop token is not part of the text,
        unless `include_stop_str_in_output`.

        Args:
            token: The row's token; -1 if the row only ends the sequence.
            finish: A value of `FinishReason`.
            out: The step output, for the row's other columns.
        """
        if token >= 0:
            self.tokens.append(token)
        # A token that only completes a grammar is no stop token.
        is_stop_token = finish == FinishReason.STOP and token in self.sampling.stop_ids
        is_shown = not is_stop_token or self.owner.params.include_stop_str_in_output
        text = ""
        if self.detokenizer is not None and token >= 0 and is_shown:
            text = self.detokenizer.push(token)
        delta = Delta(self.index, text, [token] if token >= 0 else [])
        if finish:
            delta.finish_reason = FinishReason.NAMES[finish]
            delta.stop_reason = out.stop_ids.get(self.rid)
            if self.detokenizer is not None:
                delta.text += self.detokenizer.flush()
        if self.stop_matcher is not None:
            self._hold_back_stops(delta)
        if self.parser is not None:
            self.parse(delta)
        if out.logprobs and (rows := out.logprobs.get(self.rid)):
            delta.logprobs.append(rows.pop(0))
        if out.drafts and (verified := out.drafts.pop(self.rid, None)):
            delta.num_drafts, delta.num_accepted = verified
        # A sequence that was submitted again finds its own earlier blocks in the cache. These hits
        # do not count.
        if out.cached and len(self.tokens) <= 1:
            delta.cached_tokens = out.cached.get(self.rid)
        self.ended = delta.finish_reason is not None
        return delta

    def parse(self, delta: Delta) -> None:
        """Parse a delta's text into `parts`.

        Call it before the delta is merged with others, so that the parts do not depend on the
        merging.
        """
        assert self.parser is not None
        delta.parts = self.parser.push(delta.text, final=delta.finish_reason is not None)
        if delta.parts:
            self.is_reasoning = delta.parts[-1].kind == "reasoning"
        delta.num_reasoning = len(delta.token_ids) if self.is_reasoning else 0

    def _hold_back_stops(self, delta: Delta) -> None:
        """Hold back text that may become a stop string, and end the sequence at the first one."""
        assert self.stop_matcher is not None
        may_stop = len(self.tokens) >= self.owner.params.min_tokens
        delta.text, stop = self.stop_matcher.push(delta.text, active=may_stop)
        if stop is not None:
            delta.finish_reason = "stop"
            delta.stop_reason = stop
        elif delta.finish_reason is not None:
            delta.text += self.stop_matcher.flush()


class Generation:
    """A running request. `async for delta in generation` ends after the last sequence has ended.

    Unread deltas are merged, so an unread answer takes no more memory than its tokens and text.
    `aclose()`, leaving an `async with`, or cancelling the reader aborts the running sequences,
    unless the request is resumable.
    """

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        submitted_at_s: float,
        abort: "Callable[[Generation], None]",
        priority: int = 0,
        salt: str = "",
        marked: bool = False,
    ) -> None:
        self.prompt_token_ids = prompt
        self.params = params
        self.request_id = request_id
        self.submitted_at_s = submitted_at_s
        self.sequences: list[Sequence] = []
        self.num_live = params.n  # how many sequences have not ended
        self.priority = priority
        self.salt = salt
        self.marked = marked  # see `FrontEnd.generate`
        # Tries to write a delta at once, without waking the reader, which costs as much as all
        # other work for a token. Returns False to leave the delta to the reader. The reader raises
        # its errors.
        self.write_directly: Callable[[Delta], bool] | None = None
        # Prompt logprobs that are not delivered yet; None: there are none.
        self.prompt_rows: list[Logprobs | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.merges = True  # whether unread deltas are merged
        self.pause: Callable[[], Awaitable[None]] | None = None  # awaited before each delta
        self.stream_log: StreamLog | None = None  # the log of a resumable request
        # Adopted from a dead process, and has stop strings. Its tokens have no text yet, so only
        # a replay, which decodes them again, finds the stop strings.
        self.must_replay = False
        # Called when the reader is cancelled or closes the generation.
        self.on_reader_left: Callable[[Generation], None] = Generation.abort
        self._abort = abort
        # Unread deltas, by index of the sequence if they are merged
        self._pending: dict[object, Delta] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the reader, while it waits

    def create_sequences(
        self,
        samplings: list[TokenSampling],
        rids: Iterator[int],
        tokenizer: Tokenizer | None,
        parser: Callable[[], AnswerParser] | None,
        line_limits: LineLimits | None = None,
    ) -> None:
        """Create the sequences. Called by the front end."""
        params = self.params
        for index, sampling in enumerate(samplings):
            sequence = Sequence(next(rids), index, self, sampling)
            if tokenizer is not None:
                pieces = tokenizer.pieces(skip_special_tokens=params.skip_special_tokens)
                sequence.detokenizer = Detokenizer(
                    tokenizer.marked_pieces if self.marked else pieces, self.prompt_token_ids
                )
            if parser is not None:
                sequence.parser = parser()
            if params.stop_strings or line_limits is not None:
                matcher = StopMatcher(
                    params.stop_strings, include_stop=params.include_stop_str_in_output
                )
                sequence.stop_matcher = (
                    matcher if line_limits is None else LineLimiter(matcher, line_limits)
                )
            self.sequences.append(sequence)

    def push(self, delta: Delta) -> None:
        """Add a delta, merged with an unread one of the same sequence. Called by the front end,
        which then calls `deliver`.
        """
        key = delta.index if self.merges else object()  # a unique key keeps the delta separate
        unread = self._pending.setdefault(key, delta)
        if unread is not delta:
            unread.merge(delta)

    def deliver(self) -> None:
        """Write deltas directly until `write_directly` returns False, then wake the reader.

        Does nothing unless the reader waits. Called by the front end.
        """
        if self._waiter is None or self._waiter.done():
            return
        pending = self._pending
        write_directly = self.write_directly
        try:
            while write_directly is not None and pending:
                key = next(iter(pending))
                if not write_directly(pending[key]):
                    break
                del pending[key]
        except Exception as error:
            self.fail(error)
        if pending or not self.num_live:
            self._wake()

    def add_prompt_rows(self, piece: PromptLogprobs) -> None:
        """Add a chunk of prompt logprobs. A chunk may be repeated after a preemption."""
        rows = self.prompt_rows or [None]  # the first token has no logprobs
        rows[piece.start : piece.start + len(piece.rows)] = piece.rows
        self.prompt_rows = rows

    def fail(self, error: Exception) -> None:
        """End the request with an error, which is raised after the unread deltas. The first error
        is kept.
        """
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> Delta:
        if self.pause is not None:
            await self.pause()
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self.num_live == 0:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.on_reader_left(self)
                raise
            finally:
                self._waiter = None
        return self._pending.pop(next(iter(self._pending)))

    def abort(self) -> None:
        """End the running sequences. The engine frees them before its next step. Idempotent."""
        if self.num_live:
            self._abort(self)

    def hand_over(self, error: Exception) -> None:
        """Drop the unread deltas and raise an error in the reader, because another generation
        continues the sequences.
        """
        self._pending.clear()
        self.fail(error)

    def end_replay(self) -> None:
        """Merge unread deltas from now on. Called when the reader of a replay has caught up."""
        self.merges = True
        self.pause = None

    def discard_deltas(self) -> None:
        """Drop the unread deltas of a replay without a reader."""
        self._pending.clear()
        self.end_replay()

    async def aclose(self) -> None:
        """Tell `on_reader_left` that there is no reader any more."""
        self.on_reader_left(self)

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def check_request(prompt: list[int], priority: int, ready: Ready) -> None:
    """Raise ContextLengthExceeded for a long prompt, and InvalidRequest for an empty prompt, an
    unknown token id, or a priority that is not a 32-bit integer.
    """
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    low = min(prompt)
    high = max(prompt)
    if low < 0 or high >= ready.vocab_size:
        unknown_id = low if low < 0 else high
        raise InvalidRequest(
            f"token id {unknown_id} is outside the vocabulary of {ready.vocab_size} tokens",
            param="prompt",
        )
    if len(prompt) >= ready.max_model_len:
        too_long = ContextLengthExceeded(
            f"this model's maximum context length is {ready.max_model_len} tokens, prompt and "
            f"answer together; the prompt has {len(prompt)}, so shorten it",
            param="prompt",
        )
        too_long.num_tokens = len(prompt)
        too_long.max_tokens = ready.max_model_len - 1
        raise too_long
    if not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise InvalidRequest(
            f"priority must be a 32-bit integer (lower values run first), got {priority!r}",
            param="priority",
        )


def token_sampling(
    params: SamplingParams,
    prompt_len: int,
    ready: Ready,
    bad_seqs: tuple[tuple[int, ...], ...] = (),
    grammar: GrammarSpec | None = None,
    known_processors: Collection[str] = (),
) -> list[TokenSampling]:
    """Return the `TokenSampling` of each of the n sequences.

    Sequence i samples with seed + i, and only the first one computes prompt logprobs. max_tokens is
    reduced to the rest of the context, which has room for at least 1 token.

    The parameters must have passed `SamplingParams.check`, and the prompt `check_request`.

    known_processors: the names of the logits processors that this server has. Raises InvalidRequest
    if the parameters name another one.
    """
    max_tokens = ready.max_model_len - prompt_len
    if params.max_tokens is not None:
        max_tokens = min(params.max_tokens, max_tokens)
    eos_ids = () if params.ignore_eos else ready.eos_token_ids
    allowed = params.allowed_token_ids
    seed = params.seed
    if seed is None or seed == RANDOM_SEED:
        seed = random.getrandbits(63)
    resolved = {
        "temperature": 0.0 if params.greedy else params.temperature,
        "top_k": max(params.top_k, 0),
        "min_tokens": min(params.min_tokens, max_tokens),
    }
    shared = TokenSampling(
        **{name: getattr(params, name) for name in LogitParams.__struct_fields__} | resolved,
        seed=0,
        max_tokens=max_tokens,
        stop_ids=tuple(dict.fromkeys((*eos_ids, *params.stop_token_ids))),
        allowed_ids=None if allowed is None else tuple(allowed),
        bad_seqs=bad_seqs,
        grammar=grammar,
        processors=checked_processors(params.logits_processors, known_processors)
        if params.logits_processors
        else (),
    )
    first, *others = [
        msgspec.structs.replace(shared, seed=(seed + i) & _SEED_MASK) for i in range(params.n)
    ]
    return [first, *(msgspec.structs.replace(other, prompt_logprobs=None) for other in others)]


def submission(sequence: Sequence) -> Submit:
    """Return the message that starts a sequence, or resumes it with its generated tokens."""
    owner = sequence.owner
    sampling = sequence.sampling
    if sequence.tokens and sampling.prompt_logprobs is not None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)  # already delivered
    return Submit(
        rid=sequence.rid,
        tokens=array("i", [*owner.prompt_token_ids, *sequence.tokens]).tobytes(),
        num_prompt=len(owner.prompt_token_ids),
        sampling=sampling,
        priority=owner.priority,
        salt=owner.salt,
    )
