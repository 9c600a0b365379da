"""Request tables: one int32 arena on the device, written by staged diffs; and the inputs of a step,
gathered from it.

    tokens  [slots, width]      prompt and answer of each slot's request; the sampler appends here
    blocks  [slots, max_blocks] per KV group: its block table

The host never reads the arena, so the step after this one may be planned before this one's tokens
are known. The host stages (offset, value) pairs, and `apply` sends all of a step's pairs in one
copy and one scatter.

Only an `Upload` knows whether a copy is needed. On CPUs host memory is device memory: arrays are
wrapped as they are.
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


# Moves arrays to the device: returns contiguous tensors; the caller must not write to the arrays
# afterwards.
Upload = Callable[..., tuple[Tensor, ...]]


def host_upload(*arrays: NDArray[Any]) -> tuple[Tensor, ...]:
    """Return the arrays as CPU tensors, without a copy unless an array has gaps."""
    return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on the host they take memory only where they are touched (`torch.zeros` writes
    every page).
    """
    count = math.prod(shape)
    if device.type != "cpu" or count == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, count * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)


def scatter(arena: Tensor, upload: Upload, offsets_N: I64, values_N: I32) -> None:
    """Set arena[offsets] = values with one copy to the device; offsets are unique."""
    offsets, values = upload(offsets_N, values_N)
    arena.index_put_((offsets,), values)


Scatter = Callable[[Tensor, Upload, I64, I32], None]


