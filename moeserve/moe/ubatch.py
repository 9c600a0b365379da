"""A micro-batch is one part of the batch on its way through the model: its scratch, its communication, its loads.

With a single micro-batch nothing overlaps but the work given as `meanwhile`. Dual-batch overlap is two micro-batches
that take turns:
`overlap` sends this micro-batch's rows, lets the other one compute while they travel, and then waits for what is still
on its
way. Only the MoE layer calls it, so model code stays the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.moe.all2all.base import Completed
from moeserve.moe.meter import WORK_BEFORE, UBatchMeter
from moeserve.moe.ping_pong import PingPong

if TYPE_CHECKING:
    from moeserve.moe.all2all.base import Pending

T = TypeVar("T")
Load = NDArray[np.int64] | Tensor  # rows per expert; a tensor where they were counted on a device


class Scratch:
    """Named buffers that live as long as their micro-batch and grow to the largest size asked for."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A buffer of `shape` with like's dtype and device; it holds whatever was there before."""
        count = int(np.prod(shape))
        key = (name, like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[key] = torch.zeros(count, dtype=like.dtype, device=like.device)
        return buffer[:count].view(shape)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


class UBatch:
    """`index` is its place among the step's micro-batches.

    most_tokens: of the rank that has most in this micro-batch in this step; all ranks make as many rounds as that one
    needs.
    """

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.most_tokens = 0
        self.scratch = Scratch()
        self.meter = UBatchMeter(index)
        self._loads: list[Load] = []
        self._ping_pong: PingPong | None = None
        self._sibling: UBatch | None = None
        self._inbox: list[Callable[[], None]] = []  # receives that the sibling wants launched
        self._early_ns = 0  # when the first part of the next transfer was sent

    def couple(self, ping_pong: PingPong, sibling: UBatch) -> None:
        """The step that comes is shared with `sibling`. Called for both before either enters."""
        self._ping_pong, self._sibling = ping_pong, sibling
        self._inbox.clear()
        self._early_ns = 0

    @property
    def in_turns(self) -> bool:
        """Whether this step has two micro-batches, on every rank."""
        return self._ping_pong is not None

    def enter(self) -> None:
        """Returns when it is this micro-batch's turn for the first time."""
        if self._ping_pong is not None:
            self._ping_pong.take(self.index)

    def leave(self) -> None:
        """The micro-batch's work of this step is done; the sibling goes on alone."""
        if self._ping_pong is not None:
            self._receive()
            if self._sibling is not None:
                self._sibling._sibling = None
            self._ping_pong.give_up(self.index)
        self._ping_pong = self._sibling = None

    def fail(self, error: BaseException) -> None:
        """The micro-batch's work failed, which ends the sibling's too."""
        if self._ping_pong is not None:
            self._ping_pong.poison(error)
        self._ping_pong = self._sibling = None
        self._inbox.clear()

    def overlap(
        self, start: Callable[[], Pending[T]], meanwhile: Callable[[], None] | None = None, name: str = "transfer"
    ) -> T:
        """Start a communication, run what needs no result of it, let the sibling work, and wait for it.

        name: for traces, "dispatch" or "combine".
        """
        meter, layer = self.meter, len(self._loads) - 1
        meter.work(WORK_BEFORE.get(name, "work"), layer)
        self._receive()
        start_ns = self._early_ns or time.monotonic_ns()
        self._early_ns = 0
        pending = start()
        meter.resume()
        if meanwhile is not None:
            meanwhile()
            meter.work("shared", layer)
        if self._sibling is not None and self._ping_pong is not None:
            if not isinstance(pending, Completed):
                self._sibling._inbox.append(pending.arrive)
            self._ping_pong.pass_on(self.index)
            meter.resume()
        wait_ns = time.monotonic_ns()
        value = pending.wait()
        if not isinstance(pending, Completed):
            meter.transfer(name, layer, start_ns, wait_ns, time.monotonic_ns(), pending.arrived_ns)
        return value

    def run_fused(self, compute: Callable[[], tuple[Tensor, Load]]) -> Tensor:
        """Runs a layer whose rows stay on this rank; `compute` returns the output and the rows per expert."""
        layer = len(self._loads)
        self.meter.work(WORK_BEFORE["dispatch"], layer)
        out_TD, counts_E = compute()
        self.note_load(counts_E)
        self.meter.work(WORK_BEFORE["combine"], layer)
        return out_TD

    def send_early(self, send: Callable[[], None]) -> None:
        """Sends part of what this micro-batch's next transfer is about; that counts as begun."""
        self._early_ns = time.monotonic_ns()
        send()

    def _receive(self) -> None:
        """Launches what the sibling will wait for. Right before the own send, not on resuming: where a receive
        occupies the device or waits for its rows, it must come behind this micro-batch's work."""
        if self._inbox:
            began_ns = time.monotonic_ns()
            for arrive in self._inbox:
                arrive()
            self._inbox.clear()
            self.meter.exposed_ns += time.monotonic_ns() - began_ns

    def note_load(self, counts_E: Load) -> None:
        """Record how many rows of this micro-batch one layer sent to each logical expert; padding is not among them."""
        self._loads.append(counts_E)

    def take_load(self) -> Load:
        """Rows per layer and expert [layers, E] since the last call; an empty array when nothing was routed. A tensor
        if they were counted on the device, for all layers or for none."""
        loads, self._loads = self._loads, []
        if loads and isinstance(loads[0], Tensor):
            return torch.stack([load for load in loads if isinstance(load, Tensor)])
        return np.concatenate(loads).reshape(len(loads), -1) if loads else np.zeros((0, 0), np.int64)
