"""The rendezvous of a cluster's machines: machine 0 listens, the others register.

CURVE keys keep strangers out. Machine 0 compares everything that must be the same on all machines,
so that a wrong flag or an outdated copy of the model is named within seconds.
"""

import asyncio
import logging
import socket
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import fields
from itertools import count

import msgspec
import zmq
import zmq.asyncio

from moeserve.actor.handshake import (
    Hello,
    Keys,
    answer_hello,
    keys_of,
    read_secret,
    secure,
    token_of,
)
from moeserve.actor.tasks import cancel, log_error, spawn
from moeserve.cluster.check_parallel import rendezvous_of
from moeserve.cluster.forks import LocalHost
from moeserve.cluster.host import Host, RemoteHost, Root, RootHost
from moeserve.config import Config
from moeserve.errors import AddressInUse, ConfigError
from moeserve.loader.checkpoint import fingerprint, open_checkpoint
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.messages import PROTOCOL_VERSION
from moeserve.version import __version__

log = logging.getLogger(__name__)

TOKEN = "rendezvous"  # what the first token is for
MAX_HELLO_BYTES = 1 << 16
MAX_GREETED = 4096  # nodes between hello and registration, more than a cluster has machines
PAUSE_S = 0.1  # after an unexpected error
LINGER_MS = 500
EPOCHS = 1 << 18  # numbers for the groups of one front end: those of the next one are above them
_SHARED = ("parallel", "cache", "scheduler", "device")  # sections of settings that must be alike
# Settings that each machine has for itself.
_OWN = {"node_rank", "rendezvous", "cluster_key_file", "threads", "fork_server"}


