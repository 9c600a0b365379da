"""Symmetric memory and streams of CPU ranks, in place of CUDA's.

Regions are shared memory, so ranks may be threads or processes. Kernels are interpreted, one at a
time per process, because the interpreter belongs to one thread. It is released while a rank waits
for others, so that they can be interpreted meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

from moeserve.comm.cudart import CudaMemory
from moeserve.comm.shm import native_module
from moeserve.comm.symmetric import Symmetric
from moeserve.kernels.exchange import ABORT, CALLS, FAILED, RANK_STATES
from moeserve.moe.streams import CommStream
from tests.kernels.interpreted import rounded

T = TypeVar("T")
INTERPRETER = threading.Lock()


@contextmanager
def interpreting() -> Iterator[None]:
    with INTERPRETER, patch.object(interpreter, "_convert_float", rounded):
        yield


class HostMemory(CudaMemory):
    """CudaMemory whose `launch_barrier` does in Python what the kernel does."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._region: tuple[Tensor, Any] | None = None
        self._mapped: list[mmap.mmap] = []

    def allocate(self, num_bytes: int) -> tuple[Tensor, Any]:
        if self._region is None or self._region[0].nbytes != num_bytes:
            region = native_module().Region(num_bytes)
            self._region = torch.frombuffer(region, dtype=torch.uint8), region
        return self._region

    def open(self, rank: int, fd: int) -> int:
        self._mapped.append(mmap.mmap(fd, 0))
        return ctypes.addressof(ctypes.c_char.from_buffer(self._mapped[-1]))

    def close(self) -> None:
        """Keep mapped memory: it costs little, and a failed test's stream may still use it."""

    def pinned_words(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32)

    def launch_barrier(
        self, bases_R: Tensor, state: Any, rank: int, control: Any, timeout_s: float, call: int
    ) -> None:
        control = control.numpy()
        state = state.numpy()
        if state[1]:
            return
        state[0] += 1
        number = int(state[0])
        bases = bases_R.tolist()
        for base in bases:
            ctypes.c_int64.from_address(base + 8 * rank).value = number * CALLS + call % CALLS
        flags = np.ctypeslib.as_array((ctypes.c_int64 * len(bases)).from_address(bases[rank]))
        until_s = time.monotonic() + timeout_s
        INTERPRETER.release()
        try:
            while (
                (late := flags // CALLS < number).any()
                and not control[ABORT]
                and time.monotonic() < until_s
            ):
                time.sleep(1e-4)
        finally:
            INTERPRETER.acquire()
        strange = (flags // CALLS == number) & (flags % CALLS != call % CALLS)
        if late.any() or strange.any():
            control[RANK_STATES:] = late + 2 * strange
            control[FAILED] = state[1] = 1


class HostStream(CommStream):
    """Runs work in order on a thread of its own, as a device does.

    `join` waits for it and checks whether it failed.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._thread = ThreadPoolExecutor(1)

    def launch(self, work: Callable[[], T]) -> Callable[[], T]:
        def run() -> T:
            with interpreting():
                return work()

        running = self._thread.submit(run)

        def join() -> T:
            value = running.result()
            self._check()
            return value

        return join


def host_symmetric() -> tuple[Symmetric, Callable[[torch.device], HostStream]]:
    """Return a rank's memory, and a function that makes its streams."""
    memory = Symmetric(HostMemory())
    return memory, lambda device: HostStream(memory.check)
