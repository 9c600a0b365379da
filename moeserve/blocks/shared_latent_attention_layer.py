"""The layer of `SharedLatentAttention`, in the absorbed form of `LatentAttentionLayer`.

Shapes: T tokens (including padding), S of which select, D model width, H heads of this rank, n and
p the parts of a query without and with rotary embedding, v width of values, L rank of the latents,
C = L + p, J index heads, d their width.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.attention_layer import item_bytes
from moeserve.blocks.build import Builder
from moeserve.blocks.linear import FP32, INT64, gathered_bytes
from moeserve.blocks.norm import Norm
from moeserve.blocks.rope import RopeSpec, half_layout
from moeserve.blocks.rotary import inverse_frequencies
from moeserve.blocks.shared_latent_attention import SharedLatentAttention
from moeserve.ops.attention import MAX_SCORES, padded_context
from moeserve.ops.elementwise import rotary
from moeserve.ops.inputs import (
    GroupInputs,
    HeadShape,
    LayerCache,
    Positions,
    RowContext,
    StepInputs,
)
from moeserve.ops.latent import HeadsLinear
from moeserve.ops.selected import (
    MAX_QUERIES,
    MIN_KEYS,
    Selection,
    chosen_as_requests,
    plan_selection,
    select_always,
)
from moeserve.ops.table import Ops

INDEX_EPS = 1e-6  # epsilon of the layer norms of index heads


@dataclass(slots=True, eq=False)
class SharedStep:
    """The inputs of one step that all layers share, and what layers leave for later ones."""

    ops: Ops
    step: StepInputs
    group: GroupInputs
    selection: Selection | None  # the queries that select; None: none does
    cos_T1p: Tensor
    sin_T1p: Tensor
    log_T11: Tensor  # log(position + 1)
    # The latents of the last layer that shares some, by whether it rotates
    latents: dict[bool, Tensor] = field(default_factory=dict)
    # Slots that the last layer with index heads selected
    chosen_SK: Tensor | None = None
    # Attention metadata by the shape of heads: of queries that select, and of the others
    chosen_plans: dict[HeadShape, Any] = field(default_factory=dict)
    plans: dict[HeadShape, Any] = field(default_factory=dict)

    def choose(self, slots_SK: Tensor) -> None:
        """Set the selected slots, for this layer and for those that share its selection."""
        self.chosen_SK = slots_SK
        self.chosen_plans = {}

    def attend(self, q_THC: Tensor, latent: Tensor, shape: HeadShape) -> Tensor:
        """Return attention over latents, [T, H * L]; selecting queries see selected ones only."""
        attention = self.ops.attention
        rank = shape.v_dim
        selection = self.selection
        plain = self._plan(shape)
        if selection is None:
            return attention(q_THC, latent, latent[..., :rank], plain)
        out = q_THC.new_zeros((len(q_THC), shape.num_heads * rank))
        if plain is not None:
            others = selection.other_tokens
            out[others] = attention(
                q_THC.index_select(0, others), latent, latent[..., :rank], plain
            )
        tokens_S = selection.tokens_S
        entries = latent.view(-1, 1, *latent.shape[2:])
        out[tokens_S] = attention(
            q_THC.index_select(0, tokens_S),
            entries,
            entries[..., :rank],
            self._chosen_plan(shape, selection),
        )
        return out

    def _plan(self, shape: HeadShape) -> Any:
        """Return the attention metadata of the queries that do not select; None: all select."""
        if shape not in self.plans:
            inputs: tuple[GroupInputs, StepInputs] | None = (self.group, self.step)
            if self.selection is not None:
                inputs = self.selection.others
            self.plans[shape] = None if inputs is None else self.ops.plan_attention(*inputs, shape)
        return self.plans[shape]

    def _chosen_plan(self, shape: HeadShape, selection: Selection) -> Any:
        if shape not in self.chosen_plans:
            assert self.chosen_SK is not None
            inputs = chosen_as_requests(
                self.chosen_SK, self.group, self.step, selection.positions_S
            )
            self.chosen_plans[shape] = self.ops.plan_attention(*inputs, shape)
        return self.chosen_plans[shape]


@dataclass(frozen=True, slots=True, eq=False)
class PrepareShared:
    """Makes the `SharedStep` of all layers of a KV group."""

    ops: Ops
    group: int
    top_k: int
    rotary: tuple[Tensor, Tensor]  # cos and sin of each position, fp32 [positions, p / 2]
    logs: Tensor  # log(position + 1) of each position, fp32

    def __call__(self, step: StepInputs, positions: Positions) -> SharedStep:
        """Look up rotary angles and logarithms, and find the queries that select."""
        group = step.groups[self.group]
        make = plan_selection if step.live is None else select_always
        positions_T = positions.text_T
        cos, sin = (table.index_select(0, positions_T) for table in self.rotary)
        return SharedStep(
            ops=self.ops,
            step=step,
            group=group,
            selection=make(group, step, self.top_k),
            cos_T1p=torch.cat((cos, cos), -1)[:, None],
            sin_T1p=torch.cat((-sin, sin), -1)[:, None],
            log_T11=self.logs.index_select(0, positions_T)[:, None, None],
        )


def rotary_tables(rope: RopeSpec, size: int, max_position: int, alpha: Tensor) -> Any:
    """Return cos and sin of positions, with frequencies multiplied by exp(alpha)."""
    freqs = inverse_frequencies(rope, size).to(alpha.device) * alpha.double().exp().float()
    positions = torch.arange(max_position, device=alpha.device).float()
    angles = (positions[:, None] * freqs).double()
    factor = rope.attention_factor
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def prepare_shared(spec: SharedLatentAttention, build: Builder, group: int) -> PrepareShared:
    """Return the `PrepareShared` of all layers of a KV group."""

    def make() -> PrepareShared:
        tables = build.slots.load(
            ("rope_alpha",),
            lambda ops, alpha: rotary_tables(
                spec.rope, spec.rotated, build.max_position, alpha.float()
            ),
        )
        logs = torch.arange(1, build.max_position + 1).double().log().float()
        return PrepareShared(build.ops, group, spec.top_k, tables, logs.to(build.ops.device))

    prepare: PrepareShared = build.shared(("shared latents", group), make)
    return prepare


def _rotate_first(x_THd: Tensor, cos_T1p: Tensor, sin_T1p: Tensor) -> Tensor:
    """Rotate the first p elements of each head, in fp32."""
    size = cos_T1p.shape[2]
    return torch.cat((rotary(x_THd[..., :size], cos_T1p, sin_T1p), x_THd[..., size:]), -1)


class IndexHeads:
    """The index heads of a layer, which score all tokens of a query's context."""

    def __init__(self, spec: SharedLatentAttention, build: Builder, name: str) -> None:
        """Build the index heads. name: prefix of their parameters."""
        self.ops = build.ops
        self.heads = spec.index_heads
        self.dim = spec.index_dim
        self.rotates = spec.rotates
        order = half_layout(spec.rope, spec.rotated)
        if spec.rotates and order is not None:
            head = [*order, *range(spec.rotated, self.dim)]
            build.reorder(name + "q", [j * self.dim + i for j in range(self.heads) for i in head])
            for part in ("k", "norm", "norm_bias"):
                build.reorder(name + part, head)
        self.input_norm, self.norm = (
            Norm(
                build.ops,
                INDEX_EPS,
                build.fp32(name + part),
                build.fp32(name + part + "_bias"),
                centred=True,
            )
            for part in ("input_norm", "norm")
        )
        self.queries = build.linear(name + "q")  # D -> J * d
        self.keys = build.linear(name + "k")  # D -> d
        self.weights = build.linear(name + "weights")  # D -> J, fp32: weights of heads in a score
        self.scale_J = build.fp32(name + "scale")
        self.bias_J = build.fp32(name + "scale_bias")

    def write(self, x_TD: Tensor, step: SharedStep, cache: Tensor, context: RowContext) -> None:
        """Write the tokens' keys, after norm and rope in fp32, to `cache` [blocks, size, 1, d]."""
        slot_mapping_T = step.group.slot_mapping_T
        real = len(slot_mapping_T)
        k_T1d = self.norm(self.keys(x_TD, context)[:real].float())[:, None]
        if self.rotates:
            k_T1d = _rotate_first(k_T1d, step.cos_T1p[:real], step.sin_T1p[:real])
        cache.view(-1, self.dim).index_copy_(0, slot_mapping_T, k_T1d[:, 0].to(cache.dtype))

    def choose(self, x_TD: Tensor, step: SharedStep, cache: Tensor, context: RowContext) -> None:
        """Select tokens, for this layer and for those that share its selection."""
        selection = step.selection
        assert selection is not None
        tokens_S = selection.tokens_S
        chosen = context.select(tokens_S)
        x_SD = x_TD.index_select(0, tokens_S)
        products = self.queries(self.input_norm(x_SD), chosen)
        factors_SJ1 = (
            step.log_T11.index_select(0, tokens_S) * self.scale_J[:, None] + self.bias_J[:, None]
        )
        q_SJd = products.float().view(len(x_SD), self.heads, self.dim) * factors_SJ1
        if self.rotates:
            angles = (step.cos_T1p, step.sin_T1p)
            q_SJd = _rotate_first(q_SJd, *(table.index_select(0, tokens_S) for table in angles))
        weights_SJ = self.weights(x_SD.float(), chosen)
        step.choose(
            self.ops.index_select(
                q_SJd.to(x_TD.dtype), weights_SJ, cache, selection, self.ops.pack_heads
            )
        )


