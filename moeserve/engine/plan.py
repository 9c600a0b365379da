"""The plan of one step, which is the scheduler's output and the runner's input, its builder, and the step's result.

R rows scheduled in the step, S rows that sample (those rows where `samples_R`), N new block-table entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from moeserve.messages import Logprobs, PromptLogprobs, TraceEvent
from moeserve.sampling import TokenSampling

I32 = NDArray[np.int32]
Slots = NDArray[np.intp]
T = TypeVar("T", bound=np.generic)
UNEVEN = 0.15  # share of all tokens by which two micro-batches may differ before a request is split


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that takes a slot: the runner writes its tokens and sampling row before anything reads them.

    tokens: prompt and, after a preemption or a replay, the tokens generated since; the first num_prompt are prompt.
    """

    slot: int
    tokens: I32
    num_prompt: int
    sampling: TokenSampling


@dataclass(frozen=True, slots=True)
class BlockDiff:
    """New entries of one KV group's block table: table[slots_N[i], indices_N[i]] = blocks_N[i]."""

    slots_N: I32
    indices_N: I32
    blocks_N: I32


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Copy one KV block between the device pool and a host block of the block store, before the forward pass."""

    block: int
    host_block: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """The decision of all ranks about a step that they run together; the same on each of them.

    step: the number of the vote within its epoch, counting votes that decide to rest. ubatches: 1 or 2 micro-batches.
    most_tokens: per micro-batch, the tokens of the engine that has most. placed: how far the pending placement is to
    be in force (runner/experts.py). trace: whether to record this step.
    """

    step: int
    ubatches: int = 1
    most_tokens: tuple[int, int] = (0, 0)
    placed: int = 0
    trace: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Row i computes positions starts_R[i] .. starts_R[i]+counts_R[i]-1 of the request in slots_R[i].

    A row with samples_R ends at its last known token and samples the next one. The runner keeps that token in its own
    table, so the following step may be planned before the host knows the token.
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
    split_at: int = 0  # tokens of the first micro-batch, if the step runs in two
    agreed: Agreed | None = None  # None: this engine serves alone

    def __post_init__(self) -> None:
        rows = len(self.slots_R)
        assert len(self.starts_R) == len(self.counts_R) == len(self.samples_R) == rows, self
        assert rows == 0 or int(self.counts_R.min()) > 0, self

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows together."""
        return int(self.counts_R.sum())

    @property
    def uniform_len(self) -> int | None:
        """Tokens of every row, or None if rows differ. The plan must have rows."""
        first = int(self.counts_R[0])
        return first if (self.counts_R == first).all() else None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step. tokens_S has the sampled tokens in the order of the plan's sampling rows.

    The dictionaries are keyed by slot and empty for most steps. A slot in `failed` sampled nothing: its request ends
    with that message, and all others go on.
    """

    step: int
    tokens_S: I32
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    device_us: int = 0
    comm_us: int = 0
    exposed_comm_us: int = 0
    load_LE: NDArray[np.int64] | None = None  # tokens per layer and logical expert of this step
    events: tuple[TraceEvent, ...] = ()


class StepHandle(Protocol):
    """A step that was started."""

    async def result(self) -> StepResult:
        """Waits for the step and returns its result. Raises the step's error."""
        ...


class Runner(Protocol):
    """The engine core's view of a model runner, which executes plans strictly in the order of `start`."""

    def start(self, plan: StepPlan) -> StepHandle:
        """Queues a step without waiting for it."""
        ...

    def close(self) -> None:
        """Waits for the running step and frees the device's resources."""
        ...


def best_split(counts_R: I32) -> int:
    """Returns the tokens of the first of two micro-batches; 0 when there is nothing to split.

    The split falls between two requests if the halves are even enough, otherwise inside one. counts_R: tokens of each
    row, at least one. [1, 1, 1, 1] -> 2, [100] -> 50, [3, 90, 3] -> 48
    """
    total = int(counts_R.sum())
    if total < 2:
        return 0
    ends = np.cumsum(counts_R)[:-1]
    if len(ends):
        best = int(ends[np.abs(2 * ends - total).argmin()])
        if abs(2 * best - total) <= UNEVEN * total:
            return best
    return total // 2


_NO_DIFF = BlockDiff(*(np.zeros(0, np.int32) for _ in range(3)))


@dataclass(slots=True)
class PlanBuilder:
    """The rows that the scheduler has granted so far in this step. budget: tokens that are left to grant."""

    budget: int
    rows: list[tuple[Slots, I32, I32]] = field(default_factory=list)  # slots, starts, counts
    new_requests: list[NewRequest] = field(default_factory=list)
    num_preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def grant(self, slots: Slots, starts: I32, counts: I32) -> None:
        """Adds rows that compute counts[i] positions from starts[i] on."""
        self.rows.append((slots, starts, counts))
        self.budget -= int(counts.sum())


@dataclass(slots=True)
class BlockChanges:
    """Changes of block tables and cached blocks that the runner must make before it runs the plan."""

    diffs: list[list[tuple[I32, I32, I32]]]  # per KV group: slots, indices, blocks
    stores: list[BlockMove] = field(default_factory=list)
    loads: list[BlockMove] = field(default_factory=list)

    def set_entries(self, group: int, slots: I32, indices: I32, blocks: I32) -> None:
        """Records new entries of one group's block table."""
        self.diffs[group].append((slots, indices, blocks))

    def block_diffs(self) -> tuple[BlockDiff, ...]:
        """Returns the recorded table entries, one diff per KV group."""
        return tuple(BlockDiff(*concat_columns(parts)) if parts else _NO_DIFF for parts in self.diffs)


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A plan without a result yet. occupancy: which occupant of each row's slot the plan was made for."""

    plan: StepPlan
    slots: Slots
    occupancy: NDArray[np.int64]
    builder: PlanBuilder


def concat_columns(parts: list[tuple[NDArray[T], I32, I32]]) -> tuple[NDArray[T], I32, I32]:
    """Concatenates tuples of arrays column by column, without a copy for a single one."""
    if len(parts) == 1:
        return parts[0]
    first, second, third = zip(*parts, strict=True)
    return np.concatenate(first), np.concatenate(second), np.concatenate(third)
