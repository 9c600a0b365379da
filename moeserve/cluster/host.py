"""The machines that engine processes run on: this one (forks.py), or another one with an agent.

The agent (node.py) starts the processes. Each engine talks to the front end over a wire of its own;
the agent's wire carries starts, deaths and log lines only.
"""

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import msgspec

from moeserve.actor.actor import Inbox
from moeserve.actor.handshake import Keys
from moeserve.actor.process import Death, Process, to_stderr
from moeserve.actor.tasks import cancel, every, log_error, spawn
from moeserve.actor.zmq_wire import PeerGone, ZmqWire, connect, listen
from moeserve.cluster.forks import LocalHost
from moeserve.errors import ActorStopped, Overloaded
from moeserve.messages import PlacementTable

log = logging.getLogger(__name__)

CONNECT_S = 5.0  # for an admitted node to open its wire
SHUTDOWN_S = 1.0  # for a released node to hang up
HEARTBEAT_S = 1.0
RELEASED = "it was released"


class Start(msgspec.Struct, frozen=True, tag=True):
    """Order to start an engine."""

    id: int  # names the process from now on
    name: str
    order: bytes  # JSON of an EngineOrder


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sign, every HEARTBEAT_S, that the front end's loop runs. Only the root process needs it."""


class FleetSnapshot(msgspec.Struct, frozen=True, tag=True):
    """The changes of a fleet since its start. The root process keeps it for the next front end."""

    engines: dict[int, int]  # machine of each engine by its number, in the order of ranks
    drained: dict[int, int]  # number of engines that each drained machine had
    placement: PlacementTable | None  # the last active one of the experts


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Order to end a process: at once if there is a reason, otherwise by SIGTERM."""

    id: int
    reason: str = ""  # see `Process.kill`


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Machine 0 ends or releases the node: the node ends."""

    cause: str  # why machine 0 failed, empty after an ordered stop


class Started(msgspec.Struct, frozen=True, tag=True):
    """The process runs."""

    id: int
    pid: int


class LogLine(msgspec.Struct, frozen=True, tag=True):
    """A line that an engine wrote to its log."""

    id: int
    text: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The process is dead."""

    id: int
    death: Death


ToNode = Start | Signal | Shutdown | Heartbeat | FleetSnapshot
FromNode = Started | LogLine | Ended
AgentWire = ZmqWire[ToNode, FromNode | PeerGone]


class RemoteHost:
    """Machine `number` of `num_machines`, through its agent. It may come late, and come back."""

    def __init__(self, number: int, num_machines: int, address: str, keys: Keys | None) -> None:
        """Make the host of a machine that is not here yet.

        Args:
            address: our own (as in a URL), on which we listen for the agent and for its engines.
            keys: of the cluster.
        """
        self.number = number
        self.name = f"node-{number}"
        self.folder = ""
        self.absent = self._missing = f"waiting for machine {number} of {num_machines}"
        self.taken = False  # an agent was admitted as this machine
        self.here = asyncio.Event()  # the wire to the agent is there
        self._released = False
        self._keys = keys
        self._address = address
        self._wire: AgentWire | None = None
        self._serving: asyncio.Task[None] | None = None
        self._ids = count(1)
        self._processes: dict[int, RemoteProcess] = {}

    def listen_address(self, name: str) -> tuple[str, Keys | None]:
        """Return an address here that the machine can reach, and the cluster's keys."""
        return f"tcp://{self._address}:*", self._keys

    async def start(self, name: str, order: bytes) -> Process:
        """Wait for the machine, and order its agent to start an engine.

        The engine ends with the machine.
        """
        await self.here.wait()
        process = RemoteProcess(self.tell, next(self._ids), name)
        self._processes[process.id] = process
        self.tell(Start(process.id, name, order))
        return process

    def admit(self, folder: str) -> tuple[str, str]:
        """Return address and token of the wire to which the agent may connect now.

        folder: private to the agent, on its machine.
        """
        self.taken = True
        self._released = False
        self.folder = folder
        token = secrets.token_hex(16)
        inbox: Inbox[FromNode | PeerGone] = Inbox(f"{self.name} link")
        wire = listen(
            f"tcp://{self._address}:*", token=token, receives=FromNode, inbox=inbox, keys=self._keys
        )
        self._spawn_serve(wire, inbox)
        return wire.address, token

    def _spawn_serve(self, wire: AgentWire, inbox: Inbox[FromNode | PeerGone]) -> None:
        self._serving = spawn(self._serve(wire, inbox), name=inbox.owner, on_error=log_error)

    async def close(self, cause: str) -> None:
        """Release the agent; another one may come.

        cause: why machine 0 fails, empty if nothing failed.
        """
        if self._serving is None:
            return
        if self._wire is not None:
            # The node hangs up, not we: a network that loses packets just then would lose the
            # message.
            self.tell(Shutdown(cause))
            self._released = True
            await asyncio.wait([self._serving], timeout=SHUTDOWN_S)
        await cancel(self._serving)

    def tell(self, msg: ToNode) -> None:
        """Send the agent a message. Drop it if the agent is gone: its processes are gone, too."""
        with suppress(Overloaded):
            if self._wire is not None:
                self._wire.send(msg)

    async def _serve(self, wire: AgentWire, inbox: Inbox[FromNode | PeerGone]) -> None:
        """Serve one life of the agent. However it ends, its processes are lost."""
        cause = RELEASED
        try:
            await wire.connected(CONNECT_S)
            log.info("%s is here", self.name)
            self._wire = wire
            self.absent = ""
            self.here.set()
            gone: PeerGone | None = None
            while gone is None:
                for msg in await inbox.drain(wait=True):
                    if isinstance(msg, PeerGone):
                        gone = msg
                    elif msg.id in self._processes:
                        self._on_message(self._processes[msg.id], msg)
            cause = RELEASED if self._released else gone.cause
        except (ActorStopped, TimeoutError) as error:
            cause = str(error)
        except Exception as error:
            cause = f"its link failed: {error!r}"
            raise
        finally:
            self._wire = None
            self.absent = self._missing
            self.taken = False
            self.here.clear()
            wire.close()
            level = logging.INFO if cause == RELEASED else logging.WARNING
            log.log(level, "%s is gone: %s", self.name, cause)
            for process in self._processes.values():
                process.strand(f"was lost with {self.name}: {cause}")
            self._processes.clear()

    def _on_message(self, process: "RemoteProcess", msg: FromNode) -> None:
        match msg:
            case Started(pid=pid):
                process.started(pid)
            case LogLine(text=text):
                to_stderr(text)
            case Ended(death=death):
                process.end(death)
                del self._processes[process.id]


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """The root process (server/standby.py), which keeps this machine's engines, for a front end."""

    number: int  # of the front end, from 0
    # The time when the front end was made, in tenths of a second: greater than that of all before,
    # also of those of another root, whose engines may wait on other machines.
    made_at: int
    folder: str  # private, for sockets
    address: str  # where the root's agent listens
    token: str
    follows: int  # number of the front end that serves, -1 if there is none
    secret: str  # of the journals' feeds

    def journal_of(self, number: int) -> str:
        """Return the address at which a front end sends its journal."""
        return f"ipc://{self.folder}/journal-{number}.sock"


