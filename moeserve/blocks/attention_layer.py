"""The attention block of a decoder: project, normalise, rotate, write to the cache, attend, project
back.

T tokens (padded rows included), D model width, H heads and G KV heads of this rank, d width of
queries and keys, v of values.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.attention import Attention, Heads
from moeserve.blocks.build import Builder
from moeserve.blocks.linear import FP32, INT64, gathered_bytes
from moeserve.blocks.mixer import QueryScale
from moeserve.blocks.rope import RopeSpec, half_layout
from moeserve.blocks.rotary import RotaryTable
from moeserve.ops.attention import CONTEXT, CUT, QUERY_BLOCK, SCORES, TILE, padded_context
from moeserve.ops.elementwise import HeadRule
from moeserve.ops.inputs import (
    Cut,
    HeadShape,
    LayerCache,
    Positions,
    RopeCacheInputs,
    RowContext,
    StepInputs,
)
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The inputs of one step that the attention blocks of one KV group with equal heads and angles
    share.
    """

    at: RopeCacheInputs
    plan: Any  # what `ops.plan_attention` made, or, where `cut` is, what will make it
    width: int  # H * v
    cut: Cut | None = None
    scale_T11: Tensor | None = None  # of queries

    def attend(
        self,
        ops: Ops,
        q_THd: Tensor,
        cache: LayerCache,
        sinks_H: Tensor | None = None,
        soft_cap: float = 0.0,
    ) -> Tensor:
        """Return the attention to the cache, [T, H * v]. sinks_H, soft_cap: as `ops.attention`
        takes them.
        """
        attention = ops.attention
        if sinks_H is not None or soft_cap:
            attention = partial(attention, sinks_H=sinks_H, soft_cap=soft_cap)
        if self.cut is None:
            return attention(q_THd, *cache, self.plan)
        return self.cut(
            q_THd, self.plan, lambda q, plan, out: attention(q, *cache, plan, out=out), self.width
        )


