"""The answers of /v1/responses: the response, its output items, and the events of a stream."""

from typing import Any

from msgspec import Struct, field

from moeserve.protocol import Answer, CachedTokens, TokenLogprob
from moeserve.server.file_objects import Page
from moeserve.server.responses_request import FunctionTool, ReasoningConfig, TextConfig


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
