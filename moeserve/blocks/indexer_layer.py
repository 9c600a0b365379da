"""The indexer of an MLA layer (DeepSeek sparse attention), and attention to the selected tokens.

Queries with at most `top_k` tokens of context attend to all of them and need no selection.

Shapes: T tokens (including padding), S of which select, D model width, J index heads, d their
width, p the rotated part of a head, C width of a latent cache entry, L rank of the latents.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.attention_layer import AttentionStep, PrepareAttention
from moeserve.blocks.build import Builder
from moeserve.blocks.indexer import Indexer
from moeserve.blocks.linear import FP32, INT64
from moeserve.blocks.norm import Norm
from moeserve.blocks.rope import RopeSpec, half_layout
from moeserve.ops.attention import MAX_SCORES, padded_context
from moeserve.ops.elementwise import rotary
from moeserve.ops.inputs import GroupInputs, LayerCache, Positions, RowContext, StepInputs
from moeserve.ops.linear import LinearMethod
from moeserve.ops.selected import (
    MAX_QUERIES,
    MIN_KEYS,
    Selection,
    chosen_as_requests,
    plan_selection,
    select_always,
)
from moeserve.ops.table import Ops


@dataclass(slots=True, eq=False)
class SelectedRows:
    """The attention metadata of a step with selection."""

    step: StepInputs
    group: GroupInputs
    plain: Any  # metadata of the queries that do not select; None: all select
    selection: Selection | None = None  # the queries that select; None: none does
    # Metadata of the selecting queries, set by the last layer with its own indexer
    chosen: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class PrepareSelection(PrepareAttention):
    """Makes the `AttentionStep` of layers with an indexer. Its plan is a `SelectedRows`."""

    top_k: int = 0

    def __call__(self, step: StepInputs, positions: Positions) -> AttentionStep:
        """Look up rotary angles, and plan attention.

        Without graph breaks: attention with selection runs inside of CUDA graphs.
        """
        return PrepareAttention.__call__(self, replace(step, graph_break=None), positions)

    def plan_rows(self, step: StepInputs) -> SelectedRows:
        """Return the attention metadata of a step."""
        group = step.groups[self.group]
        if step.live is not None:
            return SelectedRows(step, group, None, select_always(group, step, self.top_k))
        selection = plan_selection(group, step, self.top_k)
        if selection is None:
            return SelectedRows(step, group, self.ops.plan_attention(group, step, self.shape))
        plain = (
            None
            if selection.others is None
            else self.ops.plan_attention(*selection.others, self.shape)
        )
        return SelectedRows(step, group, plain, selection)


def prepare_selection(build: Builder, attention: PrepareAttention, top_k: int) -> PrepareSelection:
    """Return the `PrepareSelection` that all such layers share.

    attention: the `PrepareAttention` of the same layers without an indexer.
    """
    parts = (
        attention.ops,
        attention.group,
        attention.shape,
        attention.rotary,
        attention.scales,
        top_k,
    )
    prepare: PrepareSelection = build.shared(
        ("selection", attention, top_k), partial(PrepareSelection, *parts)
    )
    return prepare


def attend_to_chosen(
    step: AttentionStep,
    ops: Ops,
    q_THC: Tensor,
    cache: LayerCache,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return attention over the cache, [T, H * L]; selecting queries see selected tokens only.

    sinks_H: see `ops.attention`.
    """
    attention = ops.attention if sinks_H is None else partial(ops.attention, sinks_H=sinks_H)
    rows: SelectedRows = step.plan
    if rows.selection is None:
        return attention(q_THC, *cache, rows.plain)
    out = q_THC.new_zeros((len(q_THC), step.width))
    if rows.plain is not None:
        other_tokens = rows.selection.other_tokens
        out[other_tokens] = attention(q_THC.index_select(0, other_tokens), *cache, rows.plain)
    tokens_S = rows.selection.tokens_S
    latent = cache[0]
    width = cache[1].shape[3]
    entries = latent.view(-1, 1, *latent.shape[2:])
    out[tokens_S] = attention(
        q_THC.index_select(0, tokens_S), entries, entries[..., :width], rows.chosen
    )
    return out


