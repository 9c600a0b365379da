"""Converts a JSON object to a checked struct, and decides which fields are refused, ignored or
unknown.

Invalid input is refused here, before it costs anything. Types are strict. A field that is null or
absent has its default: the model's (generation_config.json), otherwise the server's. Each route
declares its own fields. Nested structs, and lists of objects with a `type`, are checked one by one,
so that errors name the place.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from moeserve import errors, sampling
from moeserve.sampling import MAX_INT, SamplingParams
from moeserve.server.errors import shorten
from moeserve.server.structured import StructuredFields
from moeserve.text.tokenizer import Tokenizer

MAX_UNKNOWN = 5  # names that a Warning header lists
MAX_INTEGRAL_FLOATS = 16  # integers written as floats (5.0) in one object
# A msgspec.ValidationError about a float where an integer belongs, and the steps of its path.
_NO_INTEGER = re.compile(r"Expected `int[^`]*`, got `float` - at `\$((?:\.\w+|\[\d+\])+)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")

R = TypeVar("R", bound=Struct)
# Field -> (reason, harmless values). Harmless values and null are accepted.
Refusals = Mapping[str, tuple[str, tuple[Any, ...]]]
NoEffect = dict[str, tuple[Any, ...]]  # field -> values that are its default
OpenName = Annotated[str, Meta(max_length=4096)]

# Fields without effect on all routes that generate.
NO_EFFECT_ANYWHERE: NoEffect = {
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
}


class StreamOptions(Struct, kw_only=True):
    """The options of a stream of chunks."""

    include_usage: bool = False  # send a last chunk with token counts
    continuous_usage_stats: bool = False  # send token counts in every chunk
    include_obfuscation: bool = False


class Sampling(StructuredFields, kw_only=True):
    """Fields that all generating routes share. Ranges are those of `moeserve.SamplingParams`."""

    # Fields that this route refuses, in addition to those that all routes refuse.
    refused: ClassVar[Refusals] = {}
    # Fields that are accepted but have no effect. The Warning header names them, unless they have
    # one of these default values (or null).
    no_effect: ClassVar[NoEffect] = NO_EFFECT_ANYWHERE | {"store": (False,)}

    model: str | None = None
    n: sampling.NumSequences | None = None
    temperature: sampling.Temperature | None = None
    top_p: sampling.PositiveFraction | None = None
    top_k: sampling.TopK | None = None
    min_p: sampling.Fraction | None = None
    presence_penalty: sampling.Penalty | None = None
    frequency_penalty: sampling.Penalty | None = None
    repetition_penalty: sampling.RepetitionPenalty | None = None
    repeat_penalty: sampling.RepetitionPenalty | None = None  # llama.cpp's name of the same
    seed: sampling.Seed | None = None
    stop: sampling.StopString | sampling.StopStrings | None = None
    stop_token_ids: list[sampling.TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: sampling.MinTokens | None = None
    skip_special_tokens: bool | None = None
    logit_bias: sampling.LogitBias | None = None
    allowed_token_ids: sampling.AllowedTokens | None = None
    bad_words: sampling.BadWords | None = None
    logits_processors: sampling.LogitsProcessors | None = None
    prompt_logprobs: sampling.NumLogprobs | None = None
    speculate: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=MAX_INT)] | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: OpenName | None = None
    metadata: dict[str, Any] | None = None
    service_tier: OpenName | None = None
    spaces_between_special_tokens: bool | None = None
    store: bool | None = None

    def given(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that are not null."""
        fields = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if self.repeat_penalty is not None:
            fields.setdefault("repetition_penalty", self.repeat_penalty)
        if (constraint := self.constraint()) is not None:
            fields["structured_outputs"] = constraint.params
        return fields

    @staticmethod
    def unknown_inside(raw: dict[str, Any]) -> list[str]:
        """Return the names of unknown fields inside known ones. Raises InvalidRequest."""
        return []

    def ignored(self) -> list[str]:
        """Return the names of this request's fields that are accepted but have no effect."""
        return [
            name
            for name, default_values in self.no_effect.items()
            if (value := getattr(self, name)) is not None and value not in default_values
        ]


