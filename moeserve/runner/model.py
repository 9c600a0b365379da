"""What the runner needs of a model; the families in `moeserve.models` are such models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from moeserve.layers.inputs import LayerKV, StepInputs


class Model(Protocol):
    """Weights in place, on one device. `lane` is the half of the batch that runs; None: there is only one."""

    def forward(self, step: StepInputs, kv: Sequence[LayerKV], lane: Any = None) -> Tensor:
        """Hidden states [T, D] of the step's tokens; writes their K/V into `kv`."""
        ...

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """float32 [S, V]."""
        ...
