"""The indexer over pooled keys of an MLA layer (blocks/pooled_indexer.py).

Queries that see at most `top_k` tokens attend to all of them and need no selection.

Shapes: T tokens (including padding), S of which select, N of which complete a group of R tokens, D
model width, J index heads, d their width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.blocks.attention_layer import AttentionStep, PrepareAttention
from moeserve.blocks.build import Builder
from moeserve.blocks.group_indexer_layer import NewGroups, PrepareGroups
from moeserve.blocks.indexer_layer import SelectedRows, indexer_workspace
from moeserve.blocks.linear import FP32
from moeserve.blocks.norm import Norm
from moeserve.blocks.pooled_indexer import PooledIndexer
from moeserve.ops.elementwise import exp
from moeserve.ops.inputs import RowContext, StepInputs
from moeserve.ops.selected_groups import groups_as_requests, select_groups


@dataclass(slots=True, eq=False)
class PooledRows(SelectedRows):
    """The attention metadata of a step with selection of groups."""

    groups: NewGroups | None = None  # the groups that the step completes; None: none
    # The number of tokens that each selecting query attends to
    counts_S: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class PreparePools(PrepareGroups):
    """Makes the `AttentionStep` of layers with a pooled indexer. Its plan is `PooledRows`."""

    def plan_rows(self, step: StepInputs) -> PooledRows:
        """Return the attention metadata of a step."""
        rows = PrepareGroups.plan_rows(self, step)
        selected = rows.selected
        return PooledRows(
            selected.step,
            selected.group,
            selected.plain,
            selected.selection,
            groups=rows.groups,
            counts_S=rows.counts_S,
        )


def prepare_pools(
    build: Builder, attention: PrepareAttention, indexer: PooledIndexer
) -> PreparePools:
    """Return the `PreparePools` that all such layers share.

    attention: the `PrepareAttention` of the same layers without an indexer.
    """
    parts: Sequence[Any] = (
        attention.ops,
        attention.group,
        attention.shape,
        attention.rotary,
        attention.scales,
        indexer.top_k,
        indexer.group,
        build.rotary_table(None, 2),  # index keys are not rotated
    )
    key = ("pools", attention, indexer.top_k, indexer.group)
    prepare: PreparePools = build.shared(key, partial(PreparePools, *parts))
    return prepare


class PooledIndexerLayer:
    """Scores all complete groups of a query's context, and selects the best."""

    def __init__(
        self, spec: PooledIndexer, build: Builder, name: str, prepare: PreparePools
    ) -> None:
        """name: prefix of its parameters."""
        self.spec = spec
        self.ops = build.ops
        self.prepare = prepare
        self.queries = build.linear(name + "index_q")  # q_rank -> J * d
        self.keys = build.linear(name + "index_k")  # D -> 2 d: keys, and logits of their weights
        self.norm = Norm(
            build.ops,
            spec.eps,
            build.fp32(name + "index_norm"),
            build.fp32(name + "index_norm_bias"),
            centred=True,
        )
        self.place_bias_Rd = build.fp32(name + "index_place_bias")  # added to the logits
        self.weights = build.linear(name + "index_weights")  # D -> J, fp32

    def write(self, x_TD: Tensor, context: RowContext, step: AttentionStep, *cache: Tensor) -> None:
        """Write the tokens' keys and logits, and the keys of the groups that they complete.

        Keys of groups are computed from keys of tokens in the cache's dtype, so their bits do not
        depend on which of the tokens are new.
        """
        dim = self.spec.dim
        of_tokens = cache[0].view(-1, 2 * dim)
        of_groups = cache[1].view(-1, dim)
        slot_mapping_T = step.rope_cache.slot_mapping_T
        both = self.keys(x_TD, context)[: len(slot_mapping_T)].float()
        keys_Td = self.norm(both[:, :dim].contiguous())
        entries = torch.cat((keys_Td, both[:, dim:]), 1).to(of_tokens.dtype)
        of_tokens.index_copy_(0, slot_mapping_T, entries)
        rows: PooledRows = step.plan
        if rows.groups is not None:
            pooled_Nd = self._pool(of_tokens[rows.groups.slots_NR].float())
            slots_N = rows.groups.last_slots_N // self.spec.group
            of_groups.index_copy_(0, slots_N, pooled_Nd.to(of_groups.dtype))

    def _pool(self, entries: Tensor) -> Tensor:
        """Return the keys of groups, fp32 [N, d], from their tokens' entries [N, R, 2 d].

        Sums over tokens run in the order of positions.
        """
        keys_NRd, logits_NRd = entries.chunk(2, -1)
        logits_NRd = logits_NRd + self.place_bias_Rd
        powers_NRd = exp((logits_NRd - logits_NRd.amax(1, keepdim=True)).contiguous())
        total_Nd = torch.zeros_like(powers_NRd[:, 0])
        pooled_Nd = torch.zeros_like(total_Nd)
        for place in range(self.spec.group):
            total_Nd += powers_NRd[:, place]
            pooled_Nd += powers_NRd[:, place] * keys_NRd[:, place]
        return pooled_Nd / total_Nd

    def choose(
        self,
        x_TD: Tensor,
        narrow_TN: Tensor,
        context: RowContext,
        step: AttentionStep,
        *cache: Tensor,
    ) -> None:
        """Select tokens, for this layer and for those that share its selection.

        narrow_TN: compressed queries.
        """
        rows: PooledRows = step.plan
        selection = rows.selection
        assert selection is not None
        tokens_S = selection.tokens_S
        chosen = context.select(tokens_S)
        q_SN = self.queries(narrow_TN.index_select(0, tokens_S), chosen)
        weights_SJ = self.weights(x_TD.index_select(0, tokens_S).float(), chosen)
        slots_SK = select_groups(
            q_SN.view(len(tokens_S), -1, self.spec.dim),
            cache[1],
            selection,
            self.spec.group,
            self.ops.pack_heads,
            weights_SJ,
        )
        inputs = groups_as_requests(slots_SK, rows.counts_S, rows.group, rows.step)
        rows.chosen = self.ops.plan_attention(*inputs, self.prepare.shape)


def pooled_workspace(
    spec: PooledIndexer, width: int, tokens: int, max_len: int, itemsize: int
) -> int:
    """Return an upper bound of the bytes that selection adds to one call of MLA."""
    # In fp32, per token: key and logit (converted, normed, stored), and the same of its group with
    # biases, powers and products.
    pools = tokens * spec.dim * 16 * FP32
    return pools + indexer_workspace(spec, width, tokens, max_len, itemsize)
