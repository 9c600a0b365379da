"""One engine process under supervision: started, watched, and started again when it dies or hangs.

`ChildEngine` is one engine process as an engine link; a `Fleet` has several.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import msgspec

from moeserve.actor.inbox import Inbox
from moeserve.actor.process import Death, Process
from moeserve.actor.supervisor import Life, RestartPolicy, Supervisor
from moeserve.actor.zmq_wire import PeerGone, ZmqWire, listen
from moeserve.cluster.heartbeat import INTERVAL_S, STALL_S, Heartbeat
from moeserve.cluster.host import Host
from moeserve.cluster.interface import EngineGone, is_config_error
from moeserve.cluster.order import BUILDER, EngineOrder, Role, without_secrets
from moeserve.config import Config
from moeserve.errors import ActorStopped, ConfigError, Overloaded
from moeserve.messages import Drain, EngineIn, EngineOut, Phase, Pong, Ready, Stopped

log = logging.getLogger(__name__)

INBOX_LIMIT = 20_000
EXIT_GRACE_S = 5.0  # a child that let go of its wire has this long to end
LAST_WORDS_S = 0.5  # what a dead child has sent arrives within this time


class Listener(Protocol):
    """Who is told what happens in an engine process."""

    async def hear(self, msg: EngineOut) -> None:
        """A message of the process, heartbeats excepted. Waiting in here holds the process back."""
        ...

    def lost(self) -> None:
        """Nothing more comes from this process: its wire is cut. It may be a moment until it is dead."""
        ...

    def gone(self, end: EngineGone) -> None:
        """The process is dead, whether or not it was `lost` before; `end.restarting` says what follows."""
        ...


class EngineProcess:
    """A place for one engine process at a time.

    A first start that fails is final: whoever starts a server wants to see why. A later death leads to a
    restart by `policy`, unless its cause is lasting (settings, model files, memory).
    role: what the next process is told. stall_s: an engine that has work and makes no progress for this long
    (longer, if its steps take long) is killed and started again. forward: gets each line of the engine's log
    (default: our stderr). builder: see order.py.
    """

    def __init__(
        self,
        config: Config,
        listener: Listener,
        *,
        name: str = "engine",
        role: Callable[[], Role] = Role,
        policy: RestartPolicy | None = None,
        stall_s: float = STALL_S,
        forward: Callable[[str], None] | None = None,
        builder: str = BUILDER,
    ) -> None:
        self.name = name
        self.phase = Phase("starting", 0, 0.0)
        self.ready: Ready | None = None
        self.held = False  # it waits for other engines: that it makes no progress is not its fault
        self.first_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._config = without_secrets(config)
        self._listener = listener
        self._role = role
        self._stall_s = stall_s
        self._forward = forward
        self._builder = builder
        self._supervisor = Supervisor(self, policy)
        self.host: Host  # from `run` on
        self._over = asyncio.Event()
        self._over.set()  # not begun
        self._told_to_stop = False
        # What belongs to the process that lives now:
        self._wire: ZmqWire[EngineIn, EngineOut | PeerGone] | None = None
        self._heart = Heartbeat(time.monotonic())
        self._grouped = False
        self._last_words = ""
        self._misfit = ""  # why no process started from this one can talk to us
        self._lost_s: float | None = None  # since when its wire is gone

    async def run(self, host: Host) -> None:
        """The engine process's whole life, on that machine: returns after a death that is final."""
        self.host = host
        self._over.clear()
        try:
            await self._supervisor.run()
        except ConfigError as exc:
            self._end(EngineGone(exit_code=exc.exit_code, cause=str(exc)))
        except Exception as exc:
            log.exception("the supervision of %s failed", self.name)
            self._end(EngineGone(exit_code=1, cause=f"the supervision of {self.name} failed: {exc!r}"))
        finally:
            self._over.set()

    @property
    def pid(self) -> int | None:
        child = self._supervisor.child
        return child.pid or None if child is not None and child.alive else None

    @property
    def stalled_s(self) -> float:
        return self._heart.stalled_s(time.monotonic()) if self.ready else 0.0

    @property
    def healthy(self) -> bool:
        return self.ready is not None and self._heart.healthy(time.monotonic())

    def send(self, msg: EngineIn) -> None:
        """Raises Overloaded if the process does not keep up; dropped if there is none."""
        self._told_to_stop |= isinstance(msg, Drain)
        with suppress(ActorStopped):
            self._tell(msg)

    def _tell(self, msg: EngineIn) -> None:
        if self._wire is None:
            raise ActorStopped("there is no engine at the moment")
        self._wire.send(msg)

    def kill(self, verdict: str) -> None:
        """Ends the process at once; `verdict` says why, as the rest of a sentence that begins with "it"."""
        child = self._supervisor.child
        if child is not None and child.alive:
            child.kill(verdict)

    async def stop(self, deadline_s: float) -> None:
        """Lets the process finish for up to `deadline_s`, then ends it and `run`. May be called again."""
        self._supervisor.retire()
        try:
            self._tell(Drain(deadline_s))
            patience_s = 1.0 + (deadline_s if self.ready else 0.0)
        except (ActorStopped, Overloaded):
            patience_s = 0.0  # it cannot hear us; a signal it can
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._over.wait()
        if not self._over.is_set():
            await self._supervisor.stop(term_s=1.0)
        await self._over.wait()

    # For the supervisor

    @asynccontextmanager
    async def life(self, generation: int) -> AsyncIterator[Life]:
        """One engine process with a socket, a token and a heartbeat that no other one shares."""
        address, keys = self.host.door(f"{self.name}-{generation}")
        token = secrets.token_hex(16)
        inbox: Inbox[EngineOut | PeerGone] = Inbox(f"{self.name} link", INBOX_LIMIT)
        role = self._role()
        wire = self._wire = listen(address, token=token, receives=EngineOut, inbox=inbox, keys=keys)
        order = EngineOrder(
            config=self._config,
            address=wire.address,
            token=token,
            born_s=time.monotonic(),
            builder=self._builder,
            role=role,
        )
        self._last_words, self._misfit, self._lost_s = "", "", None
        self._grouped = self.held = role.grouped
        serving = asyncio.Event()
        try:
            child = self.host.start(self.name, msgspec.json.encode(order), self._forward)
            async with asyncio.TaskGroup() as group:
                ears = group.create_task(self._listen(inbox, wire, serving), name=f"{self.name} messages")
                heart = group.create_task(self._beat(child), name=f"{self.name} heartbeat")
                absence = group.create_task(self._await_host(), name=f"{self.name} machine")
                yield Life(child, serving.wait)
                if wire.greeted:
                    await asyncio.wait([ears], timeout=LAST_WORDS_S)
                ears.cancel()
                heart.cancel()
                absence.cancel()
        finally:
            self._wire = self.ready = None
            wire.close()

    def curable(self, death: Death) -> bool:
        first_start_failed = not self.first_ready.done()
        obeyed = self._told_to_stop and death.exit_code == 0
        return death.stranded or not (self._misfit or first_start_failed or obeyed or is_config_error(death.exit_code))

    def buried(self, death: Death, again_in_s: float | None) -> None:
        cause = self._misfit or self._last_words or death.summary
        tail = death.log_tail if death.exit_code and not is_config_error(death.exit_code) else ()
        self._end(EngineGone(exit_code=death.exit_code, cause=cause, log_tail=tail, restart_in_s=again_in_s))

    def _end(self, gone: EngineGone) -> None:
        self._listener.gone(gone)
        if not gone.restarting and not self.first_ready.done():
            self.first_ready.set_exception(gone.error())
            self.first_ready.exception()  # nobody has to await it

    # While a process lives

    async def _listen(
        self,
        inbox: Inbox[EngineOut | PeerGone],
        wire: ZmqWire[EngineIn, EngineOut | PeerGone],
        serving: asyncio.Event,
    ) -> None:
        async for msg in inbox:
            match msg:
                case PeerGone(cause):
                    self._misfit = "" if wire.greeted else cause
                    self._lost_s = time.monotonic()
                    self.ready = None
                    self._listener.lost()
                    return
                case Pong():
                    self._heart.pong(msg, time.monotonic())
                    continue
                case Phase():
                    self.phase = msg
                    self._supervisor.progress()
                case Ready():
                    self._heart = Heartbeat(time.monotonic(), msg.step_s)
                    self.ready = msg
                    serving.set()
                    if not self.first_ready.done():
                        self.first_ready.set_result(msg)
                case Stopped(cause):
                    self._last_words = cause
            await self._listener.hear(msg)

    async def _await_host(self) -> None:
        """Says what the process waits for, as long as its machine is not there."""
        began_s = time.monotonic()
        while self.host.absent:
            self._supervisor.progress()
            self.phase = Phase(self.host.absent, 0, time.monotonic() - began_s)
            await self._listener.hear(self.phase)
            await asyncio.sleep(INTERVAL_S)

    async def _beat(self, child: Process) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            now_s = time.monotonic()
            ping = self._heart.ping(now_s)
            if self._lost_s is not None and now_s - self._lost_s > EXIT_GRACE_S:
                child.kill("has closed its connection and did not end")
            if self.ready is None:
                continue
            with suppress(ActorStopped, Overloaded):  # no pong is an answer too
                self._tell(ping)
            if self.held:
                self._heart.rest(now_s)
                if self._heart.is_mute(now_s, self._stall_s):  # the others would wait for it for ever
                    child.kill(f"has not answered for {self._heart.silent_s(now_s):.0f} s")
            elif self._heart.hangs(now_s, self._stall_s, grouped=self._grouped):
                child.kill(f"has made no progress for {self.stalled_s:.0f} s although it has work")
