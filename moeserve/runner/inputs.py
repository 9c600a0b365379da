"""Builds `StepInputs` from a step plan and the tables: index arithmetic on the host, one upload, a few gathers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import I32, StepPlan
from moeserve.ops.inputs import GroupInputs, StepInputs
from moeserve.runner.tables import I64, Tables, Upload


@dataclass(frozen=True, slots=True)
class HostRows:
    """The layout of one step's rows, on the host. Row i owns tokens offsets_R1[i] .. offsets_R1[i+1]-1.

    rows_T is None for a step where every row has exactly one token (then token i belongs to row i).
    """

    offsets_R1: I32
    rows_T: I64 | None
    positions_T: I64
    slots_T: I64
    sampling_S: I64  # which rows sample
    sample_S: I64  # their last tokens

    @classmethod
    def of(cls, plan: StepPlan) -> HostRows:
        """Computes the layout of a plan with at least one row."""
        rows = len(plan.slots_R)
        offsets_R1 = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(plan.counts_R, out=offsets_R1[1:])
        num_tokens = int(offsets_R1[-1])
        sampling_S = plan.samples_R.nonzero()[0]
        sample_S = offsets_R1[sampling_S + 1].astype(np.int64) - 1
        if num_tokens == rows:
            positions_T, slots_T = plan.starts_R.astype(np.int64), plan.slots_R.astype(np.int64)
            return cls(offsets_R1, None, positions_T, slots_T, sampling_S, sample_S)
        rows_T = np.repeat(np.arange(rows, dtype=np.int64), plan.counts_R)
        positions_T = np.arange(num_tokens, dtype=np.int64) + (plan.starts_R - offsets_R1[:-1])[rows_T]
        return cls(offsets_R1, rows_T, positions_T, plan.slots_R.astype(np.int64)[rows_T], sampling_S, sample_S)


def prepare_inputs(
    plan: StepPlan, rows: HostRows, tables: Tables, groups: Sequence[KVGroup], upload: Upload
) -> StepInputs:
    """Returns the inputs of the forward pass of a plan with at least one row, once the tables have been applied."""
    longest = int((plan.starts_R + plan.counts_R).max())
    assert longest < tables.width, (longest, tables.width)  # the sampled token needs an entry, too
    where_T = tables.token_offsets(rows.slots_T, rows.positions_T)
    slots_R = plan.slots_R.astype(np.int64)
    arrays: list[NDArray[Any]] = [plan.starts_R, rows.offsets_R1, where_T, rows.positions_T, rows.sample_S, slots_R]
    if rows.rows_T is not None:
        arrays.append(rows.rows_T)
    starts, offsets, where, positions, sample, slots, *token_rows = upload(*arrays)
    return StepInputs(
        ids_T=tables.arena.index_select(0, where).long(),
        positions_T=positions,
        groups=tuple(
            _group_inputs(group, blocks, longest, slots, positions, token_rows[0] if token_rows else None)
            for group, blocks in zip(groups, tables.blocks, strict=True)
        ),
        sample_S=sample,
        offsets_R1=rows.offsets_R1,
        starts_R=plan.starts_R,
        rows_on_device=(starts, offsets),
    )


def _group_inputs(
    group: KVGroup, blocks: Tensor, longest: int, slots: Tensor, positions_T: Tensor, rows_T: Tensor | None
) -> GroupInputs:
    size = group.block_size
    num_blocks = -(-longest // size)
    blocks_RN = blocks[:, :num_blocks].index_select(0, slots).long()
    index_T = torch.div(positions_T, size, rounding_mode="floor")
    if rows_T is None:
        block_T = blocks_RN.gather(1, index_T.unsqueeze(1)).squeeze(1)
    else:
        block_T = blocks_RN.view(-1).index_select(0, rows_T * num_blocks + index_T)
    slot_mapping_T = block_T * size + (positions_T - index_T * size)
    return GroupInputs(slot_mapping_T, blocks_RN, size, group.window)
