"""The process of an engine under supervision: how it starts, how hangs and deaths are found, when
it starts again.
"""

import asyncio
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from moeserve.actor.process import Death, Process
from moeserve.actor.supervisor import RestartPolicy, Supervisor
from moeserve.actor.zmq_wire import PeerGone, ZmqWire, listen
from moeserve.cluster.heartbeat import INTERVAL_S, STALL_S, Heartbeat
from moeserve.cluster.link import EngineGone, is_config_error
from moeserve.cluster.order import BUILDER, EngineOrder, without_secrets
from moeserve.config import Config
from moeserve.errors import Overloaded
from moeserve.messages import EngineIn, EngineOut, Phase

if TYPE_CHECKING:
    from moeserve.cluster.engine_handle import EngineHandle

EXIT_GRACE_S = 5.0  # a process that closed its wire has this long to end
LAST_WORDS_S = 0.5  # what a dead process has sent arrives within this time


class EngineProcess(Supervisor):
    """The supervisor of one engine: each of its processes has a wire, a token and a heartbeat of
    its own.

    The engine's handle gets all that they send in its inbox, and an EngineGone at the end of each.
    A first start that fails is final: whoever starts a server wants to see why. A later death leads
    to a restart by `policy`, unless its cause is lasting (settings, model files, memory).

    stall_s: an engine that has work and makes no progress for so long (longer, if its steps take
    long) is killed and started again. builder: see order.py.
    """

    def __init__(
        self,
        engine: "EngineHandle",
        config: Config,
        *,
        policy: RestartPolicy | None = None,
        stall_s: float = STALL_S,
        builder: str = BUILDER,
    ) -> None:
        super().__init__(engine.name, policy)
        self.stall_s = stall_s
        self.wire: ZmqWire[EngineIn, EngineOut | PeerGone | EngineGone] | None = None
        self.heart = Heartbeat(time.monotonic())
        self.last_words = ""  # why it stops, as the process has said
        self.heard_all = asyncio.Event()  # all that the process sent was handled
        self._engine = engine
        self._config = without_secrets(config)
        self._builder = builder
        self._misfit = ""  # why no process started from this one can talk to us
        self._lost_s: float | None = None  # since when the wire is gone

    @property
    def pid(self) -> int | None:
        """Process id, None while there is no process."""
        return self.child.pid or None if self.child is not None and self.child.alive else None

    def kill(self, reason: str) -> None:
        """Ends the process at once; reason: see `Process.kill`."""
        if self.child is not None and self.child.alive:
            self.child.kill(reason)

    def on_hang_up(self, cause: str) -> None:
        """Takes note of the end of the wire; the process should end now."""
        self._misfit = "" if self.wire is not None and self.wire.greeted else cause
        self._lost_s = time.monotonic()
        self.heard_all.set()

    async def begin(self, incarnation: int) -> Process:
        """Starts a process, once its machine is there. Raises ConfigError."""
        engine = self._engine
        address, keys = engine.host.listen_address(f"{self.name}-{incarnation}")
        token = secrets.token_hex(16)
        wire = self.wire = listen(
            address, token=token, receives=EngineOut, inbox=engine.inbox, keys=keys
        )
        order = EngineOrder(
            config=self._config,
            address=wire.address,
            token=token,
            born_s=time.monotonic(),
            builder=self._builder,
            role=msgspec.structs.replace(engine.role, folder=engine.host.folder),
        )
        self.last_words = ""
        self._misfit = ""
        self._lost_s = None
        engine.held = engine.role.grouped
        self.heard_all.clear()
        reporting = asyncio.get_running_loop().create_task(
            self._report_absence(), name=f"{self.name} machine"
        )
        try:
            return await engine.host.start(self.name, msgspec.json.encode(order))
        finally:
            reporting.cancel()

    async def curable(self, death: Death) -> bool:
        """Returns whether another process may fare better, once all that the dead one had sent was
        handled.
        """
        engine = self._engine
        if self.wire is not None and self.wire.greeted:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.heard_all.wait(), LAST_WORDS_S)
        first_start_failed = not engine.first_ready.done()
        obeyed = engine.told_to_stop and death.exit_code == 0
        return death.stranded or not (
            self._misfit or first_start_failed or obeyed or is_config_error(death.exit_code)
        )

    async def on_death(self, death: Death, again_in_s: float | None) -> None:
        """Returns once the fleet was told of the death."""
        self.close_wire()
        self.heard_all.clear()
        cause = self._misfit or self.last_words or death.summary
        tail = death.log_tail if death.exit_code and not is_config_error(death.exit_code) else ()
        end = EngineGone(
            exit_code=death.exit_code, cause=cause, log_tail=tail, restart_in_s=again_in_s
        )
        self._engine.inbox.put(end, force=True)
        await self.heard_all.wait()

    def close_wire(self) -> None:
        """Closes the wire."""
        if self.wire is not None:
            self.wire.close()
            self.wire = None

    async def _report_absence(self) -> None:
        """Reports what the start waits for, as long as the machine is not there."""
        began_s = time.monotonic()
        host = self._engine.host
        while host.absent:
            self._engine.inbox.put(Phase(host.absent, 0, time.monotonic() - began_s), force=True)
            await asyncio.sleep(INTERVAL_S)

    async def beat(self) -> None:
        """Sends pings to the process that lives, and kills it if it hangs; never returns."""
        engine = self._engine
        while True:
            await asyncio.sleep(INTERVAL_S)
            now_s = time.monotonic()
            ping = self.heart.ping(now_s)
            if self._lost_s is not None and now_s - self._lost_s > EXIT_GRACE_S:
                self.kill("has closed its connection and did not end")
            if engine.ready is None:
                continue
            with suppress(Overloaded):  # no pong is an answer too
                engine.send(ping)
            if why := self.heart.fault(
                now_s, self.stall_s, held=engine.held, grouped=engine.role.grouped
            ):
                self.kill(why)  # the others would wait for it for ever
