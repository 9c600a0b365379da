"""The attention block of a decoder: project, normalise, rotate, write to the cache, attend, project back.

T tokens (padded rows included), D model width, H heads and G KV heads of this rank, d head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.attention import Attention, Heads
from moeserve.blocks.build import Builder
from moeserve.blocks.linear import ColumnLinear, gathered_bytes
from moeserve.blocks.rope import half_layout
from moeserve.blocks.rotary import RotaryTable
from moeserve.comm.tensor import TensorParallel
from moeserve.ops.attention import CONTEXT, QUERY_BLOCK, SCORES, TILE, padded_context
from moeserve.ops.elementwise import HeadRule
from moeserve.ops.inputs import Cut, LayerCache, StepInputs
from moeserve.ops.linear import Linear
from moeserve.ops.table import Ops

FP32, INT64 = 4, 8  # bytes


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The inputs of one step that the attention blocks of one KV group with equal heads and angles share."""

    cos_T1d: Tensor  # as ops/elementwise.py's `rotary` takes them
    sin_T1d: Tensor
    slot_mapping_T: Tensor  # of the real tokens
    plan: Any  # what `ops.plan_attention` made, or, where `cut` is, what will make it
    cut: Cut | None = None

    def attend(self, ops: Ops, q_THd: Tensor, cache: LayerCache) -> Tensor:
        """Returns the attention to the cache, [T, H * d]."""
        k, v = cache
        if self.cut is None:
            return ops.attention(q_THd, k, v, self.plan)
        return self.cut(q_THd, self.plan, lambda q, plan, out: ops.attention(q, k, v, plan, out=out))


@dataclass(frozen=True, slots=True, eq=False)
class PrepareAttention:
    """Makes the `AttentionStep` of the layers of one KV group with the same heads and rotary table."""

    ops: Ops
    group: int
    shape: tuple[int, int, int]  # H, G, d
    rotary: RotaryTable

    def __call__(self, step: StepInputs, positions_T: Tensor) -> AttentionStep:
        """Looks the angles up and plans attention."""
        cos, sin = self.rotary(positions_T)
        cos_T1d, sin_T1d = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
        plan = self.plan_rows if step.cut else self.plan_rows(step)
        return AttentionStep(cos_T1d, sin_T1d, step.groups[self.group].slot_mapping_T, plan, step.cut)

    def plan_rows(self, step: StepInputs) -> Any:
        """Returns the attention metadata of a step's rows."""
        return self.ops.plan_attention(step.groups[self.group], step, *self.shape)


