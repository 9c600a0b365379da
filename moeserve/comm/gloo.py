"""Point-to-point messages between the ranks of one epoch over torch's Gloo, without global state.

A mesh has one `ProcessGroupGloo`, and one channel per micro-batch. It uses sends and receives
instead of collectives, for three reasons:
- A small exchange takes a sixth of the time of `alltoall_base` (four ranks on two cores), because
  it does not go through the group's worker threads.
- Receivers need not know sizes in advance.
- If an exchange fails, the peer is known.

Gloo's `abort` does not wake waiting threads, but a receive that times out does: it closes all
connections of its group, and so the peers' ends of them. `close` uses that.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moeserve.comm.envelope import PLAIN, Plain
from moeserve.comm.members import Members
from moeserve.comm.store import MembersStore, dist
from moeserve.comm.stream import to_address
from moeserve.errors import ConfigError, PeerLost

if TYPE_CHECKING:
    from moeserve.comm.seal import Seal

CONNECT_S = 10.0  # limit on connecting after all ranks have registered in the store
LOOK_S = 0.2  # how often a wait checks whether the mesh was closed
NUM_TAGS = 1 << 16  # far more than are ever in flight
ON_DEVICE = -1  # arrival time of a transfer on a device, for which the host does not wait
BREAK_TAG = (1 << 31) - 1  # a tag that no message has


class Mesh:
    """The connections between all ranks of an epoch.

    `close` may be called at any time, from any thread.

    name: a namespace for keys of the store and for encryption, different for each use of a mesh.
    terms: settings that must be the same on all ranks, such as sizes; compared by `connect`.
    sealed: whether messages between machines are encrypted.
    """

    def __init__(
        self,
        members: Members,
        num_channels: int,
        name: str,
        terms: str = "",
        *,
        sealed: bool = False,
    ) -> None:
        self.members = members
        self.missing: tuple[int, ...] = ()  # ranks that were found missing when a wait failed
        self.num_channels = num_channels
        self._terms = ", ".join(filter(None, (terms, members.terms, "encrypted" * sealed)))
        self.seal = _seal(members, f"{members.epoch}/{name}") if sealed else None
        self._store: MembersStore | None = None
        self._closed = threading.Event()
        self.lock = threading.Lock()  # guards the attributes that `close` resets
        self._channels: list[Channel] = []
        self._group: Any | None = None

    @property
    def closed(self) -> bool:
        """Whether this rank has left, or a wait has failed."""
        return self._closed.is_set()

    @property
    def store(self) -> MembersStore:
        """The store over which the ranks exchanged addresses, for further connections.

        Raises PeerLost after `close`.
        """
        if self._store is None or self.closed:
            raise self.lost()
        return self._store

    def connect(self) -> None:
        """Connect to the other ranks.

        Raises PeerLost with the ranks that did not join, and ConfigError if terms differ.
        """
        members = self.members
        if members.size == 1:
            self._channels = [Channel(self, index) for index in range(self.num_channels)]
            return
        address = _local_address(members)
        with self.lock:
            if self.closed:
                raise self.lost()
            self._store = store = MembersStore(members)
        self._await_ranks(store)
        options = dist.ProcessGroupGloo._Options()
        options._threads = 1
        options._timeout = timedelta(seconds=min(members.deadline_s, CONNECT_S))
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
        try:
            prefixed = dist.PrefixStore("gloo", store)
            self._group = group = dist.ProcessGroupGloo(
                prefixed, members.rank, members.size, options
            )
            # From here on, the timeout is that of sends and collectives.
            group.set_timeout(timedelta(seconds=members.deadline_s))
        except (RuntimeError, PeerLost) as error:
            lost = self.lost(
                f"a rank left while all were connecting: {error}", getattr(error, "missing", ())
            )
            self.close()
            raise lost from None
        self._channels = [Channel(self, index) for index in range(self.num_channels)]
        if self.closed:
            self.close()
            raise self.lost()

    @property
    def group(self) -> Any:
        """The process group, which carries the messages of all channels.

        Raises PeerLost after `close`.
        """
        if (group := self._group) is None:
            raise self.lost()
        return group

    def channel(self, ubatch: int) -> "Channel":
        """Return a micro-batch's channel. Raises PeerLost after `close`."""
        if self.closed:
            raise self.lost()
        return self._channels[ubatch]

    def envelope(self, channel: int, exchange: int) -> Plain:
        """Return the encoding of an exchange's messages: plain or encrypted."""
        return PLAIN if self.seal is None else self.seal.envelope(channel, exchange)

    def close(self) -> None:
        """Close all connections. Waits on this rank and on its peers fail."""
        self._closed.set()
        with self.lock:
            channels = self._channels
            self._channels = []
            group: Any = self._group
            self._group = None
            if self._store is not None:  # kept, because torch's threads may still use it
                self._store.close()
        peers = (
            [] if group is None else [rank for rank in range(group.size()) if rank != group.rank()]
        )
        # A receive that times out closes all connections. One from a peer that is already gone
        # fails without that, so try all peers.
        for peer in peers:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, BREAK_TAG).wait(
                    timedelta(milliseconds=1)
                )
        for channel in channels:
            channel.close()

    def leave(self) -> None:
        """Close all connections, and wait until that is complete."""
        self.close()

    def lost(
        self, reason: str = "this rank left the group", missing: tuple[int, ...] = ()
    ) -> PeerLost:
        """Return the error for a call that cannot succeed any more.

        missing: ranks that are missing. The first ones that were found are reported from then on.
        """
        if missing and not self.missing and not self.closed:
            self.missing = missing
        return PeerLost(
            f"epoch {self.members.epoch}, rank {self.members.rank}: {reason}", self.missing
        )

    def _await_ranks(self, store: MembersStore) -> None:
        """Wait until all ranks have registered in the store, and compare their terms.

        This is done before Gloo connects, because Gloo would not report which rank is missing.
        """
        keys = [f"rank/{rank}" for rank in range(self.members.size)]
        store.set(keys[self.members.rank], self._terms.encode())
        try:
            terms = [store.get(key).decode() for key in keys]
        except PeerLost as error:
            raise self.lost(str(error), error.missing) from None
        ours = terms[self.members.rank]
        for rank, theirs in enumerate(terms):
            if theirs != ours:
                raise ConfigError(
                    f"rank {self.members.rank} has {ours}, rank {rank} has {theirs}; "
                    "start all engines with the same settings, on machines with the same packages"
                )