# Fields of requests that `SamplingParams` has, too
_SAMPLING_FIELDS = [
    name for name in Sampling.__struct_fields__ if name in SamplingParams.__struct_fields__
]
_TOOLS = "tools are only supported in chats: use /v1/chat/completions"
_OLD = "OpenAI's functions of 2023 are not supported: use tools and tool_choice"
MEDIA = "this server supports text only"
HIDDEN_IMAGE = "[image: not shown, because this model reads text only]"
_REFUSED: Refusals = {
    "tools": (_TOOLS, ([],)),
    "tool_choice": (_TOOLS, ("none",)),
    "functions": (_OLD, ([],)),
    "function_call": (_OLD, ("none",)),
    "audio": (MEDIA, ()),
    "modalities": (MEDIA, (["text"],)),
    "prompt_embeds": (MEDIA, ()),
    "mm_processor_kwargs": (MEDIA, ({},)),
    "prediction": ("predicted outputs are not supported", ()),
    "web_search_options": ("web search is not supported", ()),
    "best_of": (
        "best_of other than n is not supported: ask for n answers with logprobs and choose",
        (),
    ),
    "use_beam_search": ("beam search is not supported", (False,)),
    "length_penalty": ("beam search is not supported", (1, 1.0)),
    "suffix": ("only /v1/completions fills in the middle", ("",)),
    "documents": ("documents are not supported: put them into a message", ([],)),
    "chat_template": ("a request cannot have its own template", ()),
    "truncate_prompt_tokens": ("prompts are never truncated; shorten the prompt yourself", ()),
    "kv_transfer_params": ("KV transfer is not supported", ()),
}


def convert(value: dict[str, Any], kind: type[R], *, strict: bool = True) -> R:
    """Convert `value` to a struct. Raises InvalidRequest that names the field.

    strict: "5" is not an integer. 5.0 is always accepted as one, since many clients have only
    floats; it becomes 5 in `value`.
    """
    for attempt in range(MAX_INTEGRAL_FLOATS + 1):
        try:
            return msgspec.convert(value, kind, str_keys=True, strict=strict)
        except msgspec.ValidationError as error:
            if attempt == MAX_INTEGRAL_FLOATS or not _float_to_integer(value, str(error)):
                raise errors.invalid_request(error) from error
    raise AssertionError("the last attempt returns or raises")


def _float_to_integer(value: Any, fault: str) -> bool:
    """Replace the float that msgspec's message is about by an integer; return False if it is not
    integral.
    """
    if (match := _NO_INTEGER.match(fault)) is None:
        return False
    *path, last = [int(index) if index else name for name, index in _STEP.findall(match[1])]
    for step in path:
        value = value[step]
    if not value[last].is_integer():
        return False
    value[last] = int(value[last])
    return True


