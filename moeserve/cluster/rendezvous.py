"""Where the machines of a cluster meet: machine 0 listens, and admits the others or tells them why not.

CURVE keys keep strangers out. Everything that must be the same on all machines is compared, so that a wrong flag or an
outdated copy of the model is found within seconds and named.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from contextlib import suppress
from dataclasses import fields

import msgspec
import zmq
import zmq.asyncio

from moeserve.actor.keys import keys_of, read_secret, token_of
from moeserve.actor.zmq_wire import Hello, Refusal
from moeserve.cluster.check_parallel import rendezvous_of
from moeserve.cluster.host import Host, LocalHost, RemoteHost
from moeserve.config import Config
from moeserve.errors import AddressInUse, ConfigError
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.fingerprint import fingerprint
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.messages import PROTOCOL_VERSION
from moeserve.version import __version__

log = logging.getLogger(__name__)

TOKEN = "rendezvous"  # what the first token is for
MAX_HELLO_BYTES = 1 << 16
_SHARED = ("parallel", "cache", "scheduler", "device")  # sections that must be alike
# But for these; machine 0 decides about fork_server.
_OWN = {"node_rank", "rendezvous", "cluster_key_file", "threads", "fork_server"}


class Attendance(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A node's request to join. model: fingerprint. folder: private to the node, for sockets on its machine."""

    node_rank: int
    version: str
    model: str
    settings: dict[str, str | int | float | bool | None]
    folder: str = ""


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """The node may connect to this address with this token."""

    address: str
    token: str


class TurnedAway(msgspec.Struct, frozen=True, tag=True):
    """The node cannot join, for this cause."""

    cause: str


def attendance(config: Config, folder: str = "") -> Attendance:
    """Returns our own request. Reads the model's headers and samples: slow on a slow disk. Raises ConfigError."""
    settings = {f.name: getattr(getattr(config, s), f.name) for s in _SHARED for f in fields(getattr(config, s))}
    return Attendance(
        node_rank=config.parallel.node_rank,
        version=__version__,
        model=fingerprint(open_checkpoint(resolve_model_dir(config.model.model))),
        settings={name: value for name, value in settings.items() if name not in _OWN}
        | {"dtype": config.model.dtype, "max_model_len": config.model.max_model_len},
        folder=folder,
    )


def misfit(ours: Attendance, theirs: Attendance, taken: set[int]) -> str:
    """Returns why a node cannot join, or "". taken: machines that have joined already."""
    rank, num_nodes = theirs.node_rank, ours.settings["nnodes"]
    if theirs.version != ours.version:
        return f"machine {rank} runs moeserve {theirs.version}, machine 0 {ours.version}; install the same everywhere"
    for name, value in ours.settings.items():
        if (other := theirs.settings.get(name)) != value:
            flag = f"--{name.replace('_', '-')}"
            return (
                f"{flag} is {other} on machine {rank}, {value} on machine 0; start all machines with the same settings"
            )
    if theirs.model != ours.model:
        return (
            f"the model on machine {rank} is not the one on machine 0 (fingerprints {theirs.model}, {ours.model}: "
            "config.json and *.safetensors); copy the same files to all machines"
        )
    if not 1 <= rank < int(num_nodes or 1):
        return f"--node-rank {rank}: with --nnodes {num_nodes} the other machines are 1 to {int(num_nodes or 1) - 1}"
    if rank in taken:
        return f"--node-rank {rank}: there is a machine {rank} already; give each machine a number of its own"
    return ""


