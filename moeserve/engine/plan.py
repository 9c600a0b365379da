"""The plan of one step, which is the scheduler's output and the runner's input, and the step's
result.

R rows scheduled in the step, S rows that sample (those rows where `samples_R`), N new block-table
entries, or sampled tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeserve.messages import SAMPLE, Logprobs, PromptLogprobs, TraceEvent
from moeserve.sampling import GrammarSpec, TokenSampling

I32 = NDArray[np.int32]
Slots = NDArray[np.intp]
UNEVEN = 0.15  # share of all tokens by which two micro-batches may differ before a request is split
UNEVEN_WHOLE = 0.5  # likewise, before requests that cannot be split run in one


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that takes a slot: the runner writes its tokens and sampling row before anything
    reads them.

    tokens: prompt and, after a preemption or a replay, the tokens generated since; the first
    num_prompt are prompt.
    """

    slot: int
    tokens: I32
    num_prompt: int
    sampling: TokenSampling
    grammar_ticket: int = 0  # of the GrammarJob that prepared its grammar; 0: none did
    task: str = SAMPLE  # see `Submit.task`


class GrammarJob(msgspec.Struct, frozen=True):
    """Compile a grammar and replay the answer so far, so that a step can use it at once."""

    ticket: int
    grammar: GrammarSpec
    answer: list[int]
    priority: int = 0  # lower values go first, ties by ticket


@dataclass(frozen=True, slots=True)
class BlockDiff:
    """New entries of one KV group's block table: table[slots_N[i], indices_N[i]] = blocks_N[i]."""

    slots_N: I32
    indices_N: I32
    blocks_N: I32


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Copy one KV block between the device pool and a host block of the block store, before the
    forward pass.
    """

    block: int
    host_block: int
    pool: int = 0


@dataclass(frozen=True, slots=True)
class StepDecision:
    """The decision of all ranks about a step that they run together; the same on each of them.

    step: the number of the vote within its epoch, counting votes that decide to rest. ubatches: 1
    or 2 micro-batches. most_tokens: per micro-batch, the tokens of the engine that has most.
    active: how far the pending placement is to be in force (runner/experts.py). trace: whether to
    record this step.
    """

    step: int
    ubatches: int = 1
    most_tokens: tuple[int, int] = (0, 0)
    active: int = 0
    trace: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Row i computes positions starts_R[i] .. starts_R[i]+counts_R[i]-1 of the request in
    slots_R[i].

    A row with samples_R ends at its last known token, or at the last of num_drafts_R[i] drafts
    behind it, and samples the next token there and at each position before a draft. The runner
    keeps tokens in its own table, so the following step may be planned before the host knows them.
    propose: whether drafts of the next tokens are wanted.
    """

    step: int
    slots_R: I32
    starts_R: I32
    counts_R: I32
    samples_R: NDArray[np.bool_]
    diffs: tuple[BlockDiff, ...]  # one per KV group
    new_requests: tuple[NewRequest, ...] = ()
    stores: tuple[BlockMove, ...] = ()  # device block -> store host block, run first
    loads: tuple[BlockMove, ...] = ()  # store host block -> device block
    num_drafts_R: I32 | None = None  # None: there are no drafts in this step
    drafts_N: I32 | None = None  # None: each rank's own proposer has them
    propose: bool = False
    split_at: int = 0  # tokens of the first micro-batch, if the step runs in two
    decision: StepDecision | None = None  # None: this engine serves alone

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows together."""
        return int(self.counts_R.sum())

    @property
    def uniform_len(self) -> int | None:
        """Tokens of every row, or None if rows differ. The plan must have rows."""
        first = int(self.counts_R[0])
        return first if (self.counts_R == first).all() else None


@dataclass(slots=True)
class TaskOutput:
    """What a request's task made of one step beside tokens (runner/tasks.py)."""

    logprobs: list[Logprobs] = field(default_factory=list)  # of each of its tokens
    digests: list[bytes] = field(default_factory=list)  # of the logits behind each of its tokens
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step. The dictionaries are keyed by slot and empty for most steps."""

    step: int
    tokens_N: I32  # of the rows that yield tokens (`StepPlan.samples_R`), one row after the other
    counts_S: I32 | None = None  # tokens of each of these rows; None: one each
    drafts_S: I32 | None = None  # drafts that each has for its next step; None: nothing proposes
    outputs: dict[int, TaskOutput] = field(default_factory=dict)
    # Messages. The slot's one token is -1, its request ends, and all others continue.
    failed: dict[int, str] = field(default_factory=dict)
    # How many of the slot's tokens complete the text that its grammar describes.
    complete: dict[int, int] = field(default_factory=dict)
    device_us: int = 0
    idle_us: int = 0  # from the end of the step before, and its drafting, to the start of this one
    drafting_us: int = 0  # of the step before: a model guessed these drafts
    comm_us: int = 0
    exposed_comm_us: int = 0
    load_LE: NDArray[np.int64] | None = None  # tokens per layer and logical expert of this step
    events: tuple[TraceEvent, ...] = ()
    expert_cache: tuple[int, ...] = ()  # as StepRecord has it
    kv_lost: bool = False  # some of the plan's `loads` did not bring what they should

    @property
    def took_us(self) -> int:
        """The step's time, with the drafting and the idle time before it: that of the host's work,
        which overlaps with drafting. Idle for longer than the step means that there was nothing to
        do."""
        return self.device_us + self.drafting_us + min(self.idle_us, self.device_us)


class StepHandle(Protocol):
    """A step that was started."""

    async def result(self) -> StepResult:
        """Waits for the step and returns its result. Raises the step's error."""


