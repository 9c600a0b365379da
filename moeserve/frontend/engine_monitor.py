"""The state of the engines behind a front end, and traces of their steps. A single engine is shown
as a fleet of one.
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
    from moeserve.cluster.rebalancing import FleetExperts

# Time limit for the other ranks, after the first rank has sent its trace
LATE_TRACE_TIMEOUT_S = 2.0

Rank = tuple[int, int]  # data-parallel, tensor-parallel


class EngineMonitor:
    """Creates views and traces of the engines. fleet: None for a single engine."""

    def __init__(self, link: EngineLink, fleet: Fleet | None, stats: FrontStats) -> None:
        self._fleet = fleet
        self._stats = stats
        self.tracing = Tracing(link)
        # Counts the load of experts, if each engine has all experts. Otherwise, the fleet does.
        self._rebalancing: FleetExperts | None = None

    def handle(self, msg: ExpertLoad | Traced, ready: Ready | None) -> None:
        """Handle the expert load of an engine, or the trace of a rank."""
        if isinstance(msg, Traced):
            self.tracing.add(msg)
        elif (loads := self._local_loads(ready)) is not None:
            loads.add_load(msg)

    def view(self, state: str, ready: Ready | None) -> FleetView:
        """Return the state of all engines. state, ready: the current ones of the front end."""
        if self._fleet is not None:
            view = self._fleet.view
        else:
            view = FleetView(
                dp=1,
                tp=1,
                is_one_group=False,
                epoch=0,
                complete=state in ("ready", "draining"),
                waiting=0,
                engines=(self._only_engine(state, ready),),
                experts=None,
                machines={"node-0": "here"},
            )
        if view.experts is None and (loads := self._local_loads(ready)) is not None:
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

    def _local_loads(self, ready: Ready | None) -> "FleetExperts | None":
        """Return the load statistics if each engine has all experts; None for dense models and for
        sharded experts.
        """
        ep_sharded = self._fleet is not None and self._fleet.experts is not None
        if self._rebalancing is None and ready is not None and ready.num_experts and not ep_sharded:
            from moeserve.cluster.rebalancing import FleetExperts  # here, because it needs numpy

            self._rebalancing = FleetExperts(
                ready.num_moe_layers, ready.num_experts, num_ranks=1, redundant=0
            )
            self._rebalancing.on_group_formed(None, ready.expert_bytes)
        return self._rebalancing


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one step."""

    ranks: Sequence[Traced]  # in rank order
    missing: Sequence[Rank]  # ranks that did not answer in time


class Tracing:
    """Records traces of steps, one at a time."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._answers: asyncio.Queue[Traced] | None = None

    async def take(self, view: FleetView, timeout_s: float) -> Trace:
        """Trace the next step of all engines. Engines in a group have the same step; separate
        engines are each traced in their own next step.

        Raises Conflict if no step runs within timeout_s seconds, or if another trace is being
        recorded.
        """
        if self._answers is not None:
            raise Conflict("another trace is being taken")
        serving = [
            engine.rank for engine in view.engines if engine.state in ("serving", "draining")
        ]
        if not serving or (view.is_one_group and not view.complete):
            raise Conflict("the engines do not serve at the moment")
        wanted = {(rank, tp_rank) for rank in serving for tp_rank in range(view.tp)}
        answers: asyncio.Queue[Traced] = asyncio.Queue()
        self._answers = answers
        # The traces of each rank, by step. There may be several steps, because the step of an
        # earlier request that timed out may still arrive.
        steps: dict[int, dict[Rank, Traced]] = {}
        try:
            self._link.send(TraceNext())
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s) as limit:
                    while not any(ranks.keys() == wanted for ranks in steps.values()):
                        msg = await answers.get()
                        if (rank := (msg.dp_rank, msg.tp_rank)) in wanted:
                            if not steps:
                                limit.reschedule(
                                    asyncio.get_running_loop().time() + LATE_TRACE_TIMEOUT_S
                                )
                            # Separate engines number their steps independently.
                            step = msg.step if view.is_one_group else 0
                            steps.setdefault(step, {})[rank] = msg
        finally:
            self._answers = None
        if not steps:
            raise Conflict(
                f"no step ran within {timeout_s:g} s; send a request meanwhile, or wait longer"
            )
        fullest = max(steps.values(), key=len)
        return Trace([fullest[rank] for rank in sorted(fullest)], sorted(wanted - fullest.keys()))

    def add(self, msg: Traced) -> None:
        """Add the trace of a rank. A late one is dropped."""
        if self._answers is not None:
            self._answers.put_nowait(msg)
