"""The responses of the HTTP API: the server encodes these structs, and the client decodes them.

They follow OpenAI's API, with vLLM's extensions. Fields have defaults because servers differ in the
fields that they send; unknown fields are ignored. A struct with `omit_defaults` omits fields that
are None, except for those declared by `written`. /openapi.json shows the comments beside fields.
"""

from functools import partial
from itertools import repeat
from typing import Any, Literal

from msgspec import Struct, field

from moeserve.receipts import Receipt


def written(default: Any) -> Any:
    """Declare a field that is written to JSON even if it has its default value.

    msgspec omits a value that equals a plain default, and an empty list whose factory is `list`
    itself.
    """
    return field(default_factory=partial(list) if default == [] else repeat(default).__next__)


class Answer(Struct, kw_only=True, dict=True):
    """A top-level response."""

    @property
    def request_id(self) -> str | None:
        """The server's X-Request-Id. Quote it in a bug report."""
        return self.__dict__.get("request_id")

    @request_id.setter
    def request_id(self, value: str | None) -> None:
        self.__dict__["request_id"] = value


# Generation


class CachedTokens(Struct):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: int | None = None


class CompletionDetails(Struct, omit_defaults=True):
    """Counts of the tokens of an answer, by kind."""

    # Drafts of speculative decoding: right ones, which are tokens of the answer, and wrong ones.
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
    """A token at a position of the prompt."""

    logprob: float
    rank: int  # 1 for the most likely token
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; None for the first token


class ChatMessage(Struct, kw_only=True, omit_defaults=True):
    """The assistant's message."""

    role: str = written("assistant")
    content: str | None = written(None)
    refusal: str | None = written(None)
    annotations: list[dict[str, Any]] = written([])
    reasoning: str | None = None
    reasoning_content: str | None = None  # the name of `reasoning` on some other servers
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(Struct, kw_only=True, omit_defaults=True):
    """One whole answer."""

    index: int = written(0)
    message: ChatMessage = field(default_factory=ChatMessage)
    logprobs: ChatLogprobs | None = written(None)
    finish_reason: str | None = written(None)
    stop_reason: int | str | None = written(None)  # the stop string or token that ended it
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
    """The new part of a message. The first delta has the role, the last one is empty."""

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
    """An event of a streamed chat answer."""

    choices: list[ChatChunkChoice] = written([])
    usage: Usage | None = None  # in the last chunk, with stream_options.include_usage


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
    """A whole answer of /v1/completions, or one chunk of a streamed one."""

    choices: list[CompletionChoice] = written([])
    usage: Usage | None = None


class ReceiptKey(Answer, kw_only=True):
    """The key that signs receipts, and the fields that all of them share (see `Receipt`)."""

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
    """The answer with an error status, and the event that ends a stream that failed."""

    error: ErrorBody


# Models, tokens and the server itself


class ModelMeta(Struct):
    """The context length under llama.cpp's names."""

    n_ctx_train: int
    n_ctx: int


class ModelCard(Answer, kw_only=True):
    """The model that is served, for clients of OpenAI's API and of Anthropic's.

    The context length, in tokens, has the names that clients of vLLM, OpenRouter, Anthropic and
    llama.cpp read.
    """

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "moeserve"
    root: str = ""
    parent: None = None
    max_model_len: int | None = None
    context_length: int | None = None
    max_input_tokens: int | None = None
    meta: ModelMeta | None = None
    type: str = "model"
    display_name: str = ""
    created_at: str = ""


class ModelList(Answer, kw_only=True):
    """The models that are served."""

    object: str = "list"
    data: list[ModelCard] = []


class Tokenized(Answer, kw_only=True):
    """The token ids of a text; with return_token_strs, also their texts."""

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
    """The answer to an abort."""

    id: str = ""
    aborted: int = 0  # sequences of the request that were still running


class ScaleResponse(Struct, kw_only=True):
    """The number of engines after a change."""

    dp: int
    before: int  # the number before it
    took_s: float


class RebalanceResponse(Struct, kw_only=True):
    """The result of a rebalancing."""

    moved: bool  # false if no other placement would be more even
    version: int  # of the active placement
    moved_bytes: int
    took_s: float
    why: str  # the reason, for people


class VersionResponse(Struct, kw_only=True):
    """The version of the server."""

    version: str


