"""The machines that engine processes run on: this one (forks.py), or others with an agent.

The agent (node.py) starts and ends the processes of its machine. Each engine has its own wire to
the front end. The agent's wire carries the orders to the agent, and its reports of starts, deaths
and log lines.
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

CONNECT_S = 5.0  # timeout for an admitted agent to open its wire
SHUTDOWN_S = 1.0  # timeout for a released agent to disconnect
HEARTBEAT_S = 1.0
RELEASED = "it was released"  # the cause if the end of an agent was ordered


class Start(msgspec.Struct, frozen=True, tag=True):
    """Order to start an engine."""

    id: int  # identifies the process in later messages
    name: str
    order: bytes  # JSON of an EngineOrder


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """A sign that the front end's loop runs, every HEARTBEAT_S. Only the root process needs it."""


class FleetSnapshot(msgspec.Struct, frozen=True, tag=True):
    """The state of a fleet, which the root process keeps for the next front end."""

    engines: dict[int, int]  # rank of each engine -> number of its machine, in the order of ranks
    drained: dict[int, int]  # drained machine -> number of engines that it had
    placement: PlacementTable | None  # the last active placement of the experts


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Order to end a process: at once if there is a reason, otherwise by SIGTERM."""

    id: int
    reason: str = ""  # see `Process.kill`


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Order to end the agent, because machine 0 stops or releases the machine."""

    cause: str  # why machine 0 failed, empty after an ordered stop


class Started(msgspec.Struct, frozen=True, tag=True):
    """Report that the process runs."""

    id: int
    pid: int


class LogLine(msgspec.Struct, frozen=True, tag=True):
    """A line of an engine's log."""

    id: int
    text: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Report that the process is dead."""

    id: int
    death: Death


ToNode = Start | Signal | Shutdown | Heartbeat | FleetSnapshot
FromNode = Started | LogLine | Ended
AgentWire = ZmqWire[ToNode, FromNode | PeerGone]


class RemoteHost:
    """Machine `number` of `num_machines`, through its agent. The agent may join late, or again."""

    def __init__(self, number: int, num_machines: int, address: str, keys: Keys | None) -> None:
        """Create the host of a machine whose agent has not joined yet.

        Args:
            address: this machine's address (as in a URL), to listen at for the agent and its
                engines.
            keys: the cluster's keys.
        """
        self.number = number
        self.name = f"node-{number}"
        self.folder = ""
        # The phase of an engine whose start waits for the agent (see `messages.Phase`).
        self.waiting_phase = f"waiting for machine {number} of {num_machines}"
        self.is_taken = False  # an agent was admitted as this machine
        self.connected = asyncio.Event()  # whether the agent is connected
        self._released = False
        self._keys = keys
        self._address = address
        self._wire: AgentWire | None = None
        self._serving: asyncio.Task[None] | None = None
        self._ids = count(1)
        self._processes: dict[int, RemoteProcess] = {}

    @property
    def is_missing(self) -> bool:
        """Whether no agent is connected, so that engine processes cannot start."""
        return not self.connected.is_set()

    def listen_address(self, name: str) -> tuple[str, Keys | None]:
        """Return the address at which this machine listens for an engine, and the keys to use.

        name: the engine's name, which only the addresses of Unix sockets need.
        """
        return f"tcp://{self._address}:*", self._keys

    async def start(self, name: str, order: bytes) -> Process:
        """Wait for the agent, and order it to start an engine, which ends with the agent."""
        await self.connected.wait()
        process = RemoteProcess(self.send, next(self._ids), name)
        self._processes[process.id] = process
        self.send(Start(process.id, name, order))
        return process

    def admit(self, folder: str) -> tuple[str, str]:
        """Listen for the agent, and return address and token for it.

        folder: the agent's private directory, on its machine.
        """
        self.is_taken = True
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
        """Release the agent. Another one may join later.

        cause: why machine 0 fails, empty if it does not.
        """
        if self._serving is None:
            return
        if self._wire is not None:
            # Let the agent close the connection, because closing it here could lose the message.
            self.send(Shutdown(cause))
            self._released = True
            await asyncio.wait([self._serving], timeout=SHUTDOWN_S)
        await cancel(self._serving)

    def send(self, msg: ToNode) -> None:
        """Send the agent a message, or drop it if the agent is gone (with its processes)."""
        with suppress(Overloaded):
            if self._wire is not None:
                self._wire.send(msg)

    async def _serve(self, wire: AgentWire, inbox: Inbox[FromNode | PeerGone]) -> None:
        """Serve one connection of the agent. When it ends, the agent's processes are lost."""
        cause = RELEASED
        try:
            await wire.connected(CONNECT_S)
            log.info("%s is here", self.name)
            self._wire = wire
            self.connected.set()
            gone: PeerGone | None = None
            while gone is None:
                for msg in await inbox.drain(wait=True):
                    if isinstance(msg, PeerGone):
                        gone = msg
                    elif msg.id in self._processes:
                        self._on_message(self._processes[msg.id], msg)
            cause = RELEASED if self._released else gone.cause
        except (ActorStopped, TimeoutError) as error:  # the agent did not connect
            cause = str(error)
        except Exception as error:
            cause = f"its link failed: {error!r}"
            raise
        finally:
            self._wire = None
            self.is_taken = False
            self.connected.clear()
            wire.close()
            level = logging.INFO if cause == RELEASED else logging.WARNING
            log.log(level, "%s is gone: %s", self.name, cause)
            for process in self._processes.values():
                process.record_loss(f"was lost with {self.name}: {cause}")
            self._processes.clear()

    def _on_message(self, process: "RemoteProcess", msg: FromNode) -> None:
        match msg:
            case Started(pid=pid):
                process.record_start(pid)
            case LogLine(text=text):
                to_stderr(text)
            case Ended(death=death):
                process.record_death(death)
                del self._processes[process.id]


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """The root process (server/standby.py), which keeps this machine's engines.

    Each front end gets one such struct.
    """

    number: int  # of the front end, from 0
    # When the front end was created, in tenths of a second. It is greater than that of all earlier
    # front ends, even those of another root, whose engines may wait on other machines. Epochs and
    # placement versions begin at a multiple of it, so that they are greater, too.
    made_at: int
    folder: str  # private, for sockets
    address: str  # at which the root's agent listens
    token: str
    follows: int  # number of the front end that serves now, -1 if there is none
    secret: str  # of the journal feeds

    def journal_of(self, number: int) -> str:
        """Return the address of a front end's journal feed."""
        return f"ipc://{self.folder}/journal-{number}.sock"


