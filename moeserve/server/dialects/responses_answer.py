"""Answers of /v1/responses: the response, its output items, and the events of a stream."""

import time
from collections.abc import Callable
from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from moeserve.errors import RequestError
from moeserve.frontend.generation import Delta
from moeserve.protocol import Answer, CachedTokens, TokenLogprob
from moeserve.server.conversation import Conversation
from moeserve.server.dialects.responses_request import (
    ReasoningConfig,
    ResponsesRequest,
    TextConfig,
    TextFormat,
)
from moeserve.server.dialects.responses_tools import ResponseTools, input_of
from moeserve.server.errors import error_message
from moeserve.server.file_objects import Page
from moeserve.server.logprobs import LogprobFormat
from moeserve.server.running import Counts
from moeserve.server.writer import EventWriter
from moeserve.text.answer_format import Part

# fmt: off
# Fields of a response that repeat fields of its request.
_REQUEST_FIELDS = (
    "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id",
    "prompt_cache_key", "reasoning", "safety_identifier", "user",
)
# Fields of a response that are sampling parameters, including defaults.
_SAMPLING_FIELDS = ("frequency_penalty", "presence_penalty", "temperature", "top_p")
# fmt: on


class OutputText(Struct, tag="output_text", kw_only=True):
    """The text of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []  # of all tokens of the answer, if requested


class ReasoningText(Struct, tag="reasoning_text", kw_only=True):
    """Reasoning, in full."""

    text: str = ""


class OutputMessage(Struct, tag="message", kw_only=True):
    """Text for the user."""

    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class OutputReasoning(Struct, tag="reasoning", kw_only=True):
    """The reasoning before an answer. There are no summaries."""

    id: str
    summary: list[Any] = []
    content: list[ReasoningText] = []
    status: str = "in_progress"


class OutputCall(Struct, tag="function_call", kw_only=True):
    """A call that the client is asked to make."""

    id: str
    call_id: str
    name: str
    arguments: str = ""  # JSON text
    namespace: str | UnsetType = UNSET  # of the tool, if it is in one
    status: str = "in_progress"


class OutputCustomCall(Struct, tag="custom_tool_call", kw_only=True):
    """A call of a tool that takes text."""

    id: str
    call_id: str
    name: str
    input: str = ""
    namespace: str | UnsetType = UNSET
    status: str = "in_progress"


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class OutputTokensDetails(Struct):
    """The tokens of reasoning among those of the output."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """Token counts of one response."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFault(Struct):
    """Why a response failed after its stream had begun."""

    code: str
    message: str


class IncompleteDetails(Struct):
    """Why a response is incomplete."""

    reason: str


class Response(Answer, kw_only=True):
    """A response, with the parameters of its request."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = field(default_factory=list)
    usage: ResponseUsage | None = None
    instructions: str | None
    previous_response_id: str | None
    tools: list[Any]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: TextConfig
    reasoning: ReasoningConfig | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool  # whether it can be retrieved
    metadata: dict[str, Any]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    truncation: str = "disabled"
    background: bool = False
    service_tier: str = "default"


class ItemList(Page, kw_only=True):
    """The input items of a response."""

    data: list[dict[str, Any]]


class InputTokens(Answer, kw_only=True):
    """The number of an input's tokens."""

    object: str = "response.input_tokens"
    input_tokens: int


class ResponseEvent(Struct, kw_only=True, omit_defaults=True):
    """An event of a stream. Its type decides which of the fields it has."""

    type: str
    sequence_number: int | None = None
    response: Response | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    item: OutputItem | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    input: str | None = None
    logprobs: list[TokenLogprob] | None = None


