"""The messages between front end and engine: msgspec structs, in msgpack where they cross a process
boundary.

    front end --EngineIn-->  engine        Submit, Abort, Drain, Ping, Join, UpdatePlacement, TraceNext
    engine   --EngineOut--> front end      Phase, Ready, StepOutput, Refused, Pong, Stopped,
                                           Joined, LeftGroup, ExpertLoad, PlacementResult, Traced

Arrays are little-endian bytes (`int32`, `int64`, `uint8`) in one message per step, because decoding
one struct per request costs a hundred times more.
"""

from typing import Any

import msgspec

from moeserve.sampling import TokenSampling

PROTOCOL_VERSION = 2
# What a request's rows produce: the name of a `RowTask` (runner/tasks.py).
SAMPLE = "sample"
TASKS = (SAMPLE,)


class FinishReason:
    """The values of `StepOutput.finish`: one byte per row."""

    NONE, STOP, LENGTH, ABORT, ERROR = range(5)
    NAMES = ("", "stop", "length", "abort", "error")


class Submit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Starts a request. tokens: its prompt and, for a replay, the tokens already generated.

    num_prompt: length of the prompt part of `tokens`. priority: lower values go first, ties by
    arrival. salt: only requests with the same salt share prefix-cache blocks. task: one of `TASKS`.
    """

    rid: int
    tokens: bytes  # int32
    num_prompt: int
    sampling: TokenSampling
    priority: int = 0
    salt: str = ""
    task: str = SAMPLE


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Ends these requests at once. Unknown ids are ignored."""

    rids: list[int]


class AbortAll(msgspec.Struct, frozen=True, tag=True):
    """Ends all requests at once: their front end is gone, and the next one submits again what it
    knows of.
    """


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Refuses new requests, finishes the others, then stops the engine. Aborts the rest after
    deadline_s seconds.
    """

    deadline_s: float


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Asks for a Pong with the same seq."""

    seq: int


class PlacementTable(msgspec.Struct, frozen=True, kw_only=True):
    """A `moeserve.moe.placement.Placement` as a message.

    experts: int32 [layers, num_ranks * experts_per_rank], row-major: the logical expert of each
    physical expert.
    """

    version: int
    num_ranks: int
    experts_per_rank: int
    num_experts: int
    experts: bytes