class StatusResponse(Struct, kw_only=True):
    """The state of the server, and the progress of its start."""

    # lost: the engine died and is being started again. stalled: the engine has made no progress for
    # some time.
    status: Literal["loading", "ready", "stalled", "draining", "lost"]
    phase: str
    percent: int  # of the phase
    elapsed_s: float  # since the phase began
    # Once the model is loaded: settings that were chosen so that it fits into memory, and their
    # cost.
    notes: tuple[str, ...] = ()


# GET /v1/experts: L MoE layers, E experts, R ranks; times in seconds, counters since the start


class ExpertEngine(Struct, kw_only=True):
    """One engine."""

    engine: int = 0
    host: str = ""
    pid: int | None = None
    # loading, waiting (for the other engines), serving, draining, lost (a new one starts) or gone
    state: str = ""
    epoch: int = 0
    restarts: int = 0
    requests: int = 0
    running: int = 0
    waiting: int = 0
    steps: int = 0
    step_s: float = 0.0  # time in the model of the latest step with requests of its own
    mean_step_s: float = 0.0  # the mean over about 64 such steps
    vote_s: float = 0.0  # time until all engines had agreed on the latest step
    ubatches: int = 1
    lanes: int = 1  # the former name of ubatches
    comm_s: float = 0.0  # transfer time between ranks, summed over transfers
    exposed_comm_s: float = 0.0  # the part of it for which the model stood still
    overlap_efficiency: float = 1.0  # 1 - exposed / all


class ExpertRank(Struct, kw_only=True):
    """One process."""

    rank: int = 0
    engine: int = 0
    tp_rank: int = 0
    slots: int = 0  # physical experts that it holds
    # Of recent tokens, those computed by its physical experts. Null if nothing was counted, or if
    # every engine has all experts and computes the tokens of its own requests.
    share: float | None = None


class ExpertBalance(Struct, kw_only=True):
    """Mean load divided by highest load, of recent tokens; 1 is even."""

    ranks: float = 1.0  # over ranks, averaged over layers
    experts: float = 1.0  # over experts, wherever they are
    ranks_by_layer: list[float] = []  # [L]
    experts_by_layer: list[float] = []  # [L]


class ExpertLoads(Struct, kw_only=True):
    """Tokens per expert, [L][E]. A token counts once for each of its experts."""

    total: list[list[int]] = []  # since the start
    recent: list[list[float]] = []  # older tokens count less: half after two minutes


class ExpertPlacement(Struct, kw_only=True):
    """The logical expert of each physical one.

    Physical expert p belongs to rank p // experts_per_rank.
    """

    version: int = 0
    experts_per_rank: int = 0
    slots_per_rank: int = 0  # the former name of experts_per_rank
    experts: list[list[int]] = []  # [L][R * experts_per_rank]


class RebalanceAttempt(Struct, kw_only=True):
    """One attempt to move experts."""

    age_s: float = 0.0
    version: int = 0
    forced: bool = False
    moved_bytes: int = 0
    took_s: float = 0.0
    error: str = ""  # "": the placement became active everywhere


class ExpertRebalancing(Struct, kw_only=True):
    """The rebalancing of experts over ranks."""

    mode: str = "off"  # or auto
    why: str = ""  # the last decision, for people
    moved_bytes: int = 0  # over all ranks
    placed: int = 0
    given_up: int = 0
    decisions: list[RebalanceAttempt] = []  # the last 32, newest first


class ExpertStatus(Answer, kw_only=True):
    """A moeserve server's experts, ranks and engines."""

    object: str = "experts"
    created: float = 0.0  # Unix time
    # Whether experts lie on all ranks together. Otherwise every engine has all of them, and the
    # placement is that of one engine.
    ep_sharded: bool = False
    dealt_out: bool = False  # the former name of ep_sharded
    dp: int = 1
    tp: int = 1
    epoch: int = 0
    complete: bool = True  # whether all engines serve
    waiting: int = 0  # requests that wait for an engine
    num_layers: int = 0
    num_experts: int = 0
    engines: list[ExpertEngine] = []
    # The state of each host: here, missing (the server waits for it) or drained.
    machines: dict[str, str] = {}
    ranks: list[ExpertRank] = []
    balance: ExpertBalance = field(default_factory=ExpertBalance)
    load: ExpertLoads = field(default_factory=ExpertLoads)
    placement: ExpertPlacement = field(default_factory=ExpertPlacement)
    rebalancing: ExpertRebalancing = field(default_factory=ExpertRebalancing)
