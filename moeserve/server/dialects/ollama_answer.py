"""Answers of /api/chat and /api/generate: one JSON object, or a stream with one per line."""

import time
from abc import abstractmethod
from datetime import UTC, datetime
from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from moeserve.errors import EngineLost, RequestError
from moeserve.frontend.generation import Delta
from moeserve.protocol import Answer, TokenLogprob, written
from moeserve.server.conversation import Conversation
from moeserve.server.dialects.ollama_request import OllamaRequest
from moeserve.server.errors import error_body
from moeserve.server.logprobs import LogprobFormat
from moeserve.server.writer import EventWriter, encode
from moeserve.text.answer_format import Part

NDJSON = "application/x-ndjson"
# Signs in JSON texts at which some clients (httpx) end a line, too
_LINE_ENDS = {sign.encode(): rb"\u%04x" % ord(sign) for sign in "\x85\u2028\u2029"}


class CalledFunction(Struct, kw_only=True):
    """The function of a call, and its arguments."""

    index: int
    name: str
    arguments: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


class OllamaCall(Struct, kw_only=True):
    """A call that the client is asked to make."""

    id: str
    function: CalledFunction


class AnswerMessage(Struct, kw_only=True, omit_defaults=True):
    """A message of the assistant, or its new part."""

    role: str = written("assistant")
    content: str = written("")
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaAnswer(Answer, kw_only=True, omit_defaults=True):
    """An answer, or an object of its stream. Only the last one has a reason and counts.

    Durations are in nanoseconds.
    """

    model: str
    created_at: str
    done: bool = written(False)
    done_reason: str | UnsetType = UNSET  # stop, length, load or unload
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET  # until the model began
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET  # until the first token
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class OllamaChatAnswer(OllamaAnswer, kw_only=True, omit_defaults=True):
    """An answer of /api/chat."""

    message: AnswerMessage = field(default_factory=AnswerMessage)


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True, omit_defaults=True):
    """An answer of /api/generate."""

    response: str = written("")
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET  # token ids of the conversation so far


