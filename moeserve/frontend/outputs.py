"""Results of offline and asyncio use, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from moeserve.frontend.generation import Delta
from moeserve.messages import Logprobs


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n answers. logprobs[i] belongs to token_ids[i]; logprobs is None if not asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    def add(self, delta: Delta) -> None:
        """Appends one delta of this sequence."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs = (self.logprobs or []) + delta.logprobs
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(p.values[0] for p in delta.logprobs)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers; from `AsyncEngine`, the parts of answers since the last output."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0

    def add(self, answer: CompletionOutput, delta: Delta) -> None:
        """Appends one delta to `answer`."""
        answer.add(delta)
        if delta.cached_tokens is not None:
            self.num_cached_tokens = max(self.num_cached_tokens, delta.cached_tokens)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
