"""What the runner needs of a model; the families in `moeserve.models` are such models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from moeserve.moe.layer import MoELayer
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import LayerKV, StepInputs


class Model(Protocol):
    """Weights in place, on one device."""

    @property
    def moe_layers(self) -> Sequence[MoELayer]:
        """The layers with experts, in order."""
        ...

    @property
    def graph_safe(self) -> bool:
        """Whether `forward` may be recorded: it never asks the device, and heeds `StepInputs.live`."""
        ...

    def forward(self, step: StepInputs, kv: Sequence[LayerKV], ubatch: UBatch) -> Tensor:
        """Hidden states [T, D] of the step's tokens; writes their K/V into `kv`. micro-batch: what the step runs in."""
        ...

    def serve(self, ubatch: UBatch) -> None:
        """Takes part in a step in which this rank has no tokens: its experts compute for the others."""
        ...

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """float32 [S, V]."""
        ...