class Channel:
    """The messages of one micro-batch. Used by one thread at a time.

    All ranks must post the same exchanges in the same order.

    All channels between two ranks share one connection, so messages arrive in the order in which
    they were sent. With a connection each, the two micro-batches would share the bandwidth, and the
    rows that are needed first would arrive later.
    """

    def __init__(self, mesh: Mesh, index: int) -> None:
        self.mesh = mesh
        self._index = index
        self._num_exchanges = 0
        # Sends that may not have arrived yet: (tag, works, tensors to keep alive, `release`).
        self.sends: list[tuple[int, list[Any], list[Tensor], Callable[[], None]]] = []
        self._watch: SimpleQueue[Exchange | None] | None = None

    def post(
        self,
        receive: Mapping[int, Tensor],
        send: Mapping[int, Tensor],
        release: Callable[[], None] = lambda: None,
    ) -> "Exchange":
        """Start an exchange of one message with each peer.

        receive, send: a contiguous uint8 tensor by peer, none empty. A message may be shorter than
            the tensor that receives it.
        release: called when the sent tensors may be reused, in the wait of a later exchange.

        Raises PeerLost.
        """
        exchange = self.expect(receive.items())
        exchange.send(send, release)
        exchange.watch()
        return exchange

    def expect(self, receive: Iterable[tuple[int, Tensor]]) -> "Exchange":
        """Start an exchange by posting its receives; `Exchange.send` sends later.

        Gloo transfers a message only when its receive is posted, so posting early saves time. A
        peer may send several messages; they fill its tensors in the order given. Raises PeerLost.
        """
        mesh = self.mesh
        self._num_exchanges += 1
        tag = self._num_exchanges % NUM_TAGS
        envelope = mesh.envelope(self._index, self._num_exchanges)
        peer = -1
        receives = []
        if mesh.closed:
            raise mesh.lost()
        try:
            for peer, tensor in receive:
                inbox, deliver = envelope.inbox(peer, tensor)
                receives.append((peer, mesh.group.recv([inbox], peer, self.number(tag)), deliver))
        except RuntimeError as error:
            raise mesh.lost(f"rank {peer} is gone: {_brief(error)}", (peer,)) from None
        return Exchange(self, tag, envelope, receives)

    def number(self, tag: int) -> int:
        """Return the Gloo tag of an exchange, which is different for each channel."""
        return tag * self.mesh.num_channels + self._index

    def finish(self, tag: int) -> None:
        """Release the tensors that were sent before exchange `tag`.

        Peers have received those, because each peer has now sent its messages of exchange `tag`.
        """
        sends = self.sends
        self.sends = []
        for sent in sends:
            sent_tag, works, _, release = sent
            if sent_tag == tag:
                self.sends.append(sent)
                continue
            for work in works:
                work.wait()
            release()

    def close(self) -> None:
        """End the receiving thread and free sent tensors, after the connections are closed."""
        if self._watch is not None:
            self._watch.put(None)
        self.sends = []  # their works keep the process group alive, and so the store's port

    def watch(self, exchange: "Exchange") -> None:
        """Receive the exchange in a background thread.

        So the arrival time is exact even if nothing waits yet, and a wait can be cancelled. Gloo
        does not wake a receive whose message was arriving when its sender died; only the thread
        then hangs until the deadline.
        """
        with self.mesh.lock:  # an exchange that is queued after `close` would never be received
            if not self.mesh.closed:
                if self._watch is None:
                    self._watch = SimpleQueue()
                    threading.Thread(
                        target=_receive_all, args=(self._watch,), name="gloo-watch", daemon=True
                    ).start()
                self._watch.put(exchange)


