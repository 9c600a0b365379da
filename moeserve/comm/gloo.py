"""Point-to-point messages between the ranks of one epoch over torch's Gloo, without global state.

A mesh has one `ProcessGroupGloo`, and one channel per micro-batch. It uses sends and receives
instead of collectives, for three reasons:
- A small exchange takes a sixth of the time of `alltoall_base` (measured with four ranks on two
  cores), because it does not go through the group's worker threads.
- Receivers need not know the sizes of messages in advance.
- If an exchange fails, the peer is known.

Gloo's `abort` does not wake waiting threads, but a receive that times out does: it closes all
connections of its group, which the peers notice. `Mesh.close` uses that.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from moeserve.comm.envelope import PLAIN, Envelope
from moeserve.comm.members import Members
from moeserve.comm.store import MembersStore, dist
from moeserve.comm.stream import to_address
from moeserve.errors import ConfigError, PeerLost

if TYPE_CHECKING:
    from moeserve.comm.seal import Seal

CONNECT_TIMEOUT_S = 10.0  # of connecting after all ranks have registered in the store
CHECK_INTERVAL_S = 0.2  # how often a wait checks whether the mesh was closed
NUM_TAGS = 1 << 16  # tags are reused after so many exchanges, far more than are ever in flight
ON_DEVICE = -1  # `arrived_ns` of a transfer on a device, for which the host does not wait
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
        self.missing_ranks: tuple[int, ...] = ()  # as found when a wait failed
        self._cause = "this rank left the group"  # unless ranks were found missing before
        self.num_channels = num_channels
        all_terms = [terms, members.terms, "encrypted" if sealed else ""]
        self._terms = ", ".join(term for term in all_terms if term)
        self.seal = _make_seal(members, f"{members.epoch}/{name}") if sealed else None
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
            raise self.lost_error()
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
                raise self.lost_error()
            store = MembersStore(members)
            self._store = store
        self._check_terms(store)
        options = dist.ProcessGroupGloo._Options()
        options._threads = 1
        options._timeout = timedelta(seconds=min(members.deadline_s, CONNECT_TIMEOUT_S))
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
        try:
            prefixed = dist.PrefixStore("gloo", store)
            group = dist.ProcessGroupGloo(prefixed, members.rank, members.size, options)
            self._group = group
            # From here on, the timeout is that of sends and collectives.
            group.set_timeout(timedelta(seconds=members.deadline_s))
        except (RuntimeError, PeerLost) as error:
            missing_ranks = error.missing if isinstance(error, PeerLost) else ()
            lost = self.lost_error(f"a rank left while all were connecting: {error}", missing_ranks)
            self.close()
            raise lost from None
        self._channels = [Channel(self, index) for index in range(self.num_channels)]
        if self.closed:  # `close` was called before it could see the group and the channels
            self.close()
            raise self.lost_error()

    @property
    def group(self) -> Any:
        """The process group, which carries the messages of all channels.

        Raises PeerLost after `close`.
        """
        if (group := self._group) is None:
            raise self.lost_error()
        return group

    def channel(self, ubatch: int) -> "Channel":
        """Return a micro-batch's channel. Raises PeerLost after `close`."""
        if self.closed:
            raise self.lost_error()
        return self._channels[ubatch]

    def envelope(self, channel: int, exchange: int) -> Envelope:
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
        if group is not None:
            _close_connections(group)
        for channel in channels:
            channel.close()

    def leave(self) -> None:
        """Close all connections, and wait until that is complete."""
        self.close()

    def lost_error(self, reason: str = "", missing_ranks: tuple[int, ...] = ()) -> PeerLost:
        """Return the error for a call that cannot succeed any more.

        reason: "" for a call that another error has ended.
        missing_ranks: ranks that were found missing. The first ones are kept with their reason, and
            all later errors report them.
        """
        if missing_ranks and not self.missing_ranks and not self.closed:
            self.missing_ranks = missing_ranks
            self._cause = reason
        return PeerLost(
            f"epoch {self.members.epoch}, rank {self.members.rank}: {reason or self._cause}",
            self.missing_ranks,
        )

    def _check_terms(self, store: MembersStore) -> None:
        """Wait until all ranks have registered in the store, and compare their terms.

        This is done before Gloo connects, because Gloo would not report which rank is missing.
        """
        keys = [f"rank/{rank}" for rank in range(self.members.size)]
        store.set(keys[self.members.rank], self._terms.encode())
        try:
            terms = [store.get(key).decode() for key in keys]
        except PeerLost as error:
            raise self.lost_error(str(error), error.missing) from None
        own_terms = terms[self.members.rank]
        for rank, other_terms in enumerate(terms):
            if other_terms != own_terms:
                raise ConfigError(
                    f"rank {self.members.rank} has {own_terms}, rank {rank} has {other_terms}; "
                    "start all engines with the same settings, on machines with the same packages"
                )