def unknown_fields(names: Iterable[str], known: Iterable[str], prefix: str = "") -> list[str]:
    """Return the first few unknown `names`, printable, each with the nearest known one."""
    described = []
    for name in [name for name in names if name not in known][:MAX_UNKNOWN]:
        near = get_close_matches(name[:64], known, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        described.append(f"{prefix}{shorten(name)}{hint}")
    return described


class Decoded(NamedTuple, Generic[R]):
    """A checked request body."""

    request: R
    unknown: list[str]  # names of unknown fields
    ignored: list[str]  # names of known fields without effect


def decode(raw: dict[str, Any], kind: type[R]) -> Decoded[R]:
    """Return a body as a checked request. Raises InvalidRequest."""
    refused = _refused(kind)
    unknown = unknown_fields(raw, {*kind.__struct_fields__, *refused})
    for name in refused.keys() & raw.keys():
        if name == "best_of" and raw[name] == (raw.get("n") or 1):
            continue
        reason, harmless = refused[name]
        check_refused(name, raw[name], reason, harmless)
    request = convert(raw, kind)
    ignored: list[str] = []
    if isinstance(request, Sampling):
        unknown += request.unknown_inside(raw)
        ignored = request.ignored()
        _check_common(request)
    return Decoded(request, unknown[:MAX_UNKNOWN], ignored[:MAX_UNKNOWN])


def _refused(kind: type[Struct]) -> Refusals:
    if not issubclass(kind, Sampling):
        return {}
    elsewhere = {
        name: refusal for name, refusal in _REFUSED.items() if name not in kind.__struct_fields__
    }
    return elsewhere | dict(kind.refused)


def check_refused(name: str, value: Any, reason: str, harmless: tuple[Any, ...]) -> None:
    """Raise InvalidRequest unless the value of a refused field is null or harmless."""
    if value is None:
        return
    # The types must be equal, too, because 1 == True.
    if not any(value == item and type(value) is type(item) for item in harmless):
        raise errors.InvalidRequest(f"{name}: {reason}", param=name, code="unsupported_parameter")


def _check_common(request: Sampling) -> None:
    options = request.stream_options
    if not request.stream and options is not None and options != StreamOptions():
        raise errors.InvalidRequest(
            "stream_options is only for stream: true", param="stream_options"
        )
    if request.prompt_logprobs is not None and request.stream:
        raise errors.InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    salt = request.cache_salt
    if salt is not None and (not 1 <= len(salt) <= 128 or any(char in "@/\\\0" for char in salt)):
        raise errors.InvalidRequest(
            r"cache_salt must have 1 to 128 characters, none of @ / \ NUL", param="cache_salt"
        )


def check_chars(num_chars: int, tokenizer: Tokenizer, max_model_len: int, param: str) -> None:
    """Raise ContextLengthExceeded if a text is too long even if all its tokens were the longest.

    Called before the text is tokenized.
    """
    if num_chars > 8 * max_model_len and num_chars > tokenizer.longest_token * max_model_len:
        too_long = errors.ContextLengthExceeded(
            # Clients recognize the error by its first words, which are OpenAI's.
            f"this model's maximum context length is {max_model_len} tokens; the prompt's "
            f"{num_chars} characters do not fit",
            param=param,
        )
        too_long.num_tokens = -(-num_chars // tokenizer.longest_token)
        too_long.max_tokens = max_model_len - 1
        too_long.exact = False
        raise too_long


Kinds = dict[str, type[Struct]]  # `type` of an object -> its struct


class TextItem(Struct, kw_only=True):
    """A part of a content that is text."""

    text: str


class HiddenImage(Struct):
    """An image in a tool's result. The model reads a note in its place, so that a program which
    sends its whole history with each request can go on.
    """

    @property
    def text(self) -> str:
        """The note."""
        return HIDDEN_IMAGE


class RefusalItem(Struct, kw_only=True):
    """A part of an assistant's content in which it declines to answer. It counts as text."""

    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def convert_at(value: Any, kind: type[R], where: str) -> R:
    """Convert a nested value to a struct. Raises InvalidRequest that names the field at `where`."""
    try:
        return convert(value, kind)
    except errors.InvalidRequest as error:
        param = f"{where}.{error.param}" if error.param else where
        what = error.message.removeprefix(error.param or "").strip()
        raise errors.InvalidRequest(f"{param} {what}", param=param) from error


def typed_at(value: Any, kinds: Kinds, where: str, default: str = "") -> Any:
    """Convert an object to the struct of its `type` in `kinds`. Raises InvalidRequest."""
    name: Any = default
    if isinstance(value, dict):
        name = value.get("type") or default
    if isinstance(name, str) and name in kinds:
        return convert_at(value, kinds[name], where)
    known = " or ".join(kinds)
    raise errors.InvalidRequest(
        f"{where}.type must be {known}, not {shorten(str(name))!r}: {MEDIA}, and tools that the "
        "client runs",
        param=f"{where}.type",
        code="unsupported_parameter",
    )


def text_at(content: str | list[dict[str, Any]], kinds: Kinds, where: str) -> str:
    """Return the text of a content; parts are joined by line breaks. Raises InvalidRequest."""
    return "\n".join(texts_at(content, kinds, where))


def texts_at(content: str | list[dict[str, Any]], kinds: Kinds, where: str) -> list[str]:
    """Return the text of a content, or the texts of its parts. Raises InvalidRequest."""
    if isinstance(content, str):
        return [content]
    return [typed_at(part, kinds, f"{where}[{i}]").text for i, part in enumerate(content)]


def hidden_images(content: Any, image_type: str, where: str) -> list[str]:
    """Return the places of images in a tool's result, which is not checked yet."""
    if not isinstance(content, list):
        return []
    return [
        f"{where}[{i}]"
        for i, part in enumerate(content)
        if isinstance(part, dict) and part.get("type") == image_type
    ]


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in errors that are raised inside the block, from a chat's to a dialect's.

    Args:
        names: The chat's field -> the dialect's field. [] stands for an index, which is kept if
            both names have []. If only the chat's name has [], the positions in the dialect's list
            differ, and the error names the whole list. The path after a field is kept.
    """
    try:
        yield
    except errors.InvalidRequest as error:
        param = error.param or ""
        for chat_field, dialect_field in names.items():
            if (match := _field_pattern(chat_field).match(param)) is None:
                continue
            renamed = dialect_field
            for index in match.groups():
                renamed = renamed.replace("[]", index, 1)
            keeps_path = not match.groups() or "[]" in dialect_field
            replaced = match[0] if keeps_path else param
            error.param = renamed + param.removeprefix(replaced)
            # Only at the beginning, because inside a message the word may be prose.
            if error.message.startswith(replaced):
                error.message = renamed + error.message.removeprefix(replaced)
            break
        raise


@cache
def _field_pattern(field: str) -> re.Pattern[str]:
    return re.compile(re.escape(field).replace(r"\[\]", r"(\[\d+\])") + r"(?![\w\[])")
