"""The requests of the HTTP API, and what their fields mean: what is refused and why, what is harmless, and the
SamplingParams that the fields make.

Types are strict. A field that is null or absent means its default: the model's (generation_config.json), else ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from moeserve.errors import ContextLengthExceeded, InvalidRequest
from moeserve.sampling import MAX_LOGPROBS, MAX_N, SamplingParams
from moeserve.server.body import convert, unknown_fields
from moeserve.text.tokenizer import Tokenizer

MAX_SEQUENCES = 1024  # n times prompts of one request
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_MAX_INT = 2**31 - 1  # a larger max_tokens means "as many as fit", which a smaller one would mean as well


def _shown(**schema: Any) -> Meta:
    """Bounds for /openapi.json only: `SamplingParams.check` refuses what is beyond them, in clearer words."""
    return Meta(extra_json_schema=schema)


OpenName = Annotated[str, Meta(max_length=4096)]
Priority = Annotated[int, Meta(ge=-(2**31), le=_MAX_INT)]
Penalty = Annotated[float, _shown(minimum=-2, maximum=2)]
Fraction = Annotated[float, _shown(minimum=0, maximum=1)]
PositiveFraction = Annotated[float, _shown(exclusiveMinimum=0, maximum=1)]
NumLogprobs = Annotated[int, _shown(minimum=0, maximum=MAX_LOGPROBS)]
PositiveCount = Annotated[int, _shown(minimum=1)]


class StreamOptions(Struct, kw_only=True):
    """include_usage: a last chunk with token counts. continuous_usage_stats: counts in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class TextPart(Struct, kw_only=True):
    """A part of a message's content; `type` must be text."""

    type: str
    text: str | None = None


class Message(Struct, kw_only=True, omit_defaults=True):
    """One message of a conversation."""

    role: str
    content: str | list[TextPart] | None = None
    name: OpenName | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Sampling(Struct, kw_only=True):
    """Fields that both generating routes share. Ranges are those of `moeserve.SamplingParams`."""

    model: str | None = None
    n: Annotated[int, _shown(minimum=1, maximum=MAX_N)] | None = None
    temperature: Annotated[float, _shown(minimum=0, maximum=2)] | None = None
    top_p: PositiveFraction | None = None
    top_k: Annotated[int, _shown(minimum=-1, maximum=_MAX_INT)] | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, _shown(exclusiveMinimum=0, maximum=2)] | None = None
    seed: Annotated[int, _shown(minimum=-(2**63), maximum=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, _shown(minimum=0, maximum=_MAX_INT)] | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: NumLogprobs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: OpenName | None = None
    metadata: dict[str, Any] | None = None
    service_tier: OpenName | None = None
    spaces_between_special_tokens: bool | None = None


class ChatRequest(Sampling, kw_only=True):
    """A conversation to go on with. reasoning_effort and verbosity are accepted and change nothing."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: OpenName | None = None
    safety_identifier: OpenName | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class CompletionRequest(Sampling, kw_only=True):
    """One text or several, as text or token ids, to go on with. max_tokens may be 0 with echo."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    max_tokens: Annotated[int, _shown(minimum=0)] | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Token ids whose text is wanted."""

    tokens: list[int]
    model: str | None = None


class ScaleRequest(Struct, kw_only=True):
    """dp: engines that share the requests."""

    dp: Annotated[int, _shown(minimum=1, maximum=1024)]


_TOOLS = "tool calling is not supported yet"
_GRAMMAR = "structured output is not supported yet"
_MEDIA = "this server takes and gives text only"
# field -> (why it is refused, values that ask for nothing and are let through besides null)
_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tools": (_TOOLS, ([],)),
    "tool_choice": (_TOOLS, ("none",)),
    "functions": (_TOOLS, ([],)),
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
    "best_of": ("best_of above 1 is not supported: ask for n answers with logprobs and choose", (1,)),
    "use_beam_search": ("beam search is not supported", (False,)),
    "length_penalty": ("beam search is not supported", (1, 1.0)),
    "suffix": ("fill-in-the-middle is not supported", ("",)),
    "store": ("nothing is stored on this server", (False,)),
    "documents": ("documents are not supported: put them into a message", ([],)),
    "chat_template": ("a request cannot bring its own template", ()),
    "truncate_prompt_tokens": ("prompts are never truncated here; shorten it yourself", ()),
    "logits_processors": ("custom logits processors are not supported", ([],)),
    "kv_transfer_params": ("KV transfer is not supported", ()),
}
_MESSAGE_FIELDS = frozenset(["role", "content", "name", "refusal", "reasoning", "reasoning_content"])
_MESSAGE_REFUSED = ("tool_calls", "tool_call_id", "function_call")
_ROLES = ("system", "developer", "user", "assistant")
_PLAIN = [name for name in Sampling.__struct_fields__ if name in SamplingParams.__struct_fields__]

