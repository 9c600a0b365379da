"""Where engine processes run: on this machine, or on another one whose agent (node.py) starts them for us.

Both kinds of host hand out processes that a supervisor cannot tell apart. Each engine talks to the front end over a
wire of its own in any case; over the agent's wire come births, deaths and log lines only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Protocol

import msgspec

from moeserve.actor.inbox import Inbox
from moeserve.actor.keys import Keys
from moeserve.actor.process import TAIL_LINES, Death, Process, to_stderr
from moeserve.actor.zmq_wire import PeerGone, ZmqWire, listen
from moeserve.cluster.forks import Forks
from moeserve.errors import ActorStopped, Overloaded

log = logging.getLogger(__name__)

CONNECT_S = 5.0  # for a node that was admitted to open its wire
FAREWELL_S = 1.0  # for a node that was let go to hang up
LET_GO = "it was let go"

Forward = Callable[[str], None]


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start an engine with this order (JSON of an EngineOrder). id: names the process from now on."""

    id: int
    name: str
    order: bytes


class Signal(msgspec.Struct, frozen=True, tag=True):
    """End that process: by SIGTERM, or at once if there is a verdict (see `Process.kill`)."""

    id: int
    verdict: str = ""


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Keep a fork server for engines of so many processes; see forks.py."""

    tp_size: int


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """Machine 0 ends, and so shall the node. cause: empty after an ordered stop."""

    cause: str


class Started(msgspec.Struct, frozen=True, tag=True):
    id: int
    pid: int


class LogLine(msgspec.Struct, frozen=True, tag=True):
    """What an engine wrote to its log."""

    id: int
    text: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    id: int
    death: Death


ToNode = Start | Signal | Keep | Farewell
FromNode = Started | LogLine | Ended


class Host(Protocol):
    """A machine for engines. name: equal ones share memory. folder: private there, for sockets, once it is present.
    absent: what we wait for, in a human's words; empty if the machine is there."""

    name: str
    folder: str

    @property
    def absent(self) -> str: ...

    def door(self, name: str) -> tuple[str, Keys | None]:
        """Where to listen for an engine there."""
        ...

    def start(self, name: str, order: bytes, forward: Forward | None) -> Process:
        """An engine process, which may have to wait for its machine. Raises ConfigError if it cannot be started."""
        ...

    def keep(self, tp_size: int) -> None:
        """From now on its engines, of so many processes each, are forked; see forks.py."""
        ...


class LocalHost:
    """This machine."""

    name = "node-0"
    absent = ""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.forks = Forks()

    def door(self, name: str) -> tuple[str, Keys | None]:
        return f"ipc://{os.path.join(self.folder, name.replace(' ', '-'))}.sock", None

    def start(self, name: str, order: bytes, forward: Forward | None) -> Process:
        return self.forks.start(name, order, forward)

    def keep(self, tp_size: int) -> None:
        self.forks.keep(tp_size)


