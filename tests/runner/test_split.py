"""A step in two parts: every token keeps all that attention derives from its row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moeserve.engine.plan import best_split
from moeserve.ops.inputs import GroupInputs, Positions, StepInputs
from moeserve.runner.dbo import split


def random_step(rng: np.random.Generator) -> StepInputs:
    counts = rng.integers(1, 6, rng.integers(1, 6))
    total = int(counts.sum())
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    starts = rng.integers(0, 50, len(counts)).astype(np.int32)
    positions = np.concatenate(
        [start + np.arange(count) for start, count in zip(starts, counts, strict=True)]
    )
    groups = tuple(
        GroupInputs(
            torch.randint(0, 999, (total,)), torch.randint(1, 99, (len(counts), 3)), 16, window
        )
        for window in (None, 8)
    )
    return StepInputs(
        torch.randint(0, 99, (total,)),
        Positions.of_text(torch.from_numpy(positions)),
        groups,
        torch.arange(1),
        offsets,
        starts,
        (torch.from_numpy(starts), torch.from_numpy(offsets)),
        earlier_ids_TN=torch.randint(-1, 99, (total, 2)),
    )


def by_token(step: StepInputs) -> list[tuple[Any, ...]]:
    """Return for each token of a step all that attention derives from rows."""
    tokens: list[tuple[Any, ...]] = []
    for row, start in enumerate(step.starts_R.tolist()):
        for token in range(step.offsets_R1[row], step.offsets_R1[row + 1]):
            position = start + token - int(step.offsets_R1[row])
            assert position == int(step.positions.text_T[token])
            groups = [
                (
                    int(group.slot_mapping_T[token]),
                    group.blocks_RN[row].tolist(),
                    group.block_size,
                    group.window,
                )
                for group in step.groups
            ]
            assert step.earlier_ids_TN is not None
            earlier = step.earlier_ids_TN[token].tolist()
            tokens.append((int(step.ids_T[token]), position, earlier, groups))
    assert len(tokens) == len(step.ids_T) == step.offsets_R1[-1]
    return tokens


def test_split_loses_nothing() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        step = random_step(rng)
        for split_at in range(len(step.ids_T) + 1):
            first, second = split(step, split_at)
            assert by_token(first) + by_token(second) == by_token(step)
            assert len(first.ids_T) == split_at
            for part in (first, second):
                assert len(part.starts_R) == len(part.offsets_R1) - 1
                assert (np.diff(part.offsets_R1) > 0).all(), "a row without tokens"
                on_device = [(x.dtype, x.tolist()) for x in part.rows_on_device]
                assert on_device == [
                    (torch.int32, x.tolist()) for x in (part.starts_R, part.offsets_R1)
                ]
                assert all(len(group.blocks_RN) == len(part.starts_R) for group in part.groups)
        assert 0 <= best_split(np.diff(step.offsets_R1)) < len(step.ids_T)


def test_padding_is_split_as_well() -> None:
    """Only the device knows how many of the rows, of one token each, are real."""
    for tokens in range(1, 8):
        for real in range(tokens + 1):
            here = np.arange(tokens + 1, dtype=np.int32)
            on_device = (
                torch.arange(100, 100 + tokens, dtype=torch.int32),
                torch.from_numpy(here).clamp(max=real),
            )
            whole = StepInputs(
                torch.arange(tokens),
                Positions.of_text(torch.arange(tokens)),
                (),
                torch.arange(0),
                here,
                here[:-1] + 99,
                on_device,
                live=torch.tensor([real], dtype=torch.int32),
            )
            split_at = (tokens + 1) // 2
            parts = split(whole, split_at)
            lives = [int(part.live) for part in parts if part.live is not None]
            assert lives == [min(real, split_at), max(0, real - split_at)]
            seen: list[int] = []
            for part, live in zip(parts, lives, strict=True):
                starts_R, offsets_R1 = (x.tolist() for x in part.rows_on_device)
                assert offsets_R1 == [min(row, live) for row in range(len(part.ids_T) + 1)]
                seen += starts_R[:live]
            assert seen == list(range(100, 100 + real))
