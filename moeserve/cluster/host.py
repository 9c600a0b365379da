"""The machines that engine processes run on: this one (forks.py), or another one whose agent
(node.py) starts them.

Each engine talks to the front end over a wire of its own; the agent's wire carries starts, deaths
and log lines only.
"""

import asyncio
import logging
import secrets
import signal
import time
from contextlib import suppress
from itertools import count

import msgspec

from moeserve.actor.actor import Inbox
from moeserve.actor.handshake import Keys
from moeserve.actor.process import Death, Process, to_stderr
from moeserve.actor.zmq_wire import PeerGone, ZmqWire, connect, listen
from moeserve.cluster.forks import LocalHost
from moeserve.errors import ActorStopped, Overloaded
from moeserve.messages import PlacementTable

log = logging.getLogger(__name__)

CONNECT_S = 5.0  # for a node that was admitted to open its wire
FAREWELL_S = 1.0  # for a node that was let go to hang up
ALIVE_S = 1.0
LET_GO = "it was let go"


class Start(msgspec.Struct, frozen=True, tag=True):
    """Orders the start of an engine (order: JSON of an EngineOrder). id: names the process from now
    on.
    """

    id: int
    name: str
    order: bytes


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Says every ALIVE_S that this front end's loop runs; only the root process listens to that."""


