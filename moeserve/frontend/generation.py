"""A running request: an async iterator of deltas over n sequences, and the text state of each sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from moeserve.errors import RequestError
from moeserve.frontend.delta import Delta
from moeserve.messages import FinishReason, Logprobs, PromptLogprobs
from moeserve.sampling import SamplingParams, TokenSampling
from moeserve.text.detokenizer import Detokenizer
from moeserve.text.stop import StopMatcher


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's n sequences: its sampling parameters, its tokens so far, and its text state.

    The generated tokens stay here, so that a new engine can continue where a dead one stopped.
    """

    rid: int
    index: int
    owner: Generation
    sampling: TokenSampling
    detok: Detokenizer | None
    stops: StopMatcher | None
    tokens: list[int] = field(default_factory=list)
    first_at: float | None = None
    last_at: float = 0.0

    def advance(self, token: int, finish: int, stop_id: int | None) -> Delta:
        """Takes one row of a step output and returns the delta for the caller. A token of -1 means no token.

        A stop token ends the text before itself unless `include_stop_str_in_output`.
        """
        if token >= 0:
            self.tokens.append(token)
        shown = finish != FinishReason.STOP or self.owner.params.include_stop_str_in_output
        text = self.detok.push(token) if self.detok is not None and token >= 0 and shown else ""
        delta = Delta(self.index, text, [token] if token >= 0 else [])
        if finish:
            delta.finish_reason = FinishReason.NAMES[finish]
            delta.stop_reason = stop_id
            if self.detok is not None:
                delta.text += self.detok.flush()
        if self.stops is not None:
            self._cut(delta)
        return delta

    def _cut(self, delta: Delta) -> None:
        """Holds back what may become a stop string, and ends the sequence at the first one."""
        assert self.stops is not None
        searching = len(self.tokens) >= self.owner.params.min_tokens
        delta.text, found = self.stops.push(delta.text, active=searching)
        if found is not None:
            delta.finish_reason, delta.stop_reason = "stop", found
        elif delta.finish_reason is not None:
            delta.text += self.stops.flush()


class Generation:
    """A running request. `async for delta in generation` ends after the last sequence has ended.

    A slow reader gets several tokens merged into one delta, so that memory is bounded by the answer itself. `aclose()`,
    leaving an `async with`, or cancelling the reader aborts the sequences that still run.
    """

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        submitted_at: float,
        abort: Callable[[Generation], None],
        priority: int = 0,
        salt: str = "",
    ) -> None:
        self.prompt_token_ids = prompt
        self.params = params
        self.request_id = request_id
        self.submitted_at = submitted_at
        self.sequences: list[Sequence] = []
        self.num_live = params.n
        self.priority = priority
        self.salt = salt
        self._prompt_rows: list[Logprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self._abort = abort
        self._pending: dict[int, Delta] = {}
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, delta: Delta) -> None:
        """Delivers a delta, merged with an unread one of the same sequence. For the front end."""
        held = self._pending.get(delta.index)
        if held is None:
            self._pending[delta.index] = delta
        else:
            held.text += delta.text
            held.token_ids += delta.token_ids
            held.logprobs += delta.logprobs
            held.finish_reason = delta.finish_reason
            held.stop_reason = delta.stop_reason
        self._wake()

    def add_prompt_rows(self, piece: PromptLogprobs) -> None:
        """Adds a chunk of prompt logprobs. A chunk may come again after a preemption."""
        rows = self._prompt_rows or [None]
        rows[piece.start : piece.start + len(piece.rows)] = piece.rows
        self._prompt_rows = rows

    def take_prompt_rows(self) -> list[Logprobs | None] | None:
        """Returns the prompt logprobs once; afterwards, or if not asked for, None."""
        rows, self._prompt_rows = self._prompt_rows, None
        return rows

    def fail(self, error: RequestError) -> None:
        """Ends the whole request with an error, which is raised after the unread deltas. The first error counts."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self.num_live == 0:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self._abort(self)
                raise
            finally:
                self._waiter = None
        return self._pending.pop(next(iter(self._pending)))

    async def aclose(self) -> None:
        """Aborts the sequences that still run; the engine frees them before its next step. Idempotent."""
        if self.num_live:
            self._abort(self)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
