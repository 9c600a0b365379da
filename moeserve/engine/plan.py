"""What one step does: the scheduler's only output, the runner's only input, and what comes back.

R rows scheduled this step, S rows that sample (R rows where `samples_R`), N staged block-table entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moeserve.messages import Logprobs, PromptLogprobs, TraceEvent
from moeserve.sampling import TokenSampling

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request takes a slot: the runner writes its tokens and sampling row before anything reads them.

    tokens: prompt and, after a preemption or a replay, what was emitted since. num_prompt of them are prompt.
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
    """What all ranks decided about a step that they run together; the same on each of them.

    step: the number of the vote that decided it, within its epoch; votes that decide to rest count as well.
    micro-batches: 1 or
    2. most_tokens: in each micro-batch, of the engine that has most. placed: how far the pending placement is to be in
    force
    (see runner/experts.py). trace: record this step.
    """

    step: int
    ubatches: int = 1
    most_tokens: tuple[int, int] = (0, 0)
    placed: int = 0
    trace: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Row i computes positions starts_R[i] .. starts_R[i]+counts_R[i]-1 of the request in slots_R[i].

    A row with samples_R ends at its last known token and samples the next one; the runner keeps that token in
    its own table, so the step after this one may be planned before it is known here.
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
        return int(self.counts_R.sum())

    @property
    def uniform_len(self) -> int | None:
        """The tokens of every row, None if they differ. For a plan with rows."""
        first = int(self.counts_R[0])
        return first if (self.counts_R == first).all() else None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced. tokens_S follows the sampling rows of its plan, in their order.

    The dictionaries are keyed by slot and empty for most steps. A slot in `failed` sampled nothing: its request
    ends with that message and every other one goes on.
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
    """A step on its way."""

    async def result(self) -> StepResult: ...


class Runner(Protocol):
    """What the engine core needs of whatever executes plans. Plans run strictly in the order of `start`."""

    def start(self, plan: StepPlan) -> StepHandle: ...

    def close(self) -> None: ...
