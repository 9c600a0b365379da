"""The MLA layer in its absorbed form: queries are projected to latents, and attend to latents.

Shapes: T tokens (including padding), D model width, H heads of this rank, n and p the parts of a
query without and with rotary embedding, v width of values, L rank of the latents, C = L + p.
"""

from dataclasses import dataclass

from torch import Tensor

from moeserve.blocks.attention_layer import AttentionStep, item_bytes, prepare_attention
from moeserve.blocks.build import Builder
from moeserve.blocks.indexer_layer import (
    IndexerLayer,
    attend_to_chosen,
    build_indexer,
    indexer_workspace,
    prepare_selection,
)
from moeserve.blocks.latent_attention import LatentAttention
from moeserve.blocks.linear import FP32, gathered_bytes
from moeserve.blocks.pooled_indexer import PooledIndexer
from moeserve.blocks.pooled_indexer_layer import (
    PooledIndexerLayer,
    pooled_workspace,
    prepare_pools,
)
from moeserve.blocks.rope import half_layout
from moeserve.ops.inputs import LayerCache, RowContext
from moeserve.ops.latent import HeadsLinear, LatentRule
from moeserve.ops.linear import LinearMethod, can_fuse
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True)
class CompressedQueries:
    """Low-rank queries: D -> q_rank, RMS norm, q_rank -> H * (n + p)."""

    ops: Ops
    down: LinearMethod
    norm: Tensor
    eps: float  # of the norm
    up: LinearMethod

    def __call__(self, x_TD: Tensor, context: RowContext) -> Tensor:
        """Return the queries [T, H * (n + p)]."""
        return self.up(self.narrow(x_TD, context), context)

    def narrow(self, x_TD: Tensor, context: RowContext) -> Tensor:
        """Return the compressed queries [T, q_rank]."""
        return self.ops.rms_norm(self.down(x_TD, context), self.norm, self.eps)


