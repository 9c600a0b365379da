"""The fleet: all engines of a server behind one `EngineLink`, like a single engine.

    front end -- send -->  Fleet  -- Traffic -->  EngineSupervisor  -- wire -->  engine process
              <- outbox --  FleetState  <-- on_event --

`FleetState` is the state machine. `Scaling` changes the number of engines and their machines.

If an engine dies, its requests are returned to the front end (RequestsLost), the other engines keep
theirs, and a new process joins them in the next epoch. With --ep on, all engines form one group and
compute in lockstep. With --ep off, or for a dense model, each engine runs independently.
"""

import asyncio
import time
from typing import TYPE_CHECKING, Any, assert_never

from moeserve import messages as m
from moeserve.actor.actor import Inbox
from moeserve.actor.supervisor import RestartPolicy
from moeserve.cluster.engine_state import EngineState
from moeserve.cluster.fleet_state import FleetState
from moeserve.cluster.heartbeat import UNHEALTHY_S
from moeserve.cluster.host import FleetSnapshot, Host, Root
from moeserve.cluster.link import INBOX_LIMIT, EngineGone, FromEngine
from moeserve.cluster.scaling import Scaling
from moeserve.cluster.view import FleetView
from moeserve.config import Config

if TYPE_CHECKING:
    from moeserve.cluster.rebalancing import FleetExperts

POLICY = RestartPolicy(first_pause_s=0.05, proven_s=10.0)


class Fleet:
    """`EngineLink` to dp engines of tp processes each; see link.py.

    A fleet is ready once all engines serve, and stays ready while some of them are replaced. It
    ends if an engine cannot be restarted or the engines repeatedly fail to form a group. A single
    engine of one process has no others to take over its requests, so the front end gets an
    EngineGone whenever its process ends.
    """

    def __init__(self, config: Config, root: Root | None = None, **options: Any) -> None:
        """Create a fleet that is not started yet.

        Args:
            root: the root process, if it keeps this machine's engines (--standby).
            options: keyword arguments of each `EngineSupervisor`.
        """
        self.config = config
        self.root = root
        self.outbox: Inbox[FromEngine] = Inbox("front end", INBOX_LIMIT)
        self.single = config.parallel.num_ranks == 1
        self._state = FleetState(single=self.single, emit=self._emit)
        if not self.single:
            options.setdefault("policy", POLICY)
        self.scaling = Scaling(self._state, config, self.outbox, root, options)
        self._snapshot: FleetSnapshot | None = None
        self._started = False
        self._drain_timer: asyncio.TimerHandle | None = None

    def _emit(self, msg: FromEngine) -> None:
        if not self.outbox.closed:
            self.outbox.put(msg, force=True)

    # ---- start, requests, end

    def continue_from(self, snapshot: FleetSnapshot | None) -> None:
        """Take over the engines of the previous front end at the start."""
        self._snapshot = snapshot

    async def start(self) -> None:
        """Start all engines, and return before they are ready.

        Raises ConfigError for settings that cannot work.
        """
        assert not self._started, "a link is started once"
        await self.scaling.start(self._snapshot)
        self._started = True

    def send(self, msg: m.EngineIn) -> None:
        """Send a message to the engine or engines that it concerns.

        Raises Overloaded if one does not keep up.
        """
        state = self._state
        match msg:
            case m.Submit():
                state.traffic.submit(msg)
            case m.Abort(rids=rids):
                state.traffic.abort(rids)
            case m.Drain(deadline_s=timeout_s) if state.single:
                state.drain(state.members[0], timeout_s)
            case m.Drain(deadline_s=timeout_s):
                # Drain the engines at the deadline only, and keep even idle ones in their group
                # until then. If an engine dies before, a new one needs all others to form a group.
                loop = asyncio.get_running_loop()
                self._drain_timer = loop.call_later(timeout_s, state.stop_requests)
            case m.TraceNext():
                for group in state.groups:
                    if group.complete:
                        # All engines of a group trace a step if one of them votes for it.
                        state.table.send(group.members[0], msg)
            case m.Ping() | m.Join() | m.UpdatePlacement() | m.AbortAll():
                raise ValueError(f"a fleet sends {type(msg).__name__} itself")
            case _:
                assert_never(msg)

    async def close(self, timeout_s: float) -> None:
        """Let running requests finish for up to `timeout_s`, then end all engines.

        May be called again.
        """
        state = self._state
        failure = state.failure
        if not self._started:
            return
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        await self.scaling.stop()
        supervisors = [state.table.supervisor(rank) for rank in state.table]
        await asyncio.gather(*(supervisor.close(timeout_s) for supervisor in supervisors))
        state.end(EngineGone(exit_code=0, cause="stopped"))
        await self.scaling.close(failure)

    # ---- the state, for probes, views and metrics

    @property
    def engines(self) -> list[EngineState]:
        """The state of each engine."""
        return self._state.member_states

    @property
    def experts(self) -> "FleetExperts | None":
        """The experts if they are sharded over the engines, None if each engine has all of them."""
        return self._state.experts

    @property
    def ready(self) -> m.Ready | None:
        """The combined facts of all engines, None before all have served and after the end."""
        return self._state.ready

    @property
    def phase(self) -> m.Phase:
        """The progress of the start."""
        return self._state.phase

    @property
    def dp(self) -> int:
        """The number of engines."""
        return len(self._state.members)

    @property
    def healthy(self) -> bool:
        """Whether some engines serve, and all of these make progress.

        A fleet without a serving engine stays healthy for UNHEALTHY_S, in which its group can be
        formed again.
        """
        state = self._state
        if state.ready is None or state.has_ended:
            return False
        now_s = time.monotonic()
        serving = state.serving()
        if not serving:
            since_s = state.unserved_since_s
            return since_s is None or now_s - since_s <= UNHEALTHY_S
        monitors = (state.table.supervisor(rank).progress_monitor for rank in serving)
        return all(monitor.healthy(now_s) for monitor in monitors)

    @property
    def view(self) -> FleetView:
        """A snapshot of the fleet."""
        state = self._state
        hosts = self.scaling.rendezvous.hosts if state.members else ()
        return FleetView(
            dp=self.dp,
            tp=self.config.parallel.tp,
            is_one_group=state.is_one_group,
            epoch=max((group.epoch for group in state.groups), default=0),
            complete=all(group.complete for group in state.groups),
            waiting=state.traffic.num_waiting,
            engines=state.engine_views(),
            experts=state.experts.view() if state.experts is not None else None,
            machines={host.name: self._machine_state(host) for host in hosts},
        )

    def _machine_state(self, host: Host) -> str:
        if not host.is_missing:
            return "here"
        return "drained" if host in self.scaling.drained else "missing"
