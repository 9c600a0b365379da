"""Answers of /v1/messages: the message, its blocks, and the events of a stream."""

import hashlib
from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from moeserve.errors import EngineLost, RequestError
from moeserve.protocol import Answer
from moeserve.server.conversation import Conversation
from moeserve.server.dialects.messages_request import MessagesRequest
from moeserve.server.errors import error_body
from moeserve.server.running import Counts
from moeserve.server.writer import EventWriter
from moeserve.text.answer_format import Part


class TextBlock(Struct, tag="text", kw_only=True):
    """Text for the user."""

    text: str = ""
    # Neither null nor absent, because some clients reject null and others reject absence.
    citations: list[dict[str, Any]] = []


class ThinkingBlock(Struct, tag="thinking", kw_only=True):
    """The reasoning before an answer."""

    thinking: str = ""
    signature: str = ""  # a digest, since some clients send only signed blocks back


class ToolUseBlock(Struct, tag="tool_use", kw_only=True):
    """A call that the client is asked to make."""

    id: str
    name: str
    # A JSON object, the joined text of the stream's deltas; {} in the first event of the call.
    input: Annotated[Raw, Meta(extra_json_schema={"type": "object"})] = field(
        default_factory=lambda: Raw(b"{}")
    )
    caller: dict[str, str] = field(default_factory=lambda: {"type": "direct"})


Block = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(Struct):
    """The tokens of thinking among those of the output."""

    thinking_tokens: int = 0


class MessageUsage(Struct, kw_only=True):
    """Token counts."""

    input_tokens: int  # prompt tokens that were not found in the prefix cache
    cache_creation: None = None
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: ThinkingTokens = field(default_factory=ThinkingTokens)
    server_tool_use: None = None
    service_tier: str = "standard"
    inference_geo: None = None


class ContextEdits(Struct):
    """The changes that were made to the conversation before the model read it: none."""

    applied_edits: list[dict[str, Any]] = []


class CountedContext(Struct):
    """The number of tokens before context management, which changes nothing."""

    original_input_tokens: int


class MessageAnswer(Answer, tag="message", kw_only=True):
    """A whole answer."""

    id: str
    role: str = "assistant"
    model: str
    content: list[Block] = field(default_factory=list)
    # end_turn, max_tokens, model_context_window_exceeded, stop_sequence or tool_use
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None
    usage: MessageUsage
    # Only if the request has it. In a stream it is in message_delta.
    context_management: ContextEdits | UnsetType = UNSET


class TokenCount(Answer, kw_only=True):
    """The number of a conversation's tokens."""

    input_tokens: int
    context_management: CountedContext | UnsetType = UNSET


class EventDelta(Struct, kw_only=True):
    """New content of a block. Without a type: why the message ended."""

    # text_delta, thinking_delta, signature_delta or input_json_delta
    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | UnsetType | None = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Struct, omit_defaults=True, kw_only=True):
    """An event of a stream. Its type decides which of the fields it has."""

    type: str
    message: MessageAnswer | None = None
    index: int | None = None
    content_block: Block | None = None
    delta: EventDelta | None = None
    usage: MessageUsage | None = None
    context_management: ContextEdits | UnsetType = UNSET


class MessageWriter(EventWriter):
    """Writes a message. `open_kind`, `last_delta` and `emit` are those of `EventWriter`."""

    def __init__(self, chat: Conversation, *, request: MessagesRequest) -> None:
        super().__init__(chat, stream=bool(request.stream))
        self._request = request
        self._hides_thinking = (
            request.thinking is not None and request.thinking.display == "omitted"
        )
        head = chat.running.head
        self.message = MessageAnswer(
            id=f"msg_{head.request_id}", model=head.model, usage=_usage(self.counts)
        )

    def on_block_opened(self, part: Part) -> None:
        block: Block = TextBlock()
        if part.kind == "reasoning":
            block = ThinkingBlock()
        elif part.kind == "call":
            # Anthropic's ids have no dots.
            block = ToolUseBlock(id=part.id.replace(".", "-"), name=part.text)
        self.message.content.append(block)
        self.emit(MessageEvent(type="content_block_start", index=self._index, content_block=block))

    def on_block_text(self, text: str) -> None:
        if self.open_kind == "content":
            self._emit_delta(EventDelta(type="text_delta", text=text))
        elif self.open_kind == "arguments":
            self._emit_delta(EventDelta(type="input_json_delta", partial_json=text))
        elif not self._hides_thinking:
            self._emit_delta(EventDelta(type="thinking_delta", thinking=text))

    def on_block_closed(self, text: str, *, complete: bool) -> None:
        match self.message.content[-1]:
            case TextBlock() as block:
                block.text = text
            case ThinkingBlock() as block:
                block.thinking = "" if self._hides_thinking else text
                block.signature = hashlib.sha256(text.encode()).hexdigest()
                self._emit_delta(EventDelta(type="signature_delta", signature=block.signature))
            case ToolUseBlock() as block:
                block.input = Raw(text.encode() or b"{}")
        self.emit(MessageEvent(type="content_block_stop", index=self._index))

    def on_aborted(self) -> None:
        """Raise RequestAborted if the request was aborted by its id, otherwise EngineLost.

        The dialect has no stop reason for either.
        """
        raise self.chat.running.aborted or EngineLost(
            "the server stopped before this request could finish"
        )

    def finish(self) -> None:
        if not self.message.content:  # clients expect a block
            self.open_block(Part("content", ""))
        self.close_block()
        message = self.message
        reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(
            self.last_delta.finish_reason or "", "end_turn"
        )
        if reason == "max_tokens" and self.counts.completion_tokens < self._request.max_tokens:
            reason = "model_context_window_exceeded"
        if reason == "end_turn" and isinstance(self.last_delta.stop_reason, str):
            reason = "stop_sequence"
            message.stop_sequence = self.last_delta.stop_reason
        message.stop_reason = reason
        message.usage = _usage(self.counts)
        if self._request.context_management is not None:
            message.context_management = ContextEdits()

    def opening(self) -> bytes:
        self.emit(MessageEvent(type="message_start", message=self.message))
        self.emit(MessageEvent(type="ping"))
        return self.emitted()

    def closing(self) -> bytes:
        self.finish()
        message = self.message
        end = EventDelta(stop_reason=message.stop_reason, stop_sequence=message.stop_sequence)
        self.emit(
            MessageEvent(
                type="message_delta",
                delta=end,
                usage=message.usage,
                context_management=message.context_management,
            )
        )
        self.emit(MessageEvent(type="message_stop"))
        return self.emitted()

    def failure(self, error: RequestError, request_id: str) -> bytes:
        body = error_body(error, request_id, shape="anthropic")
        return self.emitted() + b"event: error\ndata: " + body + b"\n\n"

    def whole(self) -> MessageAnswer:
        self.finish()
        return self.message

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1

    def _emit_delta(self, delta: EventDelta) -> None:
        self.emit(MessageEvent(type="content_block_delta", index=self._index, delta=delta))


def _usage(counts: Counts) -> MessageUsage:
    return MessageUsage(
        input_tokens=counts.prompt_tokens - counts.cached_tokens,
        cache_read_input_tokens=counts.cached_tokens,
        output_tokens=counts.completion_tokens,
        output_tokens_details=ThinkingTokens(counts.num_reasoning),
    )
