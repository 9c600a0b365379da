"""The selected groups of tokens against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeserve.ops.inputs import GroupInputs, Positions, StepInputs
from moeserve.ops.pick import pick_ops
from moeserve.ops.selected import plan_selection
from moeserve.ops.selected_groups import select_groups

BLOCK = 16
HEADS = 3
DIM = 8


def naive(q_Jd: torch.Tensor, keys_Gd: torch.Tensor, position: int, group: int, count: int) -> list:
    """Return the positions that a query sees."""
    complete = (position + 1) // group
    scores = (q_Jd @ keys_Gd[:complete].T).relu().sum(0).tolist()
    best = sorted(sorted(range(complete), key=lambda g: (-scores[g], g))[:count])
    tokens = [g * group + i for g in best for i in range(group)]
    return [*tokens, *range(complete * group, position + 1)]


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_groups_and_the_incomplete_one(group: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_groups = 5
    top_k = num_groups * group + group - 1
    starts = np.array([0, 70, 33, 2], np.int32)
    counts = np.array([40, 3, 40, 1], np.int32)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    blocks = torch.randperm(4 * 6, generator=generator).view(4, 6)
    step = StepInputs(
        ids_T=torch.zeros(int(counts.sum()), dtype=torch.int64),
        positions=Positions.of_text(torch.zeros(int(counts.sum()), dtype=torch.int64)),
        groups=(),
        logits_indices_N=torch.zeros(0, dtype=torch.int64),
        offsets_R1=offsets,
        starts_R=starts,
        rows_on_device=(torch.from_numpy(starts), torch.from_numpy(offsets)),
    )
    inputs = GroupInputs(step.ids_T, blocks, BLOCK)
    selection = plan_selection(inputs, step, top_k)
    assert selection is not None
    keys = torch.randn(24 * BLOCK // group, DIM, generator=generator)
    queries = torch.randn(len(selection.tokens_S), HEADS, DIM, generator=generator)
    cache = keys.view(24, BLOCK, 1, DIM // group) if DIM % group == 0 else keys
    ops = pick_ops("cpu", torch.float32, "torch")
    slots = select_groups(queries, cache, selection, group, ops.pack_heads)
    assert slots.shape == (len(queries), top_k)
    for query, row, position, found in zip(
        queries, selection.rows_S.tolist(), selection.positions_S.tolist(), slots, strict=True
    ):
        slot_of = [int(blocks[row, p // BLOCK]) * BLOCK + p % BLOCK for p in range(position + 1)]
        keys_Gd = keys[torch.tensor(slot_of[::group]) // group]
        expected = naive(query, keys_Gd, position, group, num_groups)
        assert found[: len(expected)].tolist() == [slot_of[p] for p in expected]
        assert set(found[len(expected) :].tolist()) <= {slot_of[position]}
