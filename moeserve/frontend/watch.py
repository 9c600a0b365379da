"""The state of the engines behind a front end. One engine looks like a fleet of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from moeserve.cluster.link import EngineLink, Fleet
from moeserve.cluster.view import EngineView, FleetView
from moeserve.frontend.stats import FrontStats
from moeserve.frontend.tracing import Trace, Tracing
from moeserve.messages import ExpertLoad, Ready, Traced

if TYPE_CHECKING:
    from moeserve.cluster.rebalancing import Rebalancing

STATES = {"ready": "serving"}  # of a front end -> of its only engine, where they differ


class Watch:
    """Makes views and traces of the engines. state, ready: the front end's, at the moment of the call."""

    def __init__(self, link: EngineLink, stats: FrontStats) -> None:
        self._fleet = link if isinstance(link, Fleet) else None
        self._stats = stats
        self._tracing = Tracing(link)
        self._loads: Rebalancing | None = None  # where every engine has all experts

    def hear(self, msg: ExpertLoad | Traced, ready: Ready | None) -> None:
        """Takes an engine's expert load or its part of a trace."""
        if isinstance(msg, Traced):
            self._tracing.hear(msg)
        elif (loads := self._all_experts(ready)) is not None:
            loads.note(msg)

    def view(self, state: str, ready: Ready | None) -> FleetView:
        """Returns the state of all engines."""
        if self._fleet is not None:
            view = self._fleet.view
        else:
            view = FleetView(
                dp=1,
                tp=1,
                together=False,
                epoch=0,
                complete=state in ("ready", "draining"),
                waiting=0,
                engines=(self._only_engine(state, ready),),
                experts=None,
            )
        if view.experts is None and (loads := self._all_experts(ready)) is not None:
            experts = msgspec.structs.replace(loads.view(), why="every engine has all experts")
            view = msgspec.structs.replace(view, experts=experts)
        return view

    async def trace(self, view: FleetView, timeout_s: float) -> Trace:
        """Traces the next step; see `Tracing.take`."""
        return await self._tracing.take(view, timeout_s)

    def _only_engine(self, state: str, ready: Ready | None) -> EngineView:
        stats = self._stats.engines[0]
        return EngineView(
            rank=0,
            host="node-0",
            pid=ready.pid if ready is not None and state != "lost" else None,
            state=STATES.get(state, state),
            epoch=0,
            restarts=stats.restarts,
            num_requests=self._stats.num_active,
            predicted_work=0.0,
            last=stats.last,
        )

    def _all_experts(self, ready: Ready | None) -> Rebalancing | None:
        """Returns the load statistics where every engine has all experts; None for dense models and sharded experts."""
        ep_sharded = self._fleet is not None and self._fleet.experts is not None
        if self._loads is None and ready is not None and ready.num_experts and not ep_sharded:
            from moeserve.cluster.rebalancing import Rebalancing  # here, because it needs numpy

            self._loads = Rebalancing(ready.num_moe_layers, ready.num_experts, num_ranks=1, redundant=0)
            self._loads.joined(None, ready.expert_bytes)
        return self._loads