class Send(NamedTuple):
    """The messages of an exchange that this rank has sent, and that may not have arrived yet."""

    tag: int
    works: list[Any]  # torch's handles of the operations
    tensors: list[Tensor]  # kept alive
    release: Callable[[], None]  # see `Channel.post`


class Channel:
    """The messages of one micro-batch. Used by one thread at a time.

    All ranks must post the same exchanges in the same order.

    All channels between two ranks share one connection, so messages arrive in the order in which
    they were sent. If each channel had a connection, the two micro-batches would share the
    bandwidth, and the rows that are needed first would arrive later.
    """

    def __init__(self, mesh: Mesh, index: int) -> None:
        self.mesh = mesh
        self._index = index
        self._num_exchanges = 0
        self.sends: list[Send] = []
        # Exchanges to receive, for the thread that receives them; None ends it.
        self._to_receive: SimpleQueue[Exchange | None] | None = None

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
        exchange.receive_in_background()
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
            raise mesh.lost_error()
        try:
            for peer, tensor in receive:
                buffer, decode = envelope.receive_buffer(peer, tensor)
                work = mesh.group.recv([buffer], peer, self.gloo_tag(tag))
                receives.append(Receive(peer, work, decode))
        except RuntimeError as error:
            raise mesh.lost_error(f"rank {peer} is gone: {_brief(error)}", (peer,)) from None
        return Exchange(self, tag, envelope, receives)

    def gloo_tag(self, tag: int) -> int:
        """Return the Gloo tag of an exchange, which is different for each channel."""
        return tag * self.mesh.num_channels + self._index

    def release_sent_before(self, tag: int) -> None:
        """Release the tensors that were sent in exchanges before `tag`.

        The peers have received them, because each peer has now sent its messages of exchange `tag`.
        """
        sends = self.sends
        self.sends = []
        for send in sends:
            if send.tag == tag:
                self.sends.append(send)
                continue
            for work in send.works:
                work.wait()
            send.release()

    def close(self) -> None:
        """End the receiving thread and free sent tensors, after the connections are closed."""
        if self._to_receive is not None:
            self._to_receive.put(None)
        self.sends = []  # their works keep the process group alive, and so the store's port

    def receive_in_background(self, exchange: "Exchange") -> None:
        """Receive the exchange in a background thread.

        So the arrival time is exact even if nothing waits yet, and a wait can be cancelled. Gloo
        does not wake a receive whose message was arriving when its sender died. Then only the
        thread hangs until the deadline.
        """
        with self.mesh.lock:  # an exchange that is queued after `close` would never be received
            if self.mesh.closed:
                return
            if self._to_receive is None:
                self._to_receive = SimpleQueue()
                threading.Thread(
                    target=_receive_all, args=(self._to_receive,), name="gloo-watch", daemon=True
                ).start()
            self._to_receive.put(exchange)


class Receive(NamedTuple):
    """A receive that was posted."""

    peer: int
    work: Any  # torch's handle of the operation
    decode: Callable[[], None]  # see `Envelope.receive_buffer`


