"""The grouped-query attention layer: qkv, norms, rotary embedding, cache write, attention, output.

Shapes: T tokens (including padding), D model width, H query heads and G KV heads of this rank, d
width of queries and keys, v width of values.
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
from moeserve.ops.attention import (
    CONTEXT_CUT,
    MAX_CONTEXT_ELEMENTS,
    MAX_SCORES,
    QUERY_BLOCK,
    TILE,
    padded_context,
)
from moeserve.ops.block_attention import queries_as_rows
from moeserve.ops.elementwise import HeadRule
from moeserve.ops.inputs import (
    GraphBreak,
    HeadShape,
    LayerCache,
    PlanRows,
    Positions,
    RopeCacheInputs,
    RowContext,
    StepInputs,
)
from moeserve.ops.linear import can_fuse
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The inputs of one step that layers of one KV group with the same heads and rope share.

    Piecewise CUDA graphs run attention between two graphs. Then `graph_break` and `make_plan` are
    set instead of `plan`, because each step that replays the graphs needs its own metadata.
    """

    rope_cache: RopeCacheInputs
    width: int  # width of the results, H * v
    plan: Any = None  # attention metadata from `ops.plan_attention`
    make_plan: PlanRows | None = None  # returns the metadata of a step
    graph_break: GraphBreak | None = None
    scale_T11: Tensor | None = None  # factors of queries

    def attend(
        self,
        ops: Ops,
        q_THd: Tensor,
        cache: LayerCache,
        sinks_H: Tensor | None = None,
        soft_cap: float = 0.0,
    ) -> Tensor:
        """Return attention over the cache, [T, H * v]. sinks_H, soft_cap: see `ops.attention`."""
        attention = ops.attention
        if sinks_H is not None or soft_cap:
            attention = partial(attention, sinks_H=sinks_H, soft_cap=soft_cap)
        if self.graph_break is None:
            return attention(q_THd, *cache, self.plan)
        assert self.make_plan is not None
        return self.graph_break(
            q_THd,
            self.make_plan,
            lambda q, plan, out: attention(q, *cache, plan, out=out),
            self.width,
        )


