"""Gathers between ranks that are threads of one process, without a transport."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.comm.tensor import TensorParallel, side_by_side


class Board:
    """The place where the ranks of one engine exchange their parts."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=100)
        self.gathers = 0


class BoardTensor(TensorParallel):
    """TensorParallel over a Board that all ranks share."""

    def __init__(self, rank: int, board: Board) -> None:
        super().__init__(rank, len(board.parts))
        self._board = board

    def leave(self) -> None:
        self._board.barrier.abort()

    def gather_columns(self, x_TN: Tensor, channel: int) -> Tensor:
        return side_by_side(torch.stack(self._exchange(x_TN)))

    def gather_rows(self, x_TD: Tensor, counts: Sequence[int], channel: int) -> Tensor:
        parts = self._exchange(x_TD)
        assert [len(part) for part in parts] == list(counts)
        return torch.cat(parts)

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        board = self._board
        board.parts[self.rank] = mine
        if board.barrier.wait() == 0:
            board.gathers += 1
        parts = list(board.parts)
        board.barrier.wait()
        return parts
