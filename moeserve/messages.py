"""The messages between front end and engine: msgspec structs, sent as msgpack between processes.

    front end -> engine (EngineIn)     Submit, Abort, AbortAll, Drain, Ping, Join,
                                       UpdatePlacement, TraceNext
    engine -> front end (EngineOut)    Phase, Ready, StepOutput, Refused, Pong, Stopped, Joined,
                                       LeftGroup, ExpertLoad, PlacementResult, Traced

The results of a step are one message with arrays as little-endian bytes (`int32`, `int64`,
`uint8`), because decoding one struct per request would cost a hundred times more.
"""

from typing import Any

import msgspec

from moeserve.sampling import TokenSampling

PROTOCOL_VERSION = 2
# Names of `RowTask`s (runner/tasks.py), which turn a request's hidden states into results.
SAMPLE = "sample"
TASKS = (SAMPLE,)


class FinishReason:
    """The values of `StepOutput.finish`."""

    NONE, STOP, LENGTH, ABORT, ERROR = range(5)
    NAMES = ("", "stop", "length", "abort", "error")


class Submit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Start a request."""

    rid: int
    tokens: bytes  # int32: the prompt; for a resumed request also the tokens generated so far
    num_prompt: int  # length of the prompt in `tokens`
    sampling: TokenSampling
    priority: int = 0  # lower values run first; ties by arrival
    salt: str = ""  # only requests with the same salt share prefix-cache blocks
    task: str = SAMPLE  # one of `TASKS`


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End these requests at once. Unknown ids are ignored."""

    rids: list[int]


class AbortAll(msgspec.Struct, frozen=True, tag=True):
    """End all requests at once, because their front end is gone.

    The next front end submits the requests that it knows again.
    """


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Refuse new requests, finish the running ones, then stop the engine."""

    deadline_s: float  # seconds after which the remaining requests are aborted


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Request a Pong with the same seq."""

    seq: int


class PlacementTable(msgspec.Struct, frozen=True, kw_only=True):
    """A `moeserve.moe.placement.Placement` as a message."""

    version: int
    num_ranks: int
    experts_per_rank: int
    num_experts: int
    # int32 [layers, num_ranks * experts_per_rank], row-major: each physical expert's logical expert
    experts: bytes


