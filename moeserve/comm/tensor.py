"""Tensor parallelism without partial sums: ranks compute whole columns or rows and gather them, so no sum is ever
split and the bits are those of one rank.

T rows, N columns of one rank, D model width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from moeserve.comm.gloo import Mesh, dist
from moeserve.comm.members import Members
from moeserve.comm.nccl import DeviceMesh
from moeserve.errors import PeerLost


class TensorParallel(Protocol):
    """The ranks of one engine. Between `join` and `leave` all of them make the same calls in the same order on each
    channel (a micro-batch's index); a channel is used by one thread at a time.

    Before the first `join` a rank warms up alone: shapes are right, the others' parts are this rank's own or zero.
    After `leave` every call raises PeerLost until the next `join`.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def join(self, members: Members) -> None:
        """Connects to the engine's other ranks. Blocks; raises PeerLost when they do not come."""
        ...

    def leave(self) -> None:
        """Drops all connections, at any time and from any thread: whoever waits, here or at a peer, gets PeerLost."""
        ...

    def gather_columns(self, x_TN: Tensor, channel: int) -> Tensor:
        """[T, size * N]: every rank's columns in rank order. T and N are the same on all ranks; nothing travels when
        either is 0. Raises PeerLost."""
        ...

    def gather_rows(self, x_TD: Tensor, counts: Sequence[int], channel: int) -> Tensor:
        """[sum(counts), D]: every rank's rows in rank order; rank r has counts[r]. Nothing travels when all are 0.
        Raises PeerLost."""
        ...


def share(total: int, size: int, rank: int) -> slice:
    """The rank's contiguous part of `total` rows or columns: ceil(total / size) each, the last ranks fewer or none.

    (5, 4, 2) -> slice(4, 5), (5, 4, 3) -> slice(5, 5)
    """
    each = -(-total // size)
    return slice(min(rank * each, total), min((rank + 1) * each, total))


class Alone:
    """An engine of one process: every gather returns its argument."""

    rank = 0
    size = 1

    def join(self, members: Members) -> None:
        """There is nobody to meet."""

    def leave(self) -> None:
        """There is nobody to part from."""

    def gather_columns(self, x_TN: Tensor, channel: int) -> Tensor:
        return x_TN

    def gather_rows(self, x_TD: Tensor, counts: Sequence[int], channel: int) -> Tensor:
        return x_TD


ALONE = Alone()


def side_by_side(parts_RTN: Tensor) -> Tensor:
    """What every rank sent, [size, T, N], as [T, size * N]."""
    size, rows, columns = parts_RTN.shape
    return parts_RTN.transpose(0, 1).reshape(rows, size * columns)


class GlooTensor:
    """Gathers by torch's gloo: every rank sends what it has to every other one."""

    def __init__(self, rank: int, size: int, num_channels: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._num_channels = num_channels
        self._mesh: Mesh | None = None
        self._first_rank = 0  # of the engine

    def join(self, members: Members) -> None:
        assert (members.tp_rank, members.tp_size) == (self.rank, self.size), members
        self.leave()
        self._first_rank = members.tp_ranks[0]
        self._mesh = self._new_mesh(members)
        try:
            self._mesh.connect()
        except PeerLost as error:
            raise self._of_group(error) from None

    def leave(self) -> None:
        if self._mesh is not None:
            self._mesh.close()

    def gather_columns(self, x_TN: Tensor, channel: int) -> Tensor:
        rows, columns = x_TN.shape
        if not x_TN.numel():
            return x_TN.new_empty((rows, self.size * columns))
        if self._mesh is None:
            return x_TN.repeat(1, self.size)
        parts_RTN = x_TN.new_empty((self.size, rows, columns))
        self._exchange(x_TN, parts_RTN.unbind(), channel)
        return side_by_side(parts_RTN)

    def gather_rows(self, x_TD: Tensor, counts: Sequence[int], channel: int) -> Tensor:
        assert counts[self.rank] == x_TD.shape[0], (counts, x_TD.shape)
        if not sum(counts) or self._mesh is None:
            return x_TD.new_zeros((sum(counts), x_TD.shape[1]))
        out_TD = x_TD.new_empty((sum(counts), x_TD.shape[1]))
        ends = itertools.accumulate(counts)
        self._exchange(x_TD, [out_TD[end - count : end] for end, count in zip(ends, counts, strict=True)], channel)
        return out_TD

    def _new_mesh(self, members: Members) -> Mesh:
        return _EngineMesh(members, self._num_channels)

    def _exchange(self, mine: Tensor, parts: Sequence[Tensor], channel: int) -> None:
        """Fills parts[r] with rank r's `mine`; empty parts do not travel."""
        assert self._mesh is not None
        others = [rank for rank in range(self.size) if rank != self.rank]
        parts[self.rank].copy_(mine)
        receive = {rank: _bytes(parts[rank]) for rank in others if parts[rank].numel()}
        sent = _bytes(mine.contiguous()) if mine.numel() else None
        try:
            exchange = self._mesh.channel(channel).post(receive, {} if sent is None else dict.fromkeys(others, sent))
            exchange.wait()
        except PeerLost as error:
            raise self._of_group(error) from None

    def _of_group(self, error: PeerLost) -> PeerLost:
        """The same error, with ranks of the whole group instead of the engine's."""
        return PeerLost(f"tensor parallelism: {error}", tuple(self._first_rank + rank for rank in error.missing))


class DeviceTensor(GlooTensor):
    """Gathers by NCCL on the stream that computes, which has nothing else to do; nobody waits on the host. One GPU per
    rank."""

    def check(self) -> None:
        """See `DeviceMesh`."""
        if isinstance(self._mesh, DeviceMesh):
            self._mesh.check()

    def _new_mesh(self, members: Members) -> Mesh:
        return _EngineDeviceMesh(members, self._num_channels)

    def _exchange(self, mine: Tensor, parts: Sequence[Tensor], channel: int) -> None:
        """As many rows of every rank as the one with most has: all know how many of them count."""
        assert self._mesh is not None
        most = max(len(part) for part in parts)
        all_RTN = mine.new_empty((self.size, most, mine.shape[1]))
        sent_TN = torch.nn.functional.pad(mine, (0, 0, 0, most - len(mine))).contiguous()
        try:
            self._mesh.channel(channel).all_gather(_bytes(all_RTN), _bytes(sent_TN)).wait()
        except PeerLost as error:
            raise self._of_group(error) from None
        for part, found_TN in zip(parts, all_RTN, strict=True):
            part.copy_(found_TN[: len(part)])


class _EngineMesh(Mesh):
    """The ranks of one engine. They share a machine, so they meet over a file in the epoch's folder."""

    def __init__(self, members: Members, num_channels: int) -> None:
        first, last = members.tp_ranks[0], members.tp_ranks[-1]
        self._file = Path(members.directory) / f"tensor-{members.dp_rank}"
        engine = replace(members, rank=members.tp_rank, host_of=members.host_of[first : last + 1], store="127.0.0.1:0")
        super().__init__(engine, num_channels, "tensor", f"{num_channels} channels")

    def _open_store(self, host: str, port: int, deadline: float) -> Any:
        return dist.FileStore(str(self._file), self.members.size)


class _EngineDeviceMesh(_EngineMesh, DeviceMesh):
    pass


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
