"""One process among those that serve one model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """One rank among `size`: engines of tp_size processes each, an engine's ranks side by side.

    ep: experts are sharded over all ranks; otherwise each rank has all of them. ranks_on_host: the
    number of ranks that share this machine's cores and memory. host_rank: this rank's number among
    those.
    """

    rank: int = 0
    size: int = 1
    tp_size: int = 1
    ep: bool = True
    ranks_on_host: int = 1
    host_rank: int = 0

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
        """The number of ranks that the experts are sharded over."""
        return self.size if self.ep else 1

    @property
    def expert_rank(self) -> int:
        """This rank's number among those."""
        return self.rank if self.ep else 0


def share(total: int, size: int, rank: int) -> slice:
    """Return a rank's contiguous part of `total` rows or columns: ceil(total / size), the last
    ranks fewer or none.

    (5, 4, 2) -> slice(4, 5), (5, 4, 3) -> slice(5, 5)
    """
    each = -(-total // size)
    return slice(min(rank * each, total), min((rank + 1) * each, total))