class RootHost(RemoteHost):
    """This machine, whose engines are children of the root process and outlive the front end."""

    def __init__(self, root: Root) -> None:
        super().__init__(0, 1, "", None)
        self.folder = root.folder
        self._number = root.number
        inbox: Inbox[FromNode | PeerGone] = Inbox("root link")
        wire = connect(root.address, token=root.token, receives=FromNode, inbox=inbox)
        self._spawn_serve(wire, inbox)
        beats = every(HEARTBEAT_S, lambda: self.tell(Heartbeat()), name="root heartbeat")
        self._beating = spawn(beats, name="root heartbeat", on_error=log_error)

    def listen_address(self, name: str) -> tuple[str, Keys | None]:
        """Return the address where this front end listens for an engine."""
        return f"ipc://{self.folder}/{self._number}-{name.replace(' ', '-')}.sock", None

    async def close(self, cause: str) -> None:
        await cancel(self._beating)
        await super().close(cause)

    def _on_message(self, process: "RemoteProcess", msg: FromNode) -> None:
        if not isinstance(msg, LogLine):  # the root has printed it
            super()._on_message(process, msg)


class RemoteProcess(Process):
    """A process on another machine; it ends with that machine."""

    def __init__(self, tell: Callable[[ToNode], None], id: int, name: str) -> None:
        super().__init__(name, pid=0)
        self.id = id
        self._tell = tell  # sends the agent an order
        self._begun_s = time.monotonic()
        self._death = asyncio.get_running_loop().create_future()

    def kill(self, reason: str) -> None:
        """Order the agent to send SIGKILL."""
        self._tell(Signal(self.id, reason or "was killed"))

    def terminate(self) -> None:
        """Order the agent to send SIGTERM."""
        self._tell(Signal(self.id))

    def started(self, pid: int) -> None:
        """Note that the process runs."""
        self.pid = pid

    def strand(self, reason: str) -> None:
        """Note that the machine is gone, and the process with it."""
        lived_s = time.monotonic() - self._begun_s
        self.end(Death(self.name, self.pid, -signal.SIGKILL, lived_s, (), reason, stranded=True))

    def end(self, death: Death) -> None:
        """Note that the process is dead."""
        if not self._death.done():
            self._death.set_result(death)


Host = LocalHost | RemoteHost
