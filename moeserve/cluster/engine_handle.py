"""One engine of a fleet: its process under supervision, its standing in its group, and the requests that it has."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

import msgspec

from moeserve.actor.actor import Actor
from moeserve.actor.inbox import Inbox
from moeserve.actor.process import Death, Process
from moeserve.actor.supervisor import RestartPolicy, Supervisor
from moeserve.actor.zmq_wire import PeerGone, ZmqWire, listen
from moeserve.cluster.balance import Load
from moeserve.cluster.heartbeat import INTERVAL_S, STALL_S, Heartbeat
from moeserve.cluster.host import Host
from moeserve.cluster.link import INBOX_LIMIT, EngineGone, is_config_error
from moeserve.cluster.order import BUILDER, EngineOrder, Role, without_secrets
from moeserve.cluster.view import EngineView
from moeserve.config import Config
from moeserve.errors import ActorStopped, ConfigError, Overloaded
from moeserve.messages import (
    AdminResult,
    Drain,
    EngineIn,
    EngineOut,
    ExpertLoad,
    Joined,
    Parted,
    Phase,
    Placed,
    Pong,
    Ready,
    Refused,
    StepOutput,
    StepRecord,
    Stopped,
    Traced,
)

if TYPE_CHECKING:
    from moeserve.cluster.fleet import Fleet

log = logging.getLogger(__name__)

EXIT_GRACE_S = 5.0  # a process that closed its wire has this long to end
LAST_WORDS_S = 0.5  # what a dead process has sent arrives within this time


ForFleet = Phase | Ready | StepOutput | Refused | AdminResult | Stopped | Joined | Parted | ExpertLoad | Placed | Traced


@dataclass(frozen=True, slots=True)
class EngineSaid:
    """A message of an engine, heartbeats excepted."""

    engine: EngineHandle
    msg: ForFleet


@dataclass(frozen=True, slots=True)
class EngineLost:
    """Nothing more comes from this engine's process, which had served; it may not be dead yet."""

    engine: EngineHandle


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """The engine's process is dead; `end.restarting` says whether another one follows."""

    engine: EngineHandle
    end: EngineGone


