"""Tensor parallelism without partial sums: ranks compute whole columns or rows and gather them. No
sum is ever split, so the bits are those of one rank.

T rows, N columns of one rank, D model width.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moeserve.comm.gloo import Mesh
from moeserve.comm.members import Members
from moeserve.comm.nccl import DeviceMesh
from moeserve.errors import PeerLost


class TensorParallel:
    """The ranks of one engine. With one rank, as here, every gather returns its argument;
    subclasses connect several.

    Between `join` and `leave` all ranks make the same calls in the same order on each channel (a
    micro-batch's index), which one thread at a time uses. Before the first `join` a rank warms up
    alone: shapes are right, the parts of other ranks are this rank's own or zero. After `leave`
    every call raises PeerLost until the next `join`.
    """

    def __init__(self, rank: int = 0, size: int = 1, num_channels: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._num_channels = num_channels
        self._joined_once = False

    @property
    def not_recorded(self) -> str | None:
        """Why no CUDA graph can record a gather; None if one can."""
        return None if self.size == 1 else "the host gathers what tensor-parallel ranks compute"

    def join(self, members: Members) -> None:
        """Connect to the engine's other ranks. Blocks; raises PeerLost when they do not come."""
        assert (members.tp_rank, members.tp_size) == (self.rank, self.size), members
        self.leave()
        self._joined_once = True
        self._connect(members)

    def leave(self) -> None:
        """Drop all connections, at any time, from any thread: calls that wait, here or at a peer,
        raise PeerLost.
        """

    def gather_columns(self, x_TN: Tensor, channel: int) -> Tensor:
        """Return every rank's columns in rank order, [T, size * N]. T and N are the same on all
        ranks; nothing travels when either is 0. Raises PeerLost."""
        if self.size == 1:
            return x_TN
        if not self._joined_once or not x_TN.numel():
            return x_TN.repeat(1, self.size)
        return self._columns(x_TN, channel)

    def gather_rows(self, x_TD: Tensor, counts: Sequence[int], channel: int) -> Tensor:
        """Return every rank's rows in rank order, [sum(counts), D]; rank r has counts[r]. Nothing
        travels when all counts are 0. Raises PeerLost."""
        assert counts[self.rank] == x_TD.shape[0], (counts, x_TD.shape)
        if self.size == 1:
            return x_TD
        if not self._joined_once or not sum(counts):
            return x_TD.new_zeros((sum(counts), x_TD.shape[1]))
        return self._rows(x_TD, counts, channel)

    def _connect(self, members: Members) -> None:
        """Do nothing: one rank has nobody to connect to."""

    def _columns(self, x_TN: Tensor, channel: int) -> Tensor:
        raise NotImplementedError

    def _rows(self, x_TD: Tensor, counts: Sequence[int], channel: int) -> Tensor:
        raise NotImplementedError


ALONE = TensorParallel()


def side_by_side(parts_RTN: Tensor) -> Tensor:
    """Rearranges every rank's columns, [size, T, N], to [T, size * N]."""
    size, rows, columns = parts_RTN.shape
    return parts_RTN.transpose(0, 1).reshape(rows, size * columns)


class GlooTensor(TensorParallel):
    """`TensorParallel` by torch's Gloo: every rank sends its part to every other one."""

    _new_mesh: Callable[..., Mesh] = Mesh
    _mesh: Mesh | None = None
    _first_rank = 0  # of the engine

    def _connect(self, members: Members) -> None:
        self._first_rank = members.tp_ranks[0]
        first = members.tp_ranks[0]
        last = members.tp_ranks[-1]
        hosts = members.host_of[first : last + 1]
        store = os.path.join(members.directory, f"tensor-{members.dp_rank}")
        engine = replace(members, rank=members.tp_rank, host_of=hosts, store=store)
        self._mesh = self._new_mesh(
            engine, self._num_channels, "tensor", f"{self._num_channels} channels"
        )
        try:
            self._mesh.connect()
        except PeerLost as error:
            raise self._of_group(error) from None

    def leave(self) -> None:
        """Drop all connections, from any thread."""
        if self._mesh is not None:
            self._mesh.leave()

    def _columns(self, x_TN: Tensor, channel: int) -> Tensor:
        parts_RTN = x_TN.new_empty((self.size, *x_TN.shape))
        self._exchange(x_TN, parts_RTN.unbind(), channel)
        return side_by_side(parts_RTN)

    def _rows(self, x_TD: Tensor, counts: Sequence[int], channel: int) -> Tensor:
        out_TD = x_TD.new_empty((sum(counts), x_TD.shape[1]))
        self._exchange(x_TD, torch.split(out_TD, list(counts)), channel)
        return out_TD

    def _exchange(self, mine: Tensor, parts: Sequence[Tensor], channel: int) -> None:
        """Fill parts[r] with rank r's `mine`; empty parts do not travel."""
        assert self._mesh is not None
        others = [rank for rank in range(self.size) if rank != self.rank]
        parts[self.rank].copy_(mine)
        receive = {rank: _bytes(parts[rank]) for rank in others if parts[rank].numel()}
        sent = _bytes(mine.contiguous()) if mine.numel() else None
        try:
            exchange = self._mesh.channel(channel).post(
                receive, {} if sent is None else dict.fromkeys(others, sent)
            )
            exchange.wait()
        except PeerLost as error:
            raise self._of_group(error) from None

    def _of_group(self, error: PeerLost) -> PeerLost:
        """Return the same error with the numbers that ranks have in the whole group."""
        return PeerLost(
            f"tensor parallelism: {error}", tuple(self._first_rank + rank for rank in error.missing)
        )


class DeviceTensor(GlooTensor):
    """`TensorParallel` by NCCL, one GPU per rank, on the stream that computes; the host does not
    wait.
    """

    _new_mesh = DeviceMesh
    not_recorded = None

    def check(self) -> None:
        """Raise PeerLost if what the device computed is invalid; see `DeviceMesh.check`."""
        if isinstance(self._mesh, DeviceMesh):
            self._mesh.check()

    def _exchange(self, mine: Tensor, parts: Sequence[Tensor], channel: int) -> None:
        """Send as many rows of every rank as the longest part has: all ranks know how many of them
        count.
        """
        assert isinstance(self._mesh, DeviceMesh)
        most = max(len(part) for part in parts)
        all_RTN = mine.new_empty((self.size, most, mine.shape[1]))
        sent_TN = torch.nn.functional.pad(mine, (0, 0, 0, most - len(mine))).contiguous()
        try:
            self._mesh.all_gather(_bytes(all_RTN), _bytes(sent_TN))()
        except PeerLost as error:
            raise self._of_group(error) from None
        for part, found_TN in zip(parts, all_RTN, strict=True):
            part.copy_(found_TN[: len(part)])


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
