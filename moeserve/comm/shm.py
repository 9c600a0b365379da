"""Shared memory between the ranks of one host: the exchange of its file descriptors, and the
gathers of tensor parallelism on top of it.

Suffixes of tensors are their dimensions. T: rows. N: columns of one rank. D: model width.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from moeserve.comm.members import Members
from moeserve.comm.stream import HEADER, Peer, StreamListener, connect
from moeserve.comm.tensor import TensorParallel
from moeserve.errors import ConfigError, PeerLost
from moeserve.ops.native import native

if TYPE_CHECKING:
    from moeserve._native import Channel, Gather, Region

CHECK_INTERVAL_S = 0.02  # how often a rank that waits for others checks if `leave` was called
MAX_FACTS_BYTES = 1 << 16
GATHER_PART_BYTES = 16 << 20  # shared memory of one rank and channel; larger gathers are split


def native_module() -> ModuleType:
    """Return `moeserve._native`. Raises ConfigError if it is not installed."""
    module = native()
    if module is None:
        raise ConfigError(
            "shared memory needs moeserve's native code, which is not installed; use --all2all"
            " torch"
        )
    return module


class ShmPeer(NamedTuple):
    """Another rank of a `ShmGroup`."""

    sock: socket.socket
    region_fd: int  # file descriptor of its region for micro-batch 0


class ShmGroup:
    """Connections between `ranks`, over which they pass each other descriptors of their memory.

    There is one connection per pair of ranks and micro-batch.
    """

    def __init__(self, members: Members, ranks: Sequence[int], name: str, ubatches: int) -> None:
        self._members = members
        self._ranks = list(ranks)
        self._name = name
        self._num_ubatches = ubatches
        self._lock = threading.Lock()
        self._has_left = threading.Event()
        # Those that no channel owns yet, by the other rank and the micro-batch (its channel):
        self._sockets: dict[Peer, socket.socket] = {}
        self._fds: dict[Peer, int] = {}  # file descriptors of the other ranks' memory
        self._channels: list[Channel] = []

    def open_channels(self, region_bytes: int, facts: str) -> "list[tuple[Channel, Region]]":
        """Connect, and return a channel and this rank's own region for each micro-batch.

        Raises the same errors as `connect`.
        """
        regions = [native_module().Region(region_bytes) for _ in range(self._num_ubatches)]
        self.connect(regions, facts)
        try:
            return self._make_channels(regions)
        except BaseException:
            self.close()
            raise

    def connect(self, regions: "list[Region]", facts: str) -> dict[int, ShmPeer]:
        """Connect the ranks and exchange the file descriptors of their regions.

        Return the other ranks, by number. The group closes their descriptors. Each rank listens,
        connects to all lower ranks and accepts all higher ranks. Call this in a thread without an
        event loop.

        facts: settings that must be the same on all ranks. Raises PeerLost with the ranks that did
        not connect before the members' deadline, and ConfigError if facts differ.
        """
        deadline_s = time.monotonic() + self._members.deadline_s
        folder = os.open(self._members.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            asyncio.run(self._connect_all(folder, deadline_s))
            self._exchange_facts(regions, facts, deadline_s)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(folder)
        with self._lock:
            return {
                peer.number: ShmPeer(sock, region_fd=self._fds[peer])
                for peer, sock in self._sockets.items()
                if peer.channel == 0
            }

    def close(self) -> None:
        """Leave, and close all descriptors that no channel owns."""
        self.leave()
        with self._lock:
            for sock in self._sockets.values():
                sock.close()
            for fd in self._fds.values():
                os.close(fd)
            self._sockets.clear()
            self._fds.clear()

    def leave(self) -> None:
        """Shut down all connections. Waiting calls, on this rank and on its peers, raise PeerLost.

        May be called from any thread, at any time.
        """
        self._has_left.set()
        with self._lock:
            for channel in self._channels:
                channel.leave()
            for sock in self._sockets.values():
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    async def _connect_all(self, folder: int, deadline_s: float) -> None:
        members = self._members
        peers = [Peer(rank, ubatch) for rank in self._ranks for ubatch in range(self._num_ubatches)]
        path = self._path(folder, members.rank)
        with suppress(FileNotFoundError):
            os.unlink(path)
        higher = [peer for peer in peers if peer.number > members.rank]
        with closing(StreamListener(path, members.token, members.epoch, higher)) as listener:
            pending: set[asyncio.Task[Any]] = {asyncio.create_task(listener.complete.wait())}
            pending |= {
                asyncio.create_task(self._connect(folder, peer))
                for peer in peers
                if peer.number < members.rank
            }
            try:
                while pending:
                    done, pending = await asyncio.wait(
                        pending, timeout=CHECK_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    if errors := [error for task in done if (error := task.exception())]:
                        raise errors[0]
                    if pending:
                        connected = self._sockets.keys() | listener.accepted.keys()
                        missing_ranks = {
                            peer.number
                            for peer in peers
                            if peer.number != members.rank and peer not in connected
                        }
                        self._raise_if_left_or_late(deadline_s, missing_ranks)
            finally:
                self._add_sockets({peer: link.sock for peer, link in listener.accepted.items()})

    async def _connect(self, folder: int, peer: Peer) -> None:
        members = self._members
        me = Peer(members.rank, peer.channel)
        try:
            link = await connect(self._path(folder, peer.number), members.token, members.epoch, me)
        except ConnectionError as error:
            raise PeerLost(
                f"rank {peer.number} refused this rank, or ended: {error}", (peer.number,)
            ) from None
        self._add_sockets({peer: link.sock})

    def _add_sockets(self, sockets: dict[Peer, socket.socket]) -> None:
        with self._lock:
            self._sockets |= sockets

    def _exchange_facts(self, regions: "list[Region]", facts: str, deadline_s: float) -> None:
        """Send this rank's facts and descriptors to all ranks, then receive theirs."""
        text = facts.encode()
        message = HEADER.pack(len(text)) + text
        for peer, sock in self._sockets.items():
            sock.settimeout(max(CHECK_INTERVAL_S, deadline_s - time.monotonic()))
            with suppress(OSError):  # the receive below reports the cause
                socket.send_fds(sock, [message], [regions[peer.channel].fd])
        facts_of: dict[int, str] = {}  # other rank -> its facts
        for peer, sock in self._sockets.items():
            try:
                facts_of[peer.number], fd = _receive_facts(sock)
            except (OSError, ValueError):
                self._raise_if_left_or_late(deadline_s, {peer.number})
                raise PeerLost(
                    f"rank {peer.number} ended while the ranks connected", (peer.number,)
                ) from None
            with self._lock:
                self._fds[peer] = fd
        for rank, other_facts in facts_of.items():
            if other_facts != facts:
                raise ConfigError(
                    f"ranks must be started alike; rank {rank} has {other_facts}, rank "
                    f"{self._members.rank} has {facts}"
                )

    def _path(self, folder: int, rank: int) -> str:
        # By the folder's descriptor, because paths of Unix sockets are limited to 107 bytes, and
        # folders of tests are longer.
        return f"/proc/self/fd/{folder}/{self._name}-{rank}.sock"

    def _raise_if_left_or_late(self, deadline_s: float, missing_ranks: Iterable[int]) -> None:
        if self._has_left.is_set():
            raise PeerLost("this rank left its group while the ranks connected")
        if time.monotonic() >= deadline_s:
            ranks = tuple(sorted(missing_ranks))
            names = ", ".join(map(str, ranks))
            raise PeerLost(
                f"ranks that did not come in {self._members.deadline_s:g} s: {names}", ranks
            )

    def _make_channels(self, regions: "list[Region]") -> "list[tuple[Channel, Region]]":
        """Make a channel for each micro-batch, which then owns its sockets and descriptors."""
        index = self._ranks.index(self._members.rank)
        with self._lock:
            if self._has_left.is_set():
                raise PeerLost("this rank left its group while the ranks connected")
            for ubatch, region in enumerate(regions):
                # By rank; -1 for this rank itself.
                socket_fds = []
                region_fds = []
                for rank in self._ranks:
                    sock = self._sockets.pop(Peer(rank, ubatch), None)
                    if sock is not None:
                        sock.setblocking(False)
                    socket_fds.append(-1 if sock is None else sock.detach())
                    region_fds.append(self._fds.pop(Peer(rank, ubatch), -1))
                self._channels.append(
                    native_module().Channel(
                        index, self._ranks, ubatch, socket_fds, region, region_fds
                    )
                )
            return list(zip(self._channels, regions, strict=True))