@dataclass(eq=False, repr=False)
class AttentionLayer:
    """Grouped-query attention of this rank's heads over its paged cache; head outputs are gathered before `out`.

    qkv: D -> (H + 2G) * d, queries first. head_norms: fp32 [H + G, d], a norm per head. full_norms: fp32 weights of the
    norms over all query heads of the model together and over all its key heads together (OLMoE).
    """

    spec: Attention
    ops: Ops
    eps: float
    heads: Heads
    tp: TensorParallel
    prepare: PrepareAttention
    qkv: Linear
    out: ColumnLinear
    head_norms: Tensor | None = None
    full_norms: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        spec, ops, heads = self.spec, self.ops, self.heads
        self._attend = ops.opaque(AttentionStep.attend)  # which may end one recording and begin another
        clip = math.inf if spec.clip is None else spec.clip
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self._rule = HeadRule(heads.count, heads.count_kv, scale, self.eps, self.head_norms, clip)
        self._block = None
        if ops.attention_block is not None and self.full_norms is None:
            last = self.out.part if self.tp.size == 1 else None
            self._block = ops.attention_block(self.qkv, last, self._rule, spec.head_dim, ops.dtype)

    def __call__(self, x_TD: Tensor, step: AttentionStep, cache: LayerCache, channel: int) -> Tensor:
        """Returns the attention block's output [T, D]; writes the new keys and values to `cache` first."""
        k, v = cache
        if self._block is not None:
            y = self._block(x_TD, step.cos_T1d, step.sin_T1d, k, v, step.slot_mapping_T, step.plan)
            return y if self.tp.size == 1 else self.out(self.tp.gather_columns(y, channel), channel)
        qkv = self.qkv(x_TD)
        qkv_THd = qkv.view(qkv.shape[0], -1, self.spec.head_dim)
        normed = None if self.full_norms is None else self._normalise_fully(qkv_THd, self.full_norms, channel)
        q_THd = self.ops.qk_norm_rope_cache(
            qkv_THd, self._rule, step.cos_T1d, step.sin_T1d, k, v, step.slot_mapping_T, normed
        )
        attended = self._attend(step, self.ops, q_THd, cache)
        return self.out(self.tp.gather_columns(attended, channel), channel)

    def _normalise_fully(self, qkv_THd: Tensor, weights: tuple[Tensor, Tensor], channel: int) -> Tensor:
        """Queries and keys in fp32, after norms over all ranks' heads: those are gathered, since a sum of the ranks'
        sums would round differently."""
        size, rank, heads = self.tp.size, self.tp.rank, self._rule.num_heads
        holders = max(1, size // self.spec.num_kv_heads)  # ranks that have the same keys
        gathered = self.tp.gather_columns(qkv_THd[:, : heads + self._rule.num_kv_heads].flatten(1), channel)
        all_TRHd = gathered.view(len(gathered), size, -1, self.spec.head_dim)
        parts = all_TRHd[:, :, :heads], all_TRHd[:, ::holders, heads:]
        mine = []
        for part, weight, place in zip(parts, weights, (rank, rank // holders), strict=True):
            normed = self.ops.rms_norm(part.flatten(1).float(), weight, self._rule.eps)
            mine.append(normed.view(part.shape)[:, place])
        return torch.cat(mine, dim=1)


def build_attention(spec: Attention, build: Builder, name: str, group: int) -> AttentionLayer:
    """Returns the attention block of the layer whose parameters begin with `name`."""
    heads = spec.local_heads(build.world)
    if (order := half_layout(spec.rope, spec.head_dim)) is not None:
        _reorder(spec, heads, build, name, order)
    head_norms, full_norms = None, None
    if spec.qk_norm != "none":
        q_norm, k_norm = (build.norm(f"{name}{x}_norm") for x in "qk")
        if spec.qk_norm == "full":
            full_norms = q_norm, k_norm
        else:
            head_norms = torch.cat((q_norm.expand(heads.count, -1), k_norm.expand(heads.count_kv, -1)), 0)
    table = build.shared(
        ("rotary", spec.rope, spec.head_dim),
        lambda: RotaryTable(spec.rope, spec.head_dim, build.max_position, build.ops.device),
    )
    shape = heads.count, heads.count_kv, spec.head_dim
    prepare = build.shared(
        ("attention", group, shape, spec.rope), lambda: PrepareAttention(build.ops, group, shape, table)
    )
    qkv, out = build.linear(name + "qkv"), build.columns(name + "out", build.width)
    return AttentionLayer(spec, build.ops, build.eps, heads, build.tp, prepare, qkv, out, head_norms, full_norms)


def _reorder(spec: Attention, heads: Heads, build: Builder, name: str, order: list[int]) -> None:
    """Brings the elements of query and key heads into the half layout."""
    dim = spec.head_dim
    moved = [head * dim + i for head in range(heads.count + heads.count_kv) for i in order]
    rows = [*moved, *range(len(moved), len(moved) + heads.count_kv * dim)]
    build.reorder(name + "qkv", rows)
    build.reorder(name + "qkv_bias", rows)
    for x, count in (("q", spec.num_heads), ("k", spec.num_kv_heads)):
        every = count if spec.qk_norm == "full" else 1
        build.reorder(f"{name}{x}_norm", [head * dim + i for head in range(every) for i in order])


def attention_workspace(spec: Attention, width: int, tokens: int, max_len: int, size: int, tp_size: int) -> int:
    """Returns an upper bound of the bytes of one call; see `Mixer.workspace`."""
    d = spec.head_dim
    heads, kv_heads = spec.num_heads // tp_size, spec.local_kv_heads(tp_size)
    both = (heads + kv_heads) * d
    qkv = both + kv_heads * d
    rows = tokens * (qkv * size + both * (5 * FP32 + size) + 2 * heads * d * size)
    rows += gathered_bytes(tokens, spec.num_heads * d + width, size, tp_size)
    if spec.qk_norm == "full" and tp_size > 1:
        all_both = both * tp_size
        rows += gathered_bytes(tokens, all_both, size, tp_size) + 4 * FP32 * tokens * all_both
    # One item: queries of one KV head are the least that a context is cut into.
    longest = padded_context(max_len)
    scores = max(4 * SCORES, QUERY_BLOCK * (heads // kv_heads) * longest)
    item = scores * FP32 * (5 + d // TILE)  # an int8 cache computes in fp32, whatever the activations
    context = max(CONTEXT, kv_heads * d * TILE)
    item += context * (size + FP32) + 2 * INT64 * kv_heads * longest
    return rows + item
