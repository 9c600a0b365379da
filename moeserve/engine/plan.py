"""The interface between scheduler and runner: the plan of one step, and its result.

Suffixes of arrays are their dimensions. R: rows of the step, one per scheduled request. S: the rows
that sample (those with `samples_R`). N: new block-table entries, drafts, or sampled tokens. L: MoE
layers. E: logical experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeserve.messages import SAMPLE, Logprobs, PromptLogprobs, TraceEvent
from moeserve.sampling import GrammarSpec, TokenSampling

T = TypeVar("T", bound=np.generic)
I32 = NDArray[np.int32]
Slots = NDArray[np.intp]
# The most by which two micro-batches may differ in size, as a share of all tokens. If every split
# between two requests is less even, `best_split` splits a request.
MAX_UNEVENNESS = 0.15
# The same limit if requests cannot be split. If no split is within it, there is one micro-batch.
MAX_UNEVENNESS_WHOLE = 0.5


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that gets a slot in this step. The runner sets up the slot before the step runs."""

    slot: int
    tokens: I32  # the prompt and, after a preemption or a replay, the tokens generated so far
    num_prompt: int  # length of the prompt part of `tokens`
    sampling: TokenSampling
    grammar_ticket: int = 0  # ticket of the GrammarJob that prepared its grammar; 0: none
    task: str = SAMPLE  # see `Submit.task`


class GrammarJob(msgspec.Struct, frozen=True):
    """A job to compile a grammar and replay the answer so far, before a step needs the grammar."""

    ticket: int
    grammar: GrammarSpec
    answer: list[int]  # the tokens generated so far
    priority: int = 0  # lower values first, ties by ticket


@dataclass(frozen=True, slots=True)
class BlockDiff:
    """New entries of one KV group's block table: table[slots_N[i], indices_N[i]] = blocks_N[i]."""

    slots_N: I32
    indices_N: I32
    blocks_N: I32


@dataclass(frozen=True, slots=True)
class BlockMove:
    """A copy of one KV block between the device and the connector, before the forward pass."""

    block: int  # number of the block in the device's pool
    connector_entry: int  # returned by `KVConnector.load` or `save` (engine/connector.py)
    pool_index: int = 0  # index of the device's pool: 0 for KV entries, 1 for recurrent states


@dataclass(frozen=True, slots=True)
class StepDecision:
    """The common decision of all engines about a step that they run together."""

    step: int  # the number of the vote within its epoch; votes to park (sleep) count, too
    ubatches: int = 1  # micro-batches: 1 or 2
    most_tokens: tuple[int, int] = (0, 0)  # per micro-batch, the largest number on any engine
    active: int = 0  # progress of the placement that is active in this step (runner/experts.py)
    trace: bool = False  # whether to record this step


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step.

    Row i computes the positions starts_R[i] .. starts_R[i] + counts_R[i] - 1 of the request in slot
    slots_R[i]. The last num_drafts_R[i] of them are drafts.

    A row with samples_R[i] reaches the newest token of its request. It samples a token after its
    last position, and also before each draft in order to verify it. The runner keeps sampled tokens
    in a table on the device, so the next step can be planned before the host knows them.
    """

    step: int
    slots_R: I32
    starts_R: I32
    counts_R: I32
    samples_R: NDArray[np.bool_]
    diffs: tuple[BlockDiff, ...]  # one per KV group
    new_requests: tuple[NewRequest, ...] = ()
    stores: tuple[BlockMove, ...] = ()  # copies to the connector, run before `loads`
    loads: tuple[BlockMove, ...] = ()  # copies from the connector
    num_drafts_R: I32 | None = None  # None: there are no drafts in this step
    drafts_N: I32 | None = None  # the drafts; None: each rank's proposer has them
    propose: bool = False  # whether to draft tokens for the next step
    split_at: int = 0  # tokens in the first micro-batch, if there are two
    decision: StepDecision | None = None  # None: this engine is in no group

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all rows."""
        return int(self.counts_R.sum())

    @property
    def uniform_len(self) -> int | None:
        """The number of tokens in each row; None if rows differ. The plan must have rows."""
        first = int(self.counts_R[0])
        return first if (self.counts_R == first).all() else None


