"""Attention of a model that decodes blocks: a query sees all earlier tokens and its whole block.

The keys and values of a step are written before its queries read them. So a query that sees up to
the end of its block is an ordinary query at the last position of the block. Each query becomes a
row of its own, whose context ends there, for any kernels. Its sums have the order of an ordinary
query: bits depend on query and context alone.

Source: Block Diffusion (arXiv 2503.09573), SDAR (arXiv 2510.06303).
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.ops.inputs import GroupInputs, StepInputs


def queries_as_rows(group: GroupInputs, step: StepInputs) -> tuple[GroupInputs, StepInputs]:
    """Return a group and a step in which each token is a row that sees the block of the token.

    The rows of `step` must begin and end at borders of blocks.

    blocks of 4, a row of 4 tokens from position 8 -> four rows of a token, all at position 11
    """
    block = group.diffusion_block
    assert block is not None
    counts_R = np.diff(step.offsets_R1)
    assert not (step.starts_R % block).any(), step.starts_R
    assert not (counts_R % block).any(), counts_R
    # Of each block: its row, and its last position.
    blocks_R = counts_R // block
    num_before_R = np.cumsum(blocks_R) - blocks_R
    rows_N = np.repeat(np.arange(len(counts_R)), blocks_R)
    index_N = np.arange(len(rows_N)) - num_before_R[rows_N]  # in the row
    last_N = step.starts_R[rows_N] + (index_N + 1) * block - 1
    rows_T = np.repeat(rows_N, block)
    starts_T = np.repeat(last_N, block).astype(np.int32)
    offsets_T1 = np.arange(len(starts_T) + 1, dtype=np.int32)
    device = group.blocks_RN.device
    expanded = replace(
        step,
        starts_R=starts_T,
        offsets_R1=offsets_T1,
        rows_on_device=(_on(device, starts_T), _on(device, offsets_T1)),
    )
    blocks_TN = group.blocks_RN.index_select(0, _on(device, rows_T))
    return replace(group, blocks_RN=blocks_TN, diffusion_block=None), expanded


def _on(device: torch.device, array: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(array).to(device)
