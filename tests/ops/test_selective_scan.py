"""The selective scan: against a scan in float64, in any chunks, over blocks, null blocks and hostile values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.ops.inputs import GroupInputs, StepInputs
from moeserve.ops.recurrence import Caches, causal_conv, plan_tiles
from moeserve.ops.rules import TILE
from moeserve.ops.selective_scan import selective_scan

BLOCK, CHANNELS, STATE = 32, 40, 3  # 40 channels: no multiple of a vector
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # x, dt, B, C of tokens


def inputs_of(tokens: int, seed: int = 0) -> Inputs:
    random = torch.Generator().manual_seed(seed)
    x, dt = (torch.randn(tokens, CHANNELS, generator=random) for _ in range(2))
    b, c = (torch.randn(tokens, STATE, generator=random) for _ in range(2))
    return x, dt.abs(), b, c


A_NC = -torch.linspace(0.1, 2.0, STATE * CHANNELS).view(STATE, CHANNELS)
SKIP_C = torch.linspace(-1, 1, CHANNELS)


def caches_of(blocks: int = 8) -> Caches:
    """Caches full of NaN, which nothing may read."""
    rows = ((BLOCK // TILE, STATE, CHANNELS), (BLOCK, 1, CHANNELS), (BLOCK, 1, CHANNELS), (BLOCK, 1, STATE))
    return tuple(torch.full((blocks, *shape), torch.nan) for shape in rows)


def step_of(rows: list[tuple[int, int, list[int]]]) -> tuple[GroupInputs, StepInputs]:
    """rows: first position, tokens and blocks of each request."""
    counts = [count for _, count, _ in rows]
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    none = torch.zeros(0, dtype=torch.int64)
    group = GroupInputs(none, torch.tensor([blocks for _, _, blocks in rows]), BLOCK, None)
    return group, StepInputs(
        none, none, (group,), none, offsets, np.array([s for s, _, _ in rows], np.int32), (none, none)
    )


def scan(inputs: Inputs, caches: Caches, *rows: tuple[int, int, list[int]]) -> Tensor:
    x, dt, b, c = inputs
    return selective_scan(x, dt, A_NC, b, c, SKIP_C, caches, plan_tiles(*step_of(list(rows))))


def in_chunks(inputs: Inputs, caches: Caches, chunk: int, blocks: list[int]) -> Tensor:
    parts = zip(*(part.split(chunk) for part in inputs), strict=True)
    return torch.cat([scan(part, caches, (i * chunk, len(part[0]), blocks)) for i, part in enumerate(parts)])


def test_equals_a_scan_in_float64() -> None:
    inputs = inputs_of(70)
    found = in_chunks(inputs, caches_of(), 70, [3, 1, 5])
    state, expected = torch.zeros(STATE, CHANNELS).double(), []
    for x, dt, b, c in zip(*(part.double() for part in inputs), strict=True):
        state = (dt * A_NC).exp() * state + dt * b[:, None] * x
        expected.append((c[:, None] * state).sum(0) + SKIP_C * x)
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_chunks_do_not_matter(chunk: int) -> None:
    inputs = inputs_of(70)
    expected = in_chunks(inputs, caches_of(), 70, [3, 1, 5])
    assert torch.equal(in_chunks(inputs, caches_of(), chunk, [2, 4, 1]), expected)


def test_company_and_padding_do_not_matter_and_steps_may_run_again() -> None:
    inputs, others = inputs_of(20), inputs_of(37, seed=1)
    expected = in_chunks(inputs, caches_of(), 20, [1])
    caches = caches_of()
    scan(tuple(part[:9] for part in inputs), caches, (0, 9, [2, 0]))  # type: ignore[arg-type]
    padding = inputs_of(5, seed=2)
    padding[0][:] = torch.nan
    both = tuple(torch.cat((mine[9:], other, pad)) for mine, other, pad in zip(inputs, others, padding, strict=True))
    for _ in range(2):
        found = scan(both, caches, (9, 11, [2, 0]), (0, 37, [4, 3]))  # type: ignore[arg-type]
        assert torch.equal(found[:11], expected[9:])
        assert not found[48:].any()


def test_null_blocks_are_neither_read_nor_written() -> None:
    """As a prefill leaves behind only what is needed: the states of all tiles but the last ones go on by hand."""
    inputs = inputs_of(70)
    caches = caches_of()
    found = in_chunks(inputs, caches, 70, [0, 0, 5])
    assert torch.equal(found, in_chunks(inputs, caches_of(), 70, [3, 1, 5]))
    assert all(cache[:5].isnan().all() for cache in caches)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, -0.0, 1e38])
def test_hostile_values_stay_in_their_channel(value: float) -> None:
    inputs, hostile = inputs_of(40), inputs_of(40)
    hostile[0][3, 7] = value
    found, expected = (in_chunks(each, caches_of(), 11, [1, 2]) for each in (hostile, inputs))
    others = torch.arange(CHANNELS) != 7
    assert torch.equal(found[:, others], expected[:, others])
    assert torch.equal(found[:3], expected[:3])


@pytest.mark.parametrize("share", [1, 8, 20, 24])
def test_a_share_of_the_channels_has_the_same_bits(share: int) -> None:
    """Also those of the convolution, whose SiLU torch computes otherwise at the end of a row."""
    x, dt, b, c = inputs_of(40)
    plan = plan_tiles(*step_of([(0, 40, [1, 2])]))
    weight, kept = torch.randn(CHANNELS, 4, generator=torch.Generator().manual_seed(3)), slice(0, share)

    def run(part: slice) -> Tensor:
        width = len(SKIP_C[part])
        caches = tuple(torch.zeros(8, n, 1, width) for n in (BLOCK, 1, BLOCK // TILE, BLOCK, BLOCK))
        conv = caches[0], torch.zeros(8, BLOCK // TILE, 3, width)
        y = causal_conv(x[:, part], weight[part], None, True, conv, plan)
        states = torch.zeros(8, BLOCK // TILE, STATE, width)
        rows = states, caches[3], caches[4], torch.zeros(8, BLOCK, 1, STATE)
        return selective_scan(y, dt[:, part], A_NC[:, part], b, c, SKIP_C[part], rows, plan)

    assert torch.equal(run(kept), run(slice(None))[:, kept])
