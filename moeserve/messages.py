"""Every message that crosses an actor's inbox or a process boundary. Never pickle: msgspec structs in msgpack.

    front end --EngineIn-->  engine        Submit, Abort, Drain, Ping, Call, Join, Place, TraceNext
    engine   --EngineOut--> front end      Phase, Ready, StepOutput, Refused, Pong, Answer, Stopped,
                                           Joined, Parted, ExpertLoad, Placed, Traced

Arrays travel as little-endian bytes (`int32`, `int64`, `uint8`), one message per step and front end, because
decoding one struct per request costs a hundred times more.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from moeserve.metrics import StepRecord
from moeserve.sampling import TokenSampling

PROTOCOL_VERSION = 1


class FinishReason:
    """One byte per request and step in `StepOutput.finish`."""

    NONE, STOP, LENGTH, ABORT, ERROR = range(5)
    NAMES = ("", "stop", "length", "abort", "error")


class Submit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A new request. `tokens` are its prompt and, for a replay, the tokens already emitted after it.

    num_prompt counts the prompt part of `tokens`. Lower `priority` values go first; ties go by arrival.
    `salt` keeps prefix-cache hits inside one tenant.
    """

    rid: int
    tokens: bytes  # int32
    num_prompt: int
    sampling: TokenSampling
    priority: int = 0
    salt: str = ""


class Abort(msgspec.Struct, frozen=True, tag=True):
    rids: list[int]


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish what runs and waits, accept nothing new, then stop. At `deadline_s` from now the rest is aborted."""

    deadline_s: float


class Ping(msgspec.Struct, frozen=True, tag=True):
    seq: int


class Call(msgspec.Struct, frozen=True, tag=True):
    """A rare administrative request, answered by `Answer` with the same id."""

    id: int
    what: Literal["reset_prefix_cache", "audit"]


class PlacementTable(msgspec.Struct, frozen=True, kw_only=True):
    """A placement on its way: see `moeserve.moe.placement.Placement`.

    experts: int32 [layers, num_ranks * experts_per_rank], the expert in each physical slot, row-major.
    """

    version: int
    num_ranks: int
    experts_per_rank: int
    num_experts: int
    experts: bytes


class Join(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Meet the other ranks and serve with them from now on: the membership of one epoch, as one engine sees it.

    A later Join replaces it; whatever of the earlier epoch is still connected is dropped first. hosts: the machine of
    each engine, by data-parallel rank (equal names share memory). directory: private folder for this epoch's Unix
    sockets, the same for all engines of a machine. store: host:port of the TCPStore that data-parallel rank 0 opens.
    vote: host:port at which it listens for the step vote, where there are several machines.
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

    @property
    def dp_size(self) -> int:
        return len(self.hosts)


class Place(msgspec.Struct, frozen=True, tag=True):
    """Prepare this placement in the background, layer by layer; the vote commits each layer on all ranks at once."""

    placement: PlacementTable


class TraceNext(msgspec.Struct, frozen=True, tag=True):
    """Record the next step that all ranks run, and send it as Traced."""


EngineIn = Submit | Abort | Drain | Ping | Call | Join | Place | TraceNext


class Phase(msgspec.Struct, frozen=True, tag=True):
    """Progress of start-up: `name` is a human's word, `percent` of the whole."""

    name: str
    percent: int
    elapsed_s: float


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine serves. What the front end must know to check and to tokenize requests."""

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
    step_s: float = 0.0  # the longest step to expect; 0: not worth mentioning
    num_moe_layers: int = 0
    num_experts: int = 0
    expert_bytes: int = 0  # of one expert in one layer
    checkpoint: str = ""  # fingerprint of what was loaded; "": nothing was
    notes: tuple[str, ...] = ()


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Alternatives at one position: the chosen (or prompt) token first, then the most likely ones in order."""

    ids: list[int]
    values: list[float]
    rank: int  # of the first id; 1 is the most likely


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of prompt tokens start .. start+len(rows)-1; position 0 has none and is not sent."""

    start: int
    rows: list[Logprobs]


class StepOutput(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """All tokens of one step, columnar: row i belongs to request rids[i].

    A row with token -1 carries no token (an abort or an error that ends the request).
    """

    rids: bytes  # int64
    tokens: bytes  # int32
    finish: bytes  # uint8, FinishReason
    cached: dict[int, int] = {}  # rid -> prompt tokens found in the prefix cache, sent once with its first token
    stop_ids: dict[int, int] = {}  # rid -> the stop token that ended it (not an end-of-text token)
    logprobs: dict[int, Logprobs] = {}
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    errors: dict[int, str] = {}
    record: StepRecord | None = None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot take this request (never after its first token)."""

    rid: int
    message: str
    code: str


class Pong(msgspec.Struct, frozen=True, tag=True):
    """`steps` moves on while the engine makes progress; `busy` says whether it should."""

    seq: int
    steps: int
    busy: bool


class Answer(msgspec.Struct, frozen=True, tag=True):
    id: int
    ok: bool
    detail: str = ""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The engine's last word; `cause` is empty after an ordered stop."""

    cause: str


class Joined(msgspec.Struct, frozen=True, tag=True):
    """This engine serves in `epoch`."""

    epoch: int
    took_s: float


class Parted(msgspec.Struct, frozen=True, tag=True):
    """This engine lost its group (or could not form it), keeps weights, K/V and requests, and waits for a Join.

    missing: data-parallel ranks that seem to be gone; empty when it cannot say.
    """

    epoch: int
    cause: str
    missing: tuple[int, ...] = ()


class ExpertLoad(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Tokens that this engine's requests sent to each logical expert since its last report; padding is not counted."""

    counts: bytes  # int64 [layers, experts], row-major
    num_layers: int
    num_steps: int
    version: int  # of the placement in force


class Placed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A placement is in force on this engine, or (error) was given up after its first `layers` layers, on all ranks
    alike: these are in force all the same, and the other layers stay as they were."""

    version: int
    layers: int = 0
    moved_bytes: int = 0
    took_s: float = 0.0
    error: str = ""


class TraceEvent(msgspec.Struct, frozen=True, array_like=True):
    """One span of a step. track: "micro-batch 0", "micro-batch 1", "transfer 0", "engine", ... Times in ns on the
    monotonic clock."""

    name: str
    track: str
    start_ns: int
    end_ns: int
    layer: int = -1


class Traced(msgspec.Struct, frozen=True, tag=True):
    """What one rank (data-parallel, tensor-parallel) did in a traced step of the group."""

    step: int
    dp_rank: int
    tp_rank: int
    events: list[TraceEvent]


EngineOut = (
    Phase | Ready | StepOutput | Refused | Pong | Answer | Stopped | Joined | Parted | ExpertLoad | Placed | Traced
)