class QueryScales:
    """The factors of `QueryScale` for every position, fp32, looked up by position."""

    def __init__(self, scale: QueryScale, max_position: int, device: torch.device) -> None:
        self._every = scale.every
        self._first = scale.first
        steps = torch.arange((max_position + scale.first) // scale.every + 1).double()
        self._table = (1 + scale.slope * torch.log1p(steps)).float().to(device)

    def __call__(self, positions: Positions) -> Tensor:
        """Return the factors [T, 1, 1]."""
        steps_T = torch.div(positions.text_T + self._first, self._every, rounding_mode="floor")
        return self._table.index_select(0, steps_T)[:, None, None]


@dataclass(frozen=True, slots=True, eq=False)
class PrepareAttention:
    """Makes the `AttentionStep` of the layers of one KV group with equal heads, angles and query
    scales.
    """

    ops: Ops
    group: int
    shape: HeadShape
    rotary: RotaryTable
    scales: QueryScales | None = None

    def __call__(self, step: StepInputs, positions: Positions) -> AttentionStep:
        """Look the angles up and plans attention."""
        at = RopeCacheInputs(
            *self.rotary.of_heads(positions), step.groups[self.group].slot_mapping_T
        )
        plan = self.plan_rows if step.cut else self.plan_rows(step)
        scale_T11 = None if self.scales is None else self.scales(positions)
        return AttentionStep(at, plan, self.shape.num_heads * self.shape.v_dim, step.cut, scale_T11)

    def plan_rows(self, step: StepInputs) -> Any:
        """Return the attention metadata of a step's rows."""
        return self.ops.plan_attention(step.groups[self.group], step, self.shape)


class AttentionLayer:
    """Grouped-query attention of this rank's heads over its paged cache; head outputs are gathered
    before `out`.

    qkv: D -> (H + G) * d + G * v, queries first. rule: the treatment of heads. full_norms: fp32
    weights of the norms over all query heads of the model together and over all its key heads
    together (OLMoE). gate: D -> H or H * v.
    """

    def __init__(self, spec: Attention, build: Builder, name: str, group: int) -> None:
        self.spec = spec
        self.tp = build.tp
        self.ops = ops = build.ops
        heads = spec.local_heads(build.world)
        dim = spec.head_dim
        if spec.gate_in_q:
            _part_gates(spec, heads, build, name)
        if (order := half_layout(spec.rope, dim)) is not None:
            _reorder(spec, heads, build, name, order)
        head_norms = None
        self.full_norms = None
        if spec.qk_norm == "unit":
            head_norms = torch.ones(heads.count + heads.count_kv, dim, device=ops.device)
        elif spec.qk_norm != "none":
            names = (name + "q_norm", name + "k_norm")
            if spec.qk_norm == "full":
                self.full_norms = build.norm(names[0]), build.norm(names[1])
            else:
                head_norms = build.head_norms(names, (heads.count, heads.count_kv))
        scale = dim**-0.5 if spec.scale is None else spec.scale
        clip = math.inf if spec.clip is None else spec.clip
        v_dim = None if spec.v_dim == dim else spec.v_dim
        self.rule = HeadRule(
            heads.count,
            heads.count_kv,
            scale,
            build.eps,
            head_norms,
            clip,
            v_dim,
            spec.norm_last,
            spec.value_norm,
        )
        self.qkv = build.linear(name + "qkv")
        self.out = build.columns(name + "out", build.width)
        self.gate = build.linear(name + "gate") if spec.gate != "none" else None
        self.sinks_H = build.fp32(name + "sinks") if spec.sinks else None
        self.prepare = prepare_attention(
            build, group, spec.head_shape(self.tp.size), spec.rope, dim, spec.query_scale
        )
        self._attend = ops.opaque(
            AttentionStep.attend
        )  # which may end one recording and begin another
        self.block = None
        if ops.attention_block is not None and spec.is_one_call:
            last = self.out.part if self.tp.size == 1 else None
            self.block = ops.attention_block(
                self.qkv, last, self.rule, dim, ops.dtype, self.sinks_H, spec.soft_cap
            )

    def __call__(
        self, x_TD: Tensor, step: AttentionStep, cache: LayerCache, context: RowContext
    ) -> Tensor:
        """Return the attention block's output [T, D]; writes the new keys and values to `cache`
        first.
        """
        if self.block is not None:
            y = self.block(x_TD, step.at, cache, step.plan)
            return (
                y
                if self.tp.size == 1
                else self.out(self.tp.gather_columns(y, context.channel), context)
            )
        qkv = self.qkv(x_TD, context)
        normed = None
        if self.full_norms is not None:
            normed = self._normalise_fully(qkv, self.full_norms, context)
        q_THd = self.ops.qk_norm_rope_cache(qkv, self.rule, step.at, cache, normed)
        if step.scale_T11 is not None:
            q_THd = (q_THd * step.scale_T11).to(q_THd.dtype)
        attended = self._attend(step, self.ops, q_THd, cache, self.sinks_H, self.spec.soft_cap)
        if self.spec.value_scale != 1.0:
            attended = attended * self.spec.value_scale
        if self.gate is not None:
            attended = self.ops.sigmoid_mul(attended, self.gate(x_TD, context))
        return self.out(self.tp.gather_columns(attended, context.channel), context)

    def _normalise_fully(
        self, qkv_TN: Tensor, weights: tuple[Tensor, Tensor], context: RowContext
    ) -> Tensor:
        """Queries and keys in fp32, after norms over all ranks' heads: those are gathered, since a
        sum of the ranks' sums would round differently."""
        size = self.tp.size
        rank = self.tp.rank
        heads = self.rule.num_heads
        dim = self.spec.head_dim
        holders = max(1, size // self.spec.num_kv_heads)  # ranks that have the same keys
        gathered = self.tp.gather_columns(
            qkv_TN[:, : (heads + self.rule.num_kv_heads) * dim].contiguous(), context.channel
        )
        all_TRHd = gathered.view(len(gathered), size, -1, dim)
        parts = all_TRHd[:, :, :heads], all_TRHd[:, ::holders, heads:]
        mine = []
        for part, weight, place in zip(parts, weights, (rank, rank // holders), strict=True):
            normed = self.ops.rms_norm(part.flatten(1).float(), weight, self.rule.eps)
            mine.append(normed.view(part.shape)[:, place])
        return torch.cat(mine, dim=1)

    @staticmethod
    def workspace(
        spec: Attention, width: int, tokens: int, max_len: int, size: int, tp_size: int
    ) -> int:
        shape = spec.head_shape(tp_size)
        d = spec.head_dim
        heads = shape.num_heads
        kv_heads = shape.num_kv_heads
        both = (heads + kv_heads) * d
        results = heads * shape.v_dim
        rows = tokens * (
            (both + kv_heads * shape.v_dim) * size
            + both * (5 * FP32 + size)
            + 2 * max(heads * d, results) * size
        )
        rows += tokens * results * 3 * FP32 if spec.gate != "none" else 0
        rows += gathered_bytes(tokens, spec.num_heads * shape.v_dim + width, size, tp_size)
        if spec.qk_norm == "full" and tp_size > 1:
            all_both = both * tp_size
            rows += gathered_bytes(tokens, all_both, size, tp_size) + 4 * FP32 * tokens * all_both
        return rows + item_bytes(shape, max_len, size)


def _part_gates(spec: Attention, heads: Heads, build: Builder, name: str) -> None:
    """Move the rows of gates out of qkv, where they follow the queries of their head."""
    each = spec.head_dim + spec.value_dim
    gates = [
        h * each + spec.head_dim + i for h in range(heads.count) for i in range(spec.value_dim)
    ]
    kv = range(
        heads.count * each, heads.count * each + heads.count_kv * (spec.head_dim + spec.value_dim)
    )
    queries = [h * each + i for h in range(heads.count) for i in range(spec.head_dim)]
    rows = torch.tensor(gates)
    for ending in ("", "_bias"):
        qkv = name + "qkv" + ending
        build.slots.derive(name + "gate" + ending, qkv, lambda value: value[rows])
        build.reorder(qkv, [*queries, *kv])


def prepare_attention(
    build: Builder,
    group: int,
    shape: HeadShape,
    rope: RopeSpec | None,
    rotated: int,
    scale: QueryScale | None,
) -> PrepareAttention:
    """Return what prepares steps for such layers, one for all. rotated: elements of what rope is
    applied to.
    """
    scales = None
    if scale is not None:
        scales = build.shared(
            ("scales", scale), partial(QueryScales, scale, build.max_position, build.ops.device)
        )
    make = partial(
        PrepareAttention, build.ops, group, shape, build.rotary_table(rope, rotated), scales
    )
    prepare: PrepareAttention = build.shared(
        ("attention", group, shape, rope, rotated, scale), make
    )
    return prepare


def _reorder(spec: Attention, heads: Heads, build: Builder, name: str, order: list[int]) -> None:
    """Bring the elements of query and key heads into the half layout."""
    dim = spec.head_dim
    moved = [head * dim + i for head in range(heads.count + heads.count_kv) for i in order]
    rows = [*moved, *range(len(moved), len(moved) + heads.count_kv * spec.value_dim)]
    build.reorder(name + "qkv", rows)
    build.reorder(name + "qkv_bias", rows)
    for x, count in (("q", spec.num_heads), ("k", spec.num_kv_heads)):
        every = count if spec.qk_norm == "full" else 1
        build.reorder(f"{name}{x}_norm", [head * dim + i for head in range(every) for i in order])


def item_bytes(shape: HeadShape, max_len: int, size: int) -> int:
    """Return an upper bound of the bytes of one item of attention: queries of one KV head are the
    least that a context is cut into."""
    d = shape.dim
    longest = padded_context(max_len)
    scores = max(4 * SCORES, QUERY_BLOCK * (shape.num_heads // shape.num_kv_heads) * longest)
    item = (
        scores * FP32 * (5 + d // TILE)
    )  # an int8 cache computes in fp32, whatever the activations
    context = max(CONTEXT, shape.num_kv_heads * d * CUT)
    return item + context * (size + FP32) + 2 * INT64 * shape.num_kv_heads * longest
