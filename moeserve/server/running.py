"""A running request: the deltas of its generations, its token counts, and how it ends."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from moeserve.actor.tasks import cancel, log_error, spawn
from moeserve.errors import DeadlineExceeded, RequestError
from moeserve.frontend.generation import Delta, Generation
from moeserve.protocol import CachedTokens, CompletionDetails, Usage

Deltas = AsyncGenerator[tuple[int, Delta]]


@dataclass
class Counts:
    """Token counts of one HTTP request. Like OpenAI, each prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_reasoning: int = 0

    def add(self, delta: Delta) -> None:
        """Count the tokens of a delta."""
        self.completion_tokens += len(delta.token_ids)
        self.num_reasoning += delta.num_reasoning
        if delta.num_drafts:
            self.num_drafts += delta.num_drafts
            self.num_accepted += delta.num_accepted
        if delta.cached_tokens is not None and delta.index == 0:
            self.cached_tokens += delta.cached_tokens

    def usage(self) -> Usage:
        """Return the counts in OpenAI's shape."""
        details = CompletionDetails(reasoning_tokens=self.num_reasoning)
        if self.num_drafts:
            details.accepted_prediction_tokens = self.num_accepted
            details.rejected_prediction_tokens = self.num_drafts - self.num_accepted
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=CachedTokens(self.cached_tokens),
            completion_tokens_details=details,
        )


@dataclass(frozen=True)
class AnswerHead:
    """The fields that are known when an answer begins."""

    request_id: str
    created: int
    model: str
    fingerprint: str  # changes when the same seed may give different tokens

    def fields(self, prefix: str, object: str) -> dict[str, Any]:
        """Return the common fields of OpenAI's answers and chunks."""
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class RequestAborted(RequestError, http_status=499, code="request_aborted"):
    """The request was aborted by its id: on purpose, so clients should not retry it."""


class RunningRequest:
    """The generations of one HTTP request, one per prompt, each of n sequences."""

    def __init__(
        self,
        generations: list[Generation],
        *,
        n: int,
        owner: str,
        head: AnswerHead,
        counts: Counts,
    ) -> None:
        self.generations = generations
        self.n = n
        self.owner = owner  # see `Caller`
        self.head = head
        self.counts = counts
        # Set when the request was aborted by its id. Its client gets finish_reason "abort".
        self.aborted: RequestAborted | None = None
        # The sequences that have not ended, as (prompt number, index)
        self._open_sequences = {
            (prompt, index) for prompt in range(len(generations)) for index in range(n)
        }
        # The next delta of any of several prompts. While it waits here, generations merge further
        # deltas, as with one prompt, so a slow reader takes only the memory of its own answers.
        self._queue: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue(maxsize=1)
        self._pumps: list[asyncio.Task[None]] = []
        if len(generations) > 1:
            self._pumps = [
                spawn(self._pump(i, generation), name=f"deltas of prompt {i}", on_error=log_error)
                for i, generation in enumerate(generations)
            ]

    async def deltas(self) -> Deltas:
        """Yield (prompt number, delta) until all sequences have ended. Raises RequestError."""
        try:
            while self._open_sequences:
                prompt, delta = await self._next()
                if delta.finish_reason is not None:
                    self._open_sequences.discard((prompt, delta.index))
                yield prompt, delta
        except RequestAborted as error:
            self.aborted = error
            for prompt, index in sorted(self._open_sequences):
                delta = Delta(index, finish_reason="abort")
                if (sequence := self.generations[prompt].sequences[index]).parser is not None:
                    sequence.parse(delta)  # text that the parser held back
                yield prompt, delta

    async def _next(self) -> tuple[int, Delta]:
        if not self._pumps:
            return 0, await self.generations[0].__anext__()
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def _pump(self, prompt: int, generation: Generation) -> None:
        try:
            async for delta in generation:
                await self._queue.put((prompt, delta))
        except Exception as error:  # raised again by `deltas`
            await self._queue.put(error)

    def set_write_directly(self, write_directly: Callable[[Delta], bool] | None) -> None:
        """Set `Generation.write_directly`. It has no effect for several prompts."""
        if not self._pumps:
            self.generations[0].write_directly = write_directly

    async def abort(self) -> int:
        """Abort the request; its client gets finish_reason "abort". Return the number of sequences
        that were running.
        """
        num_open = len(self._open_sequences)
        for generation in self.generations:
            generation.abort()
            generation.fail(RequestAborted("the request was ended by its id"))
        return num_open

    def expire(self) -> None:
        """Abort the request at its deadline, with an error."""
        for generation in self.generations:
            generation.abort()
            generation.fail(
                DeadlineExceeded("the request did not finish in the time that it was given")
            )

    async def aclose(self) -> None:
        """Abort the sequences that still run, unless the stream is resumable."""
        await cancel(*self._pumps)
        for generation in self.generations:
            await generation.aclose()