class Exchange:
    """An exchange of messages that is in progress."""

    def __init__(
        self, channel: Channel, tag: int, envelope: Envelope, receives: list[Receive]
    ) -> None:
        self.arrived_ns = 0  # when the last message arrived, by the monotonic clock; 0 before
        self._is_receiving = False
        # Locked until all messages have arrived. A threading.Event takes 15 us more.
        self._underway = threading.Lock()
        self._underway.acquire()
        self._channel = channel
        self._tag = tag
        self._envelope = envelope
        self._receives = receives
        self._awaited_peer = -1  # whose message is received next
        self._error: PeerLost | None = None

    def send(self, tensors: Mapping[int, Tensor], release: Callable[[], None]) -> None:
        """Send all or some of this rank's messages, as in `Channel.post`. Raises PeerLost."""
        channel = self._channel
        mesh = self._channel.mesh
        peer = -1
        works = []
        messages: list[Tensor] = []
        if mesh.closed:
            raise mesh.lost_error()
        try:
            for peer, tensor in tensors.items():
                messages.append(self._envelope.encode(peer, tensor))
                works.append(mesh.group.send(messages[-1:], peer, channel.gloo_tag(self._tag)))
        except RuntimeError as error:
            raise mesh.lost_error(f"rank {peer} is gone: {_brief(error)}", (peer,)) from None
        channel.sends.append(Send(self._tag, works, messages, release))

    def receive_in_background(self) -> None:
        """Begin to receive in the background. Call this after everything is sent."""
        self._is_receiving = True
        self._channel.receive_in_background(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all messages have arrived.

        Raises PeerLost with the first rank whose message did not arrive within `timeout_s`
        (default: the members' deadline).
        """
        mesh = self._channel.mesh
        if timeout_s is None:
            timeout_s = mesh.members.deadline_s
        deadline_s = time.monotonic() + timeout_s
        if not self._is_receiving:
            self.receive_in_background()
        while not self._underway.acquire(timeout=min(CHECK_INTERVAL_S, timeout_s)):
            if mesh.closed:
                raise mesh.lost_error()
            if time.monotonic() > deadline_s:
                peer = self._awaited_peer
                error = mesh.lost_error(f"rank {peer} was silent for {timeout_s:g} s", (peer,))
                mesh.close()
                raise error
        self._underway.release()  # so that `wait` may be called again
        if self._error is not None:
            raise self._error
        try:
            self._channel.release_sent_before(self._tag)
        except RuntimeError as error:
            raise mesh.lost_error(_brief(error)) from None

    def receive(self) -> None:
        """Receive all messages, in the background thread. An error is raised by `wait`."""
        mesh = self._channel.mesh
        timeout_s = mesh.members.deadline_s
        deadline_s = time.monotonic() + timeout_s
        try:
            for peer, work, decode in self._receives:
                self._awaited_peer = peer
                work.wait(timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
                decode()
        except (RuntimeError, PermissionError) as error:
            if isinstance(error, PermissionError):  # raised by `decode`
                reason = str(error)
            elif "Timed out" in str(error):
                reason = f"was silent for {timeout_s:g} s"
            else:
                reason = f"is gone: {_brief(error)}"
            peer = self._awaited_peer
            if mesh.closed:  # this rank left, so the peer is not to blame
                self._error = mesh.lost_error()
            else:
                self._error = mesh.lost_error(f"rank {peer} {reason}", (peer,))
            mesh.close()
        if self._receives:
            self.arrived_ns = time.monotonic_ns()
        self._underway.release()


def _receive_all(queue: SimpleQueue[Exchange | None]) -> None:
    while (exchange := queue.get()) is not None:
        exchange.receive()


def _close_connections(group: Any) -> None:
    """Close the connections of a process group.

    A receive that times out closes all connections. A receive from a peer that is already gone
    fails without that, so try all peers.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                work = group.recv([torch.empty(1, dtype=torch.uint8)], peer, BREAK_TAG)
                work.wait(timedelta(milliseconds=1))


def _make_seal(members: Members, name: str) -> "Seal":
    from moeserve.comm.seal import Seal  # imported here, because it takes 40 ms and is rarely used

    return Seal(members, name)


def _local_address(members: Members) -> str:
    """Return this machine's address on the interface that routes to the store's host.

    Connecting a UDP socket determines the route without sending anything.
    """
    address = to_address(members.store)
    host = "127.0.0.1" if isinstance(address, str) else address[0]
    family, _, _, _, remote = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(remote)
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
