"""The pre-norm decoder of every family here: embed, layers of a mixer and an MLP or experts, norm, LM head.

T tokens, rounded up to T' rows for the kernels; D model width, V vocabulary, S rows that sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.feed_forward import FeedForwardLayer
from moeserve.blocks.mixer import MixerLayer
from moeserve.models.spec import ModelSpec
from moeserve.moe.layer import MoELayer
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import LayerCache, StepInputs
from moeserve.ops.linear import Linear
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    attn_norm: Tensor
    mixer: MixerLayer
    mlp_norm: Tensor
    feed_forward: FeedForwardLayer


@dataclass(eq=False, repr=False)
class Decoder:
    """A model ready to run. `ops`, the layers and the micro-batch hide devices, ranks and micro-batches.

    head: scores of the whole vocabulary.
    """

    spec: ModelSpec
    ops: Ops
    embed_VD: Tensor
    layers: Sequence[Layer]
    norm_D: Tensor
    head: Linear

    def __post_init__(self) -> None:
        self._prepares = dict.fromkeys(layer.mixer.prepare for layer in self.layers)
        self._mix, self._add = self.ops.trace(self._mix_and_norm), self.ops.trace(self._add_and_norm)

    def forward(self, step: StepInputs, caches: Sequence[LayerCache], ubatch: UBatch) -> Tensor:
        """Returns hidden states after the final norm, [T, D]. caches: of the layers, which the tokens are added to."""
        ops, spec = self.ops, self.spec
        num_tokens = step.ids_T.shape[0]
        extra = ops.pad_rows(num_tokens) - num_tokens
        ids, positions = (
            torch.nn.functional.pad(x, (0, extra)) if extra else x for x in (step.ids_T, step.positions_T)
        )
        prepared = {prepare: prepare(step, positions) for prepare in self._prepares}
        real = num_tokens if step.live is None else step.live
        residual = ops.embedding(ids, self.embed_VD)
        if spec.embedding_scale != 1.0:
            residual = residual * spec.embedding_scale
        x = ops.rms_norm(residual, self.layers[0].attn_norm, spec.norm_eps)
        next_norms = [layer.attn_norm for layer in self.layers[1:]] + [self.norm_D]
        for layer, cache, next_norm in zip(self.layers, caches, next_norms, strict=True):
            x, residual = self._mix(layer, x, residual, prepared[layer.mixer.prepare], cache, ubatch.index)
            x = layer.feed_forward(x, real, ubatch)
            x, residual = self._add(x, residual, next_norm)
        return x[:num_tokens]

    @property
    def graph_safe(self) -> bool:
        """Whether `forward` never waits for the device, and accepts padding whose extent only the device knows."""
        return self.ops.triton and all(layer.recordable for layer in self.moe_layers)

    @property
    def moe_layers(self) -> list[MoELayer]:
        """The layers with experts, in order."""
        return [layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, MoELayer)]

    def serve(self, ubatch: UBatch) -> None:
        """Takes part in a step in which this rank has no tokens: its experts compute for other ranks."""
        for layer in self.moe_layers:
            layer.serve(self.embed_VD, ubatch)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Returns every token's score, fp32 [S, V]. Gathers on channel 0: no micro-batch may run meanwhile."""
        rows = hidden_SD.shape[0]
        if not rows:
            return hidden_SD.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
        extra = self.ops.pad_rows(rows) - rows
        padded = torch.nn.functional.pad(hidden_SD, (0, 0, 0, extra)) if extra else hidden_SD
        logits_SV = self.head(padded)[:rows].float()
        return logits_SV if self.spec.logits_divisor == 1.0 else logits_SV / self.spec.logits_divisor

    def _mix_and_norm(
        self, layer: Layer, x: Tensor, residual: Tensor, step: Any, cache: LayerCache, channel: int
    ) -> tuple[Tensor, Tensor]:
        """Computes a layer from behind its first norm to behind its second one."""
        return self._add_and_norm(layer.mixer(x, step, cache, channel), residual, layer.mlp_norm)

    def _add_and_norm(self, x: Tensor, residual: Tensor, norm_D: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (input of the next block, residual)."""
        if self.spec.residual_scale != 1.0:
            x = x * self.spec.residual_scale
        return self.ops.add_rms_norm(x, residual, norm_D, self.spec.norm_eps)
