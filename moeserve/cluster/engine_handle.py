"""One engine of a fleet: its standing in its group, its messages, and its process
(engine_process.py).
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_never

from moeserve import messages as m
from moeserve.actor.actor import Actor, Inbox
from moeserve.actor.zmq_wire import PeerGone
from moeserve.cluster.engine_process import LAST_WORDS_S, EngineProcess
from moeserve.cluster.heartbeat import Heartbeat
from moeserve.cluster.host import Host
from moeserve.cluster.link import INBOX_LIMIT, EngineGone
from moeserve.cluster.order import Role
from moeserve.config import Config
from moeserve.errors import ActorStopped, ConfigError, Overloaded

if TYPE_CHECKING:
    from moeserve.cluster.fleet import Fleet

log = logging.getLogger(__name__)

ForFleet = (
    m.Phase
    | m.Ready
    | m.StepOutput
    | m.Refused
    | m.Stopped
    | m.Joined
    | m.Parted
    | m.ExpertLoad
    | m.Placed
    | m.Traced
)


@dataclass(frozen=True, slots=True)
class EngineSaid:
    """A message of an engine, heartbeats excepted."""

    engine: "EngineHandle"
    msg: ForFleet


@dataclass(frozen=True, slots=True)
class ProcessLost:
    """Nothing more comes from this engine's process, which had served; it may not be dead yet."""

    engine: "EngineHandle"


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """The engine's process is dead; `end.restarting` says whether another one follows."""

    engine: "EngineHandle"
    end: EngineGone