class Attendance(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A node's registration."""

    node_rank: int
    version: str  # of moeserve
    model: str  # fingerprint
    settings: dict[str, str | int | float | bool | None]  # that must be the same everywhere
    folder: str = ""  # private to the node, for sockets on its machine


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """Machine 0's answer to a node that may connect to this address."""

    address: str
    token: str


class TurnedAway(msgspec.Struct, frozen=True, tag=True):
    """Machine 0's answer to a node that does not fit."""

    cause: str


_decode = msgspec.msgpack.Decoder(Hello | Attendance).decode


def attendance(config: Config, folder: str = "") -> Attendance:
    """Return this node's registration. Raises ConfigError.

    It reads the model's headers and samples of its weights, which is slow on a slow disk.
    """
    settings = {
        f.name: getattr(getattr(config, s), f.name)
        for s in _SHARED
        for f in fields(getattr(config, s))
    }
    return Attendance(
        node_rank=config.parallel.node_rank,
        version=__version__,
        model=fingerprint(open_checkpoint(resolve_model_dir(config.model.model))),
        settings={name: value for name, value in settings.items() if name not in _OWN}
        | {"dtype": config.model.dtype, "max_model_len": config.model.max_model_len},
        folder=folder,
    )


def misfit(ours: Attendance, theirs: Attendance, taken: set[int]) -> str:
    """Return why a node cannot be admitted, or "". taken: machines that are here already."""
    rank = theirs.node_rank
    num_nodes = ours.settings["nnodes"]
    if theirs.version != ours.version:
        return (
            f"machine {rank} runs moeserve {theirs.version}, machine 0 {ours.version}; install the"
            " same everywhere"
        )
    for name, value in ours.settings.items():
        if (found := theirs.settings.get(name)) != value:
            flag = f"--{name.replace('_', '-')} is {found} on machine {rank}, {value} on machine 0"
            return f"{flag}; start all machines with the same settings"
    if theirs.model != ours.model:
        return (
            f"the model on machine {rank} is not the one on machine 0 (fingerprints"
            f" {theirs.model}, {ours.model}: "
            "config.json and *.safetensors); copy the same files to all machines"
        )
    if not 1 <= rank < int(num_nodes or 1):
        return (
            f"--node-rank {rank}: with --nnodes {num_nodes} the other machines are 1 to"
            f" {int(num_nodes or 1) - 1}"
        )
    if rank in taken:
        return (
            f"--node-rank {rank}: there is a machine {rank} already; give each machine a number of"
            " its own"
        )
    return ""


class Rendezvous:
    """The machines of a fleet, as its hosts.

    With several of them it listens until `close`: nodes may come back.
    """

    def __init__(self, folder: str) -> None:
        self.here = LocalHost(folder)
        self.hosts: tuple[Host, ...] = (self.here,)
        self.address = "127.0.0.1"  # at which other machines reach this one
        self.epochs = count(1)  # of all groups
        self._root: RootHost | None = None
        self._nodes: dict[int, RemoteHost] = {}
        self._listening: asyncio.Task[None] | None = None
        self._greeted: OrderedDict[bytes, None] = OrderedDict()  # nodes that have sent their hello

    @classmethod
    async def open(cls, config: Config, folder: str, root: Root | None = None) -> "Rendezvous":
        """Return the rendezvous of machine 0.

        folder: private, for sockets. root: keeps the engines of this machine if they are to outlive
        us. Raises ConfigError for a key or an address that cannot be used.
        """
        self = cls(folder if root is None else root.folder)
        num_nodes = config.parallel.nnodes
        if root is not None:
            self._root = RootHost(root)
            self.hosts = (self._root,)
            self.epochs = count(1 + root.made_at * EPOCHS)
        if num_nodes > 1:
            own = await asyncio.to_thread(attendance, config)
            host, port = rendezvous_of(config.parallel)
            self.address = resolve(host, here=True)
            secret = read_secret(str(config.parallel.cluster_key_file))
            keys = keys_of(secret)
            hello = Hello(PROTOCOL_VERSION, token_of(secret, TOKEN))
            socket = _listen(f"tcp://{bracketed(self.address)}:{port}", keys)
            for number in range(1, num_nodes):
                self._nodes[number] = RemoteHost(number, num_nodes, bracketed(self.address), keys)
            self.hosts = (*self.hosts, *self._nodes.values())
            serve = self._serve(socket, own, hello)
            self._listening = spawn(serve, name="rendezvous", on_error=log_error)
        if root is None:
            self.here.keep(config)  # last: what raises above has no process to end
        return self

    async def close(self, cause: str = "") -> None:
        """Release all nodes. cause: why machine 0 fails, empty after an ordered stop."""
        await self.here.close()
        await cancel(self._listening)
        far = [*self._nodes.values(), *([self._root] if self._root is not None else [])]
        await asyncio.gather(*(host.close(cause) for host in far))

    async def _serve(self, socket: zmq.asyncio.Socket, own: Attendance, hello: Hello) -> None:
        """Answer those who come, until cancelled. An error costs the message that caused it."""
        try:
            while True:
                try:
                    sender, *_, frame = await socket.recv_multipart()
                    answer = self._answer(sender, frame, own, hello)
                    if answer is not None:
                        with suppress(zmq.ZMQError):  # it did not wait for us
                            await socket.send_multipart(
                                [sender, msgspec.msgpack.encode(answer)], zmq.NOBLOCK
                            )
                except Exception as error:
                    log_error("rendezvous", error)
                    await asyncio.sleep(PAUSE_S)  # a lasting error must not fill the log
        finally:
            socket.close()
            # Its last answers have LINGER_MS to leave: term would block the loop so long.
            threading.Thread(target=socket.context.term, name="rendezvous end", daemon=True).start()

    def _answer(
        self, sender: bytes, frame: bytes, own: Attendance, hello: Hello
    ) -> msgspec.Struct | None:
        """Return the answer to a message, None if it deserves none."""
        try:
            msg = _decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            log.warning("the rendezvous dropped %d bytes that are no message", len(frame))
            return None
        if isinstance(msg, Attendance):
            known = sender in self._greeted
            self._greeted.pop(sender, None)
            return self._admit(msg, own) if known else None
        answer = answer_hello(msg, hello)
        if isinstance(answer, Hello):
            self._greeted[sender] = None
            if len(self._greeted) > MAX_GREETED:  # most of them never registered
                self._greeted.popitem(last=False)
        return answer

    def _admit(self, node: Attendance, own: Attendance) -> Admitted | TurnedAway:
        cause = misfit(own, node, {number for number, host in self._nodes.items() if host.taken})
        if cause:
            log.warning("turned a machine away: %s", cause)
            return TurnedAway(cause)
        try:
            return Admitted(*self._nodes[node.node_rank].admit(node.folder))
        except ConfigError as error:
            return TurnedAway(str(error))


def _listen(address: str, keys: Keys) -> zmq.asyncio.Socket:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    secure(socket, keys, listens=True)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_HELLO_BYTES)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(0)
        context.term()
        kind = AddressInUse if error.errno == zmq.EADDRINUSE else ConfigError
        raise kind(f"--rendezvous: machine 0 cannot listen at {address}: {error}") from None
    return socket


def resolve(host: str, *, here: bool = False) -> str:
    """Return the IP address of a name, IPv4 if it has one. here: it names this machine.

    Raises ConfigError.
    """
    with ConfigError.instead_of(OSError, f"--rendezvous: there is no address for {host!r}"):
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    address = str(min(found, key=lambda info: info[0] != socket.AF_INET)[4][0])
    if here and address.startswith("127.") and host != "localhost" and not host.startswith("127."):
        raise ConfigError(
            f"--rendezvous: {host!r} means {address} on this machine, which others cannot reach; "
            "give an address of the network that the machines share"
        )
    return address


def bracketed(address: str) -> str:
    """Return an IP address as it is written in a URL."""
    return f"[{address}]" if ":" in address else address
