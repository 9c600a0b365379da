"""POST /v1/messages, Anthropic's API for conversations, and /v1/messages/count_tokens."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from aiohttp import web
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from moeserve.errors import ContextLengthExceeded, EngineLost, RequestError
from moeserve.frontend.generation import Delta
from moeserve.protocol import Answer
from moeserve.server.answer import Counts, stream_answer
from moeserve.server.app import HttpCall
from moeserve.server.conversation import Conversation, conversation, prompt_of
from moeserve.server.errors import error_body
from moeserve.server.events import EventFrames
from moeserve.server.messages_request import CountTokensRequest, MessagesRequest
from moeserve.server.requests import fields_named
from moeserve.text.answer_format import Part

# This dialect's names of a chat's fields.
_NAMES = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "stop": "stop_sequences",
    "prompt": "messages",
}


class TextBlock(Struct, tag="text", kw_only=True):
    """Text for the user."""

    text: str = ""
    citations: list[
        dict[str, Any]
    ] = []  # neither null nor absent: clients differ in which of them they refuse


class ThinkingBlock(Struct, tag="thinking", kw_only=True):
    """What the model wrote before its answer. signature: a digest, for clients that send only
    signed ones back.
    """

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Struct, tag="tool_use", kw_only=True):
    """A call that the client is asked to make.

    input: the JSON of an object, as the stream's deltas have it; {} in the stream's first event
    about the call.
    """

    id: str
    name: str
    input: Annotated[Raw, Meta(extra_json_schema={"type": "object"})] = field(
        default_factory=lambda: Raw(b"{}")
    )
    caller: dict[str, str] = field(default_factory=lambda: {"type": "direct"})


Block = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(Struct):
    """Tokens of thinking among those of the output."""

    thinking_tokens: int = 0


class MessageUsage(Struct, kw_only=True):
    """Token counts. input_tokens: those that were not found in the prefix cache."""

    input_tokens: int
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
    """The number of tokens without context management, which is the number with it."""

    original_input_tokens: int


class MessageAnswer(Answer, tag="message", kw_only=True):
    """A whole answer.

    stop_reason: end_turn, max_tokens, model_context_window_exceeded, stop_sequence or tool_use.
    context_management: for requests that have it; a stream has it at its end.
    """

    id: str
    role: str = "assistant"
    model: str
    content: list[Block] = field(default_factory=list)
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None
    usage: MessageUsage
    context_management: ContextEdits | UnsetType = UNSET


class TokenCount(Answer, kw_only=True):
    """The number of a conversation's tokens."""

    input_tokens: int
    context_management: CountedContext | UnsetType = UNSET


class EventDelta(Struct, kw_only=True):
    """What is new of a block, by its type (text_delta, thinking_delta, signature_delta,
    input_json_delta), or, without a type, why the message ended."""

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | UnsetType | None = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Struct, omit_defaults=True, kw_only=True):
    """An event of a stream. Which of the fields it has depends on its type."""

    type: str
    message: MessageAnswer | None = None
    index: int | None = None
    content_block: Block | None = None
    delta: EventDelta | None = None
    usage: MessageUsage | None = None
    context_management: ContextEdits | UnsetType = UNSET


@contextmanager
def _anthropic_errors() -> Iterator[None]:
    """Make errors inside the block speak this dialect.

    Claude Code knows a prompt that is too long by these words only, and reads by how much.
    """
    try:
        with fields_named(_NAMES):
            yield
    except ContextLengthExceeded as error:
        num = f"{'' if error.exact else 'at least '}{error.num_tokens}"
        error.message = f"prompt is too long: {num} tokens > {error.max_tokens} maximum"
        raise


async def create_message(call: HttpCall) -> web.StreamResponse:
    """Answer a conversation in Anthropic's shape, whole or as a stream of events."""
    request = await call.read(MessagesRequest)
    with _anthropic_errors():
        async with conversation(call, request.chat(request.max_tokens)) as chat:
            running = RunningMessage(call, request, chat)
            if request.stream:
                return await stream_answer(call, chat.running, running)
            await running.whole()
    return call.answer(running.message)


async def count_tokens(call: HttpCall) -> web.StreamResponse:
    """Count the tokens of a conversation."""
    request = await call.read(CountTokensRequest)
    with _anthropic_errors():
        _, prompt = await prompt_of(call, request.chat())
    count = TokenCount(input_tokens=len(prompt))
    if request.context_management is not None:
        count.context_management = CountedContext(len(prompt))
    return call.answer(count)


