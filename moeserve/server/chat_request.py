"""`ChatRequest`, the body of a chat, to which the requests of other dialects are converted.

The functions below convert it to the arguments of the chat template and the front end.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from moeserve.errors import InvalidRequest
from moeserve.sampling import MAX_INT, NumLogprobs, SamplingParams
from moeserve.server.errors import shorten
from moeserve.server.requests import (
    HIDDEN_IMAGE,
    MAX_UNKNOWN,
    MEDIA,
    NoEffect,
    OpenName,
    Sampling,
    convert,
    convert_at,
    unknown_fields,
)

PositiveCount = Annotated[int, Meta(ge=1)]
TokenLimit = Annotated[int, Meta(ge=-1)]  # -1: no limit, as in llama.cpp; see `token_limit`
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
FunctionName = Annotated[str, Meta(min_length=1, max_length=256)]
ROLES = ("system", "developer", "user", "assistant", "tool")


# ---- tools


class Function(Struct, kw_only=True, omit_defaults=True):
    """A function that the model may ask the client to call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema of its arguments
    strict: bool | None = None  # whether the arguments of a call must match the schema


class Tool(Struct, kw_only=True):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function


class _ToolList(Struct, kw_only=True):
    tools: Annotated[list[Tool], Meta(max_length=1024)] = []


class _Named(Struct):
    name: FunctionName


class _NamedTool(Struct):
    """A `tool_choice` that requires a call of one tool."""

    type: Literal["function"]
    function: _Named


class _Allowed(Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedTool], Meta(min_length=1, max_length=1024)]


class Tools(Struct, kw_only=True):
    """The tools of a request, in the form for templates and answer formats."""

    # "required": a callable tool must be called. "named": the same, and there is only one.
    choice: Literal["none", "auto", "required", "named"] = "none"
    shown: list[dict[str, Any]] = []  # tools that the template shows to the model
    callable: list[dict[str, Any]] = []  # tools that the model may call
    parallel: bool = True

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice in ("required", "named")


# ---- messages


class TextPart(Struct, kw_only=True):
    """A part of a message's content: text, or an assistant's refusal, which counts as text."""

    type: str
    text: str | None = None
    refusal: str | None = None


