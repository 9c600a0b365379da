"""The request tables on the device, and the inputs of a step, which are gathered from them.

All tables are in one int32 tensor, the arena:

    tokens  [slots, width]       prompt and answer of each slot's request; the sampler appends here
    blocks  [slots, max_blocks]  the block table of each KV group

The host never reads the arena, so the next step can be planned before the tokens of this step are
known. To write, the host stages (offset, value) pairs, and `apply` sends all pairs of a step in one
copy and one scatter.

An `Upload` moves arrays to the device. On CPUs an upload only wraps the arrays as tensors.

Suffixes of arrays are their dimensions: R rows (scheduled requests), R1 the begin of each row and
the end of the last one, T tokens of the step, S rows that sample, N a length of its own. In
`Tables`, an offset is an index into the arena.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import I32, BlockDiff, StepPlan, ranges
from moeserve.errors import ConfigError
from moeserve.ops.inputs import GroupInputs, Positions, StepInputs

I64 = NDArray[np.int64]
_INT32_MAX = 2**31 - 1


# Moves arrays to the device and returns contiguous tensors. The caller must not write to the arrays
# afterwards, because the tensors may share their memory.
Upload = Callable[..., tuple[Tensor, ...]]


def host_upload(*arrays: NDArray[Any]) -> tuple[Tensor, ...]:
    """Return the arrays as CPU tensors, without a copy if they are contiguous."""
    return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On the host, pages take memory only once they are written, unlike those of
    `torch.zeros`.
    """
    count = math.prod(shape)
    if device.type != "cpu" or count == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, count * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)


def scatter(arena: Tensor, upload: Upload, offsets_N: I64, values_N: I32) -> None:
    """Set arena[offsets] = values with one copy to the device. Offsets must be unique."""
    offsets, values = upload(offsets_N, values_N)
    arena.index_put_((offsets,), values)


Scatter = Callable[[Tensor, Upload, I64, I32], None]


