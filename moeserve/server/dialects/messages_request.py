"""The body of POST /v1/messages, and its conversion to a chat."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from moeserve.errors import InvalidRequest
from moeserve.sampling import StopStrings
from moeserve.server.chat_request import (
    ChatRequest,
    FunctionName,
    Message,
    PositiveCount,
    ReasoningEffort,
)
from moeserve.server.documents import DocumentBlock, SearchResultBlock
from moeserve.server.requests import (
    HiddenImage,
    Kinds,
    NoEffect,
    OpenName,
    Refusals,
    Sampling,
    TextItem,
    hidden_images,
    text_at,
    texts_at,
    typed_at,
)
from moeserve.server.structured import JsonSchema, ResponseFormat

MIN_BUDGET = 1024  # Anthropic's
BILLING_LINE = "x-anthropic-billing-header:"
_EFFORTS: dict[str, ReasoningEffort] = {"xhigh": "high", "max": "high"}  # others stay as they are


class _Thinking(Struct, kw_only=True):
    thinking: str


class _Redacted(Struct):
    """Encrypted thinking, which the model does not see."""


class _ToolUse(Struct, kw_only=True):
    id: OpenName
    name: FunctionName
    input: dict[str, Any]


class _ToolResult(Struct, kw_only=True):
    tool_use_id: OpenName
    content: str | list[dict[str, Any]] = ""
    is_error: bool = False


_TEXTS: Kinds = {"text": TextItem}
_IMAGE = "image"
_DOCUMENTS: Kinds = {"document": DocumentBlock, "search_result": SearchResultBlock}
_RESULTS: Kinds = _TEXTS | _DOCUMENTS | {_IMAGE: HiddenImage}
_BLOCKS: dict[str, Kinds] = {
    "system": _TEXTS,
    "user": _TEXTS | _DOCUMENTS | {"tool_result": _ToolResult},
    "assistant": _TEXTS
    | {"thinking": _Thinking, "redacted_thinking": _Redacted, "tool_use": _ToolUse},
}


class InputMessage(Struct, kw_only=True):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class _ClientTool(Struct, kw_only=True):
    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ToolChoice(Struct, kw_only=True):
    """Whether tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None  # of the one tool, for type tool
    disable_parallel_tool_use: bool = False


class ThinkingConfig(Struct, kw_only=True):
    """Whether the model reasons first."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=MIN_BUDGET)] | None = None  # an effort, not a limit
    display: Literal["summarized", "omitted"] | None = None  # omitted: hide the text


class OutputFormat(Struct, kw_only=True):
    """The format of an answer's text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True):
    """`output_config` of a request."""

    # A variable of the template.
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


_ELSEWHERE = "this is supported on other routes only; here an answer is one message"
_HOSTED = "the server runs no tools or containers"