class Tables:
    """Tables of `slots` requests with at most `max_len` tokens each.

    Attributes: `arena` int32 [everything]; `blocks` one int32 view [slots, max_blocks] per KV
    group; `width`, the tokens per slot (max_len + 1: a step may be in flight past the last token
    that will ever be used).
    """

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
        self.width = max_len + 1
        self._upload = upload
        self._scatter = scatter
        self._max_blocks = [-(-self.width // group.block_size) for group in groups]
        starts = np.cumsum([0, slots * self.width, *(slots * n for n in self._max_blocks)])
        if starts[-1] > _INT32_MAX:
            raise ConfigError(
                f"max_num_seqs={slots} times max_model_len={max_len} needs request tables "
                f"of {starts[-1]:,} entries; "
                f"at most {_INT32_MAX:,} fit. Lower one of the two."
            )
        self.arena = lazy_zeros((int(starts[-1]),), torch.int32, device)
        self._block_starts = [int(start) for start in starts[1:-1]]
        self.blocks = tuple(
            self.arena[start : start + slots * n].view(slots, n)
            for start, n in zip(self._block_starts, self._max_blocks, strict=True)
        )
        # How many leading entries of a block-table row may be non-zero: what a new request must
        # clear.
        self._dirty = [np.zeros(slots, dtype=np.int64) for _ in groups]
        self._offsets: list[I64] = []
        self._values: list[I32] = []
        self._may_repeat = False

    @property
    def tokens(self) -> Tensor:
        """The known tokens of each slot's request: an int32 view [slots, width]."""
        return self.arena[: self.slots * self.width].view(self.slots, self.width)

    def token_offsets(self, slots: NDArray[np.integer], positions: NDArray[np.integer]) -> I64:
        """Return where in the arena the token at each (slot, position) lies."""
        return slots.astype(np.int64) * self.width + positions

    def add(self, slot: int, tokens: I32) -> None:
        """Stage a new request in `slot`: its tokens, and a block table of zeros."""
        assert 0 <= slot < self.slots, (slot, self.slots)
        assert len(tokens) <= self.width, (len(tokens), self.width)
        self._stage_run(slot * self.width, tokens)
        for start, row, dirty in zip(
            self._block_starts, self._max_blocks, self._dirty, strict=True
        ):
            if dirty[slot]:
                self._stage_run(start + slot * row, np.zeros(dirty[slot], dtype=np.int32))
                dirty[slot] = 0
        self._may_repeat = True

    def update(self, group: int, diff: BlockDiff) -> None:
        """Stage new block-table entries of one KV group."""
        if not len(diff.slots_N):
            return
        row = self._max_blocks[group]
        assert int(diff.indices_N.max()) < row, (int(diff.indices_N.max()), row)
        self._offsets.append(
            diff.slots_N.astype(np.int64) * row + (diff.indices_N + self._block_starts[group])
        )
        self._values.append(diff.blocks_N)
        np.maximum.at(self._dirty[group], diff.slots_N, diff.indices_N + 1)

    def apply(self) -> None:
        """Write everything staged since the last call to the device; later writes to the same
        entry win.
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
        """Write tokens (int32) at arena offsets from `token_offsets`: the next step reads them
        there.
        """
        self.arena.index_put_((offsets_N,), tokens_N)

    def _stage_run(self, start: int, values: I32) -> None:
        self._offsets.append(np.arange(start, start + len(values), dtype=np.int64))
        self._values.append(values)


def _last_writes(offsets_N: I64, values_N: I32) -> tuple[I64, I32]:
    """Drop all but the last value for each offset: a scatter has no order.

    offsets [5, 6, 5], values [1, 2, 3] -> [5, 6], [3, 2]
    """
    kept_offsets, first_from_the_end = np.unique(offsets_N[::-1], return_index=True)
    return kept_offsets, values_N[::-1][first_from_the_end]


@dataclass(frozen=True, slots=True)
class HostRows:
    """The layout of one step's rows, on the host. Row i owns tokens offsets_R1[i] ..
    offsets_R1[i+1]-1.

    rows_T is None for a step where every row has exactly one token (then token i belongs to row i).
    S rows sample, at N tokens: each at its last one and, before its drafts, at as many others.
    """

    offsets_R1: I32
    rows_T: I64 | None
    positions_T: I64
    slots_T: I64
    sampling_S: I64  # which rows sample
    sample_N: I64  # at which tokens
    drafts_S: I32 | None  # how many drafts each of them has; None: there are none in this step

    @classmethod
    def of(cls, plan: StepPlan) -> "HostRows":
        """Compute the layout of a plan with at least one row."""
        rows = len(plan.slots_R)
        offsets_R1 = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(plan.counts_R, out=offsets_R1[1:])
        num_tokens = int(offsets_R1[-1])
        sampling_S = plan.samples_R.nonzero()[0]
        sample_N = offsets_R1[sampling_S + 1].astype(np.int64) - 1
        drafts_S = None
        if plan.num_drafts_R is not None:
            drafts_S = plan.num_drafts_R[sampling_S]
            sample_N = ranges(sample_N - drafts_S, drafts_S + 1)
        if num_tokens == rows:
            positions_T = plan.starts_R.astype(np.int64)
            slots_T = plan.slots_R.astype(np.int64)
            return cls(offsets_R1, None, positions_T, slots_T, sampling_S, sample_N, drafts_S)
        rows_T = np.repeat(np.arange(rows, dtype=np.int64), plan.counts_R)
        positions_T = (
            np.arange(num_tokens, dtype=np.int64) + (plan.starts_R - offsets_R1[:-1])[rows_T]
        )
        slots_T = plan.slots_R.astype(np.int64)[rows_T]
        return cls(offsets_R1, rows_T, positions_T, slots_T, sampling_S, sample_N, drafts_S)


def prepare_inputs(
    plan: StepPlan, rows: HostRows, tables: Tables, groups: Sequence[KVGroup], upload: Upload
) -> StepInputs:
    """Return the inputs of the forward pass of a plan with at least one row, once the tables have
    been applied.
    """
    longest = int((plan.starts_R + plan.counts_R).max())
    assert longest < tables.width, (longest, tables.width)  # the sampled token needs an entry, too
    where_T = tables.token_offsets(rows.slots_T, rows.positions_T)
    slots_R = plan.slots_R.astype(np.int64)
    arrays: list[NDArray[Any]] = [
        plan.starts_R,
        rows.offsets_R1,
        where_T,
        rows.positions_T,
        rows.sample_N,
        slots_R,
    ]
    if rows.rows_T is not None:
        arrays.append(rows.rows_T)
    starts, offsets, where, positions, sample, slots, *token_rows = upload(*arrays)
    return StepInputs(
        ids_T=tables.arena.index_select(0, where).long(),
        positions=Positions.of_text(positions),
        groups=tuple(
            group_inputs(
                group, blocks, longest, slots, positions, token_rows[0] if token_rows else None
            )
            for group, blocks in zip(groups, tables.blocks, strict=True)
        ),
        sample_N=sample,
        offsets_R1=rows.offsets_R1,
        starts_R=plan.starts_R,
        rows_on_device=(starts, offsets),
    )


def group_inputs(
    group: KVGroup,
    blocks: Tensor,
    longest: int,
    slots: Tensor,
    positions_T: Tensor,
    rows_T: Tensor | None,
) -> GroupInputs:
    """Return the inputs of one KV group. blocks: its table. longest: positions that any row
    reaches. slots: of the rows. rows_T: the row of each token; None where each row has one."""
    size = group.block_size
    num_blocks = -(-longest // size)
    blocks_RN = blocks[:, :num_blocks].index_select(0, slots).long()
    index_T = torch.div(positions_T, size, rounding_mode="floor")
    if rows_T is None:
        block_T = blocks_RN.gather(1, index_T.unsqueeze(1)).squeeze(1)
    else:
        block_T = blocks_RN.view(-1).index_select(0, rows_T * num_blocks + index_T)
    slot_mapping_T = block_T * size + (positions_T - index_T * size)
    return GroupInputs(slot_mapping_T, blocks_RN, size, group.rule.window, group.rule.chunk)
