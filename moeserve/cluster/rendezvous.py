"""The rendezvous of a cluster's machines: machine 0 listens, and the others register.

Connections are authenticated with CURVE keys. Machine 0 compares everything that must be the same
on all machines, so a wrong flag or an outdated copy of the model is reported within seconds.
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

TOKEN = "rendezvous"  # purpose from which the token of the rendezvous is derived
MAX_HELLO_BYTES = 1 << 16
MAX_GREETED = 4096  # nodes between hello and registration; a cluster has fewer machines
ERROR_PAUSE_S = 0.1  # after an unexpected error
LINGER_MS = 500  # for the last answers to be sent
# Epochs reserved for each front end, so that those of the next one are higher.
NUM_EPOCHS = 1 << 18
# Sections of the config whose settings must be equal on all machines, with these exceptions:
_SHARED_SECTIONS = ("parallel", "cache", "scheduler", "device")
_OWN_SETTINGS = {"node_rank", "rendezvous", "cluster_key_file", "threads", "fork_server"}


class Registration(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A node's registration."""

    node_rank: int
    version: str  # of moeserve
    model: str  # fingerprint of the checkpoint
    settings: dict[str, str | int | float | bool | None]  # must be equal on all machines
    folder: str = ""  # the node's private directory, for sockets


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """Machine 0's answer to a node that may join: it connects to this address."""

    address: str
    token: str


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """Machine 0's answer to a node that may not join."""

    cause: str


_decode = msgspec.msgpack.Decoder(Hello | Registration).decode


def make_registration(config: Config, folder: str = "") -> Registration:
    """Return this node's registration. Raises ConfigError.

    This reads the checkpoint's headers and samples of its weights, so it may be slow.
    """
    shared_settings = {
        field.name: getattr(section, field.name)
        for section in (getattr(config, name) for name in _SHARED_SECTIONS)
        for field in fields(section)
        if field.name not in _OWN_SETTINGS
    }
    shared_settings["dtype"] = config.model.dtype
    shared_settings["max_model_len"] = config.model.max_model_len
    return Registration(
        node_rank=config.parallel.node_rank,
        version=__version__,
        model=fingerprint(open_checkpoint(resolve_model_dir(config.model.model))),
        settings=shared_settings,
        folder=folder,
    )


def why_rejected(own: Registration, node: Registration, joined: set[int]) -> str:
    """Return why a node cannot join, or "".

    own: the registration of machine 0. joined: machines that have joined already.
    """
    rank = node.node_rank
    num_nodes = own.settings["nnodes"]
    if node.version != own.version:
        return (
            f"machine {rank} runs moeserve {node.version}, machine 0 {own.version}; install the"
            " same version on all machines"
        )
    for name, value in own.settings.items():
        if (node_value := node.settings.get(name)) != value:
            flag = f"--{name.replace('_', '-')}"
            return (
                f"{flag} is {node_value} on machine {rank}, {value} on machine 0; start all"
                " machines with the same settings"
            )
    if node.model != own.model:
        return (
            f"the model on machine {rank} differs from the one on machine 0 (fingerprints"
            f" {node.model}, {own.model} of config.json and *.safetensors); copy the same files"
            " to all machines"
        )
    if not 1 <= rank < int(num_nodes or 1):
        return (
            f"--node-rank {rank}: with --nnodes {num_nodes} the other machines are 1 to"
            f" {int(num_nodes or 1) - 1}"
        )
    if rank in joined:
        return (
            f"--node-rank {rank}: there is a machine {rank} already; give each machine a different"
            " number"
        )
    return ""


