"""Tensor parallelism by gathers: each rank computes whole columns or rows, and all gather them.

There are no partial sums and no all-reduce, so results have the same bits as on one rank.

Suffixes of tensors are their dimensions. R: ranks of the engine. T: rows. N: columns of one rank.
D: model width.
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
    """The tensor-parallel ranks of one engine.

    This class implements a single rank, whose gathers return their argument. Subclasses connect
    several ranks.

    Between `join` and `leave`, all ranks must make the same calls in the same order on each channel
    (the index of a micro-batch). One thread at a time may use a channel. Before the first `join`, a
    rank can warm up alone: results have the right shape, and copies of this rank's part or zeros
    replace those of other ranks. After `leave`, all calls raise PeerLost until the next `join`.
    """

    def __init__(self, rank: int = 0, size: int = 1, num_channels: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._num_channels = num_channels
        self._has_joined = False  # at least once

    @property
    def why_not_recordable(self) -> str | None:
        """Why no CUDA graph can record a gather; None if one can."""
        return None if self.size == 1 else "tensor-parallel ranks gather on the host"

    def join(self, members: Members) -> None:
        """Connect to the engine's other ranks. Blocks. Raises PeerLost if they do not connect."""
        assert (members.tp_rank, members.tp_size) == (self.rank, self.size), members
        self.leave()
        self._has_joined = True
        self._connect(members)

    def leave(self) -> None:
        """Close all connections. Waiting calls, on this rank and on its peers, raise PeerLost.

        May be called from any thread, at any time.
        """

    def gather_columns(self, x_TN: Tensor, channel: int) -> Tensor:
        """Return all ranks' columns in rank order, [T, size * N]. Raises PeerLost.

        T and N must be the same on all ranks. Nothing is sent if either is 0.
        """
        if self.size == 1:
            return x_TN
        if not self._has_joined or not x_TN.numel():
            return x_TN.repeat(1, self.size)
        return self._gather_columns(x_TN, channel)

    def gather_rows(self, x_TD: Tensor, counts: Sequence[int], channel: int) -> Tensor:
        """Return all ranks' rows in rank order, [sum(counts), D]. Raises PeerLost.

        counts: the number of rows of each rank. Nothing is sent if all are 0.
        """
        assert counts[self.rank] == x_TD.shape[0], (counts, x_TD.shape)
        if self.size == 1:
            return x_TD
        if not self._has_joined or not sum(counts):
            return x_TD.new_zeros((sum(counts), x_TD.shape[1]))
        return self._gather_rows(x_TD, counts, channel)

    def _connect(self, members: Members) -> None:
        """Connect to the other ranks; here, there are none."""

    def _gather_columns(self, x_TN: Tensor, channel: int) -> Tensor:
        raise NotImplementedError

    def _gather_rows(self, x_TD: Tensor, counts: Sequence[int], channel: int) -> Tensor:
        raise NotImplementedError


ALONE = TensorParallel()


def side_by_side(parts_RTN: Tensor) -> Tensor:
    """Concatenate the columns of all ranks: [size, T, N] -> [T, size * N]."""
    size, rows, columns = parts_RTN.shape
    return parts_RTN.transpose(0, 1).reshape(rows, size * columns)


class GlooTensor(TensorParallel):
    """`TensorParallel` over torch's Gloo. Every rank sends its part to every other rank."""

    _mesh_class: Callable[..., Mesh] = Mesh
    _mesh: Mesh | None = None
    _first_rank = 0  # the lowest rank of the engine

    def _connect(self, members: Members) -> None:
        first_rank = members.tp_ranks[0]
        last_rank = members.tp_ranks[-1]
        self._first_rank = first_rank
        members_of_engine = replace(
            members,
            rank=members.tp_rank,
            host_of=members.host_of[first_rank : last_rank + 1],
            store=os.path.join(members.directory, f"tensor-{members.dp_rank}"),
        )
        self._mesh = self._mesh_class(
            members_of_engine,
            self._num_channels,
            name="tensor",
            terms=f"{self._num_channels} channels",
        )
        try:
            self._mesh.connect()
        except PeerLost as error:
            raise self._with_group_ranks(error) from None

    def leave(self) -> None:
        if self._mesh is not None:
            self._mesh.leave()

    def _gather_columns(self, x_TN: Tensor, channel: int) -> Tensor:
        parts_RTN = x_TN.new_empty((self.size, *x_TN.shape))
        self._exchange(x_TN, parts_RTN.unbind(), channel)
        return side_by_side(parts_RTN)

    def _gather_rows(self, x_TD: Tensor, counts: Sequence[int], channel: int) -> Tensor:
        out_TD = x_TD.new_empty((sum(counts), x_TD.shape[1]))
        self._exchange(x_TD, torch.split(out_TD, list(counts)), channel)
        return out_TD

    def _exchange(self, mine: Tensor, parts: Sequence[Tensor], channel: int) -> None:
        """Fill parts[r] with `mine` of rank r. Empty parts are not sent."""
        assert self._mesh is not None
        others = [rank for rank in range(self.size) if rank != self.rank]
        parts[self.rank].copy_(mine)
        receive = {rank: _bytes(parts[rank]) for rank in others if parts[rank].numel()}
        send = dict.fromkeys(others, _bytes(mine.contiguous())) if mine.numel() else {}
        try:
            exchange = self._mesh.channel(channel).post(receive, send)
            exchange.wait()
        except PeerLost as error:
            raise self._with_group_ranks(error) from None

    def _with_group_ranks(self, error: PeerLost) -> PeerLost:
        """Return the error with the ranks' numbers in the whole group instead of the engine."""
        return PeerLost(
            f"tensor parallelism: {error}", tuple(self._first_rank + rank for rank in error.missing)
        )


class DeviceTensor(GlooTensor):
    """`TensorParallel` over NCCL, with one GPU per rank.

    Gathers run on the compute stream, and the host does not wait for them.
    """

    _mesh_class = DeviceMesh
    why_not_recordable = None

    def check(self) -> None:
        """Raise PeerLost if results on the device are invalid; see `DeviceMesh.check`."""
        if isinstance(self._mesh, DeviceMesh):
            self._mesh.check()

    def _exchange(self, mine: Tensor, parts: Sequence[Tensor], channel: int) -> None:
        """Fill parts[r] with `mine` of rank r.

        NCCL gathers equal sizes. So all ranks send as many rows as the longest part has, and
        receivers drop the padding.
        """
        assert isinstance(self._mesh, DeviceMesh)
        max_rows = max(len(part) for part in parts)
        all_RTN = mine.new_empty((self.size, max_rows, mine.shape[1]))
        sent_TN = torch.nn.functional.pad(mine, (0, 0, 0, max_rows - len(mine))).contiguous()
        try:
            self._mesh.all_gather(_bytes(all_RTN), _bytes(sent_TN))()
        except PeerLost as error:
            raise self._with_group_ranks(error) from None
        for part, received_TN in zip(parts, all_RTN, strict=True):
            part.copy_(received_TN[: len(part)])


def _bytes(x: Tensor) -> Tensor:
    """Return a contiguous tensor as uint8 [n]."""
    return x.view(-1).view(torch.uint8)
