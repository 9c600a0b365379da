"""The bodies of POST /api/chat and /api/generate, and their conversion to a chat."""

import re
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from moeserve import sampling
from moeserve.errors import InvalidRequest
from moeserve.server.chat_request import ChatRequest, Message, ReasoningEffort
from moeserve.server.dialects.completions import CompletionRequest
from moeserve.server.requests import (
    HIDDEN_IMAGE,
    MAX_UNKNOWN,
    MEDIA,
    NoEffect,
    OpenName,
    Refusals,
    Sampling,
    check_refused,
    unknown_fields,
)
from moeserve.server.structured import JsonSchema, ResponseFormat

LEAST_TOP_P = 1e-6  # means the most likely token, as Ollama's 0 does
CallId = Callable[[str, int], str]  # name and number of an earlier call -> its id

# A duration as Go writes it, such as 5m or 1h30m
_DURATION = r"^[-+]?(0|((\d+(\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h))+)$"
_OTHER_SAMPLING = "this way of sampling is not supported; use temperature, top_p, top_k and min_p"
_OPTIONS_REFUSED: Refusals = {
    "mirostat": (_OTHER_SAMPLING, (0, 0.0)),
    "tfs_z": (_OTHER_SAMPLING, (1, 1.0)),
    "typical_p": (_OTHER_SAMPLING, (1, 1.0)),
}
# Option -> field of `Sampling`
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_OTHER_USED = ("repeat_last_n", "num_predict")
# Values of penalties that change nothing
_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class Options(Struct, kw_only=True):
    """Sampling parameters, and how Ollama would load the model."""

    temperature: sampling.Temperature | None = None
    top_p: sampling.Fraction | None = None  # 0: the most likely token
    top_k: sampling.TopK | None = None
    min_p: sampling.Fraction | None = None
    seed: sampling.Seed | None = None
    stop: sampling.StopString | sampling.StopStrings | None = None
    repeat_penalty: sampling.RepetitionPenalty | None = None
    presence_penalty: sampling.Penalty | None = None
    frequency_penalty: sampling.Penalty | None = None
    # The tokens that penalties count: -1 for all, 0 for none. Other numbers are not supported.
    repeat_last_n: Annotated[int, Meta(ge=-1)] | None = None
    # 0, -1, -2: up to the end of the context
    num_predict: Annotated[int, Meta(ge=-2)] | None = None
    # Without effect: the model is loaded already, and every request has its whole context.
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_thread: int | None = None
    main_gpu: int | None = None
    draft_num_predict: int | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    numa: bool | None = None
    vocab_only: bool | None = None
    logits_all: bool | None = None
    embedding_only: bool | None = None
    penalize_newline: bool | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None

    def ignored(self) -> list[str]:
        """Return the names of the options that are given and have no effect."""
        names = [
            name
            for name in self.__struct_fields__
            if name not in (*_SAMPLING, *_OTHER_USED) and getattr(self, name) is not None
        ]
        if self.repeat_last_n not in (None, -1, 0) and not self._has_penalty:
            names.append("repeat_last_n")
        return names

    def sampling(self) -> dict[str, Any]:
        """Return the given options as fields of `Sampling`. Raises InvalidRequest."""
        given = {
            field: value
            for name, field in _SAMPLING.items()
            if (value := getattr(self, name)) is not None
        }
        if given.get("top_p") == 0:
            given["top_p"] = LEAST_TOP_P
        if self.repeat_last_n == 0:
            given |= _NEUTRAL
        elif self.repeat_last_n not in (None, -1) and self._has_penalty:
            raise InvalidRequest(
                "options.repeat_last_n: penalties count all tokens, not the last "
                f"{self.repeat_last_n}; leave it out, or set it to -1",
                param="options.repeat_last_n",
                code="unsupported_parameter",
            )
        return given

    @property
    def _has_penalty(self) -> bool:
        penalties = (self.presence_penalty, self.frequency_penalty)
        return self.repeat_penalty not in (None, 1) or any(penalties)


_ELSEWHERE = "this is supported on /v1/chat/completions only; here an answer is one message"


