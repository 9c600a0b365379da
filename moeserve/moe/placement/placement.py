"""The map between logical and physical experts: immutable, versioned, the same on every rank.

L MoE layers, E logical experts, S physical experts of all ranks; physical expert p is local expert
p % experts_per_rank of rank p // experts_per_rank. Every logical expert has one physical expert or
several (replicas).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeserve.messages import PlacementTable

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines under the ranks, with equally many consecutive ranks on each.

    groups: the router's, if each token gets experts of some of them only: they stay on a node, so
    that a token's rows go to few nodes. even: least mean over fullest node for that. With less,
    with one group, or with a number that the nodes cannot share evenly, an expert's replicas go to
    different nodes instead: fewer experts are lost with one.
    """

    number: int = 1
    groups: int = 1
    even: float = 0.9

    def under(self, num_ranks: int) -> "Nodes":
        """Return these nodes as so many ranks can use them: one node, or one group, where it comes
        out uneven.
        """
        number = 1 if num_ranks % self.number else self.number
        return Nodes(number, 1 if number == 1 or self.groups % number else self.groups, self.even)


ONE_NODE = Nodes()


@dataclass(frozen=True, eq=False)
class Placement:
    """experts_LS: the logical expert of each physical one. Two ranks with equal versions have equal
    maps.
    """

    version: int
    num_ranks: int
    num_experts: int
    experts_LS: I32

    def __post_init__(self) -> None:
        layers, physical = self.experts_LS.shape
        if physical % self.num_ranks:
            raise ValueError(
                f"{physical} physical experts cannot be sharded evenly to {self.num_ranks} ranks"
            )
        if layers and (
            self.experts_LS.min(initial=0) < 0 or self.experts_LS.max(initial=0) >= self.num_experts
        ):
            raise ValueError(
                f"placement {self.version} names experts outside of 0..{self.num_experts - 1}"
            )
        present_LE = np.zeros((layers, self.num_experts), np.bool_)
        np.put_along_axis(present_LE, self.experts_LS, True, axis=1)
        if not present_LE.all():
            layer, expert = np.argwhere(~present_LE)[0].tolist()
            raise ValueError(f"layer {layer} of placement {self.version} lacks expert {expert}")

    @classmethod
    def initial(
        cls,
        num_layers: int,
        num_experts: int,
        num_ranks: int,
        redundant: int = 0,
        nodes: Nodes = ONE_NODE,
    ) -> "Placement":
        """Return experts in order, then replicas, also in order, until every rank has equally many
        experts.

        redundant: replicas at least. Where groups stay on nodes, each node has the replicas of its
        own experts.

        5 experts, 2 ranks -> [0, 1, 2 | 3, 4, 0]
        """
        per_rank = -(-(num_experts + redundant) // num_ranks)
        nodes = nodes.under(num_ranks)
        parts = nodes.number if nodes.groups > 1 else 1
        here = num_experts // parts
        places = np.arange(per_rank * num_ranks // parts, dtype=np.int32) % here
        row = (np.arange(parts, dtype=np.int32)[:, None] * here + places).ravel()
        return cls(0, num_ranks, num_experts, np.tile(row, (num_layers, 1)))

    @property
    def experts_per_rank(self) -> int:
        """The physical experts of one rank."""
        return int(self.experts_LS.shape[1]) // self.num_ranks

    @property
    def num_layers(self) -> int:
        """The MoE layers."""
        return int(self.experts_LS.shape[0])

    def local(self, layer: int, rank: int) -> list[int]:
        """Return the logical expert of each local expert of a rank."""
        per_rank = self.experts_per_rank
        experts: list[int] = self.experts_LS[
            layer, rank * per_rank : (rank + 1) * per_rank
        ].tolist()
        return experts

    def with_layers(self, other: "Placement", layers: int, version: int) -> "Placement":
        """Return the first `layers` layers of `other` and the rest of this one."""
        if (self.num_ranks, self.experts_LS.shape) != (other.num_ranks, other.experts_LS.shape):
            raise ValueError(
                f"placements {self.version} and {other.version} are of different groups"
            )
        rows_LS = np.concatenate((other.experts_LS[:layers], self.experts_LS[layers:]))
        return Placement(version, self.num_ranks, self.num_experts, rows_LS)

    def counts(self) -> I32:
        """Return the replicas of each expert, [L, E]."""
        layers = np.arange(self.num_layers)[:, None] * self.num_experts
        counts = np.bincount(
            (self.experts_LS + layers).ravel(), minlength=self.num_layers * self.num_experts
        )
        return counts.reshape(self.num_layers, self.num_experts).astype(np.int32)

    def replicas(self, layer: int) -> tuple[I32, I32]:
        """Return (physical_EN, counts_E): each expert's physical ones in order, the last repeated
        to fill a row.

        [0, 1, 2 | 3, 4, 0] -> [[0, 5], [1, 1], [2, 2], [3, 3], [4, 4]], [2, 1, 1, 1, 1]
        """
        row = self.experts_LS[layer]
        counts_E = np.bincount(row, minlength=self.num_experts).astype(np.int32)
        order = row.argsort(kind="stable").astype(np.int32)
        ends = counts_E.cumsum()
        columns = (
            np.minimum(np.arange(counts_E.max())[None], counts_E[:, None] - 1)
            + (ends - counts_E)[:, None]
        )
        return order[columns], counts_E

    def to_table(self) -> PlacementTable:
        """Return the message that carries this placement."""
        return PlacementTable(
            version=self.version,
            num_ranks=self.num_ranks,
            experts_per_rank=self.experts_per_rank,
            num_experts=self.num_experts,
            experts=self.experts_LS.astype("<i4").tobytes(),
        )

    @classmethod
    def from_table(cls, table: PlacementTable) -> "Placement":
        """Return the placement in a message. Raises ValueError if it is damaged."""
        experts = np.frombuffer(table.experts, "<i4").reshape(
            -1, table.num_ranks * table.experts_per_rank
        )
        return cls(table.version, table.num_ranks, table.num_experts, experts.astype(np.int32))