class _Called(Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None  # JSON text (OpenAI) or the object


class _ToolCall(Struct, kw_only=True):
    """A call that the assistant made earlier."""

    function: _Called
    id: OpenName | None = None
    type: Literal["function"] | None = "function"


class Message(Struct, kw_only=True, omit_defaults=True):
    """One message of a conversation."""

    role: str
    content: str | list[TextPart] | None = None
    name: OpenName | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: OpenName | None = None


_IMAGE = "image_url"  # type of a part
_MESSAGE_FIELDS = frozenset(Message.__struct_fields__)


class ThinkingSwitch(Struct):
    """Whether the model reasons first, in the form of DeepSeek's and GLM's APIs."""

    type: Literal["enabled", "disabled", "auto"]


class ChatRequest(Sampling, kw_only=True):
    """A conversation to answer.

    reasoning_effort, enable_thinking, thinking: variables of the template. The last two are names
    of the same switch. include_reasoning: false omits the reasoning from the answer.
    """

    no_effect: ClassVar[NoEffect] = Sampling.no_effect | {
        "options": (),
        "prompt_cache_key": (),
        "safety_identifier": (),
        "verbosity": (),
    }

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: OpenName | None = None
    safety_identifier: OpenName | None = None
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    include_reasoning: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    options: dict[str, Any] | None = None  # Ollama's, which its clients send on this route, too
    receipt: bool | None = None

    def ignored(self) -> list[str]:
        names = super().ignored()
        for i, message in enumerate(self.messages):
            if isinstance(message.content, list) and _hides_images(self.messages, i):
                names += [
                    f"messages[{i}].content[{j}]"
                    for j, part in enumerate(message.content)
                    if part.type == _IMAGE
                ]
        return names

    @staticmethod
    def unknown_inside(raw: dict[str, Any]) -> list[str]:
        unknown: list[str] = []
        for i, message in enumerate(raw["messages"]):
            if message.keys() <= _MESSAGE_FIELDS:
                continue
            if message.get("function_call"):
                param = f"messages[{i}].function_call"
                raise InvalidRequest(
                    f"{param}: use tool_calls", param=param, code="unsupported_parameter"
                )
            if len(unknown) < MAX_UNKNOWN:
                # Clients add empty fields of their own when they send an answer back.
                names = [name for name, value in message.items() if value not in (None, [])]
                unknown += unknown_fields(names, Message.__struct_fields__, f"messages[{i}].")
        return unknown


def chat_params(request: ChatRequest, defaults: dict[str, Any]) -> SamplingParams:
    """Return the sampling parameters. max_tokens None: up to the end of the context.

    Raises InvalidRequest.
    """
    given = request.given()
    given["max_tokens"] = token_limit(request.max_tokens, "max_tokens")
    if request.max_completion_tokens is not None:
        given["max_tokens"] = token_limit(request.max_completion_tokens, "max_completion_tokens")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    for name in ("logprobs", "return_token_ids"):
        if request.include_reasoning is False and getattr(request, name):
            what = f"{name} would show the reasoning that include_reasoning: false omits"
            raise InvalidRequest(what, param=name)
    given["receipt"] = bool(request.receipt)
    given["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    return SamplingParams(**defaults | given)


def token_limit(given: int | None, field: str) -> int | None:
    """Return the `max_tokens` of `SamplingParams`; None: up to the end of the context.

    Raises InvalidRequest for 0.
    """
    if given == 0:
        raise InvalidRequest(f"{field} must be at least 1, or -1 for no limit", param=field)
    return None if given is None or given < 0 else min(given, MAX_INT)


def chat_tools(
    tools: list[dict[str, Any]] | None,
    choice: str | dict[str, Any] | None,
    *,
    parallel: bool | None = None,
) -> Tools:
    """Return the tools that a request shows and allows. Raises InvalidRequest."""
    checked = convert({"tools": tools or []}, _ToolList).tools
    known: dict[str, dict[str, Any]] = {
        tool.function.name: msgspec.to_builtins(tool) for tool in checked
    }
    if len(known) < len(checked):
        raise InvalidRequest("tools: two tools have the same name", param="tools")
    result = Tools(
        choice="auto",
        shown=[*known.values()],
        callable=[*known.values()],
        parallel=parallel is not False,
    )
    match choice:
        case None | "auto":
            return result if known else Tools()
        case "none":
            return Tools()
        case "required":
            result.choice = "required"
        case {"type": "allowed_tools", "allowed_tools": dict(allowed)}:
            subset = convert_at(allowed, _Allowed, "tool_choice.allowed_tools")
            result.choice = subset.mode
            result.shown = _chosen(known, [tool.function.name for tool in subset.tools])
            result.callable = result.shown
        case dict():
            named = convert_at(choice, _NamedTool, "tool_choice")
            result.choice = "named"
            result.callable = _chosen(known, [named.function.name])
        case _:
            what = "tool_choice must be auto, none, required, or an object that names a function"
            raise InvalidRequest(what, param="tool_choice")
    if not known:
        raise InvalidRequest("tool_choice required needs tools", param="tool_choice")
    return result


def _chosen(known: dict[str, dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """Return the tools with these names, each once. Raises InvalidRequest for an unknown name."""
    for name in names:
        if name not in known:
            raise InvalidRequest(
                f"tool_choice: there is no tool {shorten(name)!r} in tools", param="tool_choice"
            )
    return [known[name] for name in dict.fromkeys(names)]


def chat_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Convert messages to the form for templates. Raises InvalidRequest for an unknown role, for
    content that is not text, and for malformed calls.
    """
    converted = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.role not in ROLES:
            raise InvalidRequest(
                f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role"
            )
        checked: dict[str, Any] = {"role": message.role}
        if message.tool_calls:
            checked["tool_calls"] = [
                _tool_call(call, f"{where}.tool_calls[{j}]")
                for j, call in enumerate(message.tool_calls)
            ]
        for name in ("name", "reasoning", "reasoning_content", "tool_call_id"):
            if (value := getattr(message, name)) is not None:
                checked[name] = value
        # With calls, `ChatTemplate` decides how the template gets an absent content.
        text = _content(message, f"{where}.content", _hides_images(messages, i))
        if text or not message.tool_calls:
            checked["content"] = text
        converted.append(checked)
    return converted


def _hides_images(messages: list[Message], i: int) -> bool:
    """Whether the images of a message come from a tool. The message of a tool can only have text
    in OpenAI's API, so some clients send a tool's images as the user's next message.
    """
    role = messages[i].role
    return role == "tool" or (role == "user" and i > 0 and messages[i - 1].role == "tool")


def _content(message: Message, where: str, hides_images: bool) -> str:
    """Return the text of a message.

    System and user messages must have text. An assistant that only called tools, or ended at once,
    has a null or absent content.
    """
    content = message.content
    if isinstance(content, list):
        return "\n".join(
            HIDDEN_IMAGE
            if hides_images and part.type == _IMAGE
            else _part_text(part, message.role, f"{where}[{i}]")
            for i, part in enumerate(content)
        )
    if content is None and message.role == "assistant":
        return message.refusal or ""
    if content is None and message.role != "tool":
        raise InvalidRequest(f"{where} must be text", param=where)
    return content or ""


def _part_text(part: TextPart, role: str, where: str) -> str:
    known = ("text", "refusal") if role == "assistant" else ("text",)
    if part.type not in known:
        what = f"{where}.type must be {' or '.join(known)}, not {shorten(part.type)!r}: {MEDIA}"
        raise InvalidRequest(what, param=f"{where}.type", code="unsupported_parameter")
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise InvalidRequest(f"{where}.{part.type} must be text", param=f"{where}.{part.type}")
    return text


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return an earlier call with its arguments as an object, which templates expect."""
    checked = convert_at(call, _ToolCall, where)
    if not isinstance(checked.function.arguments, dict):
        checked.function.arguments = _arguments(checked.function.arguments or "")
    checked.type = "function"
    converted: dict[str, Any] = msgspec.to_builtins(checked)
    if checked.id is None:
        del converted["id"]
    return converted


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of an earlier call as an object.

    Clients send the model's earlier calls with every turn, so arguments that are not a JSON object
    (for example, cut off) must not end the conversation. The model sees them as {"raw": text}.
    """
    try:
        value = msgspec.json.decode(text) if text.strip() else None
    except (msgspec.DecodeError, RecursionError):
        return {"raw": text}
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"raw": text}