class ResponseWriter(EventWriter):
    """Writes a response.

    `open_kind` and `last_delta` are those of `EventWriter`. Items are changed in place after events
    with them were emitted, which is safe because `emit` encodes at once.
    """

    def __init__(
        self,
        chat: Conversation,
        *,
        request: ResponsesRequest,
        tools: ResponseTools,
        key: str,
        stores: bool,
        on_end: Callable[[Response], None],
    ) -> None:
        """Begin a response to `request`, which `chat` runs.

        tools: those of the request.
        key: the part that all ids of the response share (resp_KEY, msg_KEY0, ...).
        stores: whether the server stores responses.
        on_end: called with the response when it has ended, completed or failed.
        """
        super().__init__(chat, stream=bool(request.stream))
        self.response = _new_response(chat, request, tools, key, stores=stores)
        self._tools = tools
        self._key = key
        self._on_end = on_end
        self._logprob_format = None  # without logprobs
        if request.logprobs:
            self._logprob_format = LogprobFormat(
                chat.front.tokenizer, num_top=request.top_logprobs or 0
            )
        self._unsent_logprobs: list[TokenLogprob] = []  # not sent in an event yet
        self._next_sequence_number = 0

    def add(self, prompt: int, delta: Delta) -> None:
        if self._logprob_format is not None:
            self._unsent_logprobs += (
                self._logprob_format.chat_logprobs(delta.logprobs).content or []
            )
        super().add(prompt, delta)

    def on_block_opened(self, part: Part) -> None:
        number = len(self.response.output)
        item: OutputItem
        if part.kind == "content":
            item = OutputMessage(id=f"msg_{self._key}{number}")
        elif part.kind == "reasoning":
            item = OutputReasoning(id=f"rs_{self._key}{number}")
        else:
            item = self._output_call(part, number)
        self.response.output.append(item)
        self._emit_event("response.output_item.added", output_index=number, item=item)
        if isinstance(item, OutputMessage):
            item.content = [OutputText()]
        elif isinstance(item, OutputReasoning):
            item.content = [ReasoningText()]
        else:
            return
        self._emit_item_event("response.content_part.added", content_index=0, part=item.content[0])

    def _output_call(self, part: Part, number: int) -> OutputCall | OutputCustomCall:
        tool = self._tools.called(part.text)
        kind = OutputCustomCall if tool.is_custom else OutputCall
        return kind(
            id=f"{'ctc' if tool.is_custom else 'fc'}_{self._key}{number}",
            call_id=part.id,
            name=tool.name,
            namespace=tool.namespace,
        )

    def on_block_text(self, text: str) -> None:
        if self.open_kind == "content":
            logprobs = self._unsent_logprobs
            if logprobs:
                self._unsent_logprobs = []
                item = self.response.output[-1]
                assert isinstance(item, OutputMessage)
                item.content[0].logprobs += logprobs
            self._emit_item_event(
                "response.output_text.delta", content_index=0, delta=text, logprobs=logprobs
            )
        elif self.open_kind == "reasoning":
            self._emit_item_event("response.reasoning_text.delta", content_index=0, delta=text)
        elif isinstance(self.response.output[-1], OutputCall):
            self._emit_item_event("response.function_call_arguments.delta", delta=text)
        # The input of a custom call is inside the arguments, which must be complete to read it.

    def on_block_closed(self, text: str, *, complete: bool) -> None:
        item = self.response.output[-1]
        if isinstance(item, OutputCall):
            item.arguments = text
            self._emit_item_event("response.function_call_arguments.done", arguments=text)
        elif isinstance(item, OutputCustomCall):
            item.input = input_of(text)
            self._emit_item_event("response.custom_tool_call_input.delta", delta=item.input)
            self._emit_item_event("response.custom_tool_call_input.done", input=item.input)
        else:
            (part,) = item.content
            part.text = text
            logprobs = None
            if isinstance(part, OutputText):
                event = "response.output_text.done"
                part.logprobs += self._unsent_logprobs  # of tokens without text
                self._unsent_logprobs = []
                logprobs = part.logprobs
            else:
                event = "response.reasoning_text.done"
            self._emit_item_event(event, content_index=0, text=text, logprobs=logprobs)
            self._emit_item_event("response.content_part.done", content_index=0, part=part)
        item.status = "completed" if complete else "incomplete"
        number = len(self.response.output) - 1
        self._emit_event("response.output_item.done", output_index=number, item=item)

    def finish(self) -> None:
        """Set the status, end the open block and call `on_end`.

        A response without output gets an empty message, because clients expect text.
        """
        response = self.response
        match self.last_delta.finish_reason:
            case "length":
                response.status = "incomplete"
                response.incomplete_details = IncompleteDetails("max_output_tokens")
            case "abort":
                response.status = "cancelled"
            case _:
                response.status = "completed"
                response.completed_at = int(time.time())
        if not response.output:
            self.open_block(Part("content", ""))
        self.close_block(complete=response.status == "completed")
        self._report_end()

    async def cancel(self) -> Response:
        """Abort the response, and return it. Its client gets the output so far, too."""
        self.response.status = "cancelled"
        await self.chat.running.abort()
        return self.response

    def opening(self) -> bytes:
        self._emit_event("response.created", response=self.response)
        self._emit_event("response.in_progress", response=self.response)
        return self.emitted()

    def ping(self) -> bytes:
        """Return an event, because Codex counts events only and gives up a stream of comments."""
        self._emit_event("response.in_progress", response=self.response)
        return self.emitted()

    def closing(self) -> bytes:
        self.finish()
        if self.response.status == "completed":
            self._emit_event("response.completed", response=self.response)
        else:
            # Also for a cancelled response, because the API has no event "response.cancelled".
            self._emit_event("response.incomplete", response=self.response)
        return self.emitted()

    def failure(self, error: RequestError, request_id: str) -> bytes:
        self.close_block(complete=False)
        self.response.status = "failed"
        self.response.error = ResponseFault("server_error", error_message(error, request_id))
        self._report_end()
        self._emit_event("response.failed", response=self.response)
        return self.emitted()

    def whole(self) -> Response:
        self.finish()
        return self.response

    def _report_end(self) -> None:
        self.response.usage = _usage(self.counts)
        self._on_end(self.response)

    def _emit_item_event(self, name: str, **fields: Any) -> None:
        """Emit an event about the last item."""
        items = self.response.output
        self._emit_event(name, item_id=items[-1].id, output_index=len(items) - 1, **fields)

    def _emit_event(self, name: str, **fields: Any) -> None:
        self.emit(ResponseEvent(type=name, sequence_number=self._next_sequence_number, **fields))
        self._next_sequence_number += 1


def _new_response(
    chat: Conversation, request: ResponsesRequest, tools: ResponseTools, key: str, *, stores: bool
) -> Response:
    """Return a response that has just begun."""
    text = request.text or TextConfig()
    return Response(
        id=f"resp_{key}",
        created_at=chat.running.head.created,
        model=chat.running.head.model,
        tools=tools.given,
        tool_choice=request.tool_choice or "auto",
        parallel_tool_calls=request.parallel_tool_calls is not False,
        text=TextConfig(format=text.format or TextFormat(type="text"), verbosity=text.verbosity),
        top_logprobs=request.top_logprobs or 0,
        store=request.store is not False and stores,
        metadata=request.metadata or {},
        **{name: getattr(request, name) for name in _REQUEST_FIELDS},
        **{name: getattr(chat.params, name) for name in _SAMPLING_FIELDS},
    )


def _usage(counts: Counts) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=counts.prompt_tokens,
        input_tokens_details=CachedTokens(counts.cached_tokens),
        output_tokens=counts.completion_tokens,
        output_tokens_details=OutputTokensDetails(counts.num_reasoning),
        total_tokens=counts.prompt_tokens + counts.completion_tokens,
    )
