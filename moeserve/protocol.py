"""Every answer of the HTTP API, declared once: the server encodes these structs, the client decodes
them, and /openapi.json describes them.

The shapes are OpenAI's, with vLLM's extensions. Fields have defaults because servers differ in what
they send; unknown fields are ignored. A struct with `omit_defaults` leaves out what is None, except
for the fields declared by `written`.
"""

from functools import partial
from itertools import repeat
from typing import Any, Literal

from msgspec import Struct, field

from moeserve.receipts import Receipt


def written(default: Any) -> Any:
    """Declares a field that is written to JSON even where it has its default.

    msgspec leaves out what equals a plain default, and an empty list whose factory is `list`
    itself.
    """
    return field(default_factory=partial(list) if default == [] else repeat(default).__next__)


class Answer(Struct, kw_only=True, dict=True):
    """A top-level response."""

    @property
    def request_id(self) -> str | None:
        """The server's X-Request-Id, to be quoted in a bug report."""
        return self.__dict__.get("request_id")

    @request_id.setter
    def request_id(self, value: str | None) -> None:
        """Set by the client."""
        self.__dict__["request_id"] = value


# Generation


class CachedTokens(Struct):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: int | None = None


class CompletionDetails(Struct, omit_defaults=True):
    """What the tokens of an answer were.

    accepted_prediction_tokens, rejected_prediction_tokens: drafts that speculation had verified for
    the request, right ones, which are tokens of the answer, and wrong ones, which are not.
    reasoning_tokens: those before the content.
    """

    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    reasoning_tokens: int | None = None


class Usage(Struct):
    """Token counts of one request. Each prompt counts once, whatever `n` is."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: CompletionDetails | None = None


class TopLogprob(Struct):
    """A token, its logprob and its bytes, which need not be whole characters."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    """A sampled token and the most likely tokens of its position."""

    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(Struct):
    """One entry per token of the content."""

    content: list[TokenLogprob] | None = None
    refusal: None = None


class CompletionLogprobs(Struct):
    """Columns, one entry per token; the first token of an echoed prompt has no logprob."""

    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] | None = None


class PromptLogprob(Struct):
    """A token at a position of the prompt: its logprob and its place among all tokens, 1 for the
    most likely.
    """

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; None for the first token


class ChatMessage(Struct, kw_only=True, omit_defaults=True):
    """The assistant's message. reasoning_content: the name that some other servers give
    `reasoning`.
    """

    role: str = written("assistant")
    content: str | None = written(None)
    refusal: str | None = written(None)
    annotations: list[dict[str, Any]] = written([])
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(Struct, kw_only=True, omit_defaults=True):
    """One whole answer. stop_reason: the stop string or the stop token that ended it."""

    index: int = written(0)
    message: ChatMessage = field(default_factory=ChatMessage)
    logprobs: ChatLogprobs | None = written(None)
    finish_reason: str | None = written(None)
    stop_reason: int | str | None = written(None)
    token_ids: list[int] | None = None
    receipt: Receipt | None = None


class Generated(Answer, kw_only=True, omit_defaults=True):
    """The fields that whole answers and chunks of both generating routes begin with."""

    id: str = written("")
    object: str = written("")
    created: int = written(0)
    model: str = written("")
    system_fingerprint: str | None = None


class ChatCompletion(Generated, kw_only=True, omit_defaults=True):
    """A whole answer of /v1/chat/completions."""

    choices: list[ChatChoice] = written([])
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChoiceDelta(Struct, kw_only=True, omit_defaults=True):
    """What is new of a message; the first delta has the role, the last one is empty."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class OpenChatChoice(Struct, kw_only=True, omit_defaults=True):
    """A choice in a chunk that does not end it."""

    index: int = written(0)
    delta: ChoiceDelta = field(default_factory=ChoiceDelta)
    logprobs: ChatLogprobs | None = written(None)
    finish_reason: str | None = written(None)
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class ChatChunkChoice(OpenChatChoice, kw_only=True, omit_defaults=True):
    """A choice in any chunk; `stop_reason` is written where the choice ends."""

    stop_reason: int | str | None = written(None)
    receipt: Receipt | None = None


class ChatCompletionChunk(Generated, kw_only=True, omit_defaults=True):
    """An event of a streamed chat answer. usage: in the last chunk, if it was asked for."""

    choices: list[ChatChunkChoice] = written([])
    usage: Usage | None = None


class OpenCompletionChoice(Struct, kw_only=True, omit_defaults=True):
    """A text in a chunk that does not end it."""

    index: int = written(0)
    text: str = written("")
    logprobs: CompletionLogprobs | None = written(None)
    finish_reason: str | None = written(None)
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionChoice(OpenCompletionChoice, kw_only=True, omit_defaults=True):
    """One whole text, or its last chunk."""

    stop_reason: int | str | None = written(None)
    receipt: Receipt | None = None


class Completion(Generated, kw_only=True, omit_defaults=True):
    """A whole answer of /v1/completions, or one chunk of a streamed one: both have the same shape."""

    choices: list[CompletionChoice] = written([])
    usage: Usage | None = None


class ReceiptKey(Answer, kw_only=True):
    """The key that signs receipts, and what all of them say. numerics: see `Receipt`."""

    algorithm: str = "ed25519"
    public_key: str = ""
    weights: str = ""
    numerics: dict[str, str] = {}


class ErrorBody(Struct):
    """An error. vLLM sends its code as a number."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(Struct):
    """Every answer with an error status, and the event that ends a stream that failed."""

    error: ErrorBody


# Models, tokens and the server itself


class ModelCard(Answer, kw_only=True):
    """The model that is served, for clients of OpenAI's API and of Anthropic's."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "moeserve"
    root: str = ""
    parent: None = None
    max_model_len: int | None = None
    type: str = "model"
    display_name: str = ""
    created_at: str = ""


