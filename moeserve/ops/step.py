"""What the kernels of a table read of a step: the parts of blocks/inputs.py that attention is planned from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class PagedGroup(Protocol):
    """`GroupInputs`."""

    @property
    def blocks_RN(self) -> Tensor: ...
    @property
    def block_size(self) -> int: ...
    @property
    def window(self) -> int | None: ...


class StepRows(Protocol):
    """`StepInputs`."""

    @property
    def offsets_R1(self) -> NDArray[np.int32]: ...
    @property
    def starts_R(self) -> NDArray[np.int32]: ...
    @property
    def rows_on_device(self) -> tuple[Tensor, Tensor]: ...


PlanAttention = Callable[[PagedGroup, StepRows, int, int, int], Any]  # and H, G, d


def from_host(plan: Callable[..., Any]) -> PlanAttention:
    """A planner that reads host arrays, as the table has it."""
    return lambda group, step, *heads: plan(
        group.blocks_RN, group.block_size, group.window, step.starts_R, step.offsets_R1, *heads
    )