class Runner(Protocol):
    """The engine core's view of a model runner, which executes plans strictly in the order of
    `start`.
    """

    def start(self, plan: StepPlan) -> StepHandle:
        """Queues a step without waiting for it."""

    def prepare_grammar(self, job: GrammarJob, on_done: Callable[[str], None]) -> None:
        """Prepare a grammar on all ranks that sample, beside the steps.

        `on_done` is called once, from any thread: with "" when a plan may have the request, else
        with the reason why no plan can.
        """

    def drop_grammars(self, tickets: Sequence[int]) -> None:
        """Forget prepared grammars that no plan will name. Unknown tickets are ignored."""

    def close(self) -> None:
        """Waits for the running step and frees the device's resources."""


def best_split(counts_R: I32, *, whole: bool = False) -> int:
    """Returns the tokens of the first of two micro-batches; 0 when there is nothing to split.

    The split falls between two requests if the halves are even enough, otherwise inside one. whole:
    never inside one, as a recurrence needs it, which goes on from tile to tile of a call without a
    block for each. counts_R: tokens of each row, at least one. [1, 1, 1, 1] -> 2, [100] -> 50, [3,
    90, 3] -> 48; whole: [30, 70] -> 30, [3, 90, 3] -> 0
    """
    total = int(counts_R.sum())
    if total < 2:
        return 0
    ends = np.cumsum(counts_R)[:-1]
    if len(ends):
        best = int(ends[np.abs(2 * ends - total).argmin()])
        if abs(2 * best - total) <= (UNEVEN_WHOLE if whole else UNEVEN) * total:
            return best
    return 0 if whole else total // 2


def ranges(starts: NDArray[np.integer], counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """Returns starts[i] .. starts[i] + counts[i] - 1, one range after the other.

    starts [5, 2], counts [2, 1] -> [5, 6, 2]
    """
    return np.repeat(starts.astype(np.int64) - (counts.cumsum() - counts), counts) + np.arange(
        int(counts.sum())
    )


def _pack(value: Any) -> tuple[str, bytes]:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(type(value).__name__)
    return value.dtype.str, value.tobytes()


def _unpack(_: type, packed: Any) -> Any:
    array = np.frombuffer(packed[1], packed[0])
    return array.astype(
        array.dtype.newbyteorder("=")
    )  # a copy: torch wants memory that it may write to


# A plan as bytes, for the other processes of an engine, which execute the same plans as its leader.
encode_plan = msgspec.msgpack.Encoder(enc_hook=_pack).encode
decode_plan = msgspec.msgpack.Decoder(StepPlan, dec_hook=_unpack).decode
