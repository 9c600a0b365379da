"""What the runner needs of a model; the families in `moeserve.models` are such models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from moeserve.layers.inputs import LayerKV, StepInputs
from moeserve.moe.lane import Lane


class Model(Protocol):
    """Weights in place, on one device."""

    def forward(self, step: StepInputs, kv: Sequence[LayerKV], lane: Lane) -> Tensor:
        """Hidden states [T, D] of the step's tokens; writes their K/V into `kv`. lane: what the step runs in."""
        ...

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """float32 [S, V]."""
        ...
