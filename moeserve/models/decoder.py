"""The pre-norm decoder of every family here: embed, layers of attention and MLP or experts, norm, LM head.

T tokens, rounded up to T' rows for the kernels; D model width, V vocabulary, S rows that sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.attention import Attention, AttentionStep
from moeserve.loader.spec import Heads, ModelSpec
from moeserve.moe.layer import MoELayer
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import HeadShape, LayerKV, StepInputs
from moeserve.ops.linear import Linear
from moeserve.ops.table import Ops

FeedForward = Callable[[Tensor, int | Tensor, UBatch], Tensor]  # x_T'D, number of real rows, micro-batch -> T'D


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. `group` is the KV group whose block table its cache follows."""

    attn_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    feed_forward: FeedForward
    group: int


@dataclass(eq=False, repr=False)
class Decoder:
    """A model ready to run. `ops`, the layers and the micro-batch hide devices, ranks and micro-batches.

    head: scores of the whole vocabulary. rotary: cos and sin of every position, [positions, d / 2].
    """

    spec: ModelSpec
    ops: Ops
    embed_VD: Tensor
    layers: Sequence[Layer]
    norm_D: Tensor
    head: Linear
    rotary: tuple[Tensor, Tensor]
    heads: Heads

    def __post_init__(self) -> None:
        self._attend, self._add = self.ops.trace(self._attention_and_norm), self.ops.trace(self._add_and_norm)

    def forward(self, step: StepInputs, kv: Sequence[LayerKV], ubatch: UBatch) -> Tensor:
        """Returns hidden states after the final norm, [T, D], and writes keys and values to kv, one per layer."""
        ops, spec = self.ops, self.spec
        num_tokens = step.ids_T.shape[0]
        extra = ops.pad_rows(num_tokens) - num_tokens
        ids, positions = (
            torch.nn.functional.pad(x, (0, extra)) if extra else x for x in (step.ids_T, step.positions_T)
        )
        groups = self._attention_steps(step, positions)
        real = num_tokens if step.live is None else step.live
        residual = ops.embedding(ids, self.embed_VD)
        if spec.embedding_scale != 1.0:
            residual = residual * spec.embedding_scale
        x = ops.rms_norm(residual, self.layers[0].attn_norm, spec.norm_eps)
        next_norms = [layer.attn_norm for layer in self.layers[1:]] + [self.norm_D]
        for layer, cache, next_norm in zip(self.layers, kv, next_norms, strict=True):
            x, residual = self._attend(layer, x, residual, groups[layer.group], cache, ubatch.index)
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

    def _attention_and_norm(
        self, layer: Layer, x: Tensor, residual: Tensor, step: AttentionStep, cache: LayerKV, channel: int
    ) -> tuple[Tensor, Tensor]:
        """Computes a layer from behind its first norm to behind its second one."""
        return self._add_and_norm(layer.attention(x, step, cache, channel), residual, layer.mlp_norm)

    def _add_and_norm(self, x: Tensor, residual: Tensor, norm_D: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (input of the next block, residual)."""
        if self.spec.residual_scale != 1.0:
            x = x * self.spec.residual_scale
        return self.ops.add_rms_norm(x, residual, norm_D, self.spec.norm_eps)

    def _attention_steps(self, step: StepInputs, positions: Tensor) -> list[AttentionStep]:
        """Returns the attention blocks' inputs, one per KV group."""
        cos, sin = (table.index_select(0, positions) for table in self.rotary)
        cos_T1d, sin_T1d = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
        steps = []
        for index, group in enumerate(step.groups):
            plan = partial(self._plan_rows, index)
            steps.append(
                AttentionStep(cos_T1d, sin_T1d, group.slot_mapping_T, plan if step.cut else plan(step), step.cut)
            )
        return steps

    def _plan_rows(self, group: int, step: StepInputs) -> Any:
        dim = self.spec.head_dim
        return self.ops.plan_attention(
            step.groups[group], step, HeadShape(self.heads.count, self.heads.count_kv, dim, dim)
        )
