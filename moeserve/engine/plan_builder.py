"""Building a step's plan row by row, and the record that the scheduler keeps of a plan until its result comes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.plan import I32, BlockDiff, BlockMove, NewRequest, Slots, StepPlan

T = TypeVar("T", bound=np.generic)
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