class QueryScales:
    """The factors of a `QueryScale` by position, fp32."""

    def __init__(self, scale: QueryScale, max_position: int, device: torch.device) -> None:
        self._first = scale.first
        # The positions that share a factor
        self._every = scale.every if scale.form == "steps" else 1
        steps = torch.arange((max_position + scale.first) // self._every + 1).double()
        x = steps * (self._every / scale.every)
        match scale.form:
            case "steps":
                factors = 1 + scale.slope * torch.log1p(x)
            case "power":
                factors = (1 + x) ** scale.slope
            case "log":
                factors = 1 + scale.slope * torch.log(x.clamp(min=1.0))
        self._table = factors.float().to(device)

    def __call__(self, positions: Positions) -> Tensor:
        """Return the factors [T, 1, 1]."""
        steps_T = torch.div(positions.text_T + self._first, self._every, rounding_mode="floor")
        return self._table.index_select(0, steps_T)[:, None, None]


@dataclass(frozen=True, slots=True, eq=False)
class PrepareAttention:
    """Makes the `AttentionStep` that layers with equal heads, rope and query scale share."""

    ops: Ops
    group: int
    shape: HeadShape
    rotary: RotaryTable
    scales: QueryScales | None = None

    def __call__(self, step: StepInputs, positions: Positions) -> AttentionStep:
        """Look up rotary angles, and plan attention."""
        cos_T1d, sin_T1d = self.rotary.of_heads(positions)
        slot_mapping_T = step.groups[self.group].slot_mapping_T
        graph_break = step.graph_break
        return AttentionStep(
            rope_cache=RopeCacheInputs(cos_T1d, sin_T1d, slot_mapping_T),
            width=self.shape.num_heads * self.shape.v_dim,
            plan=self.plan_rows(step) if graph_break is None else None,
            make_plan=None if graph_break is None else self.plan_rows,
            graph_break=graph_break,
            scale_T11=None if self.scales is None else self.scales(positions),
        )

    def plan_rows(self, step: StepInputs) -> Any:
        """Return the attention metadata of a step."""
        group = step.groups[self.group]
        if group.diffusion_block is not None:
            group, step = queries_as_rows(group, step)
        return self.ops.plan_attention(group, step, self.shape)


class AttentionLayer:
    """Grouped-query attention of this rank's heads over its paged KV cache.

    Tensor-parallel ranks gather the results of all heads before the output projection.
    """

    def __init__(self, spec: Attention, build: Builder, name: str, group: int) -> None:
        """Build the layer. name: prefix of its parameters. group: its KV group."""
        self.spec = spec
        self.tp = build.tp
        ops = build.ops
        self.ops = ops
        heads = spec.local_heads(build.world)
        dim = spec.head_dim
        if spec.gate_in_q:
            _split_off_gates(spec, heads, build, name)
        order = half_layout(spec.rope, dim)
        if spec.paired:
            order = [*range(0, dim, 2), *range(1, dim, 2)]
        if order is not None:
            _reorder(spec, heads, build, name, order)
        head_norms = None
        # fp32 weights of the two norms over all query heads and over all key heads (OLMoE)
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
            num_heads=heads.count,
            num_kv_heads=heads.count_kv,
            scale=scale,
            eps=build.eps,
            norms=head_norms,
            clip=clip,
            v_dim=v_dim,
            norm_last=spec.norm_last,
            norm_values=spec.value_norm,
        )
        self.qkv = build.linear(name + "qkv")  # D -> (H + G) * d + G * v, queries first
        self.out = build.columns(name + "out", build.width)
        if spec.gate_bias and spec.gate == "element":
            build.slots.prepare(
                name + "gate_bias",
                lambda bias: bias[:, None].expand(-1, spec.value_dim).flatten(),
            )
        # D -> H or H * v
        self.gate = build.linear(name + "gate") if spec.gate != "none" else None
        # (results, gates) -> results times the gates' activations
        self.multiply = ops.sigmoid_mul
        if spec.gate_act == "softplus":
            self.multiply = partial(_softplus_mul, ops)
        self.sinks_H = build.fp32(name + "sinks") if spec.sinks else None
        self.prepare = prepare_attention(
            build, group, spec.head_shape(self.tp.size), spec.rope, dim, spec.query_scale
        )
        # Opaque to torch.compile, because `attend` may end one CUDA graph and begin another.
        self._attend = ops.opaque(AttentionStep.attend)
        self.fused_call = None  # computes the whole layer, if the kernels have such a call
        # With tensor parallelism, the fused call ends before the output projection.
        fused_out = self.out.part if self.tp.size == 1 else None
        attention_block = ops.attention_block
        if attention_block and spec.can_be_one_call and can_fuse(self.qkv, fused_out):
            self.fused_call = attention_block(
                self.qkv, fused_out, self.rule, dim, ops.dtype, self.sinks_H, spec.soft_cap
            )

    def __call__(
        self, x_TD: Tensor, step: AttentionStep, cache: LayerCache, context: RowContext
    ) -> Tensor:
        """Return the layer's output [T, D]. Writes the new keys and values to `cache` first."""
        if self.fused_call is not None:
            return self.fused(x_TD, step.rope_cache, cache, step.plan, context)
        return self.unfused(x_TD, step, cache, context)

    def fused(
        self,
        x_TD: Tensor,
        rope_cache: RopeCacheInputs,
        cache: LayerCache,
        plan: Any,
        context: RowContext,
    ) -> Tensor:
        """Compute the layer by one call. plan: attention metadata."""
        assert self.fused_call is not None
        y = self.fused_call(x_TD, rope_cache, cache, plan)
        if self.tp.size == 1:
            return y
        return self.out(self.tp.gather_columns(y, context.channel), context)

    def unfused(
        self, x_TD: Tensor, step: AttentionStep, cache: LayerCache, context: RowContext
    ) -> Tensor:
        """Compute the layer by a call for each of its parts."""
        qkv = self.qkv(x_TD, context)
        normed = None
        if self.full_norms is not None:
            normed = self._normalise_fully(qkv, self.full_norms, context)
        q_THd = self.ops.qk_norm_rope_cache(qkv, self.rule, step.rope_cache, cache, normed)
        if step.scale_T11 is not None:
            q_THd = (q_THd * step.scale_T11).to(q_THd.dtype)
        attended = self._attend(step, self.ops, q_THd, cache, self.sinks_H, self.spec.soft_cap)
        if self.spec.value_scale != 1.0:
            attended = attended * self.spec.value_scale
        if self.gate is not None:
            attended = self.multiply(attended, self.gate(x_TD, context))
        return self.out(self.tp.gather_columns(attended, context.channel), context)

    def _normalise_fully(
        self, qkv_TN: Tensor, weights: tuple[Tensor, Tensor], context: RowContext
    ) -> Tensor:
        """Return this rank's queries and keys in fp32, after norms over the heads of all ranks.

        Ranks gather all heads, because adding up the ranks' sums would round differently.
        """
        size = self.tp.size
        rank = self.tp.rank
        heads = self.rule.num_heads
        dim = self.spec.head_dim
        ranks_per_kv_head = max(1, size // self.spec.num_kv_heads)
        gathered = self.tp.gather_columns(
            qkv_TN[:, : (heads + self.rule.num_kv_heads) * dim].contiguous(), context.channel
        )
        all_TRHd = gathered.view(len(gathered), size, -1, dim)
        queries = all_TRHd[:, :, :heads]
        keys = all_TRHd[:, ::ranks_per_kv_head, heads:]  # each KV head once
        own_heads = []
        for part, weight, index in (
            (queries, weights[0], rank),
            (keys, weights[1], rank // ranks_per_kv_head),
        ):
            normed = self.ops.rms_norm(part.flatten(1).float(), weight, self.rule.eps)
            own_heads.append(normed.view(part.shape)[:, index])
        return torch.cat(own_heads, dim=1)

    @staticmethod
    def workspace(
        spec: Attention, width: int, tokens: int, max_len: int, itemsize: int, tp_size: int
    ) -> int:
        """See `mixer_workspace`."""
        shape = spec.head_shape(tp_size)
        d = spec.head_dim
        heads = shape.num_heads
        kv_heads = shape.num_kv_heads
        qk_width = (heads + kv_heads) * d
        result_width = heads * shape.v_dim
        # The product qkv.
        num_bytes = tokens * (qk_width + kv_heads * shape.v_dim) * itemsize
        # Queries and keys in fp32: converted, normed, weighted, clipped and rotated. Then rounded.
        num_bytes += tokens * qk_width * (5 * FP32 + itemsize)
        # The queries and results of attention.
        num_bytes += tokens * 2 * max(heads * d, result_width) * itemsize
        if spec.gate != "none":
            # Gates, their sigmoid, and the product with the results, in fp32.
            num_bytes += tokens * result_width * 3 * FP32
        # The results of all heads, and the output.
        num_bytes += gathered_bytes(tokens, spec.num_heads * shape.v_dim + width, itemsize, tp_size)
        if spec.qk_norm == "full" and tp_size > 1:
            # The queries and keys of all ranks: gathered, and four fp32 copies for their norms.
            all_qk_width = qk_width * tp_size
            num_bytes += gathered_bytes(tokens, all_qk_width, itemsize, tp_size)
            num_bytes += tokens * all_qk_width * 4 * FP32
        return num_bytes + item_bytes(shape, max_len, itemsize)


def _softplus_mul(ops: Ops, x_TN: Tensor, gates_TM: Tensor) -> Tensor:
    """Return x * softplus(gates), computed in fp32 and rounded once; see `ops.sigmoid_mul`."""
    rows, num_gates = gates_TM.shape
    factors = ops.softplus(gates_TM.float())
    return (x_TN.view(rows, num_gates, -1) * factors[:, :, None]).flatten(1).to(x_TN.dtype)


def _split_off_gates(spec: Attention, heads: Heads, build: Builder, name: str) -> None:
    """Move the rows of gates from qkv to `gate`. In qkv, they follow the queries of each head."""
    per_head = spec.head_dim + spec.value_dim
    num_queries = heads.count * per_head
    queries = [h * per_head + i for h in range(heads.count) for i in range(spec.head_dim)]
    gates = [
        h * per_head + spec.head_dim + i for h in range(heads.count) for i in range(spec.value_dim)
    ]
    kv = range(num_queries, num_queries + heads.count_kv * per_head)
    rows = torch.tensor(gates)
    for suffix in ("", "_bias"):
        qkv = name + "qkv" + suffix
        build.slots.derive(name + "gate" + suffix, qkv, lambda value: value.index_select(0, rows))
        build.reorder(qkv, [*queries, *kv])


def prepare_attention(
    build: Builder,
    group: int,
    shape: HeadShape,
    rope: RopeSpec | None,
    rotated: int,
    scale: QueryScale | None,
) -> PrepareAttention:
    """Return the `PrepareAttention` that all layers with these properties share.

    rotated: number of elements of a head to which rope applies.
    """
    scales = None
    if scale is not None:
        scales = build.shared(
            ("scales", scale), partial(QueryScales, scale, build.max_position, build.ops.device)
        )
    rotary = build.rotary_table(rope, rotated)
    prepare: PrepareAttention = build.shared(
        ("attention", group, shape, rope, rotated, scale),
        partial(PrepareAttention, build.ops, group, shape, rotary, scales),
    )
    return prepare


def _reorder(spec: Attention, heads: Heads, build: Builder, name: str, order: list[int]) -> None:
    """Reorder the elements of query and key heads to the half layout of rope."""
    dim = spec.head_dim
    moved = [head * dim + i for head in range(heads.count + heads.count_kv) for i in order]
    rows = [*moved, *range(len(moved), len(moved) + heads.count_kv * spec.value_dim)]
    build.reorder(name + "qkv", rows)
    build.reorder(name + "qkv_bias", rows)
    for part, num_heads in (("q", spec.num_heads), ("k", spec.num_kv_heads)):
        num_normed = num_heads if spec.qk_norm == "full" else 1  # heads with weights of their own
        normed = [head * dim + i for head in range(num_normed) for i in order]
        build.reorder(f"{name}{part}_norm", normed)


def item_bytes(shape: HeadShape, max_len: int, itemsize: int) -> int:
    """Return an upper bound of the bytes of one work item of attention.

    The smallest item has the queries of one KV head.
    """
    d = shape.dim
    longest = padded_context(max_len)
    queries_per_kv_head = shape.num_heads // shape.num_kv_heads
    num_scores = max(4 * MAX_SCORES, QUERY_BLOCK * queries_per_kv_head * longest)
    # fp32, because with an int8 cache attention computes in fp32 for any dtype of activations.
    # The scores, and temporaries of their products, masks and exponentials.
    num_bytes = num_scores * 5 * FP32
    # The sums of weighted values: d elements for each tile of TILE scores.
    num_bytes += num_scores * (d // TILE) * FP32
    # The keys and values of one cut: as they are cached, and converted to fp32.
    num_bytes += max(MAX_CONTEXT_ELEMENTS, shape.num_kv_heads * d * CONTEXT_CUT) * (itemsize + FP32)
    # The cache rows of all positions, for each KV head: of the item, and of one cut.
    num_bytes += 2 * shape.num_kv_heads * longest * INT64
    return num_bytes