def _receive_facts(sock: socket.socket) -> tuple[str, int]:
    """Receive a peer's facts and the descriptor of its memory. Raises OSError or ValueError."""
    header, fds, _, _ = socket.recv_fds(sock, HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if len(header) < HEADER.size or len(fds) != 1:
            raise ValueError("these are no facts")
        (size,) = HEADER.unpack(header)
        if size > MAX_FACTS_BYTES:
            raise ValueError("these are no facts")
        # Read no more than the facts, because what follows is for the channel.
        body = b""
        while len(body) < size:
            part = sock.recv(size - len(body))
            if not part:
                raise ValueError("the end came early")
            body += part
        return body.decode(), fds[0]
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


class ShmTensor(TensorParallel):
    """`TensorParallel` between the processes of one engine, through shared memory."""

    _group: ShmGroup | None = None
    _gathers: "Sequence[Gather]" = ()
    _deadline_s = 0.0

    def leave(self) -> None:
        group = self._group
        self._group = None
        if group is not None:
            group.leave()
        self._gathers = ()  # the memory is freed when the last call that uses it ends

    def _connect(self, members: Members) -> None:
        group = ShmGroup(members, members.tp_ranks, name="tensor", ubatches=self._num_channels)
        self._group = group
        gather = native_module().Gather
        channels = group.open_channels(
            gather.region_bytes(GATHER_PART_BYTES), f"{self._num_channels} channels"
        )
        self._gathers = [gather(channel, GATHER_PART_BYTES) for channel, _ in channels]
        self._deadline_s = members.deadline_s

    def _gather_columns(self, x_TN: Tensor, channel: int) -> Tensor:
        rows, columns = x_TN.shape
        x_TN = x_TN.contiguous()
        out_TN = x_TN.new_empty((rows, self.size * columns))
        row_bytes = columns * x_TN.element_size()
        self._gather_of(channel).columns(
            x_TN.data_ptr(), rows, row_bytes, out_TN.data_ptr(), self._deadline_s
        )
        return out_TN

    def _gather_rows(self, x_TD: Tensor, counts: Sequence[int], channel: int) -> Tensor:
        x_TD = x_TD.contiguous()
        out_TD = x_TD.new_empty((sum(counts), x_TD.shape[1]))
        row_bytes = x_TD.shape[1] * x_TD.element_size()
        self._gather_of(channel).rows(
            x_TD.data_ptr(), list(counts), row_bytes, out_TD.data_ptr(), self._deadline_s
        )
        return out_TD

    def _gather_of(self, channel: int) -> "Gather":
        gathers = self._gathers
        if not gathers:
            raise PeerLost("this rank left its engine's group")
        return gathers[channel]