class LatentAttentionLayer:
    """Attention of this rank's heads to latents.

    Tensor-parallel ranks gather the results of all heads before the output projection.
    """

    def __init__(self, spec: LatentAttention, build: Builder, name: str, group: int) -> None:
        self.spec = spec
        self.tp = build.tp
        ops = build.ops
        self.ops = ops
        local = spec.heads(build.world)
        nope = spec.nope_dim
        heads = local.stop - local.start
        queries = nope + spec.rope_dim
        if (order := half_layout(spec.rope, spec.rope_dim)) is not None:
            rows = [
                h * queries + i
                for h in range(heads)
                for i in (*range(nope), *(nope + j for j in order))
            ]
            build.reorder(name + ("q" if spec.q_rank is None else "q_b"), rows)
            for part in ("kv_a", "kv_a_bias"):
                build.reorder(name + part, [*range(spec.rank), *(spec.rank + j for j in order)])
        narrow = None
        last_q = build.linear(name + ("q" if spec.q_rank is None else "q_b"))
        # D -> H * (n + p)
        self.queries: CompressedQueries | LinearMethod = last_q
        if spec.q_rank is not None:
            narrow = (
                build.linear(name + "q_a"),
                build.norm(name + "q_norm", spec.q_factor),
            )  # product and norm
            self.queries = CompressedQueries(ops, *narrow, spec.eps, last_q)
        self.latents = build.linear(name + "kv_a")  # D -> C

        def pack_heads(ops: Ops, kv_b: Tensor) -> tuple[HeadsLinear, HeadsLinear]:
            kv_b = kv_b.view(heads, -1, spec.rank)  # per head W_UK [n, L], then W_UV [v, L]
            up = ops.pack_heads(kv_b[:, :nope].transpose(1, 2).contiguous())
            return up, ops.pack_heads(kv_b[:, nope:].contiguous())

        # Per head: `up` projects queries to latents, n -> L, and `down` the weighted sums of
        # latents to values, L -> v.
        self.up, self.down = build.slots.load((name + "kv_b",), pack_heads)
        self.out = build.columns(name + "out", build.width)
        # D -> H or H * v
        self.gate = None if spec.gate == "none" else build.linear(name + "gate")
        self.sinks_H = build.fp32(name + "sinks") if spec.sinks else None
        scale = queries**-0.5 if spec.scale is None else spec.scale
        self.rule = LatentRule(
            num_heads=heads,
            nope_dim=nope,
            rope_dim=spec.rope_dim,
            rank=spec.rank,
            scale=scale,
            eps=spec.eps,
            norm_L=build.norm(name + "kv_norm", spec.kv_factor),
        )
        shape = spec.head_shape(self.tp.size)
        self.why_not_recordable = None
        # None also if the layer shares another layer's selection
        self.indexer: IndexerLayer | PooledIndexerLayer | None = None
        self.prepare = prepare_attention(
            build, group, shape, spec.rope, spec.rope_dim, spec.query_scale
        )
        if isinstance(spec.indexer, PooledIndexer):
            pooling = prepare_pools(build, self.prepare, spec.indexer)
            self.prepare = pooling
            self.why_not_recordable = "groups of tokens are selected on the host"
            if not spec.indexer.shared:
                self.indexer = PooledIndexerLayer(spec.indexer, build, name, pooling)
        elif spec.indexer is not None:
            assert spec.rope is not None, "an indexer needs a rotary embedding"
            selecting = prepare_selection(build, self.prepare, spec.indexer.top_k)
            self.prepare = selecting
            self.indexer = build_indexer(
                spec.indexer, build, name, selecting, spec.rope, spec.rope_dim
            )
        self._selects = spec.indexer is not None
        self._attend = ops.opaque(attend_to_chosen if self._selects else AttentionStep.attend)
        self._choose = None if self.indexer is None else ops.opaque(self.indexer.choose)
        self._fused_call = None  # computes the whole layer, if the kernels have such a call
        # The fused call ends before gates, and before ranks gather results.
        self._fuses_out = self.tp.size == 1 and self.gate is None
        fused_out = self.out.part if self._fuses_out else None
        if (
            ops.latent_block is not None
            and spec.query_scale is None  # the fused call has no query scale and no sinks
            and not spec.sinks
            and can_fuse(narrow and narrow[0], last_q, self.latents, fused_out)
        ):
            self._fused_call = ops.latent_block(
                narrow, last_q, self.latents, self.up, self.down, fused_out, self.rule, ops.dtype
            )

    def __call__(
        self, x_TD: Tensor, step: AttentionStep, cache: LayerCache, context: RowContext
    ) -> Tensor:
        """Return the layer's output [T, D]. Writes latents and index keys to `cache` first."""
        latent, *index = cache
        if self.indexer is not None:
            self.indexer.write(x_TD, context, step, *index)
        if self._fused_call is not None and not (self._selects and step.plan.selection):
            plan = step.plan.plain if self._selects else step.plan
            y = self._fused_call(x_TD, step.rope_cache, latent, plan)
            return y if self._fuses_out else self._project_back(y, x_TD, context)
        rank = self.rule.rank
        heads = self.rule.num_heads
        if self._choose is not None and step.plan.selection:
            assert isinstance(self.queries, CompressedQueries)
            narrow_TN = self.queries.narrow(x_TD, context)
            self._choose(x_TD, narrow_TN, context, step, *index)
            q_THe = self.queries.up(narrow_TN, context)
        else:
            q_THe = self.queries(x_TD, context)
        q_THe = q_THe.view(len(x_TD), heads, -1)
        kv_TC = self.latents(x_TD, context)
        q_THC = x_TD.new_empty((len(x_TD), heads, self.spec.entry))
        q_THn = self.ops.latent_rope_cache(q_THe, kv_TC, self.rule, step.rope_cache, latent, q_THC)
        self.up(q_THn, out=q_THC[..., :rank])
        if step.scale_T11 is not None:
            q_THC = (q_THC * step.scale_T11).to(q_THC.dtype)
        attended = self._attend(step, self.ops, q_THC, (latent, latent[..., :rank]), self.sinks_H)
        v_Tv = self.down(attended.view(len(x_TD), heads, rank)).flatten(1)
        return self._project_back(v_Tv, x_TD, context)

    def _project_back(self, values_TN: Tensor, x_TD: Tensor, context: RowContext) -> Tensor:
        """Return the block's output [T, D] from the results of this rank's heads [T, H * v]."""
        if self.gate is not None:
            values_TN = self.ops.sigmoid_mul(values_TN, self.gate(x_TD, context))
        return self.out(self.tp.gather_columns(values_TN, context.channel), context)

    @staticmethod
    def workspace(
        spec: LatentAttention, width: int, tokens: int, max_len: int, itemsize: int, tp_size: int
    ) -> int:
        """See `mixer_workspace`."""
        shape = spec.head_shape(tp_size)
        queries = shape.num_heads * (spec.nope_dim + spec.rope_dim)
        # Queries, compressed queries and latents.
        num_bytes = tokens * (queries + (spec.q_rank or 0) + spec.entry) * itemsize
        # Per head: queries to latents, without and with their scale, attended latents, and values.
        num_bytes += tokens * shape.num_heads * (2 * spec.entry + spec.rank + spec.v_dim) * itemsize
        # Queries (converted and rotated) and latents, in fp32.
        num_bytes += tokens * (2 * queries + spec.entry) * FP32
        if spec.num_gates:
            # Gates, their sigmoid, and the product with the results, in fp32.
            num_bytes += tokens * shape.num_heads * spec.v_dim * 3 * FP32
        num_bytes += gathered_bytes(tokens, spec.num_heads * spec.v_dim + width, itemsize, tp_size)
        if isinstance(spec.indexer, PooledIndexer):
            num_bytes += pooled_workspace(spec.indexer, width, tokens, max_len, itemsize)
        elif spec.indexer:
            num_bytes += indexer_workspace(spec.indexer, width, tokens, max_len, itemsize)
        return num_bytes + item_bytes(shape, max_len, itemsize)
