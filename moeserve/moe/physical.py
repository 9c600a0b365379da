"""Map logical experts, which the router chooses, to physical experts, of which ranks may have
replicas. One table lookup per (token, k) pair. Also counts the load of each logical expert.

T: tokens. K: experts per token. E: logical experts. N: replicas of the expert that has the most.
W: turns in the table.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from moeserve.moe.placement.placement import Placement
from moeserve.moe.routing import Routing

# Limits the table. If an expert's number of replicas does not divide it, the shares of its replicas
# differ by up to 1 / MAX_TURNS of its tokens.
MAX_TURNS = 64
_STARTS_STEP = 1024  # tokens by which `_starts_T1` grows


class LogicalToPhysical:
    """The map of one layer.

    Tokens use an expert's replicas in turn, by token index plus layer. The choice of a replica does
    not change results, because all replicas hold the same weights.

    In a flat table, entry w * (E + 1) + e + 1 is the physical expert of logical expert e in turn w.
    For padding, e is -1, and entry w * (E + 1) is -1.

    counts_on_device: count the load on the device, so that the host need not wait for the ids.
    """

    def __init__(
        self,
        placement: Placement,
        layer: int,
        device: torch.device | str = "cpu",
        *,
        counts_on_device: bool = False,
    ) -> None:
        self.counts_on_device = counts_on_device
        physical_EN, counts_E = placement.replicas(layer)
        self.layer = layer
        self.num_experts = placement.num_experts
        self.device = torch.device(device)
        self.is_identity = (
            bool((physical_EN[:, 0] == np.arange(self.num_experts)).all())
            and physical_EN.shape[1] == 1
        )
        num_turns = min(MAX_TURNS, math.lcm(*set(counts_E.tolist())))
        table_WE = physical_EN[
            np.arange(self.num_experts), np.arange(num_turns)[:, None] % counts_E
        ]
        padded_table = np.concatenate(
            (np.full((num_turns, 1), -1, np.int32), table_WE.astype(np.int32)), axis=1
        )
        self._table = torch.from_numpy(padded_table.ravel()).to(self.device)
        self._num_turns = num_turns
        self._starts_T1 = torch.empty((0, 1), dtype=torch.int32, device=self.device)
        self._outgrown: list[torch.Tensor] = []  # kept because recorded graphs still read them

    def __call__(self, routing: Routing) -> Routing:
        """Replace logical experts by physical experts; -1 stays -1."""
        if self.is_identity:
            return routing
        ids_TK = routing.ids_TK
        starts_T1 = self._starts(ids_TK.shape[0])
        places_N = (ids_TK + starts_T1).view(-1)
        return replace(routing, ids_TK=self._table.index_select(0, places_N).view_as(ids_TK))

    def with_placement(self, placement: Placement) -> "LogicalToPhysical":
        """Return the map of the same layer under another placement."""
        return LogicalToPhysical(
            placement, self.layer, self.device, counts_on_device=self.counts_on_device
        )

    def count_load(self, routing: Routing) -> NDArray[np.int64] | torch.Tensor:
        """Count the (token, k) pairs of each logical expert, [E], without padding.

        A tensor of int32 if the device counts.
        """
        if self.counts_on_device:
            ids_N = routing.ids_TK.reshape(-1).long() + 1
            counts = torch.zeros(self.num_experts + 1, dtype=torch.int32, device=ids_N.device)
            return counts.scatter_add_(0, ids_N, torch.ones_like(ids_N, dtype=torch.int32))[1:]
        ids = routing.ids_TK.reshape(-1).cpu().numpy()
        return np.bincount(ids + 1, minlength=self.num_experts + 1)[1:]

    def _starts(self, num_tokens: int) -> torch.Tensor:
        """Return the table entry of expert 0 for each token, w * (E + 1) + 1, [T, 1]."""
        if num_tokens > self._starts_T1.shape[0]:
            capacity = -(-num_tokens // _STARTS_STEP) * _STARTS_STEP
            self._outgrown.append(self._starts_T1)
            token_T = torch.arange(capacity, dtype=torch.int32, device=self.device)
            turn_T = (token_T + self.layer) % self._num_turns
            self._starts_T1 = (turn_T * (self.num_experts + 1) + 1)[:, None]
        return self._starts_T1[:num_tokens]