class Join(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Connects the engine with the other ranks: the membership of one epoch, as one engine sees it.

    A later Join replaces this one, and drops its connections first. hosts: the machine of each
    engine, by data-parallel rank (equal names share memory). directory: private folder for this
    epoch's Unix sockets, the same for all engines of a machine. store, vote: host:port at which
    data-parallel rank 0 listens for those who ask for addresses, and for the step vote, if there
    are several machines; on one the store's is the path of a Unix socket.
    """

    epoch: int
    dp_rank: int
    tp_size: int
    hosts: tuple[str, ...]
    directory: str
    store: str
    token: str
    placement: PlacementTable | None = None  # None: a model without experts, or ep off
    vote: str = ""


class UpdatePlacement(msgspec.Struct, frozen=True, tag=True):
    """Prepares a placement in the background, layer by layer; the vote commits each layer on all
    ranks at once.
    """

    placement: PlacementTable


class TraceNext(msgspec.Struct, frozen=True, tag=True):
    """Records the next step that all ranks run; each rank sends a Traced."""


EngineIn = Submit | Abort | AbortAll | Drain | Ping | Join | UpdatePlacement | TraceNext


class Phase(msgspec.Struct, frozen=True, tag=True):
    """Progress of start-up. name: for people; percent: of the whole start."""

    name: str
    percent: int
    elapsed_s: float


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine serves. Carries the facts that the front end needs to check requests."""

    version: int = PROTOCOL_VERSION
    pid: int
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    num_params: int
    num_active_params: int
    weight_bytes: int
    startup_s: float
    step_s: float = 0.0  # the longest step to expect; 0: short
    num_moe_layers: int = 0
    num_experts: int = 0
    expert_bytes: int = 0  # of one expert in one layer
    checkpoint: str = ""  # fingerprint of what was loaded; "": nothing was
    numerics: dict[
        str, str
    ] = {}  # all that decides the bits of a request's logits and tokens; empty: they vary
    notes: tuple[str, ...] = ()


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at one position: the chosen (or prompt) token first, then the most likely tokens in
    order.
    """

    ids: list[int]
    values: list[float]
    rank: int  # of the first id by probability; 1 is the most likely


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of prompt tokens start .. start+len(rows)-1. Position 0 has none and is not sent."""

    start: int
    rows: list[Logprobs]


class StepRecord(msgspec.Struct, kw_only=True, array_like=True):
    """The work and the cost of one engine step, for metrics, dashboards and benchmarks.

    Times in microseconds; at_s: the step's start on the monotonic clock.
    """

    step: int
    at_s: float = 0.0
    num_tokens: int
    num_requests: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    plan_us: int = 0
    device_us: int = 0
    comm_us: int = 0  # from the start of each transfer to its last row, summed
    exposed_comm_us: int = 0  # the part of comm_us during which the model waited
    ubatches: int = 1
    vote_us: int = 0
    dp_rank: int = 0
    num_states: int = (
        0  # blocks of recurrent layers' states, the null block included; 0: the model has none
    )
    num_free_states: int = 0
    num_cached_states: int = 0  # held ones included
    num_drafts: list[int] = []  # verified drafts, by their place behind the last known token
    num_accepted: list[int] = []  # those of them that were right
    # Of experts on disk: wanted ones that were in memory and that were not, microseconds of
    # waiting, bytes read.
    expert_cache: tuple[int, ...] = ()


class StepOutput(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The tokens of one step, in columns: row i belongs to request rids[i], whose rows follow each
    other.

    A row with token -1 has no token: an abort or an error ended the request. logprobs: of each of
    its rows. digests: of the logits of each of its rows; behind the row that ends the request there
    may be more.
    """

    rids: bytes  # int64
    tokens: bytes  # int32
    finish: bytes  # uint8, FinishReason
    started: list[int] = []  # the requests (rids) that this was the first step of
    cached: dict[
        int, int
    ] = {}  # rid -> prompt tokens found in the prefix cache, sent once, with its first token
    stop_ids: dict[int, int] = {}  # rid -> the stop token that ended it (not an end-of-text token)
    logprobs: dict[int, list[Logprobs]] = {}
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    digests: dict[int, list[bytes]] = {}
    drafts: dict[
        int, tuple[int, int]
    ] = {}  # rid -> drafts that were verified, and how many of them were right
    kv_params: dict[int, dict[str, Any]] = {}  # rid -> a connector's words for whoever continues it
    errors: dict[int, str] = {}
    record: StepRecord | None = None


# How errors of a step begin that are the request's own doing.
NO_TOKEN_LEFT = "no token is left to choose"
GRAMMAR_FAILED = "structured output"


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The engine does not take this request. Never sent after its first token."""

    rid: int
    message: str
    code: str


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Answers a Ping. steps grows while the engine makes progress; busy: whether it should."""

    seq: int
    steps: int
    busy: bool


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The engine's last message. cause: empty after an ordered stop."""

    cause: str


class Joined(msgspec.Struct, frozen=True, tag=True):
    """This engine has joined the group of `epoch`."""

    epoch: int
    took_s: float


class LeftGroup(msgspec.Struct, frozen=True, tag=True):
    """This engine left its group, or could not form it. It keeps weights, K/V and requests and
    waits for a Join.

    missing: data-parallel ranks that seem to be gone; empty if unknown.
    """

    epoch: int
    cause: str
    missing: tuple[int, ...] = ()


class ExpertLoad(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Tokens that this engine's requests sent to each logical expert since the last report, without
    padding.
    """

    counts: bytes  # int64 [layers, experts], row-major
    num_layers: int
    version: int  # of the placement in force


class PlacementResult(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A placement is in force on this engine, or was given up (error) after its first `layers`
    layers, on all ranks alike: these layers are in force, and the others stay as they were."""

    version: int
    layers: int = 0
    moved_bytes: int = 0
    took_s: float = 0.0
    error: str = ""


class TraceEvent(msgspec.Struct, frozen=True, array_like=True):
    """One span of a step, in ns of the monotonic clock. track: "micro-batch 0", "transfer 0",
    "engine", ...
    """

    name: str
    track: str
    start_ns: int
    end_ns: int
    layer: int = -1


class Traced(msgspec.Struct, frozen=True, tag=True):
    """The spans of one rank in a traced step."""

    step: int
    dp_rank: int
    tp_rank: int
    events: list[TraceEvent]


EngineOut = (
    Phase
    | Ready
    | StepOutput
    | Refused
    | Pong
    | Stopped
    | Joined
    | LeftGroup
    | ExpertLoad
    | PlacementResult
    | Traced
)