class RootHost(RemoteHost):
    """This machine, whose engines are children of the root process and outlive the front end."""

    def __init__(self, root: Root) -> None:
        super().__init__(number=0, num_machines=1, address="", keys=None)
        self.folder = root.folder
        self._number = root.number
        inbox: Inbox[FromNode | PeerGone] = Inbox("root link")
        wire = connect(root.address, token=root.token, receives=FromNode, inbox=inbox)
        self._spawn_serve(wire, inbox)
        beats = every(HEARTBEAT_S, lambda: self.send(Heartbeat()), name="root heartbeat")
        self._beating = spawn(beats, name="root heartbeat", on_error=log_error)

    def listen_address(self, name: str) -> tuple[str, Keys | None]:
        """Return the address at which this front end listens for an engine; no keys are needed."""
        return f"ipc://{self.folder}/{self._number}-{name.replace(' ', '-')}.sock", None

    async def close(self, cause: str) -> None:
        await cancel(self._beating)
        await super().close(cause)

    def _on_message(self, process: "RemoteProcess", msg: FromNode) -> None:
        if not isinstance(msg, LogLine):  # the root process prints log lines itself
            super()._on_message(process, msg)


class RemoteProcess(Process):
    """A process that an agent has started. It ends with the agent."""

    def __init__(self, send: Callable[[ToNode], None], id: int, name: str) -> None:
        super().__init__(name, pid=0)
        self.id = id
        self._send = send  # sends an order to the agent
        self._began_at_s = time.monotonic()
        self._death = asyncio.get_running_loop().create_future()

    def kill(self, reason: str) -> None:
        """Order the agent to send SIGKILL."""
        self._send(Signal(self.id, reason or "was killed"))

    def terminate(self) -> None:
        """Order the agent to send SIGTERM."""
        self._send(Signal(self.id))

    def record_start(self, pid: int) -> None:
        """Record that the process runs."""
        self.pid = pid

    def record_loss(self, reason: str) -> None:
        """Record that the process was lost with its machine."""
        self.record_death(
            Death(
                name=self.name,
                pid=self.pid,
                exit_code=-signal.SIGKILL,
                lived_s=time.monotonic() - self._began_at_s,
                log_tail=(),
                reason=reason,
                stranded=True,
            )
        )

    def record_death(self, death: Death) -> None:
        """Record the death of the process."""
        if not self._death.done():
            self._death.set_result(death)


Host = LocalHost | RemoteHost
