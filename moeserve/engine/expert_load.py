"""How many tokens went to each expert, summed over steps and told now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moeserve.messages import ExpertLoad

REPORT_S = 1.0


class LoadReport:
    """Emits an ExpertLoad one second after the first step that it covers; nothing while nothing runs.

    version: of the placement in force, which the messages carry.
    """

    def __init__(self, emit: Callable[[ExpertLoad], None]) -> None:
        self.version = 0
        self._emit = emit
        self._sum_LE: NDArray[np.int64] | None = None
        self._num_steps = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, load_LE: NDArray[np.int64]) -> None:
        """load_LE: int64 [layers, experts], tokens of one step. To be called on the loop."""
        if self._sum_LE is None:
            self._sum_LE = load_LE.astype(np.int64)  # a copy: the runner may use its own again
        else:
            self._sum_LE += load_LE
        self._num_steps += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REPORT_S, self.flush)

    def flush(self) -> None:
        """Tells what is not told yet."""
        self.close()
        if self._sum_LE is None:
            return
        counts = self._sum_LE.astype("<i8", copy=False).tobytes()
        report = ExpertLoad(
            counts=counts, num_layers=len(self._sum_LE), num_steps=self._num_steps, version=self.version
        )
        self._sum_LE, self._num_steps = None, 0
        self._emit(report)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