class RemoteHost:
    """Machine `number` of `num_machines`, by the agent there. It may come late, vanish, and come back.

    address: ours, on which we listen for it and for its engines (as in a URL).
    """

    def __init__(self, number: int, num_machines: int, address: str, keys: Keys) -> None:
        self.name = f"node-{number}"
        self.folder = ""
        self.absent = self._missing = f"waiting for machine {number} of {num_machines}"
        self.taken = False  # somebody is, or is about to be, this machine
        self._let_go = False
        self._keep: Keep | None = None
        self._keys = keys
        self._address = address
        self._wire: ZmqWire[ToNode, FromNode | PeerGone] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._ids = count(1)
        self._processes: dict[int, RemoteProcess] = {}

    def door(self, name: str) -> tuple[str, Keys | None]:
        return f"tcp://{self._address}:*", self._keys

    def start(self, name: str, order: bytes, forward: Forward | None) -> Process:
        id = next(self._ids)
        process = self._processes[id] = RemoteProcess(self, Start(id, name, order), forward or to_stderr)
        if not self.absent:
            process.begin()
        return process

    def keep(self, tp_size: int) -> None:
        self._keep = Keep(tp_size)
        self.tell(self._keep)

    def admit(self, folder: str) -> tuple[str, str]:
        """Address and token of the wire that a node may now connect to. folder: its private one."""
        self.taken, self.folder = True, folder
        token = secrets.token_hex(16)
        inbox: Inbox[FromNode | PeerGone] = Inbox(f"{self.name} link")
        wire = listen(f"tcp://{self._address}:*", token=token, receives=FromNode, inbox=inbox, keys=self._keys)
        self._serving = asyncio.get_running_loop().create_task(self._serve(wire, inbox), name=inbox.owner)
        return wire.address, token

    async def close(self, cause: str) -> None:
        """Lets the node go. cause: why machine 0 fails, empty if it was told to stop."""
        if self._serving is None:
            return
        if self._wire is not None:
            # The node hangs up, not we: a network that loses packets just then would lose the farewell.
            self.tell(Farewell(cause))
            self._let_go = True
            await asyncio.wait([self._serving], timeout=FAREWELL_S)
        self._serving.cancel()
        await asyncio.wait([self._serving])

    def tell(self, msg: ToNode) -> None:
        """Dropped where the node is gone: its processes are then, too."""
        with suppress(ActorStopped, Overloaded):
            if self._wire is not None:
                self._wire.send(msg)

    def forget(self, id: int) -> None:
        self._processes.pop(id, None)

    async def _serve(self, wire: ZmqWire[ToNode, FromNode | PeerGone], inbox: Inbox[FromNode | PeerGone]) -> None:
        """One life of the node."""
        cause = LET_GO
        try:
            await wire.connected(CONNECT_S)
            log.info("%s is here", self.name)
            self._wire, self.absent = wire, ""
            if self._keep is not None:
                self.tell(self._keep)
            for process in list(self._processes.values()):
                process.begin()
            async for msg in inbox:
                if isinstance(msg, PeerGone):
                    cause = LET_GO if self._let_go else msg.cause
                    break
                if msg.id in self._processes:
                    self._processes[msg.id].hear(msg)
        except (ActorStopped, TimeoutError) as error:
            cause = str(error)
        finally:
            self._wire, self.absent, self.taken = None, self._missing, False
            wire.close()
            log.log(logging.INFO if cause == LET_GO else logging.WARNING, "%s is gone: %s", self.name, cause)
            for process in list(self._processes.values()):
                process.strand(f"was lost with {self.name}: {cause}")


class RemoteProcess:
    """`Process` on another machine. It waits for that machine; one that has begun ends with it."""

    def __init__(self, host: RemoteHost, order: Start, forward: Forward) -> None:
        self.name = order.name
        self.pid = 0
        self._host = host
        self._id = order.id
        self._order: Start | None = order  # until it has begun
        self._forward = forward
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._begun_s = time.monotonic()
        self._death: asyncio.Future[Death] = asyncio.get_running_loop().create_future()

    def begin(self) -> None:
        assert self._order is not None
        self._host.tell(self._order)
        self._order, self._begun_s = None, time.monotonic()

    def hear(self, msg: FromNode) -> None:
        match msg:
            case Started(pid=pid):
                self.pid = pid
            case LogLine(text=text):
                self._tail.append(text)
                self._forward(text)
            case Ended(death=death):
                self._settle(death)

    def strand(self, verdict: str) -> None:
        """The machine is gone."""
        if self._order is None:
            self._die(verdict, stranded=True)

    @property
    def alive(self) -> bool:
        return not self._death.done()

    async def death(self) -> Death:
        return await asyncio.shield(self._death)

    def kill(self, verdict: str) -> None:
        if self._order is not None:
            self._die(verdict)
        else:
            self._host.tell(Signal(self._id, verdict or "was killed"))

    async def stop(self, term_s: float, verdict: str = "") -> Death:
        if self._order is not None:
            self._die(verdict or "was stopped before it began")
        self._host.tell(Signal(self._id))
        try:
            async with asyncio.timeout(term_s):
                return await self.death()
        except TimeoutError:
            self.kill(verdict or f"did not end within {term_s:g} s of SIGTERM")
            return await self.death()

    def _die(self, verdict: str, stranded: bool = False) -> None:
        lived_s = time.monotonic() - self._begun_s
        code = -signal.SIGKILL
        self._settle(Death(self.name, self.pid, code, lived_s, tuple(self._tail)[-20:], verdict, stranded))

    def _settle(self, death: Death) -> None:
        self._host.forget(self._id)
        if not self._death.done():
            self._death.set_result(death)