class OllamaRequest(Sampling, kw_only=True):
    """The fields that chats and completions have in common.

    The sampling parameters of the other routes are fields, too. `options` has precedence.
    """

    refused: ClassVar[Refusals] = {
        "response_format": ("use format on this route", ()),
        "stream_options": ("the last object of a stream always has the counts", ()),
        "_debug_render_only": ("use /v1/chat/completions/render", (False,)),
        "n": (_ELSEWHERE, (1,)),
        "prompt_logprobs": (_ELSEWHERE, ()),
        "return_token_ids": (_ELSEWHERE, (False,)),
        "return_tokens_as_token_ids": (_ELSEWHERE, (False,)),
    }
    # The model always stays loaded. A prompt that is too long is refused, so nothing is truncated.
    no_effect: ClassVar[NoEffect] = Sampling.no_effect | {
        "keep_alive": (-1,),
        "truncate": (False,),
        "shift": (False,),
    }

    model: str
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None  # a dict: a JSON schema
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: sampling.NumLogprobs | None = None
    # Seconds, or a duration such as 5m
    keep_alive: float | Annotated[str, Meta(max_length=64, pattern=_DURATION)] | None = None
    truncate: bool | None = None
    shift: bool | None = None

    @staticmethod
    def unknown_inside(raw: dict[str, Any]) -> list[str]:
        options = raw.get("options") or {}
        for name in _OPTIONS_REFUSED.keys() & options.keys():
            reason, harmless = _OPTIONS_REFUSED[name]
            check_refused(f"options.{name}", options[name], reason, harmless)
        return unknown_fields(
            options, {*Options.__struct_fields__, *_OPTIONS_REFUSED}, prefix="options."
        )

    def ignored(self) -> list[str]:
        options = [] if self.options is None else self.options.ignored()
        return super().ignored() + [f"options.{name}" for name in options]

    @property
    def unloads(self) -> bool:
        """Whether Ollama would unload the model at the end of the request."""
        if isinstance(self.keep_alive, str):
            return re.search("[1-9]", self.keep_alive) is None
        return self.keep_alive == 0

    @property
    def max_tokens(self) -> int | None:
        """The tokens of the answer at most; -1, None: up to the end of the context."""
        given = None if self.options is None else self.options.num_predict
        return -1 if given in (0, -2) else given

    def shared(self) -> dict[str, Any]:
        """Return the fields of `Sampling`. Raises InvalidRequest."""
        fields = {name: getattr(self, name) for name in Sampling.__struct_fields__}
        fields |= (self.options or Options()).sampling()
        fields["stream"] = self.stream is not False
        if self.format == "json":
            fields["response_format"] = ResponseFormat("json_object")
        elif isinstance(self.format, dict):
            schema = JsonSchema("format", self.format)
            fields["response_format"] = ResponseFormat("json_schema", schema)
        return fields

    def chat_of(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None
    ) -> ChatRequest:
        """Return a chat with these messages and the request's other fields."""
        last = messages[-1]
        effort: ReasoningEffort | None = self.think if isinstance(self.think, str) else None
        return ChatRequest(
            **self.shared(),
            messages=messages,
            tools=tools,
            max_completion_tokens=self.max_tokens,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.logprobs else None,
            reasoning_effort=effort,
            enable_thinking=self.think if isinstance(self.think, bool) else None,
            continue_final_message=True
            if last.role == "assistant" and last.content and not last.tool_calls
            else None,
        )