class Tables:
    """The tables of `slots` requests with at most `max_len` tokens each."""

    def __init__(
        self,
        slots: int,
        max_len: int,
        groups: Sequence[KVGroup],
        device: torch.device,
        upload: Upload,
        scatter: Scatter = scatter,
    ) -> None:
        self.slots = slots
        # Tokens per slot. One more than max_len, because a step may be in flight that samples a
        # token after the last one of a request.
        self.width = max_len + 1
        self._upload = upload
        self._scatter = scatter
        self._max_blocks = [-(-self.width // group.block_size) for group in groups]
        # The offset of each table, and the size of the arena.
        starts = np.cumsum([0, slots * self.width, *(slots * n for n in self._max_blocks)])
        if starts[-1] > _INT32_MAX:
            raise ConfigError(
                f"max_num_seqs={slots} times max_model_len={max_len} needs request tables of "
                f"{starts[-1]:,} entries, but at most {_INT32_MAX:,} are possible. Lower one of "
                "the two."
            )
        self.arena = lazy_zeros((int(starts[-1]),), torch.int32, device)
        self._block_starts = [int(start) for start in starts[1:-1]]
        # The block table of each KV group: a view int32 [slots, max_blocks].
        self.blocks = tuple(
            self.arena[start : start + slots * n].view(slots, n)
            for start, n in zip(self._block_starts, self._max_blocks, strict=True)
        )
        # How many leading block-table entries of each slot were written. `add` zeroes them for the
        # next request.
        self._num_dirty = [np.zeros(slots, dtype=np.int64) for _ in groups]
        self._offsets: list[I64] = []
        self._values: list[I32] = []
        self._may_repeat = False  # whether an offset may be staged twice

    @property
    def tokens(self) -> Tensor:
        """The known tokens of each slot's request: an int32 view [slots, width]."""
        return self.arena[: self.slots * self.width].view(self.slots, self.width)

    def token_offsets(self, slots: NDArray[np.integer], positions: NDArray[np.integer]) -> I64:
        """Return the offsets in the arena of the tokens at (slot, position)."""
        return slots.astype(np.int64) * self.width + positions

    def add(self, slot: int, tokens: I32) -> None:
        """Stage the tokens of a new request in `slot`, and a block table of zeros."""
        assert 0 <= slot < self.slots, (slot, self.slots)
        assert len(tokens) <= self.width, (len(tokens), self.width)
        self._stage_run(slot * self.width, tokens)
        for start, max_blocks, num_dirty in zip(
            self._block_starts, self._max_blocks, self._num_dirty, strict=True
        ):
            if num_dirty[slot]:
                zeros = np.zeros(num_dirty[slot], dtype=np.int32)
                self._stage_run(start + slot * max_blocks, zeros)
                num_dirty[slot] = 0
        # `update` may write the same entries of the block table in this step.
        self._may_repeat = True

    def extend(self, slot: int, start: int, tokens: I32) -> None:
        """Stage tokens of a request from position `start` on."""
        self._stage_run(slot * self.width + start, tokens)

    def update(self, group: int, diff: BlockDiff) -> None:
        """Stage new block-table entries of one KV group."""
        if not len(diff.slots_N):
            return
        max_blocks = self._max_blocks[group]
        assert int(diff.indices_N.max()) < max_blocks, (int(diff.indices_N.max()), max_blocks)
        self._offsets.append(
            diff.slots_N.astype(np.int64) * max_blocks
            + (diff.indices_N + self._block_starts[group])
        )
        self._values.append(diff.blocks_N)
        np.maximum.at(self._num_dirty[group], diff.slots_N, diff.indices_N + 1)

    def apply(self) -> None:
        """Write everything staged since the last call to the device. The last write to an entry
        counts.
        """
        if not self._offsets:
            return
        offsets_N = np.concatenate(self._offsets)
        values_N = np.concatenate(self._values).astype(np.int32, copy=False)
        if self._may_repeat:
            offsets_N, values_N = _last_writes(offsets_N, values_N)
        self._offsets = []
        self._values = []
        self._may_repeat = False
        self._scatter(self.arena, self._upload, offsets_N, values_N)

    def append(self, offsets_N: Tensor, tokens_N: Tensor) -> None:
        """Write tokens (int32) at offsets from `token_offsets`, where the next step reads them."""
        self.arena.index_put_((offsets_N,), tokens_N)

    def _stage_run(self, start: int, values: I32) -> None:
        self._offsets.append(np.arange(start, start + len(values), dtype=np.int64))
        self._values.append(values)


def _last_writes(offsets_N: I64, values_N: I32) -> tuple[I64, I32]:
    """Drop all but the last value of each offset, because a scatter has no order.

    offsets [5, 6, 5], values [1, 2, 3] -> [5, 6], [3, 2]
    """
    kept_offsets, first_from_the_end = np.unique(offsets_N[::-1], return_index=True)
    return kept_offsets, values_N[::-1][first_from_the_end]


@dataclass(frozen=True, slots=True)
class HostRows:
    """The layout of one step's rows, on the host.

    Row i has the tokens offsets_R1[i] .. offsets_R1[i + 1] - 1. A row's drafts are its last tokens.
    A row that samples does so at each of its drafts and at the token before the first one, because
    each sampled token follows the token at which it is sampled.
    """

    offsets_R1: I32
    rows_T: I64 | None  # the row of each token; None: each row has one token
    positions_T: I64
    slots_T: I64
    sampling_rows_S: I64  # the rows that sample
    logits_indices_N: I64  # indices of the tokens at which these rows sample, row after row
    num_drafts_S: I32 | None  # the number of drafts of each such row; None: there are no drafts

    @classmethod
    def of(cls, plan: StepPlan) -> "HostRows":
        """Compute the layout of a plan with at least one row."""
        rows = len(plan.slots_R)
        offsets_R1 = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(plan.counts_R, out=offsets_R1[1:])
        num_tokens = int(offsets_R1[-1])
        sampling_rows_S = plan.samples_R.nonzero()[0]
        logits_indices_N = offsets_R1[sampling_rows_S + 1].astype(np.int64) - 1
        num_drafts_S = None
        if plan.num_drafts_R is not None:
            num_drafts_S = plan.num_drafts_R[sampling_rows_S]
            logits_indices_N = ranges(logits_indices_N - num_drafts_S, num_drafts_S + 1)
        rows_T: I64 | None = None
        slots_T = plan.slots_R.astype(np.int64)
        if num_tokens == rows:
            positions_T = plan.starts_R.astype(np.int64)
        else:
            rows_T = np.repeat(np.arange(rows, dtype=np.int64), plan.counts_R)
            positions_T = (
                np.arange(num_tokens, dtype=np.int64) + (plan.starts_R - offsets_R1[:-1])[rows_T]
            )
            slots_T = slots_T[rows_T]
        return cls(
            offsets_R1=offsets_R1,
            rows_T=rows_T,
            positions_T=positions_T,
            slots_T=slots_T,
            sampling_rows_S=sampling_rows_S,
            logits_indices_N=logits_indices_N,
            num_drafts_S=num_drafts_S,
        )


def prepare_inputs(
    plan: StepPlan,
    rows: HostRows,
    tables: Tables,
    groups: Sequence[KVGroup],
    upload: Upload,
    num_earlier_ids: int = 0,
) -> StepInputs:
    """Return the inputs of the forward pass of a plan with at least one row. The tables must be up
    to date (`Tables.apply`).

    num_earlier_ids: see `ModelSpec`.
    """
    longest = int((plan.starts_R + plan.counts_R).max())
    assert longest < tables.width, (longest, tables.width)  # the sampled token needs an entry, too
    arrays: list[NDArray[Any]] = [
        plan.starts_R,
        rows.offsets_R1,
        tables.token_offsets(rows.slots_T, rows.positions_T),
        rows.positions_T,
        rows.logits_indices_N,
        plan.slots_R.astype(np.int64),
    ]
    if rows.rows_T is not None:
        arrays.append(rows.rows_T)
    # One upload for all arrays, because each upload may cost a copy to the device.
    (
        starts_R,
        offsets_R1,
        arena_offsets_T,
        positions_T,
        logits_indices_N,
        slots_R,
        *optional_rows_T,
    ) = upload(*arrays)
    earlier_ids_TN = None
    if num_earlier_ids:
        earlier_ids_TN = _earlier_ids(tables, arena_offsets_T, positions_T, num_earlier_ids)
    return StepInputs(
        ids_T=tables.arena.index_select(0, arena_offsets_T).long(),
        positions=Positions.of_text(positions_T),
        groups=tuple(
            group_inputs(
                group,
                blocks,
                longest=longest,
                slots_R=slots_R,
                positions_T=positions_T,
                rows_T=optional_rows_T[0] if optional_rows_T else None,
            )
            for group, blocks in zip(groups, tables.blocks, strict=True)
        ),
        logits_indices_N=logits_indices_N,
        offsets_R1=rows.offsets_R1,
        starts_R=plan.starts_R,
        rows_on_device=(starts_R, offsets_R1),
        earlier_ids_TN=earlier_ids_TN,
    )


def _earlier_ids(
    tables: Tables, arena_offsets_T: Tensor, positions_T: Tensor, count: int
) -> Tensor:
    """Return the ids of the `count` tokens before each token, int64 [T, count], latest first.

    A request's tokens are adjacent in the arena. Before its beginning, ids are -1.
    """
    back_N = torch.arange(1, count + 1, device=positions_T.device)
    is_missing_TN = positions_T[:, None] < back_N
    offsets_TN = (arena_offsets_T[:, None] - back_N).masked_fill_(is_missing_TN, 0)
    ids_TN = tables.arena.index_select(0, offsets_TN.flatten()).view_as(offsets_TN).long()
    return ids_TN.masked_fill_(is_missing_TN, -1)


def group_inputs(
    group: KVGroup,
    blocks: Tensor,
    *,
    longest: int,
    slots_R: Tensor,
    positions_T: Tensor,
    rows_T: Tensor | None,
) -> GroupInputs:
    """Return the inputs of one KV group.

    blocks: the group's block table.
    longest: the number of positions of the longest row, with its context.
    slots_R: the request slot of each row.
    rows_T: the row of each token; None: each row has one token.
    """
    size = group.block_size
    num_blocks = -(-longest // size)
    blocks_RN = blocks[:, :num_blocks].index_select(0, slots_R).long()
    index_T = torch.div(positions_T, size, rounding_mode="floor")
    if rows_T is None:
        block_T = blocks_RN.gather(1, index_T.unsqueeze(1)).squeeze(1)
    else:
        block_T = blocks_RN.view(-1).index_select(0, rows_T * num_blocks + index_T)
    # slot_mapping_T has the KV slot of each token; these are not the request slots.
    slot_mapping_T = block_T * size + (positions_T - index_T * size)
    return GroupInputs(
        slot_mapping_T=slot_mapping_T,
        blocks_RN=blocks_RN,
        block_size=size,
        window=group.rule.window,
        chunk=group.rule.chunk,
        diffusion_block=group.rule.diffusion_block,
    )