class Rendezvous:
    """All machines of a fleet, as its hosts. Nodes may come back until `close`. One machine needs no rendezvous."""

    def __init__(self, own: Attendance | None, folder: str) -> None:
        here = LocalHost(folder)
        self.hosts: tuple[Host, ...] = (here,)
        self.forks = here.forks
        self.address = "127.0.0.1"  # of ours, where the others find us
        self._nodes: dict[int, RemoteHost] = {}
        self._own = own
        self._met: set[bytes] = set()  # who has said hello, by ZeroMQ's name
        self._socket: zmq.asyncio.Socket | None = None
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, config: Config, folder: str) -> Rendezvous:
        """Listens for the other machines. folder: private, for sockets. Raises ConfigError for a bad key or address."""
        if config.parallel.nnodes == 1:
            return cls(None, folder)
        self = cls(await asyncio.to_thread(attendance, config), folder)
        host, port = rendezvous_of(config.parallel)
        self.address = resolve(host, here=True)
        secret = read_secret(str(config.parallel.cluster_key_file))
        self._listen(f"tcp://{bracketed(self.address)}:{port}", secret)
        keys, num_nodes = keys_of(secret), config.parallel.nnodes
        for number in range(1, num_nodes):
            self._nodes[number] = RemoteHost(number, num_nodes, bracketed(self.address), keys)
        self.hosts = (*self.hosts, *self._nodes.values())
        self._listening = asyncio.create_task(self._serve(token_of(secret, TOKEN)), name="rendezvous")
        return self

    def _listen(self, address: str, secret: bytes) -> None:
        keys = keys_of(secret)
        context = zmq.asyncio.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.server_public, keys.server_secret
        self._socket.curve_server = True
        for option, value in ((zmq.IPV6, 1), (zmq.LINGER, 500), (zmq.MAXMSGSIZE, MAX_HELLO_BYTES)):
            self._socket.setsockopt(option, value)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            context.term()
            kind = AddressInUse if error.errno == zmq.EADDRINUSE else ConfigError
            raise kind(f"--rendezvous: machine 0 cannot listen at {address}: {error}") from None

    async def close(self, cause: str = "") -> None:
        """Lets all nodes go. cause: why this machine fails, empty after an ordered stop."""
        await self.forks.close()
        if self._socket is None or self._listening is None:
            return
        self._listening.cancel()
        await asyncio.wait([self._listening])
        await asyncio.gather(*(node.close(cause) for node in self._nodes.values()))
        context, self._listening = self._socket.context, None
        self._socket.close()
        context.term()

    async def _serve(self, token: str) -> None:
        assert self._socket is not None
        decode = msgspec.msgpack.Decoder(Hello | Attendance).decode
        while True:
            sender, *_, frame = await self._socket.recv_multipart()
            try:
                answer = self._answer(sender, decode(frame), token)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                log.warning("the rendezvous dropped %d bytes that are no message", len(frame))
                continue
            except ConfigError as error:
                answer = TurnedAway(str(error))
            if answer is not None:
                with suppress(zmq.ZMQError):  # it did not wait for us
                    await self._socket.send_multipart([sender, msgspec.msgpack.encode(answer)], zmq.NOBLOCK)

    def _answer(self, sender: bytes, msg: Hello | Attendance, token: str) -> msgspec.Struct | None:
        assert self._own is not None
        if isinstance(msg, Hello):
            if not hmac.compare_digest(msg.token.encode(), token.encode()):
                return None
            if msg.version != PROTOCOL_VERSION:
                return Refusal(f"it speaks message protocol {msg.version}, machine 0 {PROTOCOL_VERSION}")
            self._met.add(sender)
            return Hello(PROTOCOL_VERSION, token)
        if sender not in self._met:
            return None
        self._met.discard(sender)
        cause = misfit(self._own, msg, {number for number, node in self._nodes.items() if node.taken})
        if cause:
            log.warning("turned a machine away: %s", cause)
            return TurnedAway(cause)
        return Admitted(*self._nodes[msg.node_rank].admit(msg.folder))


def resolve(host: str, *, here: bool = False) -> str:
    """Returns the IP address of a name, IPv4 if there is one. here: the name is this machine's. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--rendezvous: there is no address for {host!r}: {error}") from None
    address = str(min(found, key=lambda info: info[0] != socket.AF_INET)[4][0])
    if here and address.startswith("127.") and host != "localhost" and not host.startswith("127."):
        raise ConfigError(
            f"--rendezvous: {host!r} means {address} on this machine, which others cannot reach; "
            "give an address of the network that the machines share"
        )
    return address


def bracketed(address: str) -> str:
    """Returns an address as in a URL: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address
