"""A plan in the making, and what the scheduler remembers of a plan until its result comes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.input_batch import Slots
from moeserve.engine.plan import I32, BlockDiff, BlockMove, NewRequest, StepPlan

T = TypeVar("T", bound=np.generic)
_NO_DIFF = BlockDiff(*(np.zeros(0, np.int32) for _ in range(3)))


@dataclass(slots=True)
class PlanBuilder:
    """Rows granted so far in this step. `budget` is what is left of the step's tokens."""

    num_groups: int
    budget: int
    slots: list[Slots] = field(default_factory=list)
    starts: list[I32] = field(default_factory=list)
    counts: list[I32] = field(default_factory=list)
    diffs: list[list[tuple[I32, I32, I32]]] = field(init=False)
    new_requests: list[NewRequest] = field(default_factory=list)
    loads: list[BlockMove] = field(default_factory=list)
    num_preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.diffs = [[] for _ in range(self.num_groups)]

    def grant(self, slots: Slots, starts: I32, counts: I32) -> None:
        self.slots.append(slots)
        self.starts.append(starts)
        self.counts.append(counts)
        self.budget -= int(counts.sum())

    def stage(self, group: int, slots: I32, indices: I32, blocks: I32) -> None:
        self.diffs[group].append((slots, indices, blocks))

    def finish(self, step: int, slots: Slots, samples: NDArray[np.bool_], stores: tuple[BlockMove, ...]) -> StepPlan:
        return StepPlan(
            step=step,
            slots_R=slots.astype(np.int32),
            starts_R=joined(self.starts),
            counts_R=joined(self.counts),
            samples_R=samples,
            diffs=tuple(self._diff(parts) for parts in self.diffs),
            new_requests=tuple(self.new_requests),
            stores=stores,
            loads=tuple(self.loads),
        )

    @staticmethod
    def _diff(parts: list[tuple[I32, I32, I32]]) -> BlockDiff:
        if not parts:
            return _NO_DIFF
        return BlockDiff(*(joined(list(column)) for column in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A plan whose result is not here yet: the tenants of its rows, and what to say of it afterwards."""

    plan: StepPlan
    slots: Slots
    occupancy: NDArray[np.int64]
    builder: PlanBuilder


def joined(parts: list[NDArray[T]]) -> NDArray[T]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