@dataclass(eq=False, repr=False)
class IndexerLayer:
    """Scores all tokens of a query's context with its index heads, and selects the best."""

    spec: Indexer
    ops: Ops
    prepare: PrepareSelection
    queries: LinearMethod  # q_rank -> J * d
    keys: LinearMethod  # D -> d
    norm: Norm  # the norm of keys
    weights: LinearMethod  # D -> J, fp32: the weights of heads in a score

    def write(self, x_TD: Tensor, context: RowContext, step: AttentionStep, cache: Tensor) -> None:
        """Write the tokens' keys, after norm and rope in fp32, to `cache` [blocks, size, 1, d]."""
        cos_T1p, sin_T1p, slot_mapping_T = step.rope_cache
        real = len(slot_mapping_T)
        k_T1d = self.norm(self.keys(x_TD, context)[:real].float())[:, None]
        k_T1d = rotate_first(k_T1d, cos_T1p[:real], sin_T1p[:real])
        cache.view(-1, self.spec.dim).index_copy_(0, slot_mapping_T, k_T1d[:, 0].to(cache.dtype))

    def choose(
        self,
        x_TD: Tensor,
        narrow_TN: Tensor,
        context: RowContext,
        step: AttentionStep,
        cache: Tensor,
    ) -> None:
        """Select tokens, for this layer and for those that share its selection.

        narrow_TN: compressed queries.
        """
        rows: SelectedRows = step.plan
        assert rows.selection is not None
        tokens_S = rows.selection.tokens_S
        cos, sin = (table.index_select(0, tokens_S) for table in step.rope_cache[:2])
        chosen = context.select(tokens_S)
        q_SJd = self.queries(narrow_TN.index_select(0, tokens_S), chosen).view(
            len(tokens_S), -1, self.spec.dim
        )
        q_SJd = rotate_first(q_SJd.float(), cos, sin).to(x_TD.dtype)
        weights_SJ = self.weights(x_TD.index_select(0, tokens_S).float(), chosen)
        slots_SK = self.ops.index_select(
            q_SJd, weights_SJ, cache, rows.selection, self.ops.pack_heads
        )
        inputs = chosen_as_requests(slots_SK, rows.group, rows.step, rows.selection.positions_S)
        rows.chosen = self.ops.plan_attention(*inputs, self.prepare.shape)


def rotate_first(x_THd: Tensor, cos_T1p: Tensor, sin_T1p: Tensor) -> Tensor:
    """Rotate the first p elements of each head, in fp32."""
    size = cos_T1p.shape[2]
    return torch.cat((rotary(x_THd[..., :size], cos_T1p, sin_T1p), x_THd[..., size:]), -1)


def _head_order(spec: Indexer, rope: RopeSpec, rope_dim: int) -> list[int] | None:
    """Return the order of a head's elements in which the first ones are rotated, in the half
    layout; None if they have it already.
    """
    order = half_layout(rope, rope_dim) if spec.interleaved else None
    if order is None and not spec.rotates_last:
        return None
    first = spec.dim - rope_dim if spec.rotates_last else 0
    others = (i for i in range(spec.dim) if not first <= i < first + rope_dim)
    return [*(first + i for i in order or range(rope_dim)), *others]


def build_indexer(
    spec: Indexer,
    build: Builder,
    name: str,
    prepare: PrepareSelection,
    rope: RopeSpec,
    rope_dim: int,
) -> IndexerLayer | None:
    """Build a layer's indexer; None if it shares another layer's. name: prefix of parameters."""
    if spec.shared:
        return None
    if (head := _head_order(spec, rope, rope_dim)) is not None:
        build.reorder(
            name + "index_q", [j * spec.dim + i for j in range(spec.num_heads) for i in head]
        )
        for part in ("k", "norm", "norm_bias"):
            build.reorder(f"{name}index_{part}", head)
    norm = Norm(
        build.ops,
        spec.eps,
        build.fp32(name + "index_norm"),
        build.fp32(name + "index_norm_bias"),
        centred=True,
    )
    queries = build.linear(name + "index_q")
    keys = build.linear(name + "index_k")
    return IndexerLayer(
        spec, build.ops, prepare, queries, keys, norm, build.linear(name + "index_weights")
    )


def indexer_workspace(spec: Indexer, width: int, tokens: int, max_len: int, itemsize: int) -> int:
    """Return an upper bound of the bytes that selection adds to one call of MLA."""
    q_width = spec.num_heads * spec.dim
    # Index queries: the product, rounded after rope, and four fp32 temporaries of rope.
    num_bytes = tokens * q_width * (2 * itemsize + 4 * FP32)
    # The inputs of selecting tokens, and their fp32 copy for the weights of heads.
    num_bytes += tokens * width * (itemsize + FP32)
    # Index keys in fp32: converted, normed and rotated.
    num_bytes += tokens * spec.dim * 5 * FP32
    # Six arrays with the selected positions of each token.
    num_bytes += 6 * tokens * padded_context(spec.top_k) * INT64
    # Six arrays of as many keys or products as are in memory at once.
    num_elements = max(MAX_SCORES, spec.num_heads * MIN_KEYS, spec.dim * MIN_KEYS)
    num_bytes += 6 * num_elements * FP32
    # Six arrays with one element per query of a chunk and position of its context.
    num_bytes += 6 * (MAX_QUERIES + 2) * padded_context(max_len) * INT64
    return num_bytes
