"""The answers of /v1/responses: the response, its output items, and the events of a stream.

`ResponseOutput` makes items and events from the parts of an answer; a whole answer is made by the same code as a
streamed one, whose events nobody gets.
"""

from collections.abc import Callable
from typing import Any

from msgspec import Struct, field

from moeserve.protocol import Answer, CachedTokens, TokenLogprob
from moeserve.server.file_objects import Page
from moeserve.server.responses_request import FunctionTool, ReasoningConfig, TextConfig
from moeserve.text.answer_format import Part


class OutputText(Struct, tag="output_text", kw_only=True):
    """The text of a message. logprobs: of all the answer's tokens, if they were asked for."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


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
    """What the model wrote before its answer; there are no summaries."""

    id: str
    summary: list[Any] = []
    content: list[ReasoningText] = []
    status: str = "in_progress"


class OutputCall(Struct, tag="function_call", kw_only=True):
    """A call that the client is asked to make. arguments: JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


OutputItem = OutputMessage | OutputReasoning | OutputCall


class OutputTokensDetails(Struct):
    """Tokens of reasoning among those of the output."""

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
    """A response and what it was asked for. store: whether it can be retrieved."""

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
    tools: list[FunctionTool]
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
    store: bool
    metadata: dict[str, Any]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    truncation: str = "disabled"
    background: bool = False
    service_tier: str = "default"


class ItemList(Page, kw_only=True):
    """What a response was asked."""

    data: list[dict[str, Any]]


class InputTokens(Answer, kw_only=True):
    """How many tokens an input has."""

    object: str = "response.input_tokens"
    input_tokens: int


class ResponseEvent(Struct, kw_only=True, omit_defaults=True):
    """An event of a stream. Which of the fields it has depends on its type."""

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
    logprobs: list[TokenLogprob] | None = None


_ITEM = {"content": OutputMessage, "reasoning": OutputReasoning, "call": OutputCall, "arguments": OutputCall}
_TEXT = {OutputMessage: "response.output_text", OutputReasoning: "response.reasoning_text"}
_ARGUMENTS = "response.function_call_arguments"


class ResponseOutput:
    """The items of a response as they come. emit: takes each event at once, because items change afterwards."""

    def __init__(self, items: list[OutputItem], key: str, emit: Callable[[ResponseEvent], None]) -> None:
        self._items = items
        self._key = key
        self._emit = emit
        self._open: OutputItem | None = None
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []  # not yet told

    def add(self, parts: list[Part], logprobs: list[TokenLogprob]) -> None:
        """Adds new parts of the answer."""
        self._logprobs += logprobs
        for part in parts:
            if part.kind == "call" or type(self._open) is not _ITEM[part.kind]:
                self.close()
                self._begin(part)
            if part.kind != "call":
                self._extend(part.text)

    def close(self, status: str = "completed") -> None:
        """Ends the last item. A status other than completed ends the answer, too."""
        item = self._open
        match item:
            case None:
                return
            case OutputCall():
                item.arguments = "".join(self._texts)
                self._tell(f"{_ARGUMENTS}.done", arguments=item.arguments)
            case OutputMessage() | OutputReasoning():
                (part,) = item.content
                part.text = "".join(self._texts)
                logprobs = None
                if isinstance(part, OutputText):
                    part.logprobs += self._logprobs  # of tokens without text
                    self._logprobs, logprobs = [], part.logprobs
                self._tell(f"{_TEXT[type(item)]}.done", content_index=0, text=part.text, logprobs=logprobs)
                self._tell("response.content_part.done", content_index=0, part=part)
        item.status = status
        self._emit(ResponseEvent(type="response.output_item.done", output_index=len(self._items) - 1, item=item))
        self._open, self._texts = None, []

    def end(self, status: str = "completed") -> None:
        """Ends the answer. One without parts has an empty message, so that clients find a text."""
        if not self._items:
            self._begin(Part("content", ""))
        self.close(status)

    def _begin(self, part: Part) -> None:
        number = len(self._items)
        item: OutputItem
        if part.kind == "call" or part.kind == "arguments":
            item = OutputCall(id=f"fc_{self._key}{number}", call_id=part.id, name=part.text)
        elif part.kind == "reasoning":
            item = OutputReasoning(id=f"rs_{self._key}{number}")
        else:
            item = OutputMessage(id=f"msg_{self._key}{number}")
        self._items.append(item)
        self._open = item
        self._emit(ResponseEvent(type="response.output_item.added", output_index=number, item=item))
        if isinstance(item, OutputMessage):
            item.content = [OutputText()]
        elif isinstance(item, OutputReasoning):
            item.content = [ReasoningText()]
        else:
            return
        self._tell("response.content_part.added", content_index=0, part=item.content[0])

    def _extend(self, text: str) -> None:
        item = self._open
        self._texts.append(text)
        if isinstance(item, OutputMessage):
            told, self._logprobs = self._logprobs, []
            item.content[0].logprobs += told
            self._tell("response.output_text.delta", content_index=0, delta=text, logprobs=told)
        elif isinstance(item, OutputReasoning):
            self._tell("response.reasoning_text.delta", content_index=0, delta=text)
        else:
            self._tell(f"{_ARGUMENTS}.delta", delta=text)

    def _tell(self, name: str, **fields: Any) -> None:
        assert self._open is not None
        self._emit(ResponseEvent(type=name, item_id=self._open.id, output_index=len(self._items) - 1, **fields))