def now() -> str:
    """Return the time, as in Ollama's answers."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaWriter(EventWriter):
    """Writes an answer. `open_kind`, `last_delta` and `counts` are those of `EventWriter`."""

    media_type = NDJSON

    def __init__(self, chat: Conversation, *, request: OllamaRequest, began_at_s: float) -> None:
        super().__init__(chat, stream=request.stream is not False)
        self._request = request
        self._began_at_s = began_at_s
        self._logprob_format: LogprobFormat | None = None
        if request.logprobs:
            num_top = request.top_logprobs or 0
            self._logprob_format = LogprobFormat(chat.front.tokenizer, num_top=num_top)
        self._unsent_logprobs: list[TokenLogprob] = []
        # For a whole answer:
        self._content = ""
        self._thinking = ""
        self._calls: list[OllamaCall] = []
        self._open_call: Part | None = None

    @abstractmethod
    def answer(self, content: str = "", thinking: str = "") -> OllamaAnswer:
        """Return an object with a part of the answer, or with all of it."""

    @property
    def head(self) -> dict[str, Any]:
        """The fields of every object."""
        return {"model": self._request.model, "created_at": now()}

    def emit(self, event: OllamaAnswer) -> None:
        if self._is_stream:
            self._take_logprobs(event)
            self._frames += _line(encode(event))

    def _take_logprobs(self, answer: OllamaAnswer) -> None:
        if self._unsent_logprobs:
            answer.logprobs = self._unsent_logprobs
            self._unsent_logprobs = []

    def add(self, prompt: int, delta: Delta) -> None:
        if self._logprob_format is not None:
            rows = self._logprob_format.chat_logprobs(delta.logprobs).content or []
            self._unsent_logprobs += rows
        super().add(prompt, delta)

    def frames(self, prompt: int, delta: Delta) -> bytes:
        frames = super().frames(prompt, delta)
        if not self._unsent_logprobs:
            return frames
        self.emit(self.answer())  # the tokens belong to no text yet
        return frames + self.emitted()

    def on_block_opened(self, part: Part) -> None:
        self._open_call = part if part.kind == "call" else None

    def on_block_text(self, text: str) -> None:
        if self.open_kind == "content":
            self.emit(self.answer(text))
        elif self.open_kind == "reasoning":
            self.emit(self.answer(thinking=text))

    def on_block_closed(self, text: str, *, complete: bool) -> None:
        if self.open_kind == "content":
            self._content += text
        elif self.open_kind == "reasoning":
            self._thinking += text
        elif (part := self._open_call) is not None:
            arguments = Raw(text.encode() or b"{}")
            function = CalledFunction(index=part.number, name=part.text, arguments=arguments)
            self._calls.append(OllamaCall(id=part.id, function=function))
            self.on_call(self._calls[-1])

    def on_call(self, call: OllamaCall) -> None:
        """Emit the object for a complete call."""

    def on_aborted(self) -> None:
        """Raise RequestAborted if the request was aborted by its id, otherwise EngineLost.

        The API has no reason for either.
        """
        raise self.chat.running.aborted or EngineLost(
            "the server stopped before this request could finish"
        )

    def finish(self) -> None:
        self.close_block()

    def opening(self) -> bytes:
        return b""

    def closing(self) -> bytes:
        self.finish()
        self.emit(self._with_counts(self.answer()))
        return self.emitted()

    def whole(self) -> OllamaAnswer:
        self.finish()
        answer = self._with_counts(self.answer(self._content, self._thinking))
        self._take_logprobs(answer)
        return answer

    def failure(self, error: RequestError, request_id: str) -> bytes:
        return self.emitted() + _line(error_body(error, request_id, shape="ollama"))

    def ping(self) -> bytes:
        # Ollama's clients parse every line, so an empty one would end them.
        return _line(encode(self.answer()))

    def _with_counts(self, answer: OllamaAnswer) -> OllamaAnswer:
        (sequence,) = self.chat.running.generations[0].sequences
        ended_at_s = time.monotonic()
        first_token_at_s = sequence.first_token_at_s or ended_at_s
        started_at_s = sequence.started_at_s or first_token_at_s
        answer.done = True
        answer.done_reason = "length" if self.last_delta.finish_reason == "length" else "stop"
        answer.prompt_eval_count = self.counts.prompt_tokens
        answer.eval_count = self.counts.completion_tokens
        answer.total_duration = _nanoseconds(self._began_at_s, ended_at_s)
        answer.load_duration = _nanoseconds(self._began_at_s, started_at_s)
        answer.prompt_eval_duration = _nanoseconds(started_at_s, first_token_at_s)
        answer.eval_duration = _nanoseconds(first_token_at_s, sequence.last_token_at_s)
        return answer


class OllamaChatWriter(OllamaWriter):
    """Writes an answer of /api/chat."""

    def answer(self, content: str = "", thinking: str = "") -> OllamaChatAnswer:
        message = AnswerMessage(content=content, thinking=thinking or UNSET)
        return OllamaChatAnswer(**self.head, message=message)

    def on_call(self, call: OllamaCall) -> None:
        answer = self.answer()
        answer.message.tool_calls = [call]
        self.emit(answer)

    def whole(self) -> OllamaAnswer:
        answer = super().whole()
        assert isinstance(answer, OllamaChatAnswer)
        answer.message.tool_calls = self._calls or UNSET
        return answer


class OllamaGenerateWriter(OllamaWriter):
    """Writes an answer of /api/generate. gives_context: the last object has the token ids."""

    def __init__(
        self,
        chat: Conversation,
        *,
        request: OllamaRequest,
        began_at_s: float,
        gives_context: bool = True,
    ) -> None:
        super().__init__(chat, request=request, began_at_s=began_at_s)
        self._gives_context = gives_context

    def answer(self, content: str = "", thinking: str = "") -> OllamaGenerateAnswer:
        return OllamaGenerateAnswer(**self.head, response=content, thinking=thinking or UNSET)

    def _with_counts(self, answer: OllamaAnswer) -> OllamaAnswer:
        assert isinstance(answer, OllamaGenerateAnswer)
        if self._gives_context:
            (sequence,) = self.chat.running.generations[0].sequences
            answer.context = [*self.chat.prompt, *sequence.tokens]
        return super()._with_counts(answer)


def _line(json: bytes) -> bytes:
    """Return JSON on a line. The arguments of a call may have line breaks between their values."""
    json = json.replace(b"\n", b" ").replace(b"\r", b" ")
    for sign, escaped in _LINE_ENDS.items():
        json = json.replace(sign, escaped)
    return json + b"\n"


def _nanoseconds(start_s: float, end_s: float) -> int:
    """Return a duration of at least 1, because clients divide by it."""
    return max(1, round(1e9 * (end_s - start_s)))
