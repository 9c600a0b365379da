"""The interface of a model to the runner, which the families in `moeserve.models` implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from moeserve.moe.layer import MoELayer
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import LayerKV, StepInputs


class Model(Protocol):
    """One rank's layers, with weights on one device."""

    @property
    def moe_layers(self) -> Sequence[MoELayer]:
        """The layers with experts, in order."""
        ...

    @property
    def graph_safe(self) -> bool:
        """Whether `forward` can be recorded: it never waits for the device, and heeds `StepInputs.live`."""
        ...

    def forward(self, step: StepInputs, kv: Sequence[LayerKV], ubatch: UBatch) -> Tensor:
        """Returns the hidden states [T, D] of the step's tokens and writes their K/V into `kv`."""
        ...

    def serve(self, ubatch: UBatch) -> None:
        """Takes part in a step in which this rank has no tokens: its experts compute for other ranks."""
        ...

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Returns the logits of hidden states, float32 [S, V]."""
        ...
