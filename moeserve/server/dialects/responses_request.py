"""The body of POST /v1/responses, and its conversion to a chat."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from moeserve.errors import InvalidRequest
from moeserve.sampling import NumLogprobs
from moeserve.server.chat_request import (
    ChatRequest,
    FunctionName,
    Message,
    PositiveCount,
    ReasoningEffort,
)
from moeserve.server.dialects.responses_tools import (
    MAX_TOOLS,
    ResponseTools,
    chat_choice,
    input_arguments,
    shown_name,
    unenforced,
)
from moeserve.server.documents import InputFile
from moeserve.server.requests import (
    NO_EFFECT_ANYWHERE,
    HiddenImage,
    Kinds,
    NoEffect,
    OpenName,
    RefusalItem,
    Refusals,
    Sampling,
    TextItem,
    hidden_images,
    text_at,
    typed_at,
)
from moeserve.server.structured import JsonSchema, ResponseFormat

MAX_ITEMS = 10_000
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")  # values of `include` that are known here


class _Message(Struct, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class _FunctionCall(Struct, kw_only=True):
    call_id: OpenName
    name: FunctionName
    arguments: str
    namespace: FunctionName | None = None


class _CustomCall(Struct, kw_only=True):
    call_id: OpenName
    name: FunctionName
    input: str
    namespace: FunctionName | None = None


class _CallOutput(Struct, kw_only=True):
    call_id: OpenName
    output: str | list[dict[str, Any]]


class _HostedCall(Struct):
    """A call that another server has made and answered. The model does not see it."""


class _Reasoning(Struct, kw_only=True):
    content: list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] = []


_ITEMS: Kinds = {
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _CallOutput,
    "custom_tool_call": _CustomCall,
    "custom_tool_call_output": _CallOutput,
    "reasoning": _Reasoning,
}
_HOSTED_CALLS = (
    "code_interpreter_call", "file_search_call", "image_generation_call", "mcp_list_tools",
    "tool_search_call", "tool_search_output", "web_search_call",
)  # fmt: skip
_ITEMS |= dict.fromkeys(_HOSTED_CALLS, _HostedCall)
_TEXTS: Kinds = {"input_text": TextItem, "output_text": TextItem, "text": TextItem}
_IMAGE = "input_image"
_FILES: Kinds = {"input_file": InputFile}
_RESULTS: Kinds = _TEXTS | _FILES | {_IMAGE: HiddenImage}
_OWN_TEXTS: Kinds = _TEXTS | {"refusal": RefusalItem}  # of an assistant
_REASONING: Kinds = {"reasoning_text": TextItem, "summary_text": TextItem}


class TextFormat(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The format of an answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    # Only for json_schema:
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(Struct, kw_only=True, omit_defaults=True):
    """`text` of a request."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Struct, kw_only=True):
    """`reasoning` of a request."""

    effort: ReasoningEffort | None = None  # a variable of the template
    # Without effect: the answer has the reasoning itself.
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


_ELSEWHERE = "this is supported on other routes only; here an answer is one response"
_HOSTED = "the server stores responses only: send this with the input"