class OllamaMessage(Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: OpenName | None = None  # the tool whose result this is
    tool_call_id: OpenName | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """A conversation to answer. Without messages: load the model."""

    refused: ClassVar[Refusals] = dict(OllamaRequest.refused) | {
        "tool_choice": ("use /v1/chat/completions, which has it", ("auto",)),
    }

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None

    @staticmethod
    def unknown_inside(raw: dict[str, Any]) -> list[str]:
        unknown = OllamaRequest.unknown_inside(raw)
        for i, message in enumerate(raw.get("messages") or ()):
            if len(unknown) >= MAX_UNKNOWN:
                break
            unknown += unknown_fields(message, OllamaMessage.__struct_fields__, f"messages[{i}].")
        return unknown

    def ignored(self) -> list[str]:
        return super().ignored() + [
            f"messages[{i}].images"
            for i, message in enumerate(self.messages or ())
            if message.images and message.role.lower() == "tool"
        ]

    def chat(self, call_id: CallId) -> ChatRequest:
        """Return the request as a chat. Raises InvalidRequest."""
        ids = _CallIds(call_id)
        messages = [
            _chat_message(message, ids, f"messages[{i}]")
            for i, message in enumerate(self.messages or ())
        ]
        return self.chat_of(messages, self.tools)


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """A prompt to answer. Without a prompt: load the model."""

    refused: ClassVar[Refusals] = dict(OllamaRequest.refused) | {
        "images": (MEDIA, ([],)),
        "template": ("a request cannot have its own template; use raw", ("",)),
    }

    prompt: str | None = None
    suffix: str | None = None  # the text after the answer, which fills in the middle
    system: str | None = None
    raw: bool | None = None  # the prompt is not put into the chat template
    # Token ids: `context` of the answer before, whose conversation this prompt continues.
    context: list[sampling.TokenId] | None = None

    def ignored(self) -> list[str]:
        # Without the template there is no switch for reasoning.
        has_no_switch = self.is_raw and self.think is not None
        return super().ignored() + (["think"] if has_no_switch else [])

    @property
    def is_raw(self) -> bool:
        """Whether the model reads the prompt (and the suffix) without the chat template."""
        return bool(self.raw or self.suffix)

    def chat(self) -> ChatRequest:
        """Return the request as a chat. Raises InvalidRequest."""
        messages = [Message(role="user", content=self.prompt or "")]
        if self.system:
            messages.insert(0, Message(role="system", content=self.system))
        return self.chat_of(messages)

    def completion(self) -> CompletionRequest:
        """Return the request as a completion of its prompt alone. Raises InvalidRequest."""
        for name in ("system", "context"):
            if getattr(self, name):
                raise InvalidRequest(
                    f"{name} is for prompts in the chat template, without raw and suffix",
                    param=name,
                )
        return CompletionRequest(
            **self.shared(),
            prompt=self.prompt,
            suffix=self.suffix,
            max_tokens=-1 if self.max_tokens is None else self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class _CallIds:
    """Gives ids to earlier calls, and to their results.

    Ollama's clients send none with calls, but many templates show them. A result belongs to the
    call with its id; otherwise to the first call without a result, of the same tool if it has a
    name.
    """

    def __init__(self, call_id: CallId) -> None:
        self._call_id = call_id
        self._calls: list[tuple[str, str]] = []  # (name, id)
        self._answered: set[int] = set()  # numbers of the calls that have a result
        # The numbers of calls in order; the name "" stands for any name
        self._by_id: defaultdict[str, deque[int]] = defaultdict(deque)
        self._by_name: defaultdict[str, deque[int]] = defaultdict(deque)

    def of_call(self, call: dict[str, Any]) -> str | None:
        """Return the id of the next call. Malformed calls, which are refused later, get none."""
        function = call.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        given = call.get("id")
        if not isinstance(name, str):
            return None
        number = len(self._calls)
        id = given if isinstance(given, str) and given else self._call_id(name, number)
        self._calls.append((name, id))
        for numbers in (self._by_id[id], self._by_name[name], self._by_name[""]):
            numbers.append(number)
        return id

    def of_result(self, message: OllamaMessage) -> tuple[str | None, str | None]:
        """Return the tool's name and the id of the call whose result this is."""
        by_id = self._by_id[message.tool_call_id or ""]
        by_name = self._by_name[message.tool_name or ""]
        for numbers in (by_id, by_name):
            while numbers:
                number = numbers.popleft()
                if number not in self._answered:
                    self._answered.add(number)
                    return self._calls[number]
        return message.tool_name, message.tool_call_id


def _chat_message(given: OllamaMessage, ids: _CallIds, where: str) -> Message:
    role = given.role.lower()
    message = Message(role=role, content=given.content or "", reasoning_content=given.thinking)
    if given.images and role != "tool":
        raise InvalidRequest(
            f"{where}.images: {MEDIA}", param=f"{where}.images", code="unsupported_parameter"
        )
    if given.tool_calls:
        message.tool_calls = [call | {"id": ids.of_call(call)} for call in given.tool_calls]
    if role == "tool":
        message.name, message.tool_call_id = ids.of_result(given)
        notes = [HIDDEN_IMAGE] * len(given.images or ())
        message.content = "\n".join([given.content, *notes] if given.content else notes)
    return message