class ModelList(Answer, kw_only=True):
    """The models that are served."""

    object: str = "list"
    data: list[ModelCard] = []


class Tokenized(Answer, kw_only=True):
    """Token ids of a text; their texts if `return_token_strs` was given."""

    count: int = 0
    max_model_len: int | None = None
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Answer, kw_only=True):
    """The text of token ids."""

    prompt: str


class RenderedPrompt(Answer, kw_only=True):
    """A conversation as the model reads it."""

    prompt: str
    prompt_token_ids: list[int]


class Aborted(Answer, kw_only=True):
    """The answer to an abort. aborted: sequences of the request that were still running."""

    id: str = ""
    aborted: int = 0


class ScaleResponse(Struct, kw_only=True):
    """dp: engines that serve now; before: engines that served until then."""

    dp: int
    before: int
    took_s: float


class RebalanceResponse(Struct, kw_only=True):
    """moved: false if no other placement would be more even. version: of the placement in force.
    why: in words.
    """

    moved: bool
    version: int
    moved_bytes: int
    took_s: float
    why: str


class VersionResponse(Struct, kw_only=True):
    """The version of the server."""

    version: str


class StatusResponse(Struct, kw_only=True):
    """`phase` and `percent` tell how far the start is; elapsed_s: since the phase began, in
    seconds.

    lost: the engine died and is being started again. stalled: the engine has made no progress for
    some time.
    """

    status: Literal["loading", "ready", "stalled", "draining", "lost"]
    phase: str
    percent: int
    elapsed_s: float


# GET /v1/experts: L MoE layers, E experts, R ranks; times in seconds, counters since the start


class ExpertEngine(Struct, kw_only=True):
    """One engine. state: loading, waiting (for the other engines), serving, draining, lost (a new
    one starts) or gone.

    step_s: time in the model of the newest step with requests of its own; mean_step_s: the mean
    over some 64 such steps. vote_s: time until all engines had agreed on the newest step. comm_s:
    time of rows between ranks, summed over transfers; exposed_comm_s: the part for which the model
    stood still; overlap_efficiency: 1 - exposed / all. lanes: the former name of ubatches.
    """

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
    lanes: int = 1
    comm_s: float = 0.0
    exposed_comm_s: float = 0.0
    overlap_efficiency: float = 1.0


class ExpertRank(Struct, kw_only=True):
    """One process. slots: physical experts that it holds. share: of the recent rows, by its
    physical experts; null if nothing was counted, or every engine has all experts and computes what
    its own requests ask for."""

    rank: int = 0
    engine: int = 0
    tp_rank: int = 0
    slots: int = 0
    share: float | None = None


class ExpertBalance(Struct, kw_only=True):
    """Mean over fullest, for the recent rows; 1 is even. ranks: over ranks, averaged over layers;
    experts: over experts, wherever they are; by_layer: the same for each layer, [L]."""

    ranks: float = 1.0
    experts: float = 1.0
    ranks_by_layer: list[float] = []
    experts_by_layer: list[float] = []


class ExpertLoads(Struct, kw_only=True):
    """Rows (a token counts once for each expert that it chose), [L][E]. total: since the start.
    recent: older rows count less, by half every two minutes."""

    total: list[list[int]] = []
    recent: list[list[float]] = []


class ExpertPlacement(Struct, kw_only=True):
    """experts: the logical expert of each physical one, [L][R * experts_per_rank]; physical expert
    p belongs to rank p // experts_per_rank. slots_per_rank: the former name of experts_per_rank."""

    version: int = 0
    experts_per_rank: int = 0
    slots_per_rank: int = 0
    experts: list[list[int]] = []


class RebalanceAttempt(Struct, kw_only=True):
    """One attempt to move experts. error "": the placement came into force everywhere."""

    age_s: float = 0.0
    version: int = 0
    forced: bool = False
    moved_bytes: int = 0
    took_s: float = 0.0
    error: str = ""


class ExpertRebalancing(Struct, kw_only=True):
    """mode: auto or off. why: the last decision, for people. moved_bytes: over all ranks.
    decisions: the last 32, newest first."""

    mode: str = "off"
    why: str = ""
    moved_bytes: int = 0
    placed: int = 0
    given_up: int = 0
    decisions: list[RebalanceAttempt] = []


class ExpertStatus(Answer, kw_only=True):
    """A moeserve server's experts, ranks and engines.

    ep_sharded: experts lie on all ranks together; otherwise every engine has all of them, and the
    placement is that of one engine. complete: all engines serve. waiting: requests that wait for an
    engine. machines: the state of each host: here, missing (it is waited for) or drained. created:
    Unix time. dealt_out: the former name of ep_sharded.
    """

    object: str = "experts"
    created: float = 0.0
    ep_sharded: bool = False
    dealt_out: bool = False
    dp: int = 1
    tp: int = 1
    epoch: int = 0
    complete: bool = True
    waiting: int = 0
    num_layers: int = 0
    num_experts: int = 0
    engines: list[ExpertEngine] = []
    machines: dict[str, str] = {}
    ranks: list[ExpertRank] = []
    balance: ExpertBalance = field(default_factory=ExpertBalance)
    load: ExpertLoads = field(default_factory=ExpertLoads)
    placement: ExpertPlacement = field(default_factory=ExpertPlacement)
    rebalancing: ExpertRebalancing = field(default_factory=ExpertRebalancing)