R = TypeVar("R", bound=Struct)


def decode(raw: dict[str, Any], kind: type[R]) -> tuple[R, list[str]]:
    """Returns the request, and the names of its fields that mean nothing to us. Raises InvalidRequest."""
    refused = _REFUSED if issubclass(kind, Sampling) else {}
    unknown = unknown_fields(raw, frozenset(kind.__struct_fields__) | refused.keys())
    for name in refused.keys() & raw.keys():
        reason, harmless = refused[name]
        value = raw[name]
        if value is not None and not any(value == free and type(value) is type(free) for free in harmless):
            raise InvalidRequest(f"{name}: {reason}", param=name, code="unsupported_parameter")
    request = convert(raw, kind)
    if isinstance(request, ChatRequest):
        unknown += _check_message_fields(raw["messages"])
    if isinstance(request, Sampling):
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
        rest = [name for name in message if name in extra and name not in _MESSAGE_REFUSED]
        unknown += unknown_fields(rest, _MESSAGE_FIELDS, f"messages[{i}].")
    return unknown


def _check_common(request: Sampling) -> None:
    options = request.stream_options
    if not request.stream and options is not None and options != StreamOptions():
        raise InvalidRequest("stream_options is only for stream: true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    salt = request.cache_salt
    if salt is not None and (not 1 <= len(salt) <= 128 or any(char in "@/\\\0" for char in salt)):
        raise InvalidRequest(r"cache_salt must have 1 to 128 characters, none of @ / \ NUL", param="cache_salt")


def chat_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Returns the messages as the template takes them, each checked: known role, text content."""
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    found = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.role not in _ROLES:
            raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}; {_TOOLS}", param=f"{where}.role")
        content = message.content
        if content is None:
            raise InvalidRequest(f"{where}.content must be text", param=f"{where}.content")
        if isinstance(content, list):
            content = "\n".join(_part_text(part, f"{where}.content") for part in content)
        checked: dict[str, Any] = {"role": message.role, "content": content}
        for name in ("name", "reasoning", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                checked[name] = value
        found.append(checked)
    return found


def _part_text(part: TextPart, where: str) -> str:
    if part.type != "text" or part.text is None:
        raise InvalidRequest(f"{where}: {_MEDIA}; each part must be of type text", param=where)
    return part.text


def check_chars(num_chars: int, tokenizer: Tokenizer, max_model_len: int, param: str) -> None:
    """Raises ContextLengthExceeded for a text that cannot fit even if all its tokens were the longest there is.

    Called before the text is tokenized, which is what costs time.
    """
    if num_chars > 8 * max_model_len and num_chars > tokenizer.longest_token * max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {num_chars} characters, which cannot fit into {max_model_len} tokens", param=param
        )


def chat_params(request: ChatRequest, defaults: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    """Returns the checked parameters; max_tokens None means the rest of the context. Raises InvalidRequest."""
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
    """Returns the checked parameters. With echo max_tokens may be 0; it becomes 1, and the caller drops that token."""
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
