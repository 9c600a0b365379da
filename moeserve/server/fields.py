"""What a request's fields mean: which we refuse and why, which are harmless, and the SamplingParams they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from moeserve.errors import InvalidRequest
from moeserve.sampling import MAX_LOGPROBS, SamplingParams
from moeserve.server.body import convert, unknown_fields
from moeserve.server.protocol import ChatRequest, CompletionRequest, Sampling

MAX_SEQUENCES = 1024  # n times prompts of one request
_MAX_INT = 2**31 - 1  # a larger max_tokens means "as many as fit", which a smaller one would mean as well
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

_TOOLS = "tool calling is not supported yet"
_GRAMMAR = "structured output is not supported yet"
_MEDIA = "this server takes and gives text only"
# field -> (why it is refused, values that ask for nothing and are let through besides null)
_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tools": (_TOOLS, ()),
    "tool_choice": (_TOOLS, ("none",)),
    "functions": (_TOOLS, ()),
    "function_call": (_TOOLS, ("none",)),
    "response_format": (_GRAMMAR, ({"type": "text"},)),
    "structured_outputs": (_GRAMMAR, ()),
    "guided_json": (_GRAMMAR, ()),
    "guided_regex": (_GRAMMAR, ()),
    "guided_choice": (_GRAMMAR, ()),
    "guided_grammar": (_GRAMMAR, ()),
    "audio": (_MEDIA, ()),
    "modalities": (_MEDIA, (["text"],)),
    "prompt_embeds": (_MEDIA, ()),
    "mm_processor_kwargs": (_MEDIA, ({},)),
    "prediction": ("predicted outputs are not supported", ()),
    "web_search_options": ("web search is not supported", ()),
    "best_of": ("best_of is not supported: ask for n answers with logprobs and choose", ()),
    "use_beam_search": ("beam search is not supported", (False,)),
    "length_penalty": ("beam search is not supported", (1, 1.0)),
    "suffix": ("fill-in-the-middle is not supported", ("",)),
    "store": ("nothing is stored on this server", (False,)),
    "documents": ("documents are not supported: put them into a message", ([],)),
    "chat_template": ("a request cannot bring its own template", ()),
    "truncate_prompt_tokens": ("prompts are never truncated here; shorten it yourself", ()),
    "logits_processors": ("custom logits processors are not supported", ([],)),
    "kv_transfer_params": ("KV transfer is not supported", ()),
    "reasoning_effort": ("this model has no reasoning effort; see chat_template_kwargs", ("none",)),
    "verbosity": ("verbosity is not supported; say it in the prompt", ("medium",)),
}
_MESSAGE_FIELDS = frozenset(["role", "content", "name", "refusal", "reasoning", "reasoning_content"])
_MESSAGE_REFUSED = ("tool_calls", "tool_call_id", "function_call")
_ROLES = ("system", "developer", "user", "assistant")
_PLAIN = [
    name for name in Sampling.__struct_fields__ if name in SamplingParams.__struct_fields__ and name != "max_tokens"
]

R = TypeVar("R", bound=Sampling)


def decode(raw: dict[str, Any], kind: type[R]) -> tuple[R, list[str]]:
    """The request, and the names of fields in it that mean nothing to us."""
    unknown = unknown_fields(raw, frozenset(kind.__struct_fields__) | _REFUSED.keys())
    for name in _REFUSED.keys() & raw.keys():
        reason, harmless = _REFUSED[name]
        value = raw[name]
        if value is not None and not any(value == free and type(value) is type(free) for free in harmless):
            raise InvalidRequest(f"{name}: {reason}", param=name, code="unsupported_parameter")
    request = convert(raw, kind)
    if isinstance(request, ChatRequest):
        unknown += _check_message_fields(raw["messages"])
    _check_common(request)
    return request, unknown[:5]


def _check_message_fields(messages: list[dict[str, Any]]) -> list[str]:
    unknown: list[str] = []
    for i, message in enumerate(messages):
        extra = message.keys() - _MESSAGE_FIELDS
        if not extra:
            continue
        for name in _MESSAGE_REFUSED:
            if message.get(name):
                param = f"messages[{i}].{name}"
                raise InvalidRequest(f"{param}: {_TOOLS}", param=param, code="unsupported_parameter")
        rest = {name: None for name in message if name in extra and name not in _MESSAGE_REFUSED}
        unknown += unknown_fields(rest, _MESSAGE_FIELDS, f"messages[{i}].")
    return unknown


def chat_messages(request: ChatRequest) -> list[dict[str, Any]]:
    """The messages as the template takes them, each checked: known role, text content."""
    if not request.messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    found = []
    for i, message in enumerate(request.messages):
        where = f"messages[{i}]"
        if message.role not in _ROLES:
            raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}; {_TOOLS}", param=f"{where}.role")
        content = message.content
        if content is None:
            raise InvalidRequest(f"{where}.content must be text", param=f"{where}.content")
        if isinstance(content, list):
            content = "\n".join(_part_text(part.type, part.text, f"{where}.content") for part in content)
        checked: dict[str, Any] = {"role": message.role, "content": content}
        for name in ("name", "reasoning", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                checked[name] = value
        found.append(checked)
    return found


def _part_text(kind: str, text: str | None, where: str) -> str:
    if kind != "text" or text is None:
        raise InvalidRequest(f"{where}: {_MEDIA}; each part must be of type text", param=where)
    return text


def _check_common(request: Sampling) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is only for stream: true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    salt = request.cache_salt
    if salt is not None and (not 1 <= len(salt) <= 128 or any(char in "@/\\\0" for char in salt)):
        raise InvalidRequest(r"cache_salt must have 1 to 128 characters, none of @ / \ NUL", param="cache_salt")


def chat_params(request: ChatRequest, defaults: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    """Raises InvalidRequest for a value out of range. max_tokens stays None for the rest of the context."""
    given = _given(request)
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    given["max_tokens"] = asked if asked is None else min(asked, _MAX_INT)
    if request.top_logprobs is not None:
        _check_logprobs("top_logprobs", request.top_logprobs)
        if not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if request.logprobs:
        given["logprobs"] = request.top_logprobs or 0
    return _checked({**defaults, **given}, vocab_size)


def completion_params(request: CompletionRequest, defaults: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    """max_tokens 0 is allowed with echo; it then becomes 1, and the caller drops that token."""
    given = _given(request)
    max_tokens = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if request.echo and max_tokens == 0:
        max_tokens = 1
    given["max_tokens"] = min(max_tokens, _MAX_INT)
    if request.logprobs is not None:
        _check_logprobs("logprobs", request.logprobs)
        given["logprobs"] = request.logprobs
        if request.echo:
            given["prompt_logprobs"] = request.logprobs
    return _checked({**defaults, **given}, vocab_size)


def _check_logprobs(name: str, value: int) -> None:
    if not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name}: expected an integer in 0..{MAX_LOGPROBS}", param=name)


def _given(request: Sampling) -> dict[str, Any]:
    return {name: value for name in _PLAIN if (value := getattr(request, name)) is not None}


def _checked(values: dict[str, Any], vocab_size: int) -> SamplingParams:
    params = SamplingParams(**values)
    params.check(vocab_size)
    return params
