"""How ranks of one host meet over Unix sockets and shared memory, and the tensor-parallel gathers on top of that.

T rows, N columns of one rank, D model width.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from hmac import compare_digest
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from moeserve.comm.members import Members
from moeserve.errors import ConfigError, PeerLost
from moeserve.ops.native import native

if TYPE_CHECKING:
    from moeserve._native import Channel, Gather, Region

RETRY_S = 0.005
HELLO_TIMEOUT_S = 5.0
LARGEST_HELLO = 1 << 16
GATHER_PART_BYTES = 16 << 20


class Hello(msgspec.Struct, frozen=True):
    """First message of both ends; the sender's memory comes with it. facts: what must be the same on all ranks."""

    token: str
    epoch: int
    rank: int
    ubatch: int
    facts: str


def module() -> ModuleType:
    """`moeserve._native`. Raises ConfigError where it was not built."""
    found = native()
    if found is None:
        raise ConfigError("shared memory needs moeserve's native code, which is not installed; use --all2all torch")
    return found


class Meeting:
    """The connections of `ranks`, one per pair and micro-batch, and each rank's memory per micro-batch."""

    def __init__(self, members: Members, ranks: Sequence[int], name: str, ubatches: int) -> None:
        self._members = members
        self._ranks = list(ranks)
        self._name = name
        self._num_ubatches = ubatches
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._sockets: dict[tuple[int, int], socket.socket] = {}  # by (rank, micro-batch), until channels own them
        self._fds: dict[tuple[int, int], int] = {}  # memory of that rank
        self._channels: list[Channel] = []

    def meet(self, region_bytes: int, facts: str) -> list[tuple[Channel, Region]]:
        """A channel and this rank's own region for each micro-batch. Raises what `connect` raises."""
        regions = [module().Region(region_bytes) for _ in range(self._num_ubatches)]
        self.connect(regions, facts)
        try:
            return self._open(regions)
        except BaseException:
            self.close()
            raise

    def connect(self, regions: list[Region], facts: str) -> dict[int, tuple[socket.socket, int]]:
        """Each other rank's connection and the descriptor of its region, of micro-batch 0; all stay the meeting's.

        Every rank listens, connects to all ranks before it and accepts all after it. Raises PeerLost naming the ranks
        that did not come before the members' deadline, ConfigError when a rank's facts differ.
        """
        until_s = time.monotonic() + self._members.deadline_s
        folder = os.open(self._members.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with ExitStack() as stack:
                stack.callback(os.close, folder)
                listener = stack.enter_context(self._listen(folder))
                stack.callback(self._path(folder, self._members.rank).unlink, missing_ok=True)
                self._connect_to_earlier(folder, regions, facts, until_s)
                self._accept_later(listener, regions, facts, until_s)
                self._read_replies(facts, until_s)
        except BaseException:
            self.close()
            raise
        with self._lock:
            return {
                rank: (link, self._fds[rank, ubatch]) for (rank, ubatch), link in self._sockets.items() if ubatch == 0
            }

    def close(self) -> None:
        """Leaves, and lets go of all that channels do not own."""
        self.leave()
        with self._lock:
            for connection in self._sockets.values():
                connection.close()
            for fd in self._fds.values():
                os.close(fd)
            self._sockets.clear()
            self._fds.clear()

    def leave(self) -> None:
        """Any thread, any time: whoever waits, here or at a peer, gets PeerLost."""
        self._left.set()
        with self._lock:
            for channel in self._channels:
                channel.leave()
            for connection in self._sockets.values():
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _path(self, folder: int, rank: int) -> Path:
        # Through the descriptor: a Unix socket's path may have 107 bytes, and folders of tests are longer.
        return Path(f"/proc/self/fd/{folder}/{self._name}-{rank}.sock")

    def _listen(self, folder: int) -> socket.socket:
        path = self._path(folder, self._members.rank)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(len(self._ranks) * self._num_ubatches)
        return listener

    def _connect_to_earlier(self, folder: int, regions: list[Region], facts: str, until_s: float) -> None:
        earlier = [rank for rank in self._ranks if rank < self._members.rank]
        waiting = {(rank, ubatch) for rank in earlier for ubatch in range(self._num_ubatches)}
        while waiting:
            for rank, ubatch in sorted(waiting):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(HELLO_TIMEOUT_S)
                try:
                    connection.connect(str(self._path(folder, rank)))
                    self._say_hello(connection, ubatch, regions[ubatch], facts)
                except (FileNotFoundError, ConnectionError, BlockingIOError):  # not there yet, or not any more, or busy
                    connection.close()
                    continue
                self._keep(rank, ubatch, connection)
                waiting.remove((rank, ubatch))
            if waiting:
                self._still_time(until_s, {rank for rank, _ in waiting})
                self._left.wait(RETRY_S)

    def _accept_later(self, listener: socket.socket, regions: list[Region], facts: str, until_s: float) -> None:
        later = [rank for rank in self._ranks if rank > self._members.rank]
        waiting = {(rank, ubatch) for rank in later for ubatch in range(self._num_ubatches)}
        listener.settimeout(0.05)
        while waiting:
            self._still_time(until_s, {rank for rank, _ in waiting})
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(min(HELLO_TIMEOUT_S, max(RETRY_S, until_s - time.monotonic())))
            hello, fd = _receive_hello(connection)
            if hello is None or not self._is_member(hello) or (hello.rank, hello.ubatch) not in waiting:
                connection.close()  # a stranger; the one that we wait for may still come
                if fd >= 0:
                    os.close(fd)
                continue
            self._keep(hello.rank, hello.ubatch, connection, fd)
            with suppress(OSError):  # it is gone already: its first call says so
                self._say_hello(connection, hello.ubatch, regions[hello.ubatch], facts)
            self._compare(hello, facts)
            waiting.remove((hello.rank, hello.ubatch))

    def _read_replies(self, facts: str, until_s: float) -> None:
        for (rank, ubatch), connection in self._sockets.items():
            if rank > self._members.rank:
                continue
            connection.settimeout(max(RETRY_S, until_s - time.monotonic()))
            hello, fd = _receive_hello(connection)
            if hello is None or not self._is_member(hello):
                self._still_time(until_s, {rank})
                raise PeerLost(f"rank {rank} refused this rank, or ended while they met", (rank,))
            self._fds[rank, ubatch] = fd
            self._compare(hello, facts)

    def _keep(self, rank: int, ubatch: int, connection: socket.socket, fd: int = -1) -> None:
        with self._lock:
            self._sockets[rank, ubatch] = connection
            if fd >= 0:
                self._fds[rank, ubatch] = fd

    def _say_hello(self, connection: socket.socket, ubatch: int, region: Region, facts: str) -> None:
        hello = Hello(self._members.token, self._members.epoch, self._members.rank, ubatch, facts)
        body = msgspec.msgpack.encode(hello)
        socket.send_fds(connection, [len(body).to_bytes(4, "little") + body], [region.fd])

    def _is_member(self, hello: Hello) -> bool:
        return compare_digest(hello.token, self._members.token) and hello.epoch == self._members.epoch

    def _compare(self, hello: Hello, facts: str) -> None:
        if hello.facts != facts:
            theirs, ours = f"rank {hello.rank} has {hello.facts}", f"rank {self._members.rank} has {facts}"
            raise ConfigError(f"ranks must be started alike; {theirs}, {ours}")

    def _still_time(self, until_s: float, missing: set[int]) -> None:
        if self._left.is_set():
            raise PeerLost("this rank left its group while the ranks met")
        if time.monotonic() >= until_s:
            names = ", ".join(map(str, sorted(missing)))
            raise PeerLost(
                f"ranks that did not come in {self._members.deadline_s:g} s: {names}", tuple(sorted(missing))
            )

    def _open(self, regions: list[Region]) -> list[tuple[Channel, Region]]:
        index = self._ranks.index(self._members.rank)
        with self._lock:
            if self._left.is_set():
                raise PeerLost("this rank left its group while the ranks met")
            for ubatch, region in enumerate(regions):
                keys = [(rank, ubatch) for rank in self._ranks]
                for key in keys:
                    if key in self._sockets:
                        self._sockets[key].setblocking(False)
                sockets = [self._sockets.pop(key).detach() if key in self._sockets else -1 for key in keys]
                fds = [self._fds.pop(key, -1) for key in keys]
                self._channels.append(module().Channel(index, self._ranks, ubatch, sockets, region, fds))
            return list(zip(self._channels, regions, strict=True))


def _receive_hello(connection: socket.socket) -> tuple[Hello | None, int]:
    """What a peer says first and the descriptor with it; None from one that ended, is silent or talks nonsense."""
    fds: list[int] = []
    try:
        head, fds, _, _ = socket.recv_fds(connection, 4, 1, socket.MSG_CMSG_CLOEXEC)
        size = int.from_bytes(head, "little")
        if len(head) < 4 or size > LARGEST_HELLO or len(fds) != 1:
            raise ValueError("no hello")
        body = b""
        while len(body) < size:
            part = connection.recv(size - len(body))
            if not part:
                raise ValueError("no whole hello")
            body += part
        return msgspec.msgpack.decode(body, type=Hello), fds[0]
    except (OSError, ValueError, msgspec.MsgspecError):
        for fd in fds:
            os.close(fd)
        return None, -1


class ShmTensor:
    """Tensor parallelism among the processes of one engine, through shared memory; see comm/tensor.py."""

    def __init__(self, rank: int, size: int, num_channels: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._num_channels = num_channels
        self._meeting: Meeting | None = None
        self._gathers: list[Gather] = []
        self._joined_once = False
        self._deadline_s = 0.0

    def join(self, members: Members) -> None:
        assert (members.tp_rank, members.tp_size) == (self.rank, self.size), members
        self.leave()
        meeting = self._meeting = Meeting(members, members.tp_ranks, "tensor", self._num_channels)
        gather = module().Gather
        channels = meeting.meet(gather.region_bytes(GATHER_PART_BYTES), f"{self._num_channels} channels")
        self._gathers = [gather(channel, GATHER_PART_BYTES) for channel, _ in channels]
        self._deadline_s = members.deadline_s
        self._joined_once = True

    def leave(self) -> None:
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.leave()
        self._gathers = []  # memory goes when the last call that is inside ends

    def gather_columns(self, x_TN: Tensor, channel: int) -> Tensor:
        rows, columns = x_TN.shape
        if x_TN.numel() and not self._joined_once:
            return x_TN.repeat(1, self.size)
        out = x_TN.new_empty((rows, self.size * columns))
        if x_TN.numel():
            x_TN = x_TN.contiguous()
            row_bytes = columns * x_TN.element_size()
            self._gather(channel).columns(x_TN.data_ptr(), rows, row_bytes, out.data_ptr(), self._deadline_s)
        return out

    def gather_rows(self, x_TD: Tensor, counts: Sequence[int], channel: int) -> Tensor:
        assert counts[self.rank] == x_TD.shape[0], (counts, x_TD.shape)
        if not sum(counts) or not self._joined_once:
            return x_TD.new_zeros((sum(counts), x_TD.shape[1]))
        out = x_TD.new_empty((sum(counts), x_TD.shape[1]))
        x_TD = x_TD.contiguous()
        row_bytes = x_TD.shape[1] * x_TD.element_size()
        self._gather(channel).rows(x_TD.data_ptr(), list(counts), row_bytes, out.data_ptr(), self._deadline_s)
        return out

    def _gather(self, channel: int) -> Gather:
        gathers = self._gathers
        if not gathers:
            raise PeerLost("this rank left its engine's group")
        return gathers[channel]