# A posted receive: (peer, Gloo's work, function that decrypts the message).
_Receive = tuple[int, dist.Work, Callable[[], None]]


class Exchange:
    """An exchange of messages that is in progress."""

    def __init__(
        self, channel: Channel, tag: int, envelope: Plain, receives: list[_Receive]
    ) -> None:
        self.arrived_ns = 0  # when the last message arrived, by the monotonic clock; 0 before
        self._watched = False
        # Locked until all messages have arrived. (A threading.Event takes 15 us more.)
        self._underway = threading.Lock()
        self._underway.acquire()
        self._channel = channel
        self._tag = tag
        self._envelope = envelope
        self._receives = receives
        self._awaited = -1  # the peer whose message is received next
        self._error: PeerLost | None = None

    def send(self, tensors: Mapping[int, Tensor], release: Callable[[], None]) -> None:
        """Send all or some of this rank's messages, as in `Channel.post`. Raises PeerLost."""
        channel = self._channel
        mesh = self._channel.mesh
        peer = -1
        works = []
        sent = []
        if mesh.closed:
            raise mesh.lost()
        try:
            for peer, tensor in tensors.items():
                sent.append(self._envelope.outbox(peer, tensor))
                works.append(mesh.group.send(sent[-1:], peer, channel.number(self._tag)))
        except RuntimeError as error:
            raise mesh.lost(f"rank {peer} is gone: {_brief(error)}", (peer,)) from None
        channel.sends.append((self._tag, works, sent, release))

    def watch(self) -> None:
        """Begin to receive in the background. Call this after everything is sent."""
        self._watched = True
        self._channel.watch(self)

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until all messages have arrived.

        Raises PeerLost with the first rank whose message did not arrive within `limit_s` seconds
        (default: the members' deadline).
        """
        mesh = self._channel.mesh
        limit = mesh.members.deadline_s if limit_s is None else limit_s
        until = time.monotonic() + limit
        if not self._watched:
            self.watch()
        while not self._underway.acquire(timeout=min(LOOK_S, limit)):
            if mesh.closed:
                raise mesh.lost()
            if time.monotonic() > until:
                error = mesh.lost(
                    f"rank {self._awaited} was silent for {limit:g} s", (self._awaited,)
                )
                mesh.close()
                raise error
        self._underway.release()  # so that `wait` may be called again
        if self._error is not None:
            raise self._error
        try:
            self._channel.finish(self._tag)
        except RuntimeError as error:
            raise mesh.lost(_brief(error)) from None

    def receive(self) -> None:
        """Receive all messages, in the background thread. An error is raised by `wait`."""
        mesh = self._channel.mesh
        limit_s = mesh.members.deadline_s
        until = time.monotonic() + limit_s
        try:
            for peer, work, deliver in self._receives:
                self._awaited = peer
                work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))
                deliver()
        except (RuntimeError, PermissionError) as error:
            silent = "Timed out" in str(error)
            reason = f"was silent for {limit_s:g} s" if silent else f"is gone: {_brief(error)}"
            if isinstance(error, PermissionError):
                reason = str(error)
            self._error = (
                mesh.lost()
                if mesh.closed
                else mesh.lost(f"rank {self._awaited} {reason}", (self._awaited,))
            )
            mesh.close()
        if self._receives:
            self.arrived_ns = time.monotonic_ns()
        self._underway.release()


def _receive_all(queue: SimpleQueue[Exchange | None]) -> None:
    while (exchange := queue.get()) is not None:
        exchange.receive()


def _seal(members: Members, name: str) -> "Seal":
    from moeserve.comm.seal import Seal  # imported here, because it takes 40 ms and is rarely used

    return Seal(members, name)


def _local_address(members: Members) -> str:
    """Return this machine's address on the interface that routes to the store's host.

    Connecting a UDP socket determines the route without sending anything.
    """
    address = to_address(members.store)
    host = "127.0.0.1" if isinstance(address, str) else address[0]
    family, _, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        local: str = probe.getsockname()[0]
    if not members.one_host and local.startswith("127.") and not host.startswith("127."):
        raise ConfigError(
            f"the store's host {host!r} leads to {local}, which other machines cannot reach; "
            "name the machine by an address of its network"
        )
    return local


def _brief(error: BaseException) -> str:
    """Return Gloo's error message without source location and advice."""
    return str(error).split("] ", 1)[-1].split(". This is")[0]