class Standing(msgspec.Struct, frozen=True, tag=True):
    """What has changed since the start: the root process keeps it for the next front end.

    engines: the machine of each, by its number, in the order of their ranks. drained: how many
    engines each machine had that was taken out of service. placement: the experts' that was last in
    force.
    """

    engines: dict[int, int]
    drained: dict[int, int]
    placement: PlacementTable | None


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Orders the end of a process: by SIGTERM, or at once if there is a reason (see
    `Process.kill`).
    """

    id: int
    reason: str = ""


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """Machine 0 ends, and so shall the node. cause: why machine 0 failed, empty after an ordered
    stop.
    """

    cause: str


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


ToNode = Start | Signal | Farewell | Alive | Standing
FromNode = Started | LogLine | Ended


class RemoteHost:
    """Machine `number` of `num_machines`, through the agent there. It may come late, vanish, and
    come back.

    address: our own, on which we listen for the agent and for its engines (as in a URL).
    """

    def __init__(self, number: int, num_machines: int, address: str, keys: Keys | None) -> None:
        self.number = number
        self.name = f"node-{number}"
        self.folder = ""
        self.absent = self._missing = f"waiting for machine {number} of {num_machines}"
        self.taken = False  # an agent was admitted as this machine
        self._let_go = False
        self._keys = keys
        self._address = address
        self._wire: ZmqWire[ToNode, FromNode | PeerGone] | None = None
        self.here = asyncio.Event()  # the wire is there
        self._serving: asyncio.Task[None] | None = None
        self._ids = count(1)
        self._processes: dict[int, RemoteProcess] = {}

    def listen_address(self, name: str) -> tuple[str, Keys | None]:
        """Returns an address of this machine that the other one can reach, and the cluster's keys."""
        return f"tcp://{self._address}:*", self._keys

    async def start(self, name: str, order: bytes) -> Process:
        """Waits for the machine and tells its agent to start the engine, which ends with the
        machine.
        """
        await self.here.wait()
        process = RemoteProcess(self, next(self._ids), name)
        self._processes[process.id] = process
        self.tell(Start(process.id, name, order))
        return process

    def admit(self, folder: str) -> tuple[str, str]:
        """Returns address and token of the wire to which the agent may connect now. folder: its
        private one.
        """
        self.taken = True
        self._let_go = False
        self.folder = folder
        token = secrets.token_hex(16)
        inbox: Inbox[FromNode | PeerGone] = Inbox(f"{self.name} link")
        wire = listen(
            f"tcp://{self._address}:*", token=token, receives=FromNode, inbox=inbox, keys=self._keys
        )
        self._serving = asyncio.get_running_loop().create_task(
            self._serve(wire, inbox), name=inbox.owner
        )
        return wire.address, token

    async def close(self, cause: str) -> None:
        """Lets the agent go; another one may come. cause: why machine 0 fails, empty if nothing
        failed.
        """
        if self._serving is None:
            return
        if self._wire is not None:
            # The node hangs up, not we: a network that loses packets just then would lose the
            # farewell.
            self.tell(Farewell(cause))
            self._let_go = True
            await asyncio.wait([self._serving], timeout=FAREWELL_S)
        self._serving.cancel()
        await asyncio.wait([self._serving])

    def tell(self, msg: ToNode) -> None:
        """Sends the agent a message; drops it if the agent is gone, because its processes are gone
        too.
        """
        with suppress(Overloaded):
            if self._wire is not None:
                self._wire.send(msg)

    async def _serve(
        self, wire: ZmqWire[ToNode, FromNode | PeerGone], inbox: Inbox[FromNode | PeerGone]
    ) -> None:
        """Serves one life of the agent."""
        cause = LET_GO
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
                        self._hear(self._processes[msg.id], msg)
            cause = LET_GO if self._let_go else gone.cause
        except (ActorStopped, TimeoutError) as error:
            cause = str(error)
        finally:
            self._wire = None
            self.absent = self._missing
            self.taken = False
            self.here.clear()
            wire.close()
            log.log(
                logging.INFO if cause == LET_GO else logging.WARNING,
                "%s is gone: %s",
                self.name,
                cause,
            )
            for process in self._processes.values():
                process.strand(f"was lost with {self.name}: {cause}")
            self._processes.clear()

    def _hear(self, process: "RemoteProcess", msg: FromNode) -> None:
        match msg:
            case Started(pid=pid):
                process.pid = pid
            case LogLine(text=text):
                to_stderr(text)
            case Ended(death=death):
                process.end(death)
                del self._processes[process.id]


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end is told by the root process (server/standby.py), which keeps this machine's
    engines.

    number: of the front end, from 0. made_at: when it was made, in tenths of a second: greater than
    that of all before, also of another root, whose engines may wait on other machines. folder:
    private, for sockets. address, token: where the root's agent listens. follows: the number of the
    front end that serves, -1 if there is none. secret: of the journals' feeds.
    """

    number: int
    made_at: int
    folder: str
    address: str
    token: str
    follows: int
    secret: str

    def journal_of(self, number: int) -> str:
        """Returns the address at which a front end tells its journal."""
        return f"ipc://{self.folder}/journal-{number}.sock"


class RootHost(RemoteHost):
    """This machine, whose engines are children of the root process and outlive the front end."""

    def __init__(self, root: Root) -> None:
        super().__init__(0, 1, "", None)
        self.folder = root.folder
        self._number = root.number
        inbox: Inbox[FromNode | PeerGone] = Inbox("root link")
        wire = connect(root.address, token=root.token, receives=FromNode, inbox=inbox)
        loop = asyncio.get_running_loop()
        self._serving = loop.create_task(self._serve(wire, inbox), name=inbox.owner)
        self._beating = loop.create_task(self._beat(), name="root heartbeat")

    def listen_address(self, name: str) -> tuple[str, Keys | None]:
        """Returns where this front end listens for an engine."""
        return f"ipc://{self.folder}/{self._number}-{name.replace(' ', '-')}.sock", None

    async def close(self, cause: str) -> None:
        """Lets the root go."""
        self._beating.cancel()
        await super().close(cause)

    async def _beat(self) -> None:
        while True:
            self.tell(Alive())
            await asyncio.sleep(ALIVE_S)

    def _hear(self, process: "RemoteProcess", msg: FromNode) -> None:
        if not isinstance(msg, LogLine):  # the root has printed it
            super()._hear(process, msg)


class RemoteProcess(Process):
    """A process on another machine; it ends with that machine."""

    def __init__(self, host: RemoteHost, id: int, name: str) -> None:
        super().__init__(name, pid=0)
        self.id = id
        self._host = host
        self._begun_s = time.monotonic()
        self._death = asyncio.get_running_loop().create_future()

    def kill(self, reason: str) -> None:
        """Tells the agent to send SIGKILL."""
        self._host.tell(Signal(self.id, reason or "was killed"))

    def terminate(self) -> None:
        """Tells the agent to send SIGTERM."""
        self._host.tell(Signal(self.id))

    def strand(self, reason: str) -> None:
        """The machine is gone, and the process with it."""
        lived_s = time.monotonic() - self._begun_s
        self.end(Death(self.name, self.pid, -signal.SIGKILL, lived_s, (), reason, stranded=True))

    def end(self, death: Death) -> None:
        """The process is dead."""
        if not self._death.done():
            self._death.set_result(death)


Host = LocalHost | RemoteHost
