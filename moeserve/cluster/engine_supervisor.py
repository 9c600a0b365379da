"""Keep one engine running: one process at a time, and the wire to it.

The supervisor does not decide anything about the fleet. It reports every message and every end of a
process to `FleetState.on_event`, which updates the engine's `EngineState`.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from moeserve import messages as m
from moeserve.actor.actor import Inbox
from moeserve.actor.process import Death, Process
from moeserve.actor.supervisor import RestartPolicy, Supervisor
from moeserve.actor.tasks import cancel, every, log_error, spawn
from moeserve.actor.zmq_wire import PeerGone, ZmqWire, listen
from moeserve.cluster.engine_state import EngineEvent, EngineState, WireLost
from moeserve.cluster.heartbeat import INTERVAL_S, STALL_S, ProgressMonitor
from moeserve.cluster.host import Host
from moeserve.cluster.link import INBOX_LIMIT, EngineGone, FromEngine, is_config_error
from moeserve.cluster.order import BUILDER, EngineOrder, Role, without_secrets
from moeserve.config import Config
from moeserve.errors import ConfigError, Overloaded

log = logging.getLogger(__name__)

EXIT_GRACE_S = 5.0  # timeout for the exit of a process that has closed its wire
LAST_MESSAGES_S = 0.5  # timeout for the last messages of a dead process
STOP_S = 1.0  # from SIGTERM to SIGKILL
EXIT_S = 1.0  # for the exit of a process that has finished its requests
# While the front end does not read: the interval of checks whether the engine is closed
FRONT_END_CHECK_S = 0.5

FromWire = m.EngineOut | PeerGone | EngineGone


@dataclass
class _ProcessEnd:
    """What is known about the end of the present process."""

    stop_cause: str = ""  # from its Stopped message
    # Why the handshake failed. A restart is useless, because every process would fail alike.
    handshake_error: str = ""
    wire_lost_at_s: float | None = None
    # Set when PeerGone, the last message of its wire, was handled.
    wire_end_handled: asyncio.Event = field(default_factory=asyncio.Event)

    def record_stop(self, cause: str) -> None:
        """Note that the process has said why it stops."""
        self.stop_cause = cause

    def record_wire_lost(self, handshake_error: str) -> None:
        """Note that the wire is lost now. handshake_error: "" if it was connected."""
        self.handshake_error = handshake_error
        self.wire_lost_at_s = time.monotonic()
        self.wire_end_handled.set()


class EngineSupervisor(Supervisor):
    """Keeps the process of one engine running, and passes messages between it and the fleet.

    Each process has its own wire, token and heartbeat. If the first start fails, there is no
    restart, so that the user sees the error. A process that dies later is restarted by `policy`,
    unless the cause is permanent (settings, model files, memory).
    """

    def __init__(
        self,
        name: str,
        host: Host,
        config: Config,
        *,
        state: Callable[[], EngineState],
        report: Callable[[EngineEvent], None],
        outbox: Inbox[FromEngine],
        policy: RestartPolicy | None = None,
        stall_s: float = STALL_S,
        builder: str = BUILDER,
    ) -> None:
        """Create the supervisor of an engine that is not started yet.

        Args:
            host: the machine of the engine.
            state: returns the present state of the engine.
            report: called with every message of a process except Pong, with WireLost when its
                wire is lost, and with EngineGone when the process has ended.
            outbox: the fleet's messages to the front end. While it is full, no messages of the
                engine are read.
            stall_s: an engine with work is killed and restarted if it makes no progress for this
                long, or longer if its steps take long.
            builder: `module:function` that makes the runner, see assemble.py.
        """
        super().__init__(name, policy)
        self.host = host
        self.stall_s = stall_s
        self.role = Role()  # of the next process
        self.progress_monitor = ProgressMonitor(time.monotonic())
        self._config = without_secrets(config)
        self._builder = builder
        self._state = state
        self._report = report
        self._to_front_end = outbox
        self._inbox: Inbox[FromWire] = Inbox(f"{self.name} link", INBOX_LIMIT)
        self._wire: ZmqWire[m.EngineIn, FromWire] | None = None
        self._task: asyncio.Task[None] | None = None
        # `close` was called. From then on the front end might not read, so do not wait for it.
        self._closing = False
        self._process_end = _ProcessEnd()
        self._end_reported = asyncio.Event()  # set when the EngineGone of a process was handled

    def start(self, role: Role) -> None:
        """Start the engine, and return."""
        self.assign(role)
        self._task = spawn(
            self._run_processes(), name=self.name, on_error=self._on_supervision_failed
        )

    def assign(self, role: Role) -> None:
        """Set the role (part in the fleet) of the next process."""
        self.role = role

    async def close(self, timeout_s: float) -> None:
        """Let the process finish for up to `timeout_s`, then end it. May be called repeatedly."""
        if self._task is None:
            return
        self._closing = True
        self.retire()  # no more restarts
        try:
            was_sent = self.send(m.Drain(timeout_s))
        except Overloaded:
            was_sent = False  # end it by a signal
        exit_timeout_s = 0.0
        if was_sent:
            exit_timeout_s = EXIT_S
            if self._state().ready is not None:  # otherwise it has no requests to finish
                exit_timeout_s += timeout_s
        await asyncio.wait([self._task], timeout=exit_timeout_s)
        if not self._task.done():
            await self.stop(term_s=STOP_S)
        await asyncio.wait([self._task])

    def send(self, msg: m.EngineIn) -> bool:
        """Send the process a message. Return False if there is no process.

        Raises Overloaded if the process does not keep up.
        """
        return self._wire is not None and self._wire.send(msg)

    def drain(self, timeout_s: float) -> None:
        """Let running requests finish for up to `timeout_s`."""
        with suppress(Overloaded):  # `close` will end it
            self.send(m.Drain(timeout_s))

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no process."""
        if self.child is None or not self.child.alive:
            return None
        # A process on another machine has the id 0 until the agent has reported the real one.
        return self.child.pid or None

    def kill(self, reason: str) -> None:
        """Send SIGKILL. reason: see `Process.kill`."""
        if self.child is not None and self.child.alive:
            self.child.kill(reason)

    # ---- the life of the engine

    async def _run_processes(self) -> None:
        """Run processes until one ends for good."""
        try:
            async with asyncio.TaskGroup() as group:
                heartbeat = every(INTERVAL_S, self._ping_or_kill, name=f"{self.name} heartbeat")
                helpers = [group.create_task(self._read()), group.create_task(heartbeat)]
                await self.run()
                for helper in helpers:
                    helper.cancel()
        finally:
            self._close_wire()
            self._inbox.close()

    def _on_supervision_failed(self, _name: str, error: Exception) -> None:
        while isinstance(error, ExceptionGroup):  # the TaskGroup has wrapped the error
            error = error.exceptions[0]
        exit_code = 1
        cause = f"the supervision of {self.name} failed: {error!r}"
        if isinstance(error, ConfigError):
            exit_code = error.exit_code
            cause = str(error)
        else:
            log.error("the supervision of %s failed", self.name, exc_info=error)
        self._report(EngineGone(exit_code=exit_code, cause=cause))

    async def begin(self, incarnation: int) -> Process:  # called by `Supervisor.run`
        address, keys = self.host.listen_address(f"{self.name}-{incarnation}")
        token = secrets.token_hex(16)
        wire = self._wire = listen(
            address, token=token, receives=m.EngineOut, inbox=self._inbox, keys=keys
        )
        order = EngineOrder(
            config=self._config,
            address=wire.address,
            token=token,
            born_s=time.monotonic(),
            builder=self._builder,
            role=msgspec.structs.replace(self.role, folder=self.host.folder),
        )
        self._process_end = _ProcessEnd()
        waiting = spawn(
            self._report_missing_machine(),
            name=f"{self.name} waits for its machine",
            on_error=log_error,
        )
        try:
            return await self.host.start(self.name, msgspec.json.encode(order))
        finally:
            await cancel(waiting)

    async def _report_missing_machine(self) -> None:
        """Report a Phase at intervals while the start waits for a missing machine."""
        began_at_s = time.monotonic()
        while self.host.is_missing:
            elapsed_s = time.monotonic() - began_at_s
            self._inbox.put(m.Phase(self.host.waiting_phase, 0, elapsed_s), force=True)
            await asyncio.sleep(INTERVAL_S)

    async def is_curable(self, death: Death) -> bool:  # called by `Supervisor.run`
        process_end = self._process_end
        if self._wire is not None and self._wire.greeted:
            # Its last messages may tell the cause.
            with suppress(TimeoutError):
                await asyncio.wait_for(process_end.wire_end_handled.wait(), LAST_MESSAGES_S)
        if death.stranded:
            return True  # its machine was lost, so the process itself had no fault
        if process_end.handshake_error:
            return False
        state = self._state()
        if not state.loaded:
            return False  # no process was ever ready, so the user must see the error
        exited_as_ordered = state.stop_ordered and death.exit_code == 0
        return not exited_as_ordered and not is_config_error(death.exit_code)

    async def on_death(  # called by `Supervisor.run`
        self, death: Death, restart_in_s: float | None
    ) -> None:
        """Report the death, and wait until the report was handled.

        It waits, because after the last death `run` returns and the read loop is cancelled.
        """
        self._close_wire()
        self._end_reported.clear()
        process_end = self._process_end
        cause = process_end.handshake_error or process_end.stop_cause or death.summary
        # The message of a ConfigError is enough for the user.
        has_crashed = death.exit_code != 0 and not is_config_error(death.exit_code)
        report = EngineGone(
            exit_code=death.exit_code,
            cause=cause,
            log_tail=death.log_tail if has_crashed else (),
            restart_in_s=restart_in_s,
        )
        self._inbox.put(report, force=True)
        await self._end_reported.wait()

    def _close_wire(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    # ---- messages and heartbeat

    async def _read(self) -> None:
        """Handle messages no faster than the front end reads them (back pressure)."""
        while True:
            for msg in await self._inbox.drain(wait=True):
                if self._to_front_end.full:
                    await self._wait_for_front_end()
                self._handle(msg)

    async def _wait_for_front_end(self) -> None:
        """Wait until the front end has read enough, or the engine is closed."""
        while self._to_front_end.full and not self._closing:
            has_room = asyncio.Event()
            self._to_front_end.when_room(has_room.set)
            with suppress(TimeoutError):
                await asyncio.wait_for(has_room.wait(), FRONT_END_CHECK_S)

    def _handle(self, msg: FromWire) -> None:
        match msg:
            case m.Pong():
                self.progress_monitor.pong(msg, time.monotonic())
                return
            case PeerGone(cause):
                self._report(WireLost())
                self._on_wire_lost(cause)
                return
            case m.Phase():
                self.note_progress()
            case m.Ready():
                self.progress_monitor = ProgressMonitor(time.monotonic(), msg.step_s)
                self.note_ready()
            case m.Stopped(cause):
                self._process_end.record_stop(cause)
        self._report(msg)
        if isinstance(msg, EngineGone):
            self._end_reported.set()

    def _on_wire_lost(self, cause: str) -> None:
        """Note the time, and the error of a failed handshake.

        The process should end by itself within EXIT_GRACE_S.
        """
        was_connected = self._wire is not None and self._wire.greeted
        self._process_end.record_wire_lost(handshake_error="" if was_connected else cause)

    def _ping_or_kill(self) -> None:
        """Ping the process, and kill it if it hangs."""
        now_s = time.monotonic()
        # Also if it is not sent: the monitor measures the time between these calls.
        ping = self.progress_monitor.ping(now_s)
        wire_lost_at_s = self._process_end.wire_lost_at_s
        if wire_lost_at_s is not None and now_s - wire_lost_at_s > EXIT_GRACE_S:
            self.kill("has closed its connection and did not end")
        state = self._state()
        if state.ready is None:
            return
        with suppress(Overloaded):  # then there is no answer either, which `fault` detects
            self.send(ping)
        fault = self.progress_monitor.fault(
            now_s, self.stall_s, held=state.held, grouped=state.grouped
        )
        if fault:
            self.kill(fault)  # a hanging engine also blocks the others of its group
