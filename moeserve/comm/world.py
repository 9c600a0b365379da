"""The position of one process among all processes that serve a model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """One rank of `size`. The ranks of an engine (tp_size of them) are consecutive."""

    rank: int = 0
    size: int = 1
    tp_size: int = 1  # processes of one engine
    ep: bool = True  # experts are sharded over all ranks; False: each rank has all of them
    ranks_on_host: int = 1  # ranks that share this machine's cores and memory
    host_rank: int = 0  # this rank's number among the ranks on its machine

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"rank {self.rank} is not in a world of {self.size}; ranks run from 0 to"
                f" {self.size - 1}"
            )
        if self.size % self.tp_size:
            raise ValueError(f"{self.size} ranks cannot be sharded over engines of {self.tp_size}")

    @property
    def tp_rank(self) -> int:
        """This rank's number within its engine."""
        return self.rank % self.tp_size

    @property
    def dp_rank(self) -> int:
        """The number of this rank's engine."""
        return self.rank // self.tp_size

    @property
    def num_expert_ranks(self) -> int:
        """The number of ranks over which the experts are sharded."""
        return self.size if self.ep else 1

    @property
    def expert_rank(self) -> int:
        """This rank's number among the ranks over which the experts are sharded."""
        return self.rank if self.ep else 0


def share(total: int, size: int, rank: int) -> slice:
    """Return a rank's contiguous part of `total` rows or columns.

    Each rank has ceil(total / size) rows or columns. The last ranks have fewer, or none.

    share(5, 4, 2) -> slice(4, 5), share(5, 4, 3) -> slice(5, 5)
    """
    num_each = -(-total // size)
    return slice(min(rank * num_each, total), min((rank + 1) * num_each, total))