class ResponsesRequest(Sampling, kw_only=True):
    """An input to answer. The sampling parameters of the other routes are fields, too."""

    refused: ClassVar[Refusals] = {
        "background": ("nothing runs in the background: keep the connection, or stream", (False,)),
        "conversation": (_HOSTED, ()),
        "prompt": (_HOSTED, ()),
        "moderation": ("moderation is not supported", ()),
        "messages": ("use input on this route", ()),
        "max_tokens": ("use max_output_tokens on this route", ()),
        "response_format": ("use text.format on this route", ()),
        "reasoning_effort": ("use reasoning.effort on this route", ()),
        "n": (_ELSEWHERE, (1,)),
        "prompt_logprobs": (_ELSEWHERE, ()),
        "return_token_ids": (_ELSEWHERE, (False,)),
    }
    # `store` is missing, because it has an effect on this route. context_management and truncation
    # would remove parts of a long input. Here the model reads all of it, and an input that is too
    # long is refused.
    no_effect: ClassVar[NoEffect] = NO_EFFECT_ANYWHERE | {
        "context_management": ([],),
        "max_tool_calls": (),
        "prompt_cache_key": (),
        "safety_identifier": (),
        "truncation": ("disabled",),
    }

    model: str
    input: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_ITEMS)]
    instructions: str | None = None
    previous_response_id: OpenName | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: PositiveCount | None = None
    max_tool_calls: PositiveCount | None = None  # of tools that the server runs; there are none
    top_logprobs: NumLogprobs | None = None
    include: Annotated[list[OpenName], Meta(max_length=64)] | None = None
    context_management: list[dict[str, Any]] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    prompt_cache_key: OpenName | None = None
    safety_identifier: OpenName | None = None
    client_metadata: dict[str, Any] | None = None  # Codex's, for its own server

    def ignored(self) -> list[str]:
        """Return the names of this request's fields that are accepted but have no effect."""
        names = super().ignored()
        if self.text is not None and self.text.verbosity is not None:
            names.append("text.verbosity")
        names += unenforced(self.tools or ())
        for i, value in enumerate(self.include or ()):
            if value not in _INCLUDED:
                names.append(f"include[{i}]")
        for i, item in enumerate(self.items()):
            if item.get("type") in _HOSTED_CALLS:
                names.append(f"input[{i}]")
            names += hidden_images(item.get("output"), _IMAGE, f"input[{i}].output")
            if item.get("encrypted_content") and not (item.get("content") or item.get("summary")):
                names.append(f"input[{i}].encrypted_content")
        return names

    def items(self) -> list[dict[str, Any]]:
        """Return the input as a list of items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    @property
    def logprobs(self) -> bool:
        """Whether the answer lists its tokens."""
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def chat(self, history: list[dict[str, Any]], tools: ResponseTools) -> ChatRequest:
        """Convert the request to a chat that continues the items of `history`. Raises
        InvalidRequest.

        tools: those of the request.
        """
        messages = chat_messages([*history, *self.items()])
        if self.instructions is not None:
            # Templates expect a single system message.
            if messages and messages[0].role in ("system", "developer"):
                messages[0].content = f"{self.instructions}\n\n{messages[0].content}"
            else:
                messages.insert(0, Message(role="system", content=self.instructions))
        shared = {name: getattr(self, name) for name in Sampling.__struct_fields__}
        shared["response_format"] = _response_format(self.text)
        return ChatRequest(
            **shared,
            messages=messages,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.logprobs else None,
            max_completion_tokens=self.max_output_tokens,
            tools=tools.functions,
            tool_choice=chat_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
        )


def chat_messages(items: list[dict[str, Any]]) -> list[Message]:
    """Convert items to messages. The reasoning, text and calls of one turn become one message.

    Raises InvalidRequest.
    """
    messages: list[Message] = []
    for i, given in enumerate(items):
        where = f"input[{i}]"
        last = messages[-1] if messages and messages[-1].role == "assistant" else None
        match typed_at(given, _ITEMS, where, "message"):
            case _Message(role=role, content=content):
                kinds = _OWN_TEXTS if role == "assistant" else _TEXTS | _FILES
                text = text_at(content, kinds, f"{where}.content")
                if (
                    role == "assistant"
                    and last is not None
                    and last.content is None
                    and not last.tool_calls
                ):
                    last.content = text
                else:
                    messages.append(Message(role=role, content=text))
            case _Reasoning(content=content, summary=summary):
                field = "content" if content else "summary"
                if text := text_at(content or summary, _REASONING, f"{where}.{field}"):
                    messages.append(Message(role="assistant", reasoning_content=text))
            case _FunctionCall() | _CustomCall() as made:
                if last is None:
                    messages.append(last := Message(role="assistant"))
                if isinstance(made, _CustomCall):
                    arguments = input_arguments(made.input)
                else:
                    arguments = made.arguments
                called = {"name": shown_name(made.name, made.namespace), "arguments": arguments}
                last.tool_calls = [
                    *(last.tool_calls or ()),
                    {"id": made.call_id, "function": called},
                ]
            case _CallOutput(call_id=call_id, output=output):
                text = text_at(output, _RESULTS, f"{where}.output")
                messages.append(Message(role="tool", content=text, tool_call_id=call_id))
    return messages


def _response_format(text: TextConfig | None) -> ResponseFormat | None:
    given = None if text is None else text.format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return ResponseFormat("json_object")
    if given.name is None or given.schema is None:
        missing = "text.format.name" if given.name is None else "text.format.schema"
        raise InvalidRequest(f"{missing} is required", param=missing)
    return ResponseFormat("json_schema", JsonSchema(given.name, given.schema))