class EngineHandle(Actor[EngineOut | PeerGone | EngineGone]):
    """Supervises one engine process at a time and tells the fleet EngineSaid, EngineLost and EngineEnded.

    A first start that fails is final: whoever starts a server wants to see why. A later death leads to a restart by
    `policy`, unless its cause is lasting (settings, model files, memory).

    rank: data-parallel. role: what the next process is told. stall_s: an engine that has work and makes no progress
    for so long (longer, if its steps take long) is killed and started again. forward: gets each line of the engine's
    log (default: our stderr). builder: see order.py.
    """

    def __init__(
        self,
        fleet: Fleet,
        rank: int,
        role: Role,
        config: Config,
        *,
        policy: RestartPolicy | None = None,
        stall_s: float = STALL_S,
        forward: Callable[[str], None] | None = None,
        builder: str = BUILDER,
    ) -> None:
        super().__init__(f"engine {rank}", Inbox(f"engine {rank} link", INBOX_LIMIT))
        self.rank = rank
        self.role = role
        self.host: Host  # from `start` on
        self.phase = Phase("starting", 0, 0.0)
        self.ready: Ready | None = None  # its facts while a process serves, or could join
        self.first_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.rids: set[int] = set()
        self.epoch = 0  # of the group in which it serves, 0 for none
        self.parted: Parted | None = None  # why it left its group or did not get in
        self.held = False  # it waits for other engines: that it makes no progress is not its fault
        self.restarts = 0
        self.retired = False  # its messages do not count any more
        self.draining = False  # it was told to stop: no new requests
        self.obeyed = False  # its process ended because it was told to
        self.last: StepRecord | None = None
        self.end: EngineGone | None = None  # the final one
        self._fleet = fleet
        self._config = without_secrets(config)
        self._stall_s = stall_s
        self._forward = forward
        self._builder = builder
        self._supervisor = Supervisor(self, policy)
        self._task: asyncio.Task[None] | None = None
        self._told_to_stop = False
        self._closing = False  # the front end may not read any more
        # What belongs to the process that lives now:
        self._wire: ZmqWire[EngineIn, EngineOut | PeerGone | EngineGone] | None = None
        self._heart = Heartbeat(time.monotonic())
        self._grouped = False
        self._served = False  # it has been in a group
        self._last_words = ""
        self._misfit = ""  # why no process started from this one can talk to us
        self._lost_s: float | None = None  # since when its wire is gone
        self._heard_all = asyncio.Event()  # all that it sent was handled

    # ---- for the fleet --------------------------------------------------------------------------------------

    def start(self, host: Host) -> None:
        """Starts the engine on that machine, and returns."""
        self.host = host
        self._task = asyncio.get_running_loop().create_task(self.run(), name=self.name)

    async def close(self, deadline_s: float) -> None:
        """Lets the process finish for up to `deadline_s`, then ends it and this actor. May be called again."""
        if self._task is None:
            return
        self._closing = True
        self._supervisor.retire()
        try:
            self._send(Drain(deadline_s))
            patience_s = 1.0 + (deadline_s if self.ready else 0.0)
        except (ActorStopped, Overloaded):
            patience_s = 0.0  # the process cannot read messages; a signal reaches it
        await asyncio.wait([self._task], timeout=patience_s)
        if not self._task.done():
            await self._supervisor.stop(term_s=1.0)
        await asyncio.wait([self._task])

    def send(self, msg: EngineIn) -> None:
        """Sends the process a message; drops it if there is none. Raises Overloaded if the process does not keep up."""
        self._told_to_stop |= isinstance(msg, Drain)
        with suppress(ActorStopped):
            self._send(msg)

    def drain(self, deadline_s: float) -> None:
        """Lets running requests finish for up to `deadline_s`; there are no new ones."""
        self.draining = True
        with suppress(Overloaded):  # then it is stopped with the fleet
            self.send(Drain(deadline_s))

    def kill(self, reason: str) -> None:
        """Ends the process at once; reason: see `Process.kill`."""
        child = self._supervisor.child
        if child is not None and child.alive:
            child.kill(reason)

    def join(self, epoch: int) -> None:
        """The engine serves in this epoch."""
        self.epoch, self.parted = epoch, None
        self._served = True

    @property
    def pid(self) -> int | None:
        """Process id, None while there is no process."""
        child = self._supervisor.child
        return child.pid or None if child is not None and child.alive else None

    @property
    def up(self) -> bool:
        """Whether there is a process that could join."""
        return self.ready is not None and self.end is None

    @property
    def state(self) -> str:
        """The engine's state, for people: see `EngineView`."""
        if self.end is not None:
            return "gone"
        if not self.up:
            return "loading" if not self.restarts else "lost"
        if self.draining:
            return "draining"
        return "serving" if self.epoch else "waiting"

    def view(self, load: Load | None) -> EngineView:
        """Returns what there is to see of this engine now."""
        return EngineView(
            rank=self.rank,
            host=self.host.name,
            pid=self.pid,
            state=self.state,
            epoch=self.epoch,
            restarts=self.restarts,
            num_requests=len(self.rids),
            predicted_work=load.work if load is not None else 0.0,
            last=self.last,
        )

    @property
    def stalled_s(self) -> float:
        """Seconds since the last progress of an engine that has work, or since its last answer."""
        return self._heart.stalled_s(time.monotonic()) if self.ready else 0.0

    @property
    def healthy(self) -> bool:
        """Whether the engine serves and makes progress."""
        return self.ready is not None and self._heart.healthy(time.monotonic())

    # ---- the actor ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Returns after a death that is final."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(super().run(), name=f"{self.name} messages")
                beat = group.create_task(self._beat(), name=f"{self.name} heartbeat")
                await self._supervisor.run()
                beat.cancel()
                self.stop()
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, ConfigError):
                self._on_end(EngineGone(exit_code=error.exit_code, cause=str(error)))
            else:
                log.error("the supervision of %s failed", self.name, exc_info=error)
                self._on_end(EngineGone(exit_code=1, cause=f"the supervision of {self.name} failed: {error!r}"))
        finally:
            self._cut()

    async def turn(self) -> None:
        """Handles what there is, as fast as the front end reads: the process is held back with this inbox."""
        for msg in await self.inbox.drain(wait=True):
            await self._room()
            self.handle(msg)

    async def _room(self) -> None:
        """Waits until the front end has read enough; it may not read any more when the engine is closed."""
        while self._fleet.outbox.full and not self._closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._fleet.outbox.room()

    def handle(self, msg: EngineOut | PeerGone | EngineGone) -> None:
        """Takes note of a message and tells the fleet. EngineGone comes from the supervisor, the rest from the wire."""
        match msg:
            case EngineGone():
                self._on_end(msg)
                self._heard_all.set()
            case PeerGone(cause):
                self._misfit = "" if self._wire is not None and self._wire.greeted else cause
                self._lost_s = time.monotonic()
                self._on_lost()
                self._heard_all.set()
            case Pong():
                self._heart.pong(msg, time.monotonic())
            case _:
                self._note(msg)
                self._tell(EngineSaid(self, msg))

    def _note(self, msg: ForFleet) -> None:
        match msg:
            case Phase():
                self.phase = msg
                self._supervisor.progress()
            case Ready():
                self._heart = Heartbeat(time.monotonic(), msg.step_s)
                self.ready = msg
                self._supervisor.serving()
                if not self.first_ready.done():
                    self.first_ready.set_result(msg)
            case Stopped(cause):
                self._last_words = cause
                self.obeyed = not cause
            case Joined(epoch=epoch):
                self.join(epoch)
            case Parted(epoch=epoch) if epoch >= self.epoch:
                self.epoch, self.parted = 0, msg
            case StepOutput(record=record):
                self.last = record or self.last
            case Parted() | Refused() | AdminResult() | ExpertLoad() | Placed() | Traced():
                pass
            case _:
                assert_never(msg)

    def _on_lost(self) -> None:
        """The process cannot be reached any more; the next one has served in no group yet."""
        served, self._served = self._served, False
        self.ready, self.draining, self.epoch, self.parted = None, False, 0, None
        if served:
            self._tell(EngineLost(self))

    def _on_end(self, end: EngineGone) -> None:
        self._on_lost()
        if end.restarting:
            self.restarts += 1
            self.obeyed = False
        else:
            self.end = end
            if not self.first_ready.done():
                self.first_ready.set_exception(end.error())
                self.first_ready.exception()  # nobody has to await it
        self._tell(EngineEnded(self, end))

    def _tell(self, msg: EngineSaid | EngineLost | EngineEnded) -> None:
        with suppress(ActorStopped):  # the fleet has failed, and said so
            self._fleet.inbox.put(msg, force=True)

    def _send(self, msg: EngineIn) -> None:
        if self._wire is None:
            raise ActorStopped("there is no engine at the moment")
        self._wire.send(msg)

    def _cut(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    # ---- for the supervisor ---------------------------------------------------------------------------------

    async def begin(self, incarnation: int) -> Process:
        """Starts a process with a socket, a token and a heartbeat of its own. Raises ConfigError."""
        address, keys = self.host.listen_address(f"{self.name}-{incarnation}")
        token = secrets.token_hex(16)
        wire = self._wire = listen(address, token=token, receives=EngineOut, inbox=self.inbox, keys=keys)
        order = EngineOrder(
            config=self._config,
            address=wire.address,
            token=token,
            born_s=time.monotonic(),
            builder=self._builder,
            role=self.role,
        )
        self._last_words, self._misfit, self._lost_s = "", "", None
        self._grouped = self.held = self.role.grouped
        self._heard_all.clear()
        reporting = asyncio.get_running_loop().create_task(self._report_absence(), name=f"{self.name} machine")
        try:
            return await self.host.start(self.name, msgspec.json.encode(order), self._forward)
        finally:
            reporting.cancel()

    async def curable(self, death: Death) -> bool:
        """Returns whether another process may fare better, once all that the dead one had sent was handled."""
        if self._wire is not None and self._wire.greeted:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._heard_all.wait()
        first_start_failed = not self.first_ready.done()
        obeyed = self._told_to_stop and death.exit_code == 0
        return death.stranded or not (self._misfit or first_start_failed or obeyed or is_config_error(death.exit_code))

    async def buried(self, death: Death, again_in_s: float | None) -> None:
        """Returns once the end of the process was told."""
        self._cut()
        self._heard_all.clear()
        cause = self._misfit or self._last_words or death.summary
        tail = death.log_tail if death.exit_code and not is_config_error(death.exit_code) else ()
        end = EngineGone(exit_code=death.exit_code, cause=cause, log_tail=tail, restart_in_s=again_in_s)
        self.inbox.put(end, force=True)
        await self._heard_all.wait()

    async def _report_absence(self) -> None:
        """Reports what the start waits for, as long as the machine is not there."""
        began_s = time.monotonic()
        while self.host.absent:
            self.inbox.put(Phase(self.host.absent, 0, time.monotonic() - began_s), force=True)
            await asyncio.sleep(INTERVAL_S)

    async def _beat(self) -> None:
        """Sends pings to the process that lives, and kills it if it hangs."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            now_s = time.monotonic()
            ping = self._heart.ping(now_s)
            if self._lost_s is not None and now_s - self._lost_s > EXIT_GRACE_S:
                self.kill("has closed its connection and did not end")
            if self.ready is None:
                continue
            with suppress(ActorStopped, Overloaded):  # no pong is an answer too
                self._send(ping)
            if self.held:
                self._heart.rest(now_s)
                if self._heart.is_mute(now_s, self._stall_s):  # the others would wait for it for ever
                    self.kill(f"has not answered for {self._heart.silent_s(now_s):.0f} s")
            elif self._heart.hangs(now_s, self._stall_s, grouped=self._grouped):
                self.kill(f"has made no progress for {self.stalled_s:.0f} s although it has work")
