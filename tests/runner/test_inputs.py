"""Prepared inputs equal those of plain loops over the plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeserve.engine.blocks import KVGroup
from moeserve.engine.kv_rule import KVRule
from moeserve.engine.plan import BlockDiff, StepPlan
from moeserve.runner.gpu import RingUpload
from moeserve.runner.tables import HostRows, Tables, Upload, host_upload, prepare_inputs

CPU = torch.device("cpu")
GROUPS = (KVGroup(KVRule(), 4, (0,)), KVGroup(KVRule(8), 4, (1,)))


@pytest.mark.parametrize(
    "upload", [host_upload, RingUpload(CPU, 3, pinned=False)], ids=["host", "ring"]
)
@pytest.mark.parametrize("counts", ["mixed", "ones", "threes"])
@pytest.mark.parametrize("seed", range(6))
def test_inputs_match_naive_loops(upload: Upload, counts: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = 9
    max_len = 40
    tables = Tables(slots, max_len, GROUPS, CPU, upload)
    tokens = rng.integers(0, 1000, (slots, max_len)).astype(np.int32)
    blocks = (
        rng.permutation(np.arange(1, 1 + 2 * slots * 10)).reshape(2, slots, 10).astype(np.int32)
    )
    for slot in range(slots):
        tables.add(slot, tokens[slot])
    for group in range(2):
        s, i = np.mgrid[:slots, :10].astype(np.int32).reshape(2, -1)
        tables.update(group, BlockDiff(s, i, blocks[group].reshape(-1)))
    tables.apply()

    rows = int(rng.integers(1, slots + 1))
    counts_R = {
        "mixed": rng.integers(1, 15, rows),
        "ones": np.ones(rows),
        "threes": np.full(rows, 3),
    }[counts]
    plan = StepPlan(
        step=1,
        slots_R=rng.choice(slots, rows, replace=False).astype(np.int32),
        starts_R=rng.integers(0, 25, rows).astype(np.int32),
        counts_R=counts_R.astype(np.int32),
        samples_R=rng.random(rows) < 0.6,
        diffs=(),
    )
    host = HostRows.of(plan)
    step = prepare_inputs(plan, host, tables, GROUPS, upload, num_earlier_ids=3)

    ids = []
    earlier_ids = []
    positions = []
    sample = []
    entries = ([], [])
    offset = 0
    longest = int((plan.starts_R + plan.counts_R).max())
    for slot, start, count, samples in zip(
        plan.slots_R, plan.starts_R, plan.counts_R, plan.samples_R, strict=True
    ):
        for position in range(start, start + count):
            ids.append(int(tokens[slot, position]))
            before = tokens[slot, max(0, position - 3) : position][::-1].tolist()
            earlier_ids.append(before + [-1] * (3 - len(before)))
            positions.append(position)
            for group in range(2):
                entries[group].append(int(blocks[group, slot, position // 4]) * 4 + position % 4)
        offset += int(count)
        if samples:
            sample.append(offset - 1)
    assert step.ids_T.tolist() == ids
    assert step.earlier_ids_TN is not None
    assert step.earlier_ids_TN.tolist() == earlier_ids
    assert prepare_inputs(plan, host, tables, GROUPS, upload).earlier_ids_TN is None
    assert step.positions.text_T.tolist() == positions
    assert step.logits_indices_N.tolist() == sample
    assert step.offsets_R1.tolist() == [0, *np.cumsum(plan.counts_R)]
    for group, inputs in enumerate(step.groups):
        assert inputs.slot_mapping_T.tolist() == entries[group]
        assert inputs.blocks_RN.tolist() == blocks[group][plan.slots_R, : -(-longest // 4)].tolist()
        assert (inputs.block_size, inputs.window) == (
            GROUPS[group].block_size,
            GROUPS[group].rule.window,
        )
        assert (
            inputs.slot_mapping_T.dtype == inputs.blocks_RN.dtype == step.ids_T.dtype == torch.int64
        )


def test_a_token_sampled_into_the_table_is_the_next_steps_input() -> None:
    tables = Tables(2, 10, GROUPS[:1], CPU, host_upload)
    tables.add(1, np.array([5, 6], dtype=np.int32))
    tables.apply()
    tables.append(
        torch.from_numpy(tables.token_offsets(np.array([1]), np.array([2]))),
        torch.tensor([7]).int(),
    )
    one = np.array([1], dtype=np.int32)
    plan = StepPlan(1, one, 2 * one, one, one.astype(bool), ())
    assert prepare_inputs(
        plan, HostRows.of(plan), tables, GROUPS[:1], host_upload
    ).ids_T.tolist() == [7]
