"""The answer of POST /infill in llama.cpp's shape: one object, or a stream of them.

The answers to one request have a number, `index`. Several are a list, as in llama.cpp. A stream has
no [DONE]; each answer ends with an object whose `stop` is true.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Struct

from moeserve.errors import RequestError
from moeserve.frontend.generation import Delta
from moeserve.sampling import SamplingParams
from moeserve.server.dialects.infill_request import InfillRequest
from moeserve.server.errors import error_body
from moeserve.server.running import RunningRequest
from moeserve.server.writer import StreamWriter, encode
from moeserve.text.line_limits import AT_LINE_LIMIT


class Timings(Struct, kw_only=True):
    """Counts and times of one answer."""

    cache_n: int  # tokens of the prompt that the prefix cache had
    prompt_n: int  # tokens of the prompt that were computed
    prompt_ms: float  # from the request to the first token
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float  # from the first token to the last one
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillChunk(Struct, kw_only=True):
    """More text of an answer, in a stream. The last one is an `InfillAnswer`.

    All fields have defaults, because `response_fields` may leave any of them out.
    """

    index: int = 0
    content: str = ""
    tokens: list[int] = []  # with return_tokens
    stop: bool = False  # whether the answer is complete
    tokens_predicted: int = 0  # so far
    tokens_evaluated: int = 0  # tokens of the prompt


class InfillAnswer(InfillChunk, kw_only=True):
    """A finished answer. In a stream, `content` and `tokens` are empty."""

    stop: bool = True
    model: str = ""
    generation_settings: dict[str, Any] = {}
    prompt: str = ""  # as the model read it
    has_new_line: bool = False
    truncated: bool = False  # whether parts of the prompt were left out to make it fit the context
    stop_type: Literal["eos", "word", "limit"] = "eos"
    stopping_word: str = ""
    tokens_cached: int = 0  # tokens of the prompt that the prefix cache had
    timings: Timings | None = None


@dataclass
class _Written:
    """What is known of one answer so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    last: Delta | None = None


class InfillWriter(StreamWriter):
    """Writes the answers to one prompt."""

    def __init__(
        self,
        running: RunningRequest,
        request: InfillRequest,
        params: SamplingParams,
        *,
        prompt: str,
        truncated: bool,
    ) -> None:
        """prompt: as the model reads it. truncated: whether parts of it were left out."""
        self._running = running
        self._request = request
        self._params = params
        self._prompt = prompt
        self._truncated = truncated
        self._written = [_Written() for _ in range(running.n)]

    def add(self, delta: Delta) -> None:
        """Add a delta to its answer, and count its tokens."""
        if self._request.token_limit == 0:
            # One token was computed, because the prompt alone cannot be.
            delta = Delta(delta.index, finish_reason="length", cached_tokens=delta.cached_tokens)
        self._running.counts.add(delta)
        written = self._written[delta.index]
        written.texts.append(delta.text)
        written.token_ids += delta.token_ids
        written.cached_tokens = delta.cached_tokens or written.cached_tokens
        written.last = delta

    def opening(self) -> bytes:
        return b""

    def frames(self, prompt: int, delta: Delta) -> bytes:
        self.add(delta)
        written = self._written[delta.index]
        last = written.last
        assert last is not None
        frames = b""
        if last.text or (last.token_ids and self._shows_tokens):
            chunk = InfillChunk(
                index=delta.index,
                content=last.text,
                tokens=last.token_ids if self._shows_tokens else [],
                tokens_predicted=len(written.token_ids),
                tokens_evaluated=self._num_prompt_tokens,
            )
            frames = _frame(chunk)
        if last.finish_reason is None:
            return frames
        answer = self._answer(delta.index)
        answer.content = ""
        answer.tokens = []
        return frames + _frame(self._selected(answer))

    def closing(self) -> bytes:
        return b""

    def failure(self, error: RequestError, request_id: str) -> bytes:
        return b"data: " + error_body(error, request_id) + b"\n\n"

    def whole(self) -> bytes:
        """Return the answer as JSON, or the list of several answers."""
        answers = [self._selected(self._answer(index)) for index in range(self._running.n)]
        return encode(answers[0] if len(answers) == 1 else answers)

    @property
    def _shows_tokens(self) -> bool:
        return bool(self._request.return_tokens or self._request.return_token_ids)

    @property
    def _num_prompt_tokens(self) -> int:
        return len(self._running.generations[0].prompt_token_ids)

    def _selected(self, answer: InfillAnswer) -> Any:
        """Return the fields that the request names, flat, as in llama.cpp; otherwise all."""
        paths = self._request.response_fields
        if not paths:
            return answer
        fields = msgspec.to_builtins(answer)
        found = {}
        for path in paths:
            value = fields
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                found[path] = value
        return found

    def _answer(self, index: int) -> InfillAnswer:
        written = self._written[index]
        content = "".join(written.texts)
        stop_type, stopping_word = _stop_of(written.last)
        return InfillAnswer(
            index=index,
            content=content,
            tokens=written.token_ids if self._shows_tokens else [],
            model=self._running.head.model,
            tokens_predicted=len(written.token_ids),
            tokens_evaluated=self._num_prompt_tokens,
            generation_settings=self._settings(index),
            prompt=self._prompt,
            has_new_line="\n" in content,
            truncated=self._truncated,
            stop_type=stop_type,
            stopping_word=stopping_word,
            tokens_cached=written.cached_tokens,
            timings=self._timings(index),
        )

    def _settings(self, index: int) -> dict[str, Any]:
        """Return the parameters that were used, by llama.cpp's names."""
        params = self._params
        limit = self._request.token_limit
        return {
            "seed": self._running.generations[0].sequences[index].sampling.seed,
            "temperature": params.temperature,
            "top_k": max(params.top_k, 0),
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "n_predict": limit,
            "max_tokens": limit,
            "n_indent": self._request.n_indent or 0,
            "stop": list(params.stop_strings),
            "ignore_eos": params.ignore_eos,
            "stream": bool(self._request.stream),
        }

    def _timings(self, index: int) -> Timings:
        written = self._written[index]
        generation = self._running.generations[0]
        sequence = generation.sequences[index]
        first_s = sequence.first_token_at_s or generation.submitted_at_s
        prompt_ms = 1000 * (first_s - generation.submitted_at_s)
        predicted_ms = 1000 * max(sequence.last_token_at_s - first_s, 0.0)
        num_computed = max(self._num_prompt_tokens - written.cached_tokens, 0)
        num_predicted = len(written.token_ids)
        return Timings(
            cache_n=written.cached_tokens,
            prompt_n=num_computed,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=_ratio(prompt_ms, num_computed),
            prompt_per_second=_ratio(1000 * num_computed, prompt_ms),
            predicted_n=num_predicted,
            predicted_ms=predicted_ms,
            predicted_per_token_ms=_ratio(predicted_ms, num_predicted),
            predicted_per_second=_ratio(1000 * num_predicted, predicted_ms),
        )


def _stop_of(last: Delta | None) -> tuple[Literal["eos", "word", "limit"], str]:
    """Return how an answer ended, and the stop string that ended it."""
    if last is None or last.finish_reason != "stop" or last.stop_reason == AT_LINE_LIMIT:
        return "limit", ""
    if isinstance(last.stop_reason, str):
        return "word", last.stop_reason
    return "eos", ""


def _ratio(value: float, count: float) -> float:
    return value / count if count else 0.0


def _frame(event: Any) -> bytes:
    return b"data: " + encode(event) + b"\n\n"