class RunningMessage(EventFrames):
    """A message that comes into being."""

    def __init__(self, call: HttpCall, request: MessagesRequest, chat: Conversation) -> None:
        super().__init__(chat, streams=bool(request.stream))
        self._max_tokens = request.max_tokens
        self._manages_context = request.context_management is not None
        self._hides = request.thinking is not None and request.thinking.display == "omitted"
        self._end = Delta(0)
        self._open: Block | None = None
        self._texts: list[str] = []
        self.message = MessageAnswer(
            id=f"msg_{call.id}", model=chat.front.model_name, usage=_usage(chat.counts)
        )

    def add(self, parts: list[Part], delta: Delta) -> None:
        """Adds what is new of the answer. Raises RequestAborted if its id ended it, EngineLost if
        the server did.
        """
        for part in parts:
            if part.kind == "call" or type(self._open) is not _BLOCKS[part.kind]:
                self._close()
                self._begin(part)
            if part.kind != "call":
                self._extend(part.text)
        self._end = delta
        if self._end.finish_reason == "abort":
            raise self._chat.running.aborted or EngineLost(
                "the server stopped before this request could finish"
            )

    def finish(self) -> None:
        """Ends the message."""
        if self._open is None and not self.message.content:  # clients expect a block
            self._begin(Part("content", ""))
        self._close()
        reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(
            self._end.finish_reason or "", "end_turn"
        )
        if reason == "max_tokens" and self._chat.counts.completion_tokens < self._max_tokens:
            reason = "model_context_window_exceeded"
        if reason == "end_turn" and isinstance(self._end.stop_reason, str):
            reason = "stop_sequence"
            self.message.stop_sequence = self._end.stop_reason
        self.message.stop_reason = reason
        self.message.usage = _usage(self._chat.counts)
        if self._manages_context:
            self.message.context_management = ContextEdits()

    def opening(self) -> bytes:
        """Returns the events before the first text."""
        self._emit(MessageEvent(type="message_start", message=self.message))
        self._emit(MessageEvent(type="ping"))
        return self._taken()

    def closing(self) -> bytes:
        """Returns the events that end blocks and message."""
        self.finish()
        message = self.message
        end = EventDelta(stop_reason=message.stop_reason, stop_sequence=message.stop_sequence)
        self._emit(
            MessageEvent(
                type="message_delta",
                delta=end,
                usage=message.usage,
                context_management=message.context_management,
            )
        )
        self._emit(MessageEvent(type="message_stop"))
        return self._taken()

    def failure(self, error: RequestError, request_id: str) -> bytes:
        """Returns the event that ends a message that failed."""
        body = error_body(error, request_id, anthropic=True)
        return self._taken() + b"event: error\ndata: " + body + b"\n\n"

    def _begin(self, part: Part) -> None:
        block: Block = TextBlock()
        if part.kind == "reasoning":
            block = ThinkingBlock()
        elif part.kind == "call":
            block = ToolUseBlock(
                id=part.id.replace(".", "-"), name=part.text
            )  # by the pattern of Anthropic's ids
        self._open = block
        self.message.content.append(block)
        self._emit(MessageEvent(type="content_block_start", index=self._index, content_block=block))

    def _extend(self, text: str) -> None:
        self._texts.append(text)
        if isinstance(self._open, TextBlock):
            self._tell(EventDelta(type="text_delta", text=text))
        elif isinstance(self._open, ToolUseBlock):
            self._tell(EventDelta(type="input_json_delta", partial_json=text))
        elif not self._hides:
            self._tell(EventDelta(type="thinking_delta", thinking=text))

    def _close(self) -> None:
        """Ends the last block: what it is as a whole is what its deltas said."""
        text = "".join(self._texts)
        self._texts = []
        match self._open:
            case None:
                return
            case TextBlock() as block:
                block.text = text
            case ThinkingBlock() as block:
                block.thinking = "" if self._hides else text
                block.signature = hashlib.sha256(text.encode()).hexdigest()
                self._tell(EventDelta(type="signature_delta", signature=block.signature))
            case ToolUseBlock() as block:
                block.input = Raw(text.encode() or b"{}")
        self._emit(MessageEvent(type="content_block_stop", index=self._index))
        self._open = None

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1

    def _tell(self, delta: EventDelta) -> None:
        self._emit(MessageEvent(type="content_block_delta", index=self._index, delta=delta))


_BLOCKS = {
    "content": TextBlock,
    "reasoning": ThinkingBlock,
    "call": ToolUseBlock,
    "arguments": ToolUseBlock,
}


def _usage(counts: Counts) -> MessageUsage:
    return MessageUsage(
        input_tokens=counts.prompt_tokens - counts.cached_tokens,
        cache_read_input_tokens=counts.cached_tokens,
        output_tokens=counts.completion_tokens,
        output_tokens_details=ThinkingTokens(counts.num_reasoning),
    )
