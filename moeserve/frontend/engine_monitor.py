"""The state of the engines behind a front end, and traces of their steps. One engine looks like a
fleet of one.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from moeserve.cluster.fleet import Fleet
from moeserve.cluster.link import EngineLink
from moeserve.cluster.view import EngineView, FleetView
from moeserve.errors import Conflict
from moeserve.frontend.stats import FrontStats
from moeserve.messages import ExpertLoad, Ready, Traced, TraceNext

if TYPE_CHECKING:
    from moeserve.cluster.rebalancing import Rebalancing

LATE_S = 2.0  # from the first rank's part of a trace to the last one's

Rank = tuple[int, int]  # data-parallel, tensor-parallel


class EngineMonitor:
    """Makes views and traces of the engines. fleet: None for one engine. state, ready: the front
    end's at present.
    """

    def __init__(self, link: EngineLink, fleet: Fleet | None, stats: FrontStats) -> None:
        self._fleet = fleet
        self._stats = stats
        self.tracing = Tracing(link)
        self._loads: Rebalancing | None = None  # where every engine has all experts

    def hear(self, msg: ExpertLoad | Traced, ready: Ready | None) -> None:
        """Take an engine's expert load or its part of a trace."""
        if isinstance(msg, Traced):
            self.tracing.hear(msg)
        elif (loads := self._all_experts(ready)) is not None:
            loads.note(msg)

    def view(self, state: str, ready: Ready | None) -> FleetView:
        """Return the state of all engines."""
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
                machines={"node-0": "here"},
            )
        if view.experts is None and (loads := self._all_experts(ready)) is not None:
            experts = msgspec.structs.replace(loads.view(), why="every engine has all experts")
            view = msgspec.structs.replace(view, experts=experts)
        return view

    def _only_engine(self, state: str, ready: Ready | None) -> EngineView:
        stats = self._stats.engines[0]
        return EngineView(
            rank=0,
            host="node-0",
            pid=ready.pid if ready is not None and state != "lost" else None,
            state="serving" if state == "ready" else state,
            epoch=0,
            restarts=stats.restarts,
            num_requests=self._stats.num_active,
        )

    def _all_experts(self, ready: Ready | None) -> "Rebalancing | None":
        """Return the load statistics where every engine has all experts; None for dense models and
        sharded experts.
        """
        ep_sharded = self._fleet is not None and self._fleet.experts is not None
        if self._loads is None and ready is not None and ready.num_experts and not ep_sharded:
            from moeserve.cluster.rebalancing import Rebalancing  # here, because it needs numpy

            self._loads = Rebalancing(
                ready.num_moe_layers, ready.num_experts, num_ranks=1, redundant=0
            )
            self._loads.joined(None, ready.expert_bytes)
        return self._loads


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one step, in rank order. missing: ranks that did not answer in time."""

    ranks: Sequence[Traced]
    missing: Sequence[Rank]


class Tracing:
    """Takes traces of steps, one at a time."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._answers: asyncio.Queue[Traced] | None = None

    async def take(self, view: FleetView, timeout_s: float) -> Trace:
        """Trace the next step. Engines that form a group are traced in the same step, others each
        in its own.

        Raises Conflict if no step runs within timeout_s seconds, or another trace is being taken.
        """
        if self._answers is not None:
            raise Conflict("another trace is being taken")
        serving = [
            engine.rank for engine in view.engines if engine.state in ("serving", "draining")
        ]
        if not serving or (view.together and not view.complete):
            raise Conflict("the engines do not serve at the moment")
        wanted = {(rank, tp_rank) for rank in serving for tp_rank in range(view.tp)}
        answers = self._answers = asyncio.Queue()
        steps: dict[
            int, dict[Rank, Traced]
        ] = {}  # a step that was asked for earlier, when nothing ran, may still come
        try:
            self._link.send(TraceNext())
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s) as limit:
                    while not any(ranks.keys() == wanted for ranks in steps.values()):
                        msg = await answers.get()
                        if (rank := (msg.dp_rank, msg.tp_rank)) in wanted:
                            if not steps:
                                limit.reschedule(asyncio.get_running_loop().time() + LATE_S)
                            steps.setdefault(msg.step if view.together else 0, {})[rank] = msg
        finally:
            self._answers = None
        if not steps:
            raise Conflict(
                f"no step ran within {timeout_s:g} s; send a request meanwhile, or wait longer"
            )
        fullest = max(steps.values(), key=len)
        return Trace([fullest[rank] for rank in sorted(fullest)], sorted(wanted - fullest.keys()))

    def hear(self, msg: Traced) -> None:
        """Add one rank's answer; one that comes too late is dropped."""
        if self._answers is not None:
            self._answers.put_nowait(msg)
