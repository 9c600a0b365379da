"""The ranks that serve one model together. One rank needs no process group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """This rank among `size` ranks of one expert-parallel group."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in a world of {self.size}; ranks run from 0 to {self.size - 1}")

    def experts_of(self, num_experts: int) -> range:
        """The experts that this rank owns when they are dealt out in equal, contiguous runs.

        8 experts, rank 1 of 4 -> range(2, 4)
        """
        if num_experts % self.size:
            raise ValueError(f"{num_experts} experts cannot be dealt out evenly to {self.size} ranks")
        share = num_experts // self.size
        return range(self.rank * share, (self.rank + 1) * share)