class Join(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Connect the engine with the other ranks of its group, for one epoch of membership.

    A Join replaces an earlier Join, whose connections the engine drops first.
    """

    epoch: int
    dp_rank: int
    tp_size: int
    hosts: tuple[str, ...]  # the machine of each engine, by dp_rank; equal names share memory
    directory: str  # private directory for Unix sockets, the same for all engines of a machine
    # Where dp_rank 0 serves the store of the ranks' addresses: host:port, or on a single machine
    # the path of a Unix socket.
    store: str
    token: str
    placement: PlacementTable | None = None  # None: a model without experts, or ep off
    vote: str = ""  # host:port where dp_rank 0 serves the step vote, if there are several machines


class UpdatePlacement(msgspec.Struct, frozen=True, tag=True):
    """Prepare a placement in the background, layer by layer.

    The step vote activates each layer on all ranks at the same step.
    """

    placement: PlacementTable


class TraceNext(msgspec.Struct, frozen=True, tag=True):
    """Record the next step that all ranks run. Each rank answers with a Traced."""


EngineIn = Submit | Abort | AbortAll | Drain | Ping | Join | UpdatePlacement | TraceNext


class Phase(msgspec.Struct, frozen=True, tag=True):
    """The progress of the engine's start."""

    name: str  # description of the phase, for people
    percent: int  # percent of the whole start
    elapsed_s: float


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine is ready to serve, with the facts that the front end needs to check requests."""

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
    step_s: float = 0.0  # expected duration of the longest step; 0: short
    num_moe_layers: int = 0
    num_experts: int = 0
    expert_bytes: int = 0  # size of one expert in one layer
    checkpoint: str = ""  # fingerprint of the loaded checkpoint; "": none was loaded
    # Everything that decides the bits of a request's logits; empty: they depend on other requests
    numerics: dict[str, str] = {}
    notes: tuple[str, ...] = ()


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at one position: of the chosen (or prompt) token, then of the most likely tokens."""

    ids: list[int]
    values: list[float]
    rank: int  # rank of the first id, by probability; 1 is the most likely


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of prompt tokens start .. start+len(rows)-1. Position 0 has none and is not sent."""

    start: int
    rows: list[Logprobs]


class StepRecord(msgspec.Struct, kw_only=True, array_like=True):
    """The work and the cost of one engine step, for metrics, dashboards and benchmarks."""

    step: int
    at_s: float = 0.0  # start of the step on the monotonic clock
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
    comm_us: int = 0  # duration of transfers between ranks, summed
    exposed_comm_us: int = 0  # the part of comm_us during which the model waited
    ubatches: int = 1
    vote_us: int = 0
    dp_rank: int = 0
    # Slots for states of recurrent layers, including the null slot; 0: the model has none
    num_states: int = 0
    num_free_states: int = 0
    num_cached_states: int = 0  # including those in use
    num_drafts: list[int] = []  # verified draft tokens, by position after the last sampled token
    num_accepted: list[int] = []  # accepted draft tokens, likewise
    # With experts on disk: hits, misses, microseconds of waiting, bytes read. Otherwise empty.
    expert_cache: tuple[int, ...] = ()


class StepOutput(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The tokens of one step, as columns.

    Row i is a token of request rids[i]. A request may have several rows, one after another. A row
    with token -1 has no token: an abort or an error ended the request.
    """

    rids: bytes  # int64
    tokens: bytes  # int32
    finish: bytes  # uint8, FinishReason
    started: list[int] = []  # rids of the requests whose first step this was
    # rid -> prompt tokens found in the prefix cache; sent once, with the first token
    cached: dict[int, int] = {}
    stop_ids: dict[int, int] = {}  # rid -> the stop token that ended it (not an end-of-text token)
    logprobs: dict[int, list[Logprobs]] = {}  # rid -> logprobs of each of its rows
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    # rid -> digest of the logits of each of its rows; may have more entries than the request has
    # rows if it ends in this step
    digests: dict[int, list[bytes]] = {}
    drafts: dict[int, tuple[int, int]] = {}  # rid -> verified draft tokens, accepted ones
    # rid -> parameters of the KV connector for the engine that continues the request
    kv_params: dict[int, dict[str, Any]] = {}
    errors: dict[int, str] = {}
    record: StepRecord | None = None


# Prefixes of errors in `StepOutput.errors` that a request itself caused
NO_TOKEN_LEFT = "no token is left to choose"
GRAMMAR_FAILED = "structured output"


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The engine rejects this request. Never sent after its first token."""

    rid: int
    message: str
    code: str


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to a Ping."""

    seq: int
    steps: int  # grows while the engine makes progress
    busy: bool  # the engine has work, so `steps` should grow


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The engine's last message."""

    cause: str  # empty after a requested stop


class Joined(msgspec.Struct, frozen=True, tag=True):
    """This engine has joined the group of `epoch`."""

    epoch: int
    took_s: float


class LeftGroup(msgspec.Struct, frozen=True, tag=True):
    """This engine left its group, or could not form it.

    It keeps its weights, KV cache and requests, and waits for a Join.
    """

    epoch: int
    cause: str
    missing: tuple[int, ...] = ()  # data-parallel ranks that seem to be gone; empty if unknown


class ExpertLoad(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Tokens of this engine's requests per logical expert since the last report.

    Padding tokens are not counted.
    """

    counts: bytes  # int64 [layers, experts], row-major
    num_layers: int
    version: int  # version of the active placement


class PlacementResult(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A placement is active on this engine, or has failed after its first `layers` layers.

    error: why the placement has failed; "": it is active. After a failure, all ranks have the same
    state: the first `layers` layers are active, and the others are unchanged.
    """

    version: int
    layers: int = 0
    moved_bytes: int = 0
    took_s: float = 0.0
    error: str = ""


class TraceEvent(msgspec.Struct, frozen=True, array_like=True):
    """One span of a step. Times in ns of the monotonic clock."""

    name: str
    track: str  # "micro-batch 0", "transfer 0", "engine", ...
    start_ns: int
    end_ns: int
    layer: int = -1  # -1: outside of layers


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
