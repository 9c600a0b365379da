"""The indexer over groups of tokens, and attention to the selected ones (blocks/group_indexer.py).

Queries that see at most `top_k` tokens attend to all of them and need no selection.

Shapes: T tokens (including padding), S of which select, N of which complete a group of R tokens, D
model width, J index heads, d their width, p the rotated part of a head, H query heads and G KV
heads of this rank.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.blocks.attention import Attention
from moeserve.blocks.attention_layer import AttentionLayer, AttentionStep
from moeserve.blocks.build import Builder
from moeserve.blocks.group_indexer import GroupIndexedAttention, GroupIndexer
from moeserve.blocks.indexer_layer import PrepareSelection, SelectedRows, rotate_first
from moeserve.blocks.linear import FP32, INT64
from moeserve.blocks.norm import Norm
from moeserve.blocks.rotary import RotaryTable
from moeserve.ops.attention import MAX_SCORES, padded_context
from moeserve.ops.inputs import GroupInputs, LayerCache, Positions, RowContext, StepInputs
from moeserve.ops.linear import LinearMethod
from moeserve.ops.selected import MAX_QUERIES, MIN_KEYS, Selection
from moeserve.ops.selected_groups import groups_as_requests, select_groups
from moeserve.ops.table import Ops

Angles = tuple[Tensor, Tensor]  # cos and sin of `rotary`, fp32 [.., 1, p] each


@dataclass(slots=True, eq=False)
class NewGroups:
    """The groups that a step's tokens complete."""

    last_slots_N: Tensor  # int64: the cache slot of each group's last token
    slots_NR: Tensor  # int64: the cache slots of the groups' tokens
    angles: Angles  # of each group's first position


@dataclass(slots=True, eq=False)
class GroupedRows:
    """The attention metadata of a step with selection of groups."""

    selected: SelectedRows
    groups: NewGroups | None  # None: no group becomes complete
    angles: Angles | None = None  # of the selecting queries
    counts_S: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def selection(self) -> Selection | None:
        """The queries that select; None: none does."""
        return self.selected.selection


@dataclass(frozen=True, slots=True, eq=False)
class PrepareGroups(PrepareSelection):
    """Makes the `AttentionStep` of layers with an indexer of groups. Its plan is `GroupedRows`."""

    size: int = 0  # R
    index_rotary: RotaryTable | None = None

    def plan_rows(self, step: StepInputs) -> Any:
        """Return the attention metadata of a step."""
        assert step.live is None, "groups cannot be selected in CUDA graphs"
        assert self.index_rotary is not None
        selected = PrepareSelection.plan_rows(self, step)
        groups = self._new_groups(step)
        selection = selected.selection
        if selection is None:
            return GroupedRows(selected, groups)
        angles = self.index_rotary.of_heads(Positions.of_text(selection.positions_S))
        first = [np.arange(request.first, request.first + len(request.rows)) for request in
                 selection.requests]  # fmt: skip
        tails_S = (np.concatenate(first) + 1) % self.size
        counts_S = (self.top_k - self.size + 1 + tails_S).astype(np.int32)
        return GroupedRows(selected, groups, angles, counts_S)

    def _new_groups(self, step: StepInputs) -> NewGroups | None:
        """Return the groups that a step's tokens complete."""
        assert self.index_rotary is not None
        group = step.groups[self.group]
        assert group.block_size % self.size == 0, group.block_size
        counts_R = np.diff(step.offsets_R1)
        rows_T = np.repeat(np.arange(len(counts_R)), counts_R)
        positions_T = np.arange(len(rows_T)) + (step.starts_R - step.offsets_R1[:-1])[rows_T]
        last_T = np.flatnonzero(positions_T % self.size == self.size - 1)
        if not len(last_T):
            return None
        device = group.blocks_RN.device
        last_slots_N = group.slot_mapping_T.index_select(0, torch.from_numpy(last_T).to(device))
        first_N = torch.from_numpy(positions_T[last_T] - self.size + 1).to(device)
        return NewGroups(
            last_slots_N,
            # A group never crosses the border of a block.
            last_slots_N[:, None] + torch.arange(1 - self.size, 1, device=device),
            self.index_rotary.of_heads(Positions.of_text(first_N)),
        )


class GroupIndexerLayer:
    """Scores all complete groups of a query's context, and selects the best."""

    def __init__(self, spec: GroupIndexer, build: Builder, name: str) -> None:
        """name: prefix of its parameters."""
        self.spec = spec
        self.ops = build.ops
        self.queries: LinearMethod = build.linear(name + "index_q")  # D -> J * d
        self.keys: LinearMethod = build.linear(name + "index_k")  # D -> d
        self.q_norm, self.k_norm = (
            Norm(build.ops, build.eps, build.norm(f"{name}index_{x}_norm")) for x in "qk"
        )

    def write(self, x_TD: Tensor, context: RowContext, step: AttentionStep, *cache: Tensor) -> None:
        """Write the tokens' keys, and the keys of the groups that they complete.

        Keys of groups are computed from keys of tokens in the cache's dtype, so their bits do not
        depend on which of the tokens are new.
        """
        rows: GroupedRows = step.plan
        dim = self.spec.dim
        of_tokens, of_groups = (tensor.view(-1, dim) for tensor in cache)
        slot_mapping_T = step.rope_cache.slot_mapping_T
        k_Td = self.keys(x_TD, context)[: len(slot_mapping_T)]
        of_tokens.index_copy_(0, slot_mapping_T, k_Td.to(of_tokens.dtype))
        if (groups := rows.groups) is None:
            return
        k_NRd = of_tokens[groups.slots_NR].float()
        total_Nd = k_NRd[:, 0].clone()
        for i in range(1, self.spec.group):
            total_Nd += k_NRd[:, i]
        mean_Nd = (total_Nd / self.spec.group).to(x_TD.dtype).float()
        k_N1d = rotate_first(self.k_norm(mean_Nd)[:, None], *groups.angles)
        slots_N = groups.last_slots_N // self.spec.group
        of_groups.index_copy_(0, slots_N, k_N1d[:, 0].to(of_groups.dtype))

    def choose(
        self, x_TD: Tensor, context: RowContext, step: AttentionStep, of_groups: Tensor
    ) -> tuple[GroupInputs, StepInputs]:
        """Return the attention input in which each selecting query is a request of its own."""
        rows: GroupedRows = step.plan
        selection = rows.selection
        assert selection is not None
        assert rows.angles is not None
        tokens_S = selection.tokens_S
        chosen = context.select(tokens_S)
        q_SN = self.queries(x_TD.index_select(0, tokens_S), chosen)
        q_SJd = q_SN.view(len(tokens_S), -1, self.spec.dim).float()
        normed = self.q_norm(q_SJd.flatten(0, 1)).view_as(q_SJd)
        q_SJd = rotate_first(normed, *rows.angles).to(x_TD.dtype)
        slots_SK = select_groups(q_SJd, of_groups, selection, self.spec.group, self.ops.pack_heads)
        return groups_as_requests(slots_SK, rows.counts_S, rows.selected.group, rows.selected.step)