class EngineHandle(Actor[m.EngineOut | PeerGone | EngineGone]):
    """The actor that stands for one engine. It tells the fleet EngineSaid, ProcessLost and
    EngineEnded.

    rank: its number, which stays the same whatever others come and go. host: the machine that it
    runs on. options: those of `EngineProcess`.
    """

    def __init__(
        self, fleet: "Fleet", rank: int, host: Host, config: Config, **options: Any
    ) -> None:
        super().__init__(f"engine {rank}", Inbox(f"engine {rank} link", INBOX_LIMIT))
        self.rank = rank
        self.host = host
        self.role: Role  # what the next process is told, from `start` on
        self.process = EngineProcess(self, config, **options)
        self.phase = m.Phase("starting", 0, 0.0)
        self.ready: m.Ready | None = None  # its facts while a process serves, or could join
        self.first_ready: asyncio.Future[m.Ready] = asyncio.get_running_loop().create_future()
        self.epoch = 0  # of the group in which it serves, 0 for none
        self.parted: m.Parted | None = None  # why it left its group or did not get in
        self.held = False  # it waits for other engines: that it makes no progress is not its fault
        self.restarts = 0
        self.retired = False  # its messages do not count any more
        self.draining = False  # it was told to stop: no new requests
        self.told_to_stop = False
        self.obeyed = False  # its process ended because it was told to
        self.end: EngineGone | None = None  # the final one
        self._fleet = fleet
        self._task: asyncio.Task[None] | None = None
        self._closing = False  # the front end may not read any more
        self._served = False  # the process that lives now has been in a group

    def start(self, role: Role) -> None:
        """Starts the engine, and returns."""
        self.role = role
        self._task = asyncio.get_running_loop().create_task(self.run(), name=self.name)

    async def close(self, deadline_s: float) -> None:
        """Lets the process finish for up to `deadline_s`, then ends it and this actor. May be
        called again.
        """
        if self._task is None:
            return
        self._closing = True
        self.process.retire()
        try:
            can_read = self.send(m.Drain(deadline_s))
        except Overloaded:
            can_read = False  # a signal reaches it
        patience_s = 1.0 + (deadline_s if self.ready else 0.0)
        await asyncio.wait([self._task], timeout=patience_s if can_read else 0.0)
        if not self._task.done():
            await self.process.stop(term_s=1.0)
        await asyncio.wait([self._task])

    def send(self, msg: m.EngineIn) -> bool:
        """Sends the process a message. Returns False and drops it if there is no process.

        Raises Overloaded if the process does not keep up.
        """
        wire = self.process.wire
        return wire is not None and wire.send(msg)

    def drain(self, deadline_s: float) -> None:
        """Lets running requests finish for up to `deadline_s`; there are no new ones."""
        self.draining = self.told_to_stop = True
        with suppress(Overloaded):  # then it is stopped with the fleet
            self.send(m.Drain(deadline_s))

    def join(self, epoch: int) -> None:
        """Takes note that the engine serves in this epoch."""
        self.epoch = epoch
        self.parted = None
        self._served = True

    @property
    def pid(self) -> int | None:
        """Process id, None while there is no process."""
        return self.process.pid

    @property
    def up(self) -> bool:
        """Whether there is a process that could join."""
        return self.ready is not None and self.end is None

    @property
    def serving(self) -> bool:
        """Whether the engine, and all of its group, may get requests."""
        return self.up and self.epoch > 0 and not self.held and not self.draining

    async def run(self) -> None:
        """Returns after a death that is final."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(super().run(), name=f"{self.name} messages")
                beat = group.create_task(self.process.beat(), name=f"{self.name} heartbeat")
                await self.process.run()
                beat.cancel()
                self.stop()
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, ConfigError):
                self._on_end(EngineGone(exit_code=error.exit_code, cause=str(error)))
            else:
                log.error("the supervision of %s failed", self.name, exc_info=error)
                self._on_end(
                    EngineGone(
                        exit_code=1, cause=f"the supervision of {self.name} failed: {error!r}"
                    )
                )
        finally:
            self.process.close_wire()

    async def turn(self) -> None:
        """Handles what there is, as fast as the front end reads: the process is held back with this
        inbox.
        """
        for msg in await self.inbox.drain(wait=True):
            if self._fleet.outbox.full:
                await self._room()
            self.handle(msg)

    async def _room(self) -> None:
        """Waits until the front end has read enough; it may not read any more when the engine is
        closed.
        """
        while self._fleet.outbox.full and not self._closing:
            free = asyncio.Event()
            self._fleet.outbox.when_room(free.set)
            with suppress(TimeoutError):
                await asyncio.wait_for(free.wait(), LAST_WORDS_S)

    def handle(self, msg: m.EngineOut | PeerGone | EngineGone) -> None:
        """Takes note of a message and tells the fleet. EngineGone comes from the supervisor, the
        rest from the wire.
        """
        match msg:
            case EngineGone():
                self._on_end(msg)
                self.process.heard_all.set()
            case PeerGone(cause):
                self._on_lost()
                self.process.on_hang_up(cause)
            case m.Pong():
                self.process.heart.pong(msg, time.monotonic())
            case _:
                self._note(msg)
                self._tell(EngineSaid(self, msg))

    def _note(self, msg: ForFleet) -> None:
        match msg:
            case m.Phase():
                self.phase = msg
                self.process.progress()
            case m.Ready():
                self.process.heart = Heartbeat(time.monotonic(), msg.step_s)
                self.ready = msg
                self.process.serving()
                if not self.first_ready.done():
                    self.first_ready.set_result(msg)
            case m.Stopped(cause):
                self.process.last_words = cause
                self.obeyed = not cause
            case m.Joined(epoch=epoch):
                self.join(epoch)
            case m.Parted(epoch=epoch) if epoch >= self.epoch:
                self.epoch = 0
                self.parted = msg
            case (
                m.StepOutput() | m.Parted() | m.Refused() | m.ExpertLoad() | m.Placed() | m.Traced()
            ):
                pass
            case _:
                assert_never(msg)

    def _on_lost(self) -> None:
        """The process cannot be reached any more; the next one has served in no group yet."""
        served = self._served
        self._served = False
        self.ready = None
        self.draining = False
        self.epoch = 0
        self.parted = None
        if served:
            self._tell(ProcessLost(self))

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

    def _tell(self, msg: EngineSaid | ProcessLost | EngineEnded) -> None:
        with suppress(ActorStopped):  # the fleet has failed, and said so
            self._fleet.inbox.put(msg, force=True)