class Rendezvous:
    """The machines of a fleet.

    If there are several, machine 0 listens until `close`, because nodes may join again.
    """

    def __init__(self, folder: str) -> None:
        self.local_host = LocalHost(folder)
        self.hosts: tuple[Host, ...] = (self.local_host,)
        self.address = "127.0.0.1"  # of this machine, for the others
        self.epochs = count(1)  # numbers for the epochs of all groups
        self._root: RootHost | None = None
        self._nodes: dict[int, RemoteHost] = {}
        self._listening: asyncio.Task[None] | None = None
        self._greeted: OrderedDict[bytes, None] = OrderedDict()  # nodes that have sent their hello

    @classmethod
    async def open(cls, config: Config, folder: str, root: Root | None = None) -> "Rendezvous":
        """Open the rendezvous on machine 0.

        Raises ConfigError for a key or an address that cannot be used.

        Args:
            folder: a private directory, for sockets.
            root: the root process, if it keeps this machine's engines (--standby).
        """
        self = cls(folder if root is None else root.folder)
        num_nodes = config.parallel.nnodes
        if root is not None:
            self._root = RootHost(root)
            self.hosts = (self._root,)
            self.epochs = count(1 + root.made_at * NUM_EPOCHS)
        if num_nodes > 1:
            own = await asyncio.to_thread(make_registration, config)
            host, port = rendezvous_of(config.parallel)
            self.address = resolve(host, is_own=True)
            secret = read_secret(str(config.parallel.cluster_key_file))
            keys = keys_of(secret)
            hello = Hello(PROTOCOL_VERSION, token_of(secret, TOKEN))
            socket = _listen(f"tcp://{bracketed(self.address)}:{port}", keys)
            for number in range(1, num_nodes):
                self._nodes[number] = RemoteHost(number, num_nodes, bracketed(self.address), keys)
            self.hosts = (*self.hosts, *self._nodes.values())
            serving = self._serve(socket, own, hello)
            self._listening = spawn(serving, name="rendezvous", on_error=log_error)
        if root is None:
            # Last, so that no fork server is left running if anything above raises.
            self.local_host.keep_fork_server(config)
        return self

    async def close(self, cause: str = "") -> None:
        """Release all nodes. cause: why machine 0 fails, empty after an ordered stop."""
        await self.local_host.close()
        await cancel(self._listening)
        hosts_with_agent: list[RemoteHost] = [*self._nodes.values()]
        if self._root is not None:
            hosts_with_agent.append(self._root)
        await asyncio.gather(*(host.close(cause) for host in hosts_with_agent))

    async def _serve(self, socket: zmq.asyncio.Socket, own: Registration, hello: Hello) -> None:
        """Answer nodes until cancelled. An error affects only the message that caused it."""
        try:
            while True:
                try:
                    sender, *_, frame = await socket.recv_multipart()
                    answer = self._answer(sender, frame, own, hello)
                    if answer is not None:
                        with suppress(zmq.ZMQError):  # the node is gone
                            await socket.send_multipart(
                                [sender, msgspec.msgpack.encode(answer)], zmq.NOBLOCK
                            )
                except Exception as error:
                    log_error("rendezvous", error)
                    await asyncio.sleep(ERROR_PAUSE_S)  # a lasting error must not fill the log
        finally:
            socket.close()
            # In a thread, because `term` blocks until the last answers are sent (LINGER_MS).
            threading.Thread(target=socket.context.term, name="rendezvous end", daemon=True).start()

    def _answer(
        self, sender: bytes, frame: bytes, own: Registration, hello: Hello
    ) -> msgspec.Struct | None:
        """Return the answer to a message; None to send none, so that strangers learn nothing."""
        try:
            msg = _decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            log.warning("the rendezvous dropped an invalid message of %d bytes", len(frame))
            return None
        if isinstance(msg, Registration):
            has_greeted = sender in self._greeted
            self._greeted.pop(sender, None)
            return self._admit(msg, own) if has_greeted else None
        answer = answer_hello(msg, hello)
        if isinstance(answer, Hello):  # otherwise it is a refusal
            self._greeted[sender] = None
            if len(self._greeted) > MAX_GREETED:  # most of them never registered
                self._greeted.popitem(last=False)
        return answer

    def _admit(self, node: Registration, own: Registration) -> Admitted | Rejected:
        joined = {number for number, host in self._nodes.items() if host.is_taken}
        cause = why_rejected(own, node, joined)
        if cause:
            log.warning("rejected a machine: %s", cause)
            return Rejected(cause)
        try:
            address, token = self._nodes[node.node_rank].admit(node.folder)
        except ConfigError as error:  # this machine cannot listen for the agent
            return Rejected(str(error))
        return Admitted(address, token)


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


def resolve(host: str, *, is_own: bool = False) -> str:
    """Return the IP address of a host name, IPv4 if it has one. Raises ConfigError.

    is_own: the name is that of this machine, so others must be able to reach the address.
    """
    with ConfigError.instead_of(OSError, f"--rendezvous: cannot resolve {host!r}"):
        addresses = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    # getaddrinfo returns tuples of (family, ..., (address, port)). IPv4 comes first here.
    family_and_address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
    address = str(family_and_address[4][0])
    is_loopback_name = host == "localhost" or host.startswith("127.")
    if is_own and address.startswith("127.") and not is_loopback_name:
        raise ConfigError(
            f"--rendezvous: {host!r} resolves to {address} on this machine, which others cannot"
            " reach; give an address on the network that the machines share"
        )
    return address


def bracketed(address: str) -> str:
    """Return an IP address in URL form: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address
