"""An engine in a process of its own: started, watched, and started again when it dies or hangs."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec

import moeserve
from moeserve.actor.inbox import Inbox
from moeserve.actor.process import Child, Death
from moeserve.actor.supervisor import Life, RestartPolicy, Supervisor
from moeserve.actor.wire import PeerGone
from moeserve.actor.zmq_wire import ZmqWire, listen
from moeserve.config import Config
from moeserve.errors import ActorStopped, ConfigError, Overloaded
from moeserve.launch.heartbeat import INTERVAL_S, STALL_S, Heartbeat
from moeserve.launch.interface import EngineGone, FromEngine, is_config_error
from moeserve.launch.order import BUILDER, EngineOrder, without_secrets
from moeserve.launch.rundir import RunDir
from moeserve.messages import Drain, EngineIn, EngineOut, Phase, Pong, Ready, Stopped

log = logging.getLogger(__name__)

INBOX_LIMIT = 20_000
EXIT_GRACE_S = 5.0  # a child that let go of its wire has this long to end
LAST_WORDS_S = 0.5  # what a dead child has sent arrives within this time


class ChildEngine:
    """`EngineLink` to a supervised process; see link.py for the interface.

    A first start that fails is final: whoever starts a server wants to see why. A later death leads to a
    restart by `policy`, unless its cause is lasting (settings, model files, memory).
    stall_s: an engine that has work and makes no progress for this long (longer, if its steps take long) is killed
    and started again.
    forward: gets each line of the engine's log (default: our stderr). builder: see order.py.
    """

    def __init__(
        self,
        config: Config,
        *,
        policy: RestartPolicy | None = None,
        stall_s: float = STALL_S,
        forward: Callable[[str], None] | None = None,
        builder: str = BUILDER,
    ) -> None:
        self.inbox: Inbox[FromEngine] = Inbox("front end", INBOX_LIMIT)
        self.phase = Phase("starting", 0, 0.0)
        self.ready: Ready | None = None
        self._config = without_secrets(config)
        self._stall_s = stall_s
        self._forward = forward
        self._builder = builder
        self._supervisor = Supervisor(self, policy)
        self._run_dir: RunDir | None = None
        self._task: asyncio.Task[None] | None = None
        self._told_to_stop = False
        self._first_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        # What belongs to the process that lives now:
        self._wire: ZmqWire[EngineIn, EngineOut | PeerGone] | None = None
        self._heart = Heartbeat(time.monotonic())
        self._last_words = ""
        self._misfit = ""  # why no process started from this one can talk to us
        self._lost_s: float | None = None  # since when its wire is gone

    async def start(self) -> None:
        assert self._task is None, "a link is started once"
        self._run_dir = RunDir()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="engine link")

    async def until_ready(self) -> Ready:
        return await asyncio.shield(self._first_ready)

    @property
    def pid(self) -> int | None:
        child = self._supervisor.child
        return child.pid if child is not None and child.alive else None

    @property
    def stalled_s(self) -> float:
        return self._heart.stalled_s(time.monotonic()) if self.ready else 0.0

    @property
    def healthy(self) -> bool:
        return self.ready is not None and self._heart.healthy(time.monotonic())

    def send(self, msg: EngineIn) -> None:
        self._told_to_stop |= isinstance(msg, Drain)
        with suppress(ActorStopped):
            self._tell(msg)

    def _tell(self, msg: EngineIn) -> None:
        if self._wire is None:
            raise ActorStopped("there is no engine at the moment")
        self._wire.send(msg)

    async def stop(self, deadline_s: float) -> None:
        if self._task is None:
            return
        self._supervisor.retire()
        try:
            self._tell(Drain(deadline_s))
            patience_s = 1.0 + (deadline_s if self.ready else 0.0)
        except (ActorStopped, Overloaded):
            patience_s = 0.0  # it cannot hear us; a signal it can
        await asyncio.wait([self._task], timeout=patience_s)
        if not self._task.done():
            await self._supervisor.stop(term_s=1.0)
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            await self._supervisor.run()
        except ConfigError as exc:
            self._end(EngineGone(exit_code=exc.exit_code, cause=str(exc)))
        except Exception as exc:
            log.exception("the engine's supervision failed")
            self._end(EngineGone(exit_code=1, cause=f"the engine's supervision failed: {exc!r}"))
        finally:
            assert self._run_dir is not None
            self._run_dir.close()

    # For the supervisor

    @asynccontextmanager
    async def life(self, generation: int) -> AsyncIterator[Life]:
        """One engine process with a socket, a token and a heartbeat that no other one shares."""
        assert self._run_dir is not None
        address = f"ipc://{os.path.join(self._run_dir.path, f'engine-{generation}.sock')}"
        token = secrets.token_hex(16)
        inbox: Inbox[EngineOut | PeerGone] = Inbox("engine link", INBOX_LIMIT)
        order = EngineOrder(
            config=self._config, address=address, token=token, born_s=time.monotonic(), builder=self._builder
        )
        wire = self._wire = listen(address, token=token, receives=EngineOut, inbox=inbox)
        self._last_words, self._misfit, self._lost_s = "", "", None
        serving = asyncio.Event()
        try:
            child = Child.start("engine", _command(), msgspec.json.encode(order), forward=self._forward)
            async with asyncio.TaskGroup() as group:
                ears = group.create_task(self._listen(inbox, wire, serving), name="engine messages")
                heart = group.create_task(self._beat(child), name="heartbeat")
                yield Life(child, serving.wait)
                if wire.greeted:
                    await asyncio.wait([ears], timeout=LAST_WORDS_S)
                ears.cancel()
                heart.cancel()
        finally:
            self._wire = self.ready = None
            wire.close()

    def curable(self, death: Death) -> bool:
        first_start_failed = not self._first_ready.done()
        obeyed = self._told_to_stop and death.exit_code == 0
        return not (self._misfit or first_start_failed or obeyed or is_config_error(death.exit_code))

    def buried(self, death: Death, again_in_s: float | None) -> None:
        cause = self._misfit or self._last_words or death.summary
        tail = death.log_tail if death.exit_code and not is_config_error(death.exit_code) else ()
        self._end(EngineGone(exit_code=death.exit_code, cause=cause, log_tail=tail, restart_in_s=again_in_s))

    def _end(self, gone: EngineGone) -> None:
        self.inbox.put(gone, force=True)
        if not gone.restarting and not self._first_ready.done():
            self._first_ready.set_exception(gone.error())
            self._first_ready.exception()  # nobody has to await it

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
                    if not self._first_ready.done():
                        self._first_ready.set_result(msg)
                case Stopped(cause):
                    self._last_words = cause
            await self.inbox.room()
            self.inbox.put(msg)

    async def _beat(self, child: Child) -> None:
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
            if self._heart.hangs(now_s, self._stall_s):
                child.kill(f"has made no progress for {self.stalled_s:.0f} s although it has work")


def _command() -> list[str]:
    # -P: a file torch.py in the user's folder must not become the engine's torch. From a bare checkout, though,
    # the folder is where moeserve itself is.
    root = os.path.dirname(os.path.dirname(os.path.abspath(moeserve.__file__)))
    safe = [] if root == os.getcwd() else ["-P"]
    return [sys.executable, *safe, "-m", "moeserve.launch.engine_process"]