class GroupIndexedAttentionLayer(AttentionLayer):
    """Grouped-query attention of this rank's heads to the tokens of selected groups."""

    # Which tokens a query reads is planned on the host.
    why_not_recordable = "attention to selected groups of tokens is planned on the host"

    def __init__(self, spec: GroupIndexedAttention, build: Builder, name: str, group: int) -> None:
        super().__init__(spec, build, name, group)
        rope = spec.rope
        assert rope is not None, "an indexer needs a rotary embedding"
        assert not rope.interleaved, rope
        plain = self.prepare
        index_rotary = build.rotary_table(rope, rope.size or spec.head_dim)
        top_k = spec.indexer.top_k
        size = spec.indexer.group
        parts = (plain.ops, plain.group, plain.shape, plain.rotary, plain.scales)
        self.prepare = build.shared(
            ("groups", plain, top_k, size),
            partial(PrepareGroups, *parts, top_k, size, index_rotary),
        )
        self.indexer = GroupIndexerLayer(spec.indexer, build, name)
        self._attend = self.ops.opaque(attend_to_groups)
        self._choose = self.ops.opaque(self._choose_tokens)

    def __call__(
        self, x_TD: Tensor, step: AttentionStep, cache: LayerCache, context: RowContext
    ) -> Tensor:
        """Return the layer's output [T, D]. Writes keys and values to `cache` first."""
        of_tokens, of_groups = cache[2:]
        self.indexer.write(x_TD, context, step, of_tokens, of_groups)
        rows: GroupedRows = step.plan
        if rows.selection is not None:
            self._choose(x_TD, context, step, of_groups)
        return super().__call__(x_TD, step, cache[:2], context)

    def _choose_tokens(
        self, x_TD: Tensor, context: RowContext, step: AttentionStep, of_groups: Tensor
    ) -> None:
        inputs = self.indexer.choose(x_TD, context, step, of_groups)
        rows: GroupedRows = step.plan
        rows.selected.chosen = self.ops.plan_attention(*inputs, self.prepare.shape)

    @staticmethod
    def workspace(
        spec: Attention,
        width: int,
        tokens: int,
        max_len: int,
        itemsize: int,
        tp_size: int,
    ) -> int:
        """See `mixer_workspace`."""
        assert isinstance(spec, GroupIndexedAttention), spec
        num_bytes = AttentionLayer.workspace(spec, width, tokens, max_len, itemsize, tp_size)
        index = spec.indexer
        # Queries and keys of the indexer, the inputs of selecting tokens, and fp32 temporaries.
        num_bytes += tokens * (index.num_heads + 1) * index.dim * (2 * itemsize + 5 * FP32)
        num_bytes += tokens * width * itemsize
        # Queries and results of attention, of selecting tokens and of the others.
        num_bytes += 3 * tokens * spec.num_heads // tp_size * spec.head_dim * itemsize
        # Six arrays with the selected positions of each token.
        num_bytes += 6 * tokens * padded_context(index.top_k) * INT64
        # Six arrays of as many keys or products as are in memory at once.
        elements = max(MAX_SCORES, index.num_heads * MIN_KEYS, index.dim * MIN_KEYS)
        num_bytes += 6 * elements * FP32
        # Six arrays with one element per query of a chunk and position of its context.
        return num_bytes + 6 * (MAX_QUERIES + 2) * padded_context(max_len) * INT64


def attend_to_groups(
    step: AttentionStep,
    ops: Ops,
    q_THd: Tensor,
    cache: LayerCache,
    sinks_H: Tensor | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    """Return attention over the cache, [T, H * v]; selecting queries see selected tokens only."""
    rows: SelectedRows = step.plan.selected
    options = {"sinks_H": sinks_H, "soft_cap": soft_cap} if soft_cap or sinks_H is not None else {}
    if rows.selection is None:
        return ops.attention(q_THd, *cache, rows.plain, **options)
    out = q_THd.new_zeros((len(q_THd), step.width))
    if rows.plain is not None:
        others = rows.selection.other_tokens
        out[others] = ops.attention(q_THd.index_select(0, others), *cache, rows.plain, **options)
    tokens_S = rows.selection.tokens_S
    entries = (tensor.view(-1, 1, *tensor.shape[2:]) for tensor in cache)
    q_SHd = q_THd.index_select(0, tokens_S)
    out[tokens_S] = ops.attention(q_SHd, *entries, rows.chosen, **options)
    return out
