"""All layers of a decoder in one native call, where no row leaves the rank: the same bits as layer after layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.layers.attention import AttentionStep
from moeserve.layers.inputs import LayerKV
from moeserve.loader.spec import ModelSpec
from moeserve.models.layer import Layer
from moeserve.moe.lane import Lane
from moeserve.moe.layer import MoELayer
from moeserve.ops.native_layer import ExpertsBlock, LayerStack, StackLayer


class Stack:
    """norm_D: what follows the last layer. Raises ValueError if a layer has more to it than both native blocks."""

    def __init__(self, layers: Sequence[Layer], norm_D: Tensor, eps: float, dtype: torch.dtype) -> None:
        self._experts: list[MoELayer] = []
        both = []
        for layer in layers:
            experts, attention = layer.feed_forward, layer.attention.block
            if not isinstance(experts, MoELayer) or not isinstance(experts.block, ExpertsBlock) or attention is None:
                raise ValueError("a layer is not made of native blocks alone")
            self._experts.append(experts)
            both.append(StackLayer(attention, layer.mlp_norm, experts.block, layer.group))
        self._run = LayerStack(both, [layer.attn_norm for layer in layers[1:]] + [norm_D], eps, dtype)

    @staticmethod
    def of(layers: Sequence[Layer], norm_D: Tensor, spec: ModelSpec, dtype: torch.dtype) -> Stack | None:
        """If these layers can be one."""
        if spec.residual_scale != 1.0:
            return None
        try:
            return Stack(layers, norm_D, spec.norm_eps, dtype)
        except ValueError:
            return None

    def serves(self, lane: Lane) -> bool:
        """Not while experts are elsewhere, nor while a trace wants to know when each layer began."""
        return lane.meter.events is None and all(layer.at_home for layer in self._experts)

    def __call__(
        self, x_TD: Tensor, residual_TD: Tensor, steps: Sequence[AttentionStep], kv: Sequence[LayerKV], lane: Lane
    ) -> Tensor:
        """x: after the first norm; becomes what the last one gives."""
        counts_LE = self._run(
            x_TD,
            residual_TD,
            steps[0].cos_Td,
            steps[0].sin_Td,
            [(step.plan, step.cells_T) for step in steps],
            [(cache.k, cache.v) for cache in kv],
            [layer.packed for layer in self._experts],
        )
        for counts_E in counts_LE:
            lane.note_load(counts_E)
        return x_TD
