"""The fleet's state machine: it takes events of engines and sends messages to the front end."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, assert_never

import msgspec

from moeserve import messages as m
from moeserve.actor.tasks import log_error, spawn
from moeserve.cluster.assignment import num_equal_nodes
from moeserve.cluster.engine_group import EngineGroup, combined
from moeserve.cluster.engine_state import (
    EngineEvent,
    EngineState,
    FromProcess,
    Held,
    JoinSent,
    LeftFleet,
    NewRequestsEnded,
    WireLost,
)
from moeserve.cluster.engine_table import EngineTable
from moeserve.cluster.link import EngineGone, FromEngine, RequestsLost, Resized
from moeserve.cluster.traffic import Traffic
from moeserve.cluster.view import EngineView
from moeserve.errors import ConfigError

if TYPE_CHECKING:
    from moeserve.cluster.rebalancing import FleetExperts

log = logging.getLogger(__name__)


class FleetState:
    """The members of a fleet, their groups, their requests and their experts.

    Only this class changes them. `Fleet` is the interface for the front end, and `Scaling` adds and
    removes engines.
    """

    def __init__(self, *, single: bool, emit: Callable[[FromEngine], None]) -> None:
        """Create the state of a fleet without engines.

        Args:
            single: the fleet is one engine of one process. No other engine can take over its
                requests, so the front end gets its EngineGone.
            emit: sends a message to the front end.
        """
        self.single = single
        self.table = EngineTable()
        self.members: tuple[int, ...] = ()  # ranks, in the order of their dp ranks in a group
        self.groups: tuple[EngineGroup, ...] = ()
        self.experts: FleetExperts | None = None  # None if experts are not sharded over engines
        self.traffic = Traffic(serving=self.serving, send=self.table.send, fail=self.fail)
        self.phase = m.Phase("starting", 0, 0.0)
        self.ready: m.Ready | None = None  # combined facts, once all engines have served
        # Monotonic time since when no engine serves; None while one serves.
        self.unserved_since_s: float | None = None
        self.has_ended = False  # the final EngineGone was sent
        self.failure = ""  # the cause of the end, unless it was an ordered stop
        self._emit = emit
        self._drain_deadline_passed = False
        self._closing_tasks: set[asyncio.Task[None]] = set()

    # ---- members and groups

    @property
    def is_one_group(self) -> bool:
        """Whether the engines form one group."""
        return self.experts is not None

    @property
    def member_states(self) -> list[EngineState]:
        """The states of the members."""
        return self.table.states_of(self.members)

    def serving(self) -> Collection[int]:
        """Return the ranks of the engines that may get requests."""
        return {state.rank for state in self.member_states if state.serving}

    def shard_experts(self, experts: "FleetExperts") -> None:
        """Make all engines one group that shares the experts."""
        self.experts = experts

    def set_members(self, ranks: Sequence[int]) -> None:
        """Set the members of the fleet."""
        self.members = tuple(ranks)

    def add_groups(self, groups: Iterable[EngineGroup]) -> None:
        """Add groups of engines."""
        self.groups += tuple(groups)

    def detach(self, ranks: Sequence[int], cause: str) -> list[EngineGroup]:
        """Let engines leave the fleet, and return their requests to the front end.

        Return the groups without other members, which the caller must close.
        """
        for rank in ranks:
            self.table.apply(rank, LeftFleet())
            self._return_requests(rank, died=False, cause=cause)
        if self.is_one_group:  # the group gets its new members by `regroup`
            return []
        # Each group has a single member.
        emptied = [group for group in self.groups if group.members[0] in ranks]
        self.groups = tuple(group for group in self.groups if group not in emptied)
        return emptied

    # ---- events

    def on_event(self, rank: int, event: EngineEvent) -> None:
        """Handle an event of an engine. An error in the handling ends the fleet."""
        try:
            self._dispatch(rank, event)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Log an error in the fleet's own code, and end the fleet."""
        log.error("the fleet failed", exc_info=error)
        self.end(EngineGone(exit_code=1, cause=f"the fleet failed: {error!r}"))

    def _dispatch(self, rank: int, event: EngineEvent) -> None:
        match event:
            case WireLost():
                self._on_lost(rank)
            case EngineGone():
                self._on_lost(rank)
                self.table.apply(rank, event)
                self._on_ended(rank, event)
            case JoinSent() | Held() | NewRequestsEnded() | LeftFleet():
                self.table.apply(rank, event)
            case _:
                state = self.table.apply(rank, event)
                if not state.left:  # otherwise other engines have its requests now
                    self._on_message(rank, event)

    def _on_message(self, rank: int, msg: FromProcess) -> None:
        match msg:
            case m.StepOutput():
                self._on_output(rank, msg)
            case m.Refused():
                self._on_refused(rank, msg)
            case m.Traced():
                self._emit(msgspec.structs.replace(msg, dp_rank=rank))
            case m.ExpertLoad() | m.PlacementResult():
                self._on_experts(msg)
            case m.Stopped():
                if self.single:
                    self._emit(msg)
            case m.Phase():
                self._on_phase()
            case m.Ready() | m.Joined() | m.LeftGroup():
                self._check_groups()
            case _:
                assert_never(msg)

    def _on_output(self, rank: int, output: m.StepOutput) -> None:
        self.traffic.on_step_output(rank, output)
        record = output.record
        if record is not None and record.dp_rank != rank:
            # The engine has set its dp rank within the group, which is not its rank in the fleet.
            record = msgspec.structs.replace(record, dp_rank=rank)
            output = msgspec.structs.replace(output, record=record)
        self._emit(output)

    def _on_refused(self, rank: int, msg: m.Refused) -> None:
        self.traffic.balancer.remove_request(msg.rid)
        if msg.code != "server_draining" or self._drain_deadline_passed or self.single:
            self._emit(msg)
            return
        # The engine drains because it got a SIGTERM. Another engine takes over the request.
        self.table.apply(rank, NewRequestsEnded(ordered=False))
        self._emit(RequestsLost(rids=(msg.rid,), engine=rank, died=False, cause=msg.message))

    def _on_experts(self, msg: m.ExpertLoad | m.PlacementResult) -> None:
        if self.experts is None:
            self._emit(msg)  # the front end sums up the load
        elif isinstance(msg, m.PlacementResult):
            self.experts.on_placement_result(msg)
        else:
            self.experts.add_load(msg)

    def _on_phase(self) -> None:
        """Send the front end the phase of the slowest engine, unless the fleet serves."""
        phases = [state.phase for state in self.member_states]
        phase = min(phases, key=lambda phase: phase.percent)
        if phase != self.phase and (self.ready is None or not self.serving()):
            self.phase = phase
            self._emit(phase)

    def _check_groups(self) -> None:
        """Update the groups after a change in the state of an engine."""
        for group in self.groups:
            group.hold_if_incomplete()
        if self.unserved_since_s is None and not self.serving():
            self.unserved_since_s = time.monotonic()

    def _on_lost(self, rank: int) -> None:
        state_before = self.table[rank]
        self.table.apply(rank, WireLost())
        self._check_groups()
        if state_before.has_served and not state_before.left:
            self._return_requests(rank, died=not state_before.ended_by_order, cause="it ended")

    def _return_requests(self, rank: int, *, died: bool, cause: str) -> None:
        """Return the requests of an engine to the front end."""
        rids = self.traffic.balancer.remove_engine(rank)
        if (rids or died) and not self.single:
            self._emit(RequestsLost(rids=rids, engine=rank, died=died, cause=cause))

    def _on_ended(self, rank: int, end: EngineGone) -> None:
        if end.restarting:
            if self.single:
                self.ready = None
                self.traffic.forget_waiting()
                self._emit(end)
            return
        state = self.table[rank]
        if state.left or rank not in self.members:
            return
        is_failure_of_one = not self.single and end.exit_code != 0
        if is_failure_of_one and not end.cause.startswith(state.name):
            end = msgspec.structs.replace(end, cause=f"{state.name}: {end.cause}")
        if all(other.end is not None for other in self.member_states):
            self.end(end)
        elif end.exit_code == 0 and state.ended_by_order:
            self._close_group_of(rank)
        elif self.is_one_group or not self.ready:
            self.end(end)
        else:
            num_serving = len(self.serving())
            log.error("%s is not started again; %d engines continue", state.name, num_serving)

    def _close_group_of(self, rank: int) -> None:
        """Close the group's engines that are starting: they would wait for one that was stopped."""
        group_ranks = [
            other for group in self.groups if rank in group.members for other in group.members
        ]
        for other in self.table.states_of(group_ranks):
            if not other.up and other.end is None:
                closing = spawn(
                    self.table.supervisor(other.rank).close(timeout_s=0.0),
                    name=f"close {other.name}",
                    on_error=log_error,
                )
                self._closing_tasks.add(closing)
                closing.add_done_callback(self._closing_tasks.discard)

    def end(self, gone: EngineGone) -> None:
        """Send the front end the final EngineGone. Later calls have no effect."""
        if self.has_ended:
            return
        self.has_ended = True
        self.ready = None
        self.failure = gone.cause if gone.exit_code else ""
        self._emit(gone)

    # ---- groups and facts

    def on_group_formed(self, group: EngineGroup) -> None:
        """Handle that all engines of a group serve together."""
        self.unserved_since_s = None
        states = self.table.states_of(group.members)
        if self.experts is not None:
            facts = states[0].ready
            num_nodes = num_equal_nodes([state.machine for state in states])
            expert_bytes = facts.expert_bytes if facts is not None else 0
            self.experts.on_group_formed(group.placement, expert_bytes, num_nodes)
        for state in states:
            facts = state.ready
            assert facts is not None
            self.traffic.balancer.add_engine(state.rank, facts.block_size, facts.num_blocks)
        if self.ready is not None or all(other.complete for other in self.groups):
            self.announce()
        self.traffic.flush()
        if self._drain_deadline_passed:
            self.stop_requests()

    def on_group_failed(self, cause: str, exit_code: int) -> None:
        """Handle that the engines of a group will never serve together."""
        self.end(EngineGone(exit_code=exit_code, cause=cause))

    def announce(self) -> None:
        """Send the front end the combined facts of all engines, if they have changed."""
        facts_of_engines = [state.ready for state in self.member_states if state.ready is not None]
        if not facts_of_engines:
            return  # all engines are being replaced, and are announced when they form a group
        try:
            facts = combined(facts_of_engines)
        except ConfigError as error:
            self.end(EngineGone(exit_code=error.exit_code, cause=str(error)))
            return
        facts_before = self.ready
        self.ready = facts
        if facts_before is None:
            self._emit(facts)
        elif facts_before != facts:
            self._emit(Resized(facts))

    def settle(self) -> None:
        """Announce a change of members, and send waiting requests to engines."""
        self.announce()
        self.traffic.flush()

    def stop_requests(self) -> None:
        """End the running requests, because the deadline of a drain has passed.

        Engines that do not serve yet are drained once they do, because requests may wait for them.
        """
        self._drain_deadline_passed = True
        for rank in self.serving():
            self.drain(rank, 0.0)

    def drain(self, rank: int, timeout_s: float) -> None:
        """Send an engine no new requests, and let its requests finish for up to `timeout_s`."""
        self.table.apply(rank, NewRequestsEnded(ordered=True))
        self.table.supervisor(rank).drain(timeout_s)

    def engine_views(self) -> tuple[EngineView, ...]:
        """Return a snapshot of each member."""
        loads = self.traffic.balancer.loads
        return tuple(
            EngineView(
                rank=state.rank,
                host=state.host,
                pid=self.table.supervisor(state.rank).pid,
                state=state.label,
                epoch=state.epoch,
                restarts=state.restarts,
                num_requests=len(loads[state.rank].live_rids) if state.rank in loads else 0,
            )
            for state in self.member_states
        )
