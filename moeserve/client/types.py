"""What an OpenAI-compatible server answers, as typed objects. Unknown fields are ignored, missing ones have defaults,
because servers differ in both."""

from __future__ import annotations

from typing import Any

import msgspec


class Answer(msgspec.Struct, kw_only=True):
    """A top-level response. `request_id` is the server's X-Request-Id: the word to quote in a bug report."""

    request_id: str | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob] | None = None


class ChatMessage(msgspec.Struct):
    role: str = "assistant"
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(msgspec.Struct):
    index: int = 0
    message: ChatMessage = msgspec.field(default_factory=ChatMessage)
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Answer, kw_only=True):
    id: str = ""
    object: str = "chat.completion"
    created: int = 0
    model: str = ""
    choices: list[ChatChoice] = []
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None


class ChoiceDelta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int = 0
    delta: ChoiceDelta = msgspec.field(default_factory=ChoiceDelta)
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Answer, kw_only=True):
    id: str = ""
    object: str = "chat.completion.chunk"
    created: int = 0
    model: str = ""
    choices: list[ChatChunkChoice] = []
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] | None = None


class CompletionChoice(msgspec.Struct):
    index: int = 0
    text: str = ""
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Answer, kw_only=True):
    """A whole text completion, or one chunk of a streamed one: they have the same shape."""

    id: str = ""
    object: str = "text_completion"
    created: int = 0
    model: str = ""
    choices: list[CompletionChoice] = []
    usage: Usage | None = None
    system_fingerprint: str | None = None


class ModelCard(Answer, kw_only=True):
    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = ""
    max_model_len: int | None = None


class ModelList(Answer, kw_only=True):
    object: str = "list"
    data: list[ModelCard] = []


class Tokenized(Answer, kw_only=True):
    tokens: list[int]
    count: int = 0
    max_model_len: int | None = None


class Detokenized(Answer, kw_only=True):
    prompt: str


class Aborted(Answer, kw_only=True):
    """How many sequences of the request were still running."""

    id: str = ""
    aborted: int = 0


class ExpertEngine(msgspec.Struct, kw_only=True):
    """Times in seconds; see the server's /openapi.json."""

    engine: int = 0
    host: str = ""
    pid: int | None = None
    state: str = ""
    epoch: int = 0
    restarts: int = 0
    requests: int = 0
    running: int = 0
    waiting: int = 0
    steps: int = 0
    step_s: float = 0.0
    mean_step_s: float = 0.0
    vote_s: float = 0.0
    ubatches: int = 1
    comm_s: float = 0.0
    exposed_comm_s: float = 0.0
    overlap_efficiency: float = 1.0


class ExpertRank(msgspec.Struct, kw_only=True):
    """share: of the rows of late; None where nothing was counted."""

    rank: int = 0
    engine: int = 0
    tp_rank: int = 0
    slots: int = 0
    share: float | None = None


class ExpertBalance(msgspec.Struct, kw_only=True):
    """Mean over fullest; 1 is even."""

    ranks: float = 1.0
    experts: float = 1.0
    ranks_by_layer: list[float] = []
    experts_by_layer: list[float] = []


class ExpertLoads(msgspec.Struct, kw_only=True):
    """Rows by layer and expert; in `recent`, what is older counts less."""

    total: list[list[int]] = []
    recent: list[list[float]] = []


class ExpertPlacement(msgspec.Struct, kw_only=True):
    """The expert in each slot of each layer."""

    version: int = 0
    experts_per_rank: int = 0
    experts: list[list[int]] = []


class RebalanceDecision(msgspec.Struct, kw_only=True):
    age_s: float = 0.0
    version: int = 0
    forced: bool = False
    moved_bytes: int = 0
    took_s: float = 0.0
    error: str = ""


class ExpertRebalancing(msgspec.Struct, kw_only=True):
    mode: str = "off"
    why: str = ""
    moved_bytes: int = 0
    placed: int = 0
    given_up: int = 0
    decisions: list[RebalanceDecision] = []


class ExpertStatus(Answer, kw_only=True):
    """What a moeserve server shows of its experts, ranks and engines."""

    created: float = 0.0
    ep_sharded: bool = False
    dp: int = 1
    tp: int = 1
    epoch: int = 0
    complete: bool = True
    waiting: int = 0
    num_layers: int = 0
    num_experts: int = 0
    engines: list[ExpertEngine] = []
    ranks: list[ExpertRank] = []
    balance: ExpertBalance = msgspec.field(default_factory=ExpertBalance)
    load: ExpertLoads = msgspec.field(default_factory=ExpertLoads)
    placement: ExpertPlacement = msgspec.field(default_factory=ExpertPlacement)
    rebalancing: ExpertRebalancing = msgspec.field(default_factory=ExpertRebalancing)


class ErrorBody(msgspec.Struct):
    """The inside of OpenAI's {"error": {...}}; vLLM sends its code as a number."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class ErrorEnvelope(msgspec.Struct):
    error: ErrorBody | str | None = None