class CountTokensRequest(Sampling, kw_only=True):
    """A conversation. The sampling parameters of the other routes are fields, too."""

    refused: ClassVar[Refusals] = {
        "container": (_HOSTED, ()),
        "mcp_servers": (_HOSTED, ([],)),
        "speed": ("only the standard speed is supported", ("standard",)),
        "response_format": ("use output_config.format on this route", ()),
        "reasoning_effort": ("use output_config.effort on this route", ()),
        "stop": ("use stop_sequences on this route", ()),
        "n": (_ELSEWHERE, (1,)),
        "prompt_logprobs": (_ELSEWHERE, ()),
        "return_token_ids": (_ELSEWHERE, (False,)),
        "return_tokens_as_token_ids": (_ELSEWHERE, (False,)),
    }
    # context_management would remove parts of a long conversation. Here the model reads all of it,
    # and a prompt that is too long is refused. Every prompt is cached, so cache_control has no
    # effect. Inside messages, where agents always send it, it is not named.
    no_effect: ClassVar[NoEffect] = Sampling.no_effect | {
        "cache_control": (),
        "context_management": ({}, {"edits": []}),
        "service_tier": ("auto", "standard_only"),
    }

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: StopStrings | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None

    def ignored(self) -> list[str]:
        """Return the names of this request's fields that are accepted but have no effect."""
        names = super().ignored()
        for i, message in enumerate(self.messages):
            blocks = message.content if isinstance(message.content, list) else []
            for j, block in enumerate(blocks):
                where = f"messages[{i}].content[{j}]"
                if block.get("type") == "redacted_thinking":
                    names.append(where)
                elif block.get("type") == "tool_result":
                    names += hidden_images(block.get("content"), _IMAGE, f"{where}.content")
        return names

    def chat(self, max_tokens: int | None = None) -> ChatRequest:
        """Return the request as a chat. Raises InvalidRequest."""
        messages: list[Message] = []
        if (system := self._system()) is not None:
            messages.append(Message(role="system", content=system))
        for i, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages[{i}]")
        messages = _instructions_first(messages)
        output = self.output_config or OutputConfig()
        shared = {name: getattr(self, name) for name in Sampling.__struct_fields__}
        shared["stop"] = self.stop_sequences
        if output.format is not None:
            shared["response_format"] = ResponseFormat(
                "json_schema", JsonSchema("output", output.format.schema)
            )
        choice = self.tool_choice or ToolChoice(type="auto")
        switches = None
        if self.thinking is not None:
            # Templates have a variable under one of these names.
            thinks = self.thinking.type != "disabled"
            switches = {"enable_thinking": thinks, "thinking": thinks}
        return ChatRequest(
            **shared,
            messages=messages,
            max_completion_tokens=max_tokens,
            tools=[_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or [])],
            tool_choice=None if self.tool_choice is None else _chat_choice(choice),
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            reasoning_effort=self._effort(output, max_tokens),
            chat_template_kwargs=switches,
            continue_final_message=True if self.messages[-1].role == "assistant" else None,
        )

    def _system(self) -> str | None:
        """Return the system prompt, without Claude Code's billing line.

        That line changes with every conversation, so no prompt would be found in the prefix cache.
        """
        if self.system is None:
            return None
        texts = texts_at(self.system, _TEXTS, "system")
        if texts and texts[0].startswith(BILLING_LINE):
            _, _, rest = texts[0].partition("\n")
            texts[:1] = [rest] if rest else []
            if not texts:
                return None
        return "\n".join(texts)

    def _effort(self, output: OutputConfig, max_tokens: int | None) -> ReasoningEffort | None:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if self.thinking is not None and (self.thinking.type == "enabled") != (budget is not None):
            what = "thinking.budget_tokens is for, and required by, thinking.type enabled"
            raise InvalidRequest(what, param="thinking.budget_tokens")
        if budget is not None and max_tokens is not None and budget >= max_tokens:
            what = "thinking.budget_tokens must be below max_tokens, which counts thinking and text"
            raise InvalidRequest(what, param="thinking.budget_tokens")
        if output.effort is not None:
            return _EFFORTS.get(output.effort, output.effort)
        if budget is None:
            return None
        if budget < 2 * MIN_BUDGET:
            return "low"
        return "medium" if budget < 4 * MIN_BUDGET else "high"


class MessagesRequest(CountTokensRequest, kw_only=True):
    """A conversation to answer."""

    max_tokens: PositiveCount


def _instructions_first(messages: list[Message]) -> list[Message]:
    """Move the system messages before the first answer to the front.

    Claude Code sends what it knows of the machine behind the user's first message. In front of that
    message, it is in the prefix cache for the next conversation.
    """
    roles = [message.role for message in messages]
    end = roles.index("assistant") if "assistant" in roles else len(messages)
    return sorted(messages[:end], key=lambda message: message.role != "system") + messages[end:]


def _chat_messages(given: InputMessage, where: str) -> list[Message]:
    """Convert a turn to messages: one for each tool result, in order with the text around it."""
    if isinstance(given.content, str):
        return [Message(role=given.role, content=given.content)]
    messages: list[Message] = []
    texts: list[str] = []  # since the last tool result
    turn = Message(role=given.role)
    for i, block in enumerate(given.content):
        block_where = f"{where}.content[{i}]"
        match typed_at(block, _BLOCKS[given.role], block_where):
            case TextItem() | DocumentBlock() | SearchResultBlock() as shown:
                texts.append(shown.text)
            case _Thinking(thinking=thinking):
                turn.reasoning_content = (turn.reasoning_content or "") + thinking
            case _ToolUse() as used:
                called = {"name": used.name, "arguments": used.input}
                turn.tool_calls = [*(turn.tool_calls or ()), {"id": used.id, "function": called}]
            case _ToolResult() as result:
                if texts:
                    messages.append(Message(role=given.role, content="\n".join(texts)))
                    texts = []
                text = text_at(result.content, _RESULTS, f"{block_where}.content")
                prefix = "Error: " if result.is_error else ""
                messages.append(
                    Message(role="tool", content=prefix + text, tool_call_id=result.tool_use_id)
                )
    if texts or not (messages or turn.tool_calls or turn.reasoning_content):
        turn.content = "\n".join(texts)
    if turn.content is not None or given.role == "assistant":
        messages.append(turn)
    return messages


def _chat_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    checked: _ClientTool = typed_at(tool, {"custom": _ClientTool}, where, "custom")
    function: dict[str, Any] = {"name": checked.name, "parameters": checked.input_schema}
    for name in ("description", "strict"):
        if (value := getattr(checked, name)) is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _chat_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest(
            "tool_choice.name is for, and required by, tool_choice.type tool",
            param="tool_choice.name",
        )
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
