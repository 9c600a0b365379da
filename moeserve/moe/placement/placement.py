"""The map from physical to logical experts. It is immutable, versioned, and the same on all ranks.

Each logical expert has one physical expert or several (replicas). Physical expert p is local expert
p % experts_per_rank of rank p // experts_per_rank.

L: MoE layers. E: logical experts. S: physical experts of all ranks. N: replicas of the expert that
has the most.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeserve.messages import PlacementTable

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines on which the ranks run, with the same number of consecutive ranks on each.

    If the router limits each token to some groups of experts, a group is kept on one node, so that
    a token's rows are sent to few nodes. If that leaves the load of nodes too uneven, if there is
    one group, or if the nodes cannot divide the groups evenly, the replicas of an expert are placed
    on different nodes instead, so that fewer experts are lost with a node.
    """

    num_nodes: int = 1
    num_groups: int = 1  # the router's groups of experts
    min_balance: float = 0.9  # groups are kept on nodes if mean load / highest load is not lower

    def for_ranks(self, num_ranks: int) -> "Nodes":
        """Return the nodes for this number of ranks.

        If the ranks cannot be divided evenly among the nodes, all ranks count as one node. If there
        is one node, or the groups cannot be divided evenly, all experts count as one group.
        """
        num_nodes = 1 if num_ranks % self.num_nodes else self.num_nodes
        is_one_group = num_nodes == 1 or self.num_groups % num_nodes != 0
        return Nodes(num_nodes, 1 if is_one_group else self.num_groups, self.min_balance)


ONE_NODE = Nodes()


@dataclass(frozen=True, eq=False)
class Placement:
    """A placement of experts on ranks. Two ranks with the same version have the same placement."""

    version: int
    num_ranks: int
    num_experts: int  # logical experts
    experts_LS: I32  # the logical expert of each physical expert

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
        """Return a placement of the experts in order, followed by replicas in order, so that all
        ranks have the same number of physical experts.

        redundant: the least number of additional physical experts. If groups are kept on nodes,
        each node has the replicas of its own experts.

        5 experts, 2 ranks -> [0, 1, 2 | 3, 4, 0]
        """
        per_rank = -(-(num_experts + redundant) // num_ranks)
        nodes = nodes.for_ranks(num_ranks)
        num_parts = (
            nodes.num_nodes if nodes.num_groups > 1 else 1
        )  # each part has experts of its own
        experts_per_part = num_experts // num_parts
        places_per_part = per_rank * num_ranks // num_parts
        place_experts = np.arange(places_per_part, dtype=np.int32) % experts_per_part
        first_experts = np.arange(num_parts, dtype=np.int32)[:, None] * experts_per_part
        experts_S = (first_experts + place_experts).ravel()
        return cls(0, num_ranks, num_experts, np.tile(experts_S, (num_layers, 1)))

    @property
    def experts_per_rank(self) -> int:
        """The number of physical experts of one rank."""
        return int(self.experts_LS.shape[1]) // self.num_ranks

    @property
    def num_layers(self) -> int:
        """The number of MoE layers."""
        return int(self.experts_LS.shape[0])

    def local_experts(self, layer: int, rank: int) -> list[int]:
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
        experts_LS = np.concatenate((other.experts_LS[:layers], self.experts_LS[layers:]))
        return Placement(version, self.num_ranks, self.num_experts, experts_LS)

    def counts(self) -> I32:
        """Return the number of physical experts of each logical expert, [L, E]."""
        layers = np.arange(self.num_layers)[:, None] * self.num_experts
        counts = np.bincount(
            (self.experts_LS + layers).ravel(), minlength=self.num_layers * self.num_experts
        )
        return counts.reshape(self.num_layers, self.num_experts).astype(np.int32)

    def replicas(self, layer: int) -> tuple[I32, I32]:
        """Return the physical experts of each logical expert, [E, N], and their number, [E].

        Each row is in ascending order. Shorter rows are filled with their last physical expert.

        [0, 1, 2 | 3, 4, 0] -> [[0, 5], [1, 1], [2, 2], [3, 3], [4, 4]], [2, 1, 1, 1, 1]
        """
        experts_S = self.experts_LS[layer]
        counts_E = np.bincount(experts_S, minlength=self.num_experts).astype(np.int32)
        order = experts_S.argsort(kind="stable").astype(np.int32)
        ends_E = counts_E.cumsum()
        columns = (
            np.minimum(np.arange(counts_E.max())[None], counts_E[:, None] - 1)
            + (ends_E - counts_E)[:, None]
        )
        return order[columns], counts_E

    def to_table(self) -> PlacementTable:
        """Encode this placement as a message."""
        return PlacementTable(
            version=self.version,
            num_ranks=self.num_ranks,
            experts_per_rank=self.experts_per_rank,
            num_experts=self.num_experts,
            experts=self.experts_LS.astype("<i4").tobytes(),
        )

    @classmethod
    def from_table(cls, table: PlacementTable) -> "Placement":
        """Decode a message. Raises ValueError if the placement is invalid."""
        experts = np.frombuffer(table.experts, "<i4").reshape(
            -1, table.num_ranks * table.experts_per_rank
        )
        return cls(table.version, table.num_ranks, table.num_experts, experts.astype(np.int32))
