"""The MoE layer: route, dispatch, experts, combine; a shared expert runs while rows travel.

T tokens, D model width, P received rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moeserve.moe.all2all.base import All2All
from moeserve.moe.experts.base import Experts
from moeserve.moe.lane import Lane
from moeserve.moe.routing import Router


class MoELayer:
    """One layer's experts behind one backend and one kernel. `shared` maps x_TD to what is added to every token."""

    def __init__(
        self,
        router: Router,
        all2all: All2All,
        experts: Experts,
        packed: Any,
        shared: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._router = router
        self._all2all = all2all
        self._experts = experts
        self._packed = packed
        self._shared = shared

    def __call__(self, x_TD: Tensor, num_tokens: int, lane: Lane) -> Tensor:
        """Rows from `num_tokens` on are padding: they reach no expert."""
        routing = self._router(x_TD, num_tokens)
        ticket = lane.overlap(lambda: self._all2all.dispatch(x_TD, routing, lane))
        y = torch.empty_like(ticket.inbound.x)
        self._experts.run(ticket.inbound, self._packed, y, lane.scratch)
        out_TD = torch.empty_like(x_TD)
        shared = _Later(self._shared, x_TD)
        lane.overlap(lambda: self._all2all.combine(ticket, y, out_TD, lane), meanwhile=shared)
        return out_TD if shared.value is None else out_TD + shared.value


class _Later:
    """Runs the shared expert when told to and keeps what it returned."""

    __slots__ = ("_run", "_x", "value")

    def __init__(self, run: Callable[[Tensor], Tensor] | None, x_TD: Tensor) -> None:
        self._run = run
        self._x = x_TD
        self.value: Tensor | None = None

    def __call__(self) -> None:
        if self._run is not None:
            self.value = self._run(self._x)
