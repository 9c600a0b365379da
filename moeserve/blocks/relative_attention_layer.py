"""The layer of `RelativeAttention`.

Shapes: T tokens (including padding), D model width, H query heads and G KV heads of this rank, d
width of a head, K kernel size of convolutions, R width of a relative state, E distances.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.attention_layer import AttentionLayer, QueryScales
from moeserve.blocks.build import Builder
from moeserve.blocks.linear import FP32
from moeserve.blocks.relative_attention import RelativeAttention
from moeserve.blocks.rotary import RotaryTable
from moeserve.ops.attention import MAX_SCORES, TorchAttentionMetadata, plan_attention
from moeserve.ops.elementwise import HeadRule
from moeserve.ops.inputs import (
    HeadShape,
    LayerCache,
    Positions,
    RopeCacheInputs,
    RowContext,
    StepInputs,
)
from moeserve.ops.relative_attention import relative_attention
from moeserve.ops.rules import TILE
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True)
class RelativeStep:
    """The inputs of one step that layers of one KV group with the same heads share."""

    rope_cache: RopeCacheInputs  # of no rotation
    plan: TorchAttentionMetadata
    tiles: Any  # of `ops.causal_conv`
    positions_T: Tensor
    window: int | None
    scale_T11: Tensor | None  # factors of queries and relative states


@dataclass(frozen=True, slots=True, eq=False)
class PrepareRelative:
    """Makes the `RelativeStep` that layers with equal heads and query scale share."""

    ops: Ops
    group: int
    state_group: int
    shape: HeadShape
    rotary: RotaryTable
    scales: QueryScales | None

    def __call__(self, step: StepInputs, positions: Positions) -> RelativeStep:
        """Plan attention and convolutions."""
        group = step.groups[self.group]
        angles = self.rotary.of_heads(positions)
        return RelativeStep(
            rope_cache=RopeCacheInputs(*angles, group.slot_mapping_T),
            plan=plan_attention(group, step, self.shape),
            tiles=self.ops.plan_tiles(step.groups[self.state_group], step),
            positions_T=positions.text_T,
            window=group.window,
            scale_T11=None if self.scales is None else self.scales(positions),
        )


def with_conv(
    ops: Ops,
    x_TC: Tensor,
    weight_CK: Tensor,
    cache: LayerCache,
    tiles: Any,
    factor: float = 1.0,
) -> Tensor:
    """Return factor * (x + conv(x)), computed in fp32 and rounded once to x's dtype."""
    inputs_TC = x_TC.float().contiguous()
    convolved_TC = ops.causal_conv(inputs_TC, weight_CK, None, False, cache, tiles)
    total_TC = inputs_TC + convolved_TC
    return (total_TC if factor == 1.0 else total_TC * factor).to(x_TC.dtype)


def prepare_relative(
    spec: RelativeAttention, build: Builder, group: int, shape: HeadShape
) -> PrepareRelative:
    """Return the `PrepareRelative` that all layers with the same heads and scale share."""
    scale = spec.query_scale
    scales = None
    if scale is not None:
        scales = build.shared(
            ("scales", scale), partial(QueryScales, scale, build.max_position, build.ops.device)
        )
    rotary = build.rotary_table(None, spec.head_dim)
    assert build.state_group is not None
    parts = (build.ops, group, build.state_group, shape, rotary, scales)
    prepare: PrepareRelative = build.shared(
        ("relative", group, shape, scale), partial(PrepareRelative, *parts)
    )
    return prepare


class RelativeAttentionLayer:
    """Attention of this rank's heads. Ranks gather all heads before the output projection."""

    def __init__(self, spec: RelativeAttention, build: Builder, name: str, group: int) -> None:
        self.spec = spec
        self.tp = build.tp
        self.ops = build.ops
        heads = spec.local_heads(build.world)
        dim = spec.head_dim
        norms = build.head_norms((name + "q_norm", name + "k_norm"), (heads.count, heads.count_kv))
        scale = dim**-0.5 if spec.scale is None else spec.scale
        self.rule = HeadRule(
            num_heads=heads.count,
            num_kv_heads=heads.count_kv,
            scale=scale,
            eps=build.eps,
            norms=norms,
        )
        self.qkv = build.linear(name + "qkv")  # D -> (H + 2 * G) * d
        self.relative = build.linear(name + "relative")  # D -> H * R
        self.profiles = build.linear(name + "profiles")  # R -> E
        self.conv_CK = build.fp32(name + "conv")[:, 0]
        self.out = build.columns(name + "out", build.width)
        self.out_conv_DK = build.fp32(name + "out_conv")[:, 0]
        self.prepare = prepare_relative(spec, build, group, spec.head_shape(self.tp.size))
        self._attend = self.ops.opaque(relative_attention)

    def __call__(
        self, x_TD: Tensor, step: RelativeStep, cache: LayerCache, context: RowContext
    ) -> Tensor:
        """Return the layer's output [T, D]. Writes keys, values and states to `cache` first."""
        k_cache, v_cache, *states = cache
        heads = self.rule.num_heads
        queries = heads * self.spec.head_dim
        qkv = self.qkv(x_TD, context)
        kv_TC = with_conv(self.ops, qkv[:, queries:], self.conv_CK, (*states[:2],), step.tiles)
        qkv = torch.cat((qkv[:, :queries], kv_TC), 1)
        kv_cache = (k_cache, v_cache)
        q_THd = self.ops.qk_norm_rope_cache(qkv, self.rule, step.rope_cache, kv_cache)
        relative_THR = self.relative(x_TD, context).view(len(x_TD), heads, -1)
        if step.scale_T11 is not None:
            q_THd = (q_THd * step.scale_T11).to(q_THd.dtype)
            relative_THR = (relative_THR * step.scale_T11).to(x_TD.dtype)
        rows = relative_THR.flatten(0, 1)
        biases = self.profiles(rows, RowContext(len(rows), context.channel)).float()
        attended = self._attend(
            q_THd,
            biases.view(len(x_TD), heads, -1),
            kv_cache,
            step.plan,
            step.positions_T,
            step.window,
        )
        y_TD = self.out(self.tp.gather_columns(attended, context.channel), context)
        return with_conv(self.ops, y_TD, self.out_conv_DK, (*states[2:],), step.tiles)

    @staticmethod
    def workspace(
        spec: RelativeAttention,
        width: int,
        tokens: int,
        max_len: int,
        itemsize: int,
        tp_size: int,
    ) -> int:
        """See `mixer_workspace`."""
        num_bytes = AttentionLayer.workspace(spec, width, tokens, max_len, itemsize, tp_size)
        shape = spec.head_shape(tp_size)
        # Biases: the product, in fp32, and those of one work item.
        num_bytes += tokens * shape.num_heads * spec.extent * (itemsize + 2 * FP32)
        # Relative states, and a scaled copy in fp32.
        num_bytes += tokens * shape.num_heads * spec.relative_dim * (2 * itemsize + FP32)
        # Convolutions: inputs, results and sums in fp32; the products with convolved keys.
        channels = 2 * shape.num_kv_heads * shape.dim + width
        num_bytes += tokens * channels * (3 * FP32 + itemsize)
        num_bytes += tokens * (shape.num_heads + 2 * shape.num_kv_heads) * shape.dim * itemsize
        num_bytes += 4 * (TILE + spec.conv) * channels * FP32
        # Distances, their index and biases of one work item.
        return num_bytes + 4 * MAX_SCORES * (2 * FP32 + 2 * FP32 + FP32)
