"""Computes attention to the last tokens and to compressed entries.

Each token's attention is that of a request whose context is the rows of its window, followed by its
entries, in ascending order. So the bits of a result depend on these rows alone.

Shapes: T tokens (including padding), D model width, H heads of this rank, d their width, p their
rotated part, G groups of this rank's heads, R rank of a group's output, N rows of a window, W
windows of tokens that become complete in the step, C inputs of a token to compressors, K entries of
a query, J index heads.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeserve.blocks.attention_layer import item_bytes
from moeserve.blocks.build import Builder
from moeserve.blocks.compressed_attention import CompressedAttention, Compressor
from moeserve.blocks.linear import FP32, INT64, gathered_bytes
from moeserve.blocks.rotary import RotaryTable
from moeserve.ops.attention import MAX_SCORES
from moeserve.ops.compressed import (
    History,
    RowMembers,
    Tokens,
    as_requests,
    compress,
    entry_slots,
    plan_history,
    rotate_last,
)
from moeserve.ops.inputs import GroupInputs, LayerCache, Positions, RowContext, StepInputs
from moeserve.ops.selected import MAX_QUERIES, best_positions, index_scores
from moeserve.ops.table import Ops

LONGEST_CONTEXTS = 16  # of which a step gathers all entries, at most


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """The entries that a step's queries see."""

    slots: Tensor  # cache slots of all of them
    plan: Any  # metadata of attention to `History.extend`'s rows, followed by these entries


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The windows of tokens that become complete in a step."""

    rows_Wn: Tensor  # the rows of their tokens' inputs, with those of the window before
    first_W: Tensor  # whether there is no window before
    slots_W: Tensor  # of their entries
    angles: tuple[Tensor, Tensor]  # of their first tokens


@dataclass(frozen=True, slots=True, eq=False)
class CompressedStep:
    """The inputs of one step that layers with equal specifications share."""

    step: StepInputs
    group: GroupInputs  # of the cache
    tokens: Tokens
    angles: tuple[Tensor, Tensor]  # cos and sin [T, p / 2] of the tokens
    window: History
    inputs: History | None  # None: no entries
    windows: Windows | None
    all_entries: Chosen | None  # None: some queries select entries

    @property
    def num_tokens(self) -> int:
        """The tokens without padding."""
        return len(self.tokens.positions_T)


@dataclass(frozen=True, slots=True, eq=False)
class PrepareCompressed:
    """Makes the `CompressedStep` of layers with equal specifications."""

    ops: Ops
    spec: CompressedAttention
    group: int
    state_group: int
    rotary: RotaryTable
    shape: Any

    def __call__(self, step: StepInputs, positions: Positions) -> CompressedStep:
        """Find the rows, windows and entries of a step."""
        assert step.live is None, "graphs cannot record compressed attention"
        spec = self.spec
        states = step.groups[self.state_group]
        group = step.groups[self.group]
        tokens = Tokens.of(step, states.blocks_RN.device)
        window = plan_history(states, step, spec.window - 1)
        inputs = windows = None
        if spec.every:
            inputs = plan_history(states, step, spec.num_before)
            windows = self._windows(group, step, inputs)
        selects = spec.indexer and self.num_entries(tokens).max() > spec.indexer.top_k
        chosen = None if selects else self._all_entries(group, step, tokens, window)
        angles = self.rotary(positions)
        return CompressedStep(
            step=step,
            group=group,
            tokens=tokens,
            angles=angles,
            window=window,
            inputs=inputs,
            windows=windows,
            all_entries=chosen,
        )

    def num_entries(self, tokens: Tokens) -> Any:
        """Return how many entries there are for each query."""
        every = self.spec.every
        return (tokens.positions_T + 1) // every if every else tokens.positions_T * 0

    def _windows(self, group: GroupInputs, step: StepInputs, inputs: History) -> Windows:
        """Find the windows that become complete."""
        every = self.spec.every
        device = group.blocks_RN.device
        starts_R = step.starts_R.astype(np.int64)
        ends_R = starts_R + np.diff(step.offsets_R1)
        windows = RowMembers.of(starts_R // every, ends_R // every, device)
        begin = -every if self.spec.overlap else 0
        places = torch.arange(begin, every, device=device)
        positions_Wn = windows.numbers[:, None] * every + places
        return Windows(
            rows_Wn=inputs.index(windows.rows[:, None], positions_Wn),
            first_W=windows.numbers == 0,
            slots_W=entry_slots(group, windows, every),
            angles=self.rotary(Positions.of_text(windows.numbers * every)),
        )

    def _all_entries(
        self, group: GroupInputs, step: StepInputs, tokens: Tokens, window: History
    ) -> Chosen:
        """Return the choice of all entries."""
        every = self.spec.every
        device = group.blocks_RN.device
        num_entries_T = self.num_entries(tokens)
        if not num_entries_T.any():
            none = torch.empty(0, dtype=torch.int64, device=device)
            none_TK = none.new_empty((len(num_entries_T), 0))
            return Chosen(none, self.plan_rows(group, step, tokens, window, none_TK, num_entries_T))
        ends_R = step.starts_R.astype(np.int64) + np.diff(step.offsets_R1)
        num_entries_R = ends_R // every
        entries = RowMembers.of(num_entries_R * 0, num_entries_R, device)
        first_R = torch.from_numpy(np.cumsum(num_entries_R) - num_entries_R).to(device)
        first_T1 = first_R[tokens.members.rows][:, None]
        entries_TK = first_T1 + torch.arange(int(num_entries_T.max()), device=device)
        plan = self.plan_rows(group, step, tokens, window, entries_TK, num_entries_T)
        return Chosen(entry_slots(group, entries, every), plan)

    def plan_rows(
        self, group: GroupInputs, step: StepInputs, tokens: Tokens, window: History,
        entries_TK: Tensor, num_entries_T: Any,
    ) -> Any:  # fmt: skip
        """Return the metadata of attention to each token's window and entries.

        entries_TK: their indices among all entries of the step.
        """
        first = window.index.num_before * len(step.starts_R) + 1
        first += len(window.cached_slots) + len(tokens.positions_T)
        inputs = as_requests(
            group, step, tokens, window.index, self.spec.window, entries_TK + first, num_entries_T
        )
        return self.ops.plan_attention(*inputs, self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class CompressorLayer:
    """Computes entries from the inputs of windows."""

    spec: Compressor
    ops: Ops
    eps: float
    bias_mV: Tensor  # added to the scores, by place in the window
    norm_d: Tensor
    columns: slice  # of the inputs

    def __call__(self, inputs_WnC: Tensor, windows: Windows, cache: Tensor) -> None:
        """Write the entries of complete windows to the cache, after norm and rope."""
        own = inputs_WnC[..., self.columns]
        values = own[..., : self.spec.values]
        scores = own[..., self.spec.values :]
        every = self.spec.every
        dim = self.spec.dim
        if self.spec.overlap:
            before = scores[:, :every, :dim] + self.bias_mV[:, :dim]
            before = before.masked_fill(windows.first_W[:, None, None], -torch.inf)
            scores = torch.cat((before, scores[:, every:, dim:] + self.bias_mV[:, dim:]), 1)
            values = torch.cat((values[:, :every, :dim], values[:, every:, dim:]), 1)
        else:
            scores = scores + self.bias_mV
        entries_Wd = self.ops.rms_norm(compress(values, scores), self.norm_d, self.eps)
        entries_Wd = rotate_last(entries_Wd[:, None], *windows.angles)[:, 0]
        cache.view(-1, dim).index_copy_(0, windows.slots_W, entries_Wd.to(cache.dtype))


class CompressedAttentionLayer:
    """Attention of this rank's heads to the last tokens and to compressed entries.

    Tensor-parallel ranks gather the results of all groups before the last product. Each computes
    all rows and entries.
    """

    why_not_recordable = "rows and entries are found on the host"

    def __init__(self, spec: CompressedAttention, build: Builder, name: str, group: int) -> None:
        self.spec = spec
        self.tp = build.tp
        ops = build.ops
        self.ops = ops
        self.eps = build.eps
        groups = spec.groups // build.tp.size
        self._groups = groups
        self._narrow = build.linear(name + "q_a")
        self._narrow_norm = build.norm(name + "q_norm")
        self._queries = build.linear(name + "q_b")
        self._rows = build.linear(name + "kv_a")
        self._rows_norm = build.norm(name + "kv_norm")
        # The norm of queries has no weights, only the factor of scores.
        self._query_norm = torch.full((spec.head_dim,), spec.head_dim**-0.5, device=ops.device)
        self._sinks_H = build.fp32(name + "sinks")
        self._out_groups = build.slots.load(
            (name + "out_groups",),
            lambda ops, weight: ops.pack_heads(weight.view(groups, spec.group_rank, -1)),
        )
        self._out = build.columns(name + "out", build.width)
        if spec.every:
            self._inputs = build.linear(name + "compress")
            self._compressors = _build_compressors(spec, build, name)
        if spec.indexer:
            self._index_queries = build.linear(name + "index_q")
            self._index_weights = build.linear(name + "index_weights")
        self.prepare = self._prepare(build, group)
        self._compute = ops.opaque(self._attend)

    def _prepare(self, build: Builder, group: int) -> Any:
        """Return the function that makes the inputs of a step."""
        spec = self.spec
        state_group = group if build.state_group is None else build.state_group
        rotary = build.rotary_table(spec.rope, spec.rope_dim)
        shape = spec.head_shape(build.tp.size)
        return build.shared(
            ("compressed", spec, group),
            partial(PrepareCompressed, self.ops, spec, group, state_group, rotary, shape),
        )

    def __call__(
        self, x_TD: Tensor, step: CompressedStep, cache: LayerCache, context: RowContext
    ) -> Tensor:
        """Return the layer's output [T, D]. Writes rows, inputs and entries to `cache` first."""
        attended_THd = self._compute(x_TD, step, cache, context)
        grouped = attended_THd.view(len(x_TD), self._groups, -1)
        ranks_TR = self._out_groups(grouped).flatten(1)
        return self._out(self.tp.gather_columns(ranks_TR, context.channel), context)

    def _attend(
        self, x_TD: Tensor, step: CompressedStep, cache: LayerCache, context: RowContext
    ) -> Tensor:
        """Return the results of attention, rotated back, [T, H, d]."""
        dim = self.spec.head_dim
        narrow_TN = self.ops.rms_norm(self._narrow(x_TD, context), self._narrow_norm, self.eps)
        q_THd = self._queries_of(narrow_TN, step.angles, context)
        rows = self._write(x_TD, step, cache, context).to(x_TD.dtype)
        chosen = step.all_entries
        if chosen is None:
            chosen = self._select(x_TD, narrow_TN, step, cache[1], context)
        if len(chosen.slots):
            rows = torch.cat((rows, cache[0].view(-1, dim).index_select(0, chosen.slots)))
        keys = rows.view(-1, 1, 1, dim)
        attended = self.ops.attention(q_THd, keys, keys, chosen.plan, sinks_H=self._sinks_H)
        return self._rotated_back(attended.view(q_THd.shape), step.angles)

    def _queries_of(
        self, narrow_TN: Tensor, angles: tuple[Tensor, Tensor], context: RowContext
    ) -> Tensor:
        """Return normed, scaled and rotated queries [T, H, d]."""
        dim = self.spec.head_dim
        q_THd = self._queries(narrow_TN, context).view(-1, dim).float()
        q_THd = self.ops.rms_norm(q_THd, self._query_norm, self.eps)
        return rotate_last(q_THd.view(len(narrow_TN), -1, dim), *angles).to(narrow_TN.dtype)

    def _rows_of(self, x_TD: Tensor, angles: tuple[Tensor, Tensor], context: RowContext) -> Tensor:
        """Return the tokens' rows, which are keys and values, [T, d]."""
        rows_Td = self.ops.rms_norm(self._rows(x_TD, context), self._rows_norm, self.eps)
        return rotate_last(rows_Td.float()[:, None], *angles)[:, 0].to(x_TD.dtype)

    def _rotated_back(self, attended_THd: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        cos_Tp, sin_Tp = angles
        return rotate_last(attended_THd.float(), cos_Tp, -sin_Tp).to(attended_THd.dtype)

    def _write(
        self, x_TD: Tensor, step: CompressedStep, cache: LayerCache, context: RowContext
    ) -> Tensor:
        """Write rows and entries, and return the rows of the tokens and of those before them."""
        count = step.num_tokens
        states = cache[len(self.spec.compressors) :]
        rows = step.window.extend(self._rows_of(x_TD, step.angles, context)[:count], *states[:2])
        if step.inputs is not None and step.windows is not None:
            inputs = step.inputs.extend(self._inputs(x_TD, context)[:count], *states[2:])
            if len(step.windows.slots_W):
                inputs_WnC = inputs[step.windows.rows_Wn]
                for compressor, entries in zip(self._compressors, cache, strict=False):
                    compressor(inputs_WnC, step.windows, entries)
        return rows

    def _select(
        self,
        x_TD: Tensor,
        narrow_TN: Tensor,
        step: CompressedStep,
        cache: Tensor,
        context: RowContext,
    ) -> Chosen:
        """Choose each query's entries with the largest scores. cache: of the index keys."""
        assert self.spec.indexer is not None
        top_k = self.spec.indexer.top_k
        dim = self.spec.indexer.dim
        q_TJd = self._index_queries(narrow_TN, context).view(len(x_TD), -1, dim)
        q_TJd = rotate_last(q_TJd.float(), *step.angles).to(x_TD.dtype)
        weights_TJ = self._index_weights(x_TD.float(), context)
        num_entries_T = self.prepare.num_entries(step.tokens)
        device = x_TD.device
        numbers_TK = torch.arange(top_k, device=device).repeat(step.num_tokens, 1)
        for tokens in _parts(step.tokens.rows_T, num_entries_T > top_k):
            last = num_entries_T[tokens] - 1
            row = int(step.tokens.rows_T[tokens[0]])
            entries = RowMembers.of(np.array([0]), last[-1:] + 1, device)
            entries = RowMembers(entries.rows + row, entries.numbers)
            index = torch.from_numpy(tokens).to(device)
            scores = index_scores(
                q_TJd[index], weights_TJ[index], cache.view(-1, dim),
                entry_slots(step.group, entries, self.spec.every), self.ops.pack_heads,
            )  # fmt: skip
            numbers_TK[index] = best_positions(scores, torch.from_numpy(last).to(device), top_k)
        return self._chosen(step, numbers_TK, np.minimum(num_entries_T, top_k))

    def _chosen(self, step: CompressedStep, numbers_TK: Tensor, counts_T: Any) -> Chosen:
        """Return the choice of entries with these numbers, of which each token has a count."""
        device = numbers_TK.device
        counts_T1 = torch.from_numpy(counts_T).to(device)[:, None]
        is_chosen = torch.arange(numbers_TK.shape[1], device=device) < counts_T1
        rows_TK = step.tokens.members.rows[:, None].expand_as(numbers_TK)
        entries = RowMembers(rows_TK[is_chosen], numbers_TK[is_chosen])
        slots_N = entry_slots(step.group, entries, self.spec.every)
        slots, index = torch.unique(slots_N, return_inverse=True)
        entries_TK = torch.zeros_like(numbers_TK).masked_scatter_(is_chosen, index)
        plan = self.prepare.plan_rows(
            step.group, step.step, step.tokens, step.window, entries_TK, counts_T
        )
        return Chosen(slots, plan)

    @staticmethod
    def workspace(
        spec: CompressedAttention,
        width: int,
        tokens: int,
        max_len: int,
        itemsize: int,
        tp_size: int,
    ) -> int:
        """See `mixer_workspace`."""
        dim = spec.head_dim
        queries = spec.num_heads // tp_size * dim
        # Queries in fp32: converted, normed, and three times for rope; results likewise.
        num_bytes = tokens * queries * (6 * FP32 + 3 * itemsize)
        # The rows of windows and the inputs of compressors, of tokens and of those before them.
        rows = (spec.window + 2) * dim + (spec.num_before + 2) * spec.columns
        num_bytes += 3 * tokens * rows * FP32
        # The windows that become complete: inputs, and five times as many temporaries.
        num_bytes += 6 * tokens * (2 if spec.overlap else 1) * spec.columns * FP32
        num_bytes += gathered_bytes(
            tokens, spec.groups * spec.group_rank + width, itemsize, tp_size
        )
        num_entries = max_len // spec.every if spec.every else 0
        per_query = num_entries
        # Entries that are gathered: those of as many contexts as memory is likely to have.
        num_gathered = min(tokens, LONGEST_CONTEXTS) * num_entries
        if spec.indexer is not None:
            per_query = min(num_entries, spec.indexer.top_k)
            # Index queries, scores, and keys of the entries that are compared at once.
            num_bytes += tokens * spec.indexer.num_heads * spec.indexer.dim * 5 * FP32
            num_bytes += 6 * MAX_QUERIES * num_entries * INT64 + 6 * MAX_SCORES * FP32
            num_gathered = min(num_gathered, tokens * per_query)
        # These, and eight arrays of the indices of each query's rows and entries.
        num_bytes += num_gathered * dim * itemsize
        num_bytes += 8 * tokens * (spec.window + per_query) * INT64
        return num_bytes + item_bytes(spec.head_shape(tp_size), spec.window + per_query, itemsize)


@dataclass(frozen=True, slots=True, eq=False)
class SharedKeyStep:
    """The inputs of one step that layers with equal specifications share."""

    slot_mapping_T: Tensor
    angles: tuple[Tensor, Tensor]
    plan: Any  # attention metadata


@dataclass(frozen=True, slots=True, eq=False)
class PrepareSharedKeys:
    """Makes the `SharedKeyStep` of layers with equal specifications."""

    ops: Ops
    group: int
    rotary: RotaryTable
    shape: Any

    def __call__(self, step: StepInputs, positions: Positions) -> SharedKeyStep:
        """Look up rotary angles, and plan attention."""
        assert step.live is None, "graphs cannot record compressed attention"
        group = step.groups[self.group]
        plan = self.ops.plan_attention(group, step, self.shape)
        return SharedKeyStep(group.slot_mapping_T, self.rotary(positions), plan)


class SharedKeyAttentionLayer(CompressedAttentionLayer):
    """Attention of this rank's heads to the rows of the last tokens, in a paged cache."""

    def _prepare(self, build: Builder, group: int) -> Any:
        rotary = build.rotary_table(self.spec.rope, self.spec.rope_dim)
        shape = self.spec.head_shape(build.tp.size)
        return build.shared(
            ("shared keys", self.spec, group),
            partial(PrepareSharedKeys, self.ops, group, rotary, shape),
        )

    def _attend(self, x_TD: Tensor, step: Any, cache: LayerCache, context: RowContext) -> Tensor:
        narrow_TN = self.ops.rms_norm(self._narrow(x_TD, context), self._narrow_norm, self.eps)
        q_THd = self._queries_of(narrow_TN, step.angles, context)
        rows_Td = self._rows_of(x_TD, step.angles, context)[: len(step.slot_mapping_T)]
        (rows,) = cache
        rows.view(-1, self.spec.head_dim).index_copy_(0, step.slot_mapping_T, rows_Td)
        attended = self.ops.attention(q_THd, rows, rows, step.plan, sinks_H=self._sinks_H)
        return self._rotated_back(attended.view(q_THd.shape), step.angles)


def _build_compressors(
    spec: CompressedAttention, build: Builder, name: str
) -> list[CompressorLayer]:
    layers = []
    start = 0
    for prefix, compressor in zip(("entry", "index_key"), spec.compressors, strict=False):
        layers.append(
            CompressorLayer(
                compressor,
                build.ops,
                build.eps,
                build.fp32(f"{name}{prefix}_bias"),
                build.norm(f"{name}{prefix}_norm"),
                slice(start, start + compressor.columns),
            )
        )
        start += compressor.columns
    return layers


def _parts(rows_T: Any, selects_T: Any) -> list[Any]:
    """Return the tokens that select, in parts of one row and at most MAX_QUERIES tokens each."""
    tokens = np.flatnonzero(selects_T)
    borders = np.flatnonzero(np.diff(rows_T[tokens])) + 1
    return [
        row[start : start + MAX_QUERIES]
        for row in np.split(tokens, borders)
        for start in range(0, len(row), MAX_QUERIES)
    ]