class SharedLatentAttentionLayer:
    """Attention of this rank's heads to latents, which an earlier layer may own.

    Tensor-parallel ranks gather the results of all heads before the output projection.
    """

    def __init__(self, spec: SharedLatentAttention, build: Builder, name: str, group: int) -> None:
        self.spec = spec
        self.tp = build.tp
        self.ops = build.ops
        self.eps = build.eps  # of the norm of latents
        local = spec.heads(build.world)
        self.num_heads = local.stop - local.start
        self._reorder(build, name)
        self.queries = build.linear(name + "q")  # D -> H * (n + p)
        self.scale_H = build.fp32(name + "scale")
        self.bias_H = build.fp32(name + "scale_bias")
        if spec.owns_latents:
            self.latents = build.linear(name + "kv_a")  # D -> C
            self.norm_L = build.norm(name + "kv_norm")

        def pack_heads(ops: Ops, kv_b: Tensor) -> tuple[HeadsLinear, HeadsLinear]:
            kv_b = kv_b.view(self.num_heads, -1, spec.rank)  # per head W_UK [n, L], W_UV [v, L]
            up = ops.pack_heads(kv_b[:, : spec.nope_dim].transpose(1, 2).contiguous())
            return up, ops.pack_heads(kv_b[:, spec.nope_dim :].contiguous())

        # Per head: `up` projects queries to latents, n -> L, and `down` the weighted sums of
        # latents to values, L -> v.
        self.up, self.down = build.slots.load((name + "kv_b",), pack_heads)
        self.out = build.columns(name + "out", build.width)
        self.shape = spec.head_shape(self.tp.size)
        self.index = IndexHeads(spec, build, name + "index_") if spec.selects else None
        self.prepare = prepare_shared(spec, build, group)
        self._attend = self.ops.opaque(self.attend)

    def _reorder(self, build: Builder, name: str) -> None:
        """Convert the rotated elements of heads to the half layout."""
        spec = self.spec
        order = half_layout(spec.rope, spec.rotated)
        if not spec.rotates or order is None:
            return
        nope = spec.nope_dim
        head = [*range(nope), *(nope + j for j in order)]
        build.reorder(
            name + "q", [h * spec.key_dim + i for h in range(self.num_heads) for i in head]
        )
        for part in ("kv_a", "kv_a_bias"):
            build.reorder(name + part, [*range(spec.rank), *(spec.rank + j for j in order)])

    def __call__(
        self, x_TD: Tensor, step: SharedStep, cache: LayerCache, context: RowContext
    ) -> Tensor:
        """Return the layer's output [T, D]. Writes latents and index keys to `cache` first."""
        spec = self.spec
        if spec.owns_latents:
            self._write(x_TD, step, cache[0], context)
        if self.index is not None:
            self.index.write(x_TD, step, cache[-1], context)
        q_THe = self.queries(x_TD, context).view(len(x_TD), self.num_heads, -1).float()
        factors_TH1 = step.log_T11 * self.scale_H[:, None] + self.bias_H[:, None]
        q_THe = q_THe * (factors_TH1 * spec.scale)
        q_THC = x_TD.new_empty((len(x_TD), self.num_heads, spec.entry))
        if spec.rotates:
            q_THC[..., spec.rank :] = rotary(
                q_THe[..., spec.nope_dim :], step.cos_T1p, step.sin_T1p
            )
        q_THn = q_THe[..., : spec.nope_dim].to(x_TD.dtype).contiguous()
        self.up(q_THn, out=q_THC[..., : spec.rank])
        attended = self._attend(q_THC, x_TD, step, cache, context)
        v_TN = self.down(attended.view(len(x_TD), self.num_heads, spec.rank)).flatten(1)
        return self.out(self.tp.gather_columns(v_TN, context.channel), context)

    def _write(self, x_TD: Tensor, step: SharedStep, cache: Tensor, context: RowContext) -> None:
        """Write the tokens' latents, normed and rotated in fp32, to `cache`."""
        rank = self.spec.rank
        slot_mapping_T = step.group.slot_mapping_T
        real = len(slot_mapping_T)
        kv_TC = self.latents(x_TD, context)[:real].float()
        entries = self.ops.rms_norm(kv_TC[:, :rank].contiguous(), self.norm_L, self.eps)
        if self.spec.rotates:
            rotated = rotary(kv_TC[:, None, rank:], step.cos_T1p[:real], step.sin_T1p[:real])
            entries = torch.cat((entries, rotated[:, 0]), 1)
        cache.view(-1, self.spec.entry).index_copy_(0, slot_mapping_T, entries.to(cache.dtype))

    def attend(
        self,
        q_THC: Tensor,
        x_TD: Tensor,
        step: SharedStep,
        cache: LayerCache,
        context: RowContext,
    ) -> Tensor:
        """Select tokens, if this layer does, and return attention to latents, [T, H * L]."""
        latents = step.latents
        rotates = self.spec.rotates
        if self.spec.shares_latents:
            latents[rotates] = cache[0]
        if self.index is not None and step.selection is not None:
            self.index.choose(x_TD, step, cache[-1], context)
        latent = cache[0] if self.spec.owns_latents else latents[rotates]
        return step.attend(q_THC, latent, self.shape)

    @staticmethod
    def workspace(
        spec: SharedLatentAttention,
        width: int,
        tokens: int,
        max_len: int,
        itemsize: int,
        tp_size: int,
    ) -> int:
        """See `mixer_workspace`."""
        shape = spec.head_shape(tp_size)
        queries = shape.num_heads * spec.key_dim
        # Queries and latents: the products, and four fp32 copies of scale, norm and rope.
        num_bytes = tokens * (queries + spec.entry) * (2 * itemsize + 4 * FP32)
        # Per head: queries to latents and attended latents, also of selecting queries; values.
        num_bytes += (
            tokens * shape.num_heads * (2 * spec.entry + 2 * spec.rank + spec.v_dim) * itemsize
        )
        num_bytes += gathered_bytes(tokens, spec.num_heads * spec.v_dim + width, itemsize, tp_size)
        # Index queries and keys, likewise.
        index_width = (spec.index_heads + 1) * spec.index_dim
        num_bytes += tokens * index_width * (2 * itemsize + 5 * FP32)
        # The inputs of selecting tokens, normed, and their fp32 copies.
        num_bytes += tokens * width * 2 * (itemsize + 2 * FP32)
        # Six arrays with the selected positions of each token.
        num_bytes += 6 * tokens * padded_context(spec.top_k) * INT64
        # Six arrays of as many keys or products as are in memory at once.
        num_elements = max(MAX_SCORES, spec.index_heads * MIN_KEYS, spec.index_dim * MIN_KEYS)
        num_bytes += 6 * num_elements * FP32
        # Six arrays with one element per query of a chunk and position of its context.
        num_bytes += 6 * (MAX_QUERIES + 2) * padded_context(max_len) * INT64
        return num_bytes + item_bytes(shape, max_len, itemsize)