@dataclass(slots=True)
class TaskOutput:
    """The results of one request in one step, besides its tokens (runner/tasks.py)."""

    logprobs: list[Logprobs] = field(default_factory=list)  # one for each of its tokens
    digests: list[bytes] = field(default_factory=list)  # one for the logits of each token
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step. The dictionaries are keyed by slot, and empty for most steps."""

    step: int
    tokens_N: I32  # sampled tokens of the rows with `StepPlan.samples_R`, row after row
    counts_S: I32 | None = None  # tokens of each of these rows; None: one each
    # Number of drafts of each row for its next step; None: no proposer
    num_drafts_S: I32 | None = None
    outputs: dict[int, TaskOutput] = field(default_factory=dict)
    # Error messages of requests that failed. A failed request has one token, -1. Other requests
    # continue.
    failed: dict[int, str] = field(default_factory=dict)
    # How many of the slot's tokens in this step complete the text by its grammar.
    complete: dict[int, int] = field(default_factory=dict)
    device_us: int = 0
    idle_us: int = 0  # time between the previous step, with its drafting, and this step
    drafting_us: int = 0  # time of the draft model after the previous step
    comm_us: int = 0
    exposed_comm_us: int = 0
    expert_tokens_LE: NDArray[np.int64] | None = None  # tokens per layer and expert
    events: tuple[TraceEvent, ...] = ()
    expert_cache: tuple[int, ...] = ()  # see `StepRecord.expert_cache`
    kv_lost: bool = False  # whether some of the plan's `loads` failed

    @property
    def took_us(self) -> int:
        """The time of the step, including the drafting and the idle time before it.

        The device is idle while the host works, so idle time counts. It counts at most as much as
        the step itself: a longer idle time means that there was no work.
        """
        return self.device_us + self.drafting_us + min(self.idle_us, self.device_us)


class StepHandle(Protocol):
    """A step that was started."""

    async def result(self) -> StepResult:
        """Wait for the step and return its result. Raises the step's error."""


class Runner(Protocol):
    """The engine core's view of a model runner."""

    def start(self, plan: StepPlan) -> StepHandle:
        """Queue a step without waiting for it. Steps run in the order of their `start`."""

    def prepare_grammar(self, job: GrammarJob, on_done: Callable[[str], None]) -> None:
        """Prepare a grammar on all ranks that sample, in the background.

        `on_done` is called once, from any thread: with "" when the grammar is ready to be used in a
        plan, otherwise with an error message.
        """

    def drop_grammars(self, tickets: Sequence[int]) -> None:
        """Drop prepared grammars that no plan will use. Unknown tickets are ignored."""

    def close(self) -> None:
        """Wait for the running step, and free the device's resources."""


def best_split(counts_R: I32, *, whole: bool = False) -> int:
    """Return the number of tokens in the first of two micro-batches; 0: do not split.

    The split is between two requests if the halves are even enough, otherwise inside a request.

    counts_R: tokens of each row, at least one.
    whole: never split a request. Recurrent layers need whole requests, because within a call they
    pass their state from tile to tile without storing the state in a block. So do models that
    decode blocks (engine/decoding.py).

    [1, 1, 1, 1] -> 2, [100] -> 50, [3, 90, 3] -> 48; whole: [30, 70] -> 30, [3, 90, 3] -> 0
    """
    total = int(counts_R.sum())
    if total < 2:
        return 0
    ends = np.cumsum(counts_R)[:-1]
    if len(ends):
        best = int(ends[np.abs(2 * ends - total).argmin()])
        if abs(2 * best - total) <= (MAX_UNEVENNESS_WHOLE if whole else MAX_UNEVENNESS) * total:
            return best
    return 0 if whole else total // 2


def ranges(starts: NDArray[np.integer], counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the ranges starts[i] .. starts[i] + counts[i] - 1, concatenated.

    starts [5, 2], counts [2, 1] -> [5, 6, 2]
    """
    return np.repeat(starts.astype(np.int64) - (counts.cumsum() - counts), counts) + np.arange(
        int(counts.sum())
    )


def concatenate(triples: list[tuple[NDArray[T], I32, I32]]) -> tuple[NDArray[T], I32, I32]:
    """Concatenate triples of arrays column by column, without a copy if there is only one."""
    if len(triples) == 1:
        return triples[0]
    first, second, third = zip(*triples, strict=True)
    return np.concatenate(first), np.concatenate(second), np.concatenate(third)


def _pack(value: Any) -> tuple[str, bytes]:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(type(value).__name__)
    return value.dtype.str, value.tobytes()


def _unpack(_: type, packed: Any) -> Any:
    array = np.frombuffer(packed[1], packed[0])
    return array.astype(array.dtype.newbyteorder("="))  # a copy, because torch needs it writable


# Plans as bytes: the leader sends them to the other processes of a tensor-parallel engine.
encode_plan = msgspec.msgpack.Encoder(enc_hook=_pack).encode
decode_plan = msgspec.msgpack.Decoder(StepPlan, dec_hook=_unpack).decode
