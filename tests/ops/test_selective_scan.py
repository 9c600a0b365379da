"""The selective scan: against a scan in float64, in any chunks, over blocks, null blocks and
hostile values; the native one is close to the reference, and has the same bits on every instruction
set and any number of threads.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.ops import native_recurrence, recurrence
from moeserve.ops.inputs import GroupInputs, Positions, StepInputs
from moeserve.ops.recurrence import Caches
from moeserve.ops.rules import TILE
from moeserve.ops.selective_scan import selective_scan

from .isas import ISAS, MODULE, needs_native

pytestmark = pytest.mark.usefixtures("usual_native")
REFERENCE = SimpleNamespace(
    plan_tiles=recurrence.plan_tiles,
    causal_conv=recurrence.causal_conv,
    selective_scan=selective_scan,
)
by_kernels = pytest.mark.parametrize(
    "kernels",
    [REFERENCE, pytest.param(native_recurrence, marks=needs_native)],
    ids=["reference", "native"],
)
# 40 channels: no multiple of a vector
BLOCK = 32
CHANNELS = 40
STATE = 3
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
    rows = (
        (BLOCK // TILE, STATE, CHANNELS),
        (BLOCK, 1, CHANNELS),
        (BLOCK, 1, CHANNELS),
        (BLOCK, 1, STATE),
    )
    return tuple(torch.full((blocks, *shape), torch.nan) for shape in rows)


def step_of(rows: list[tuple[int, int, list[int]]]) -> tuple[GroupInputs, StepInputs]:
    """rows: first position, tokens and blocks of each request."""
    counts = [count for _, count, _ in rows]
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    none = torch.zeros(0, dtype=torch.int64)
    group = GroupInputs(none, torch.tensor([blocks for _, _, blocks in rows]), BLOCK, None)
    return group, StepInputs(
        none,
        Positions.of_text(none),
        (group,),
        none,
        offsets,
        np.array([s for s, _, _ in rows], np.int32),
        (none, none),
    )


def scan(kernels: Any, inputs: Inputs, caches: Caches, *rows: tuple[int, int, list[int]]) -> Tensor:
    x, dt, b, c = inputs
    y: Tensor = kernels.selective_scan(
        x, dt, A_NC, b, c, SKIP_C, caches, kernels.plan_tiles(*step_of(list(rows)))
    )
    return y


def in_chunks(
    kernels: Any, inputs: Inputs, caches: Caches, chunk: int, blocks: list[int]
) -> Tensor:
    parts = zip(*(part.split(chunk) for part in inputs), strict=True)
    return torch.cat(
        [
            scan(kernels, part, caches, (i * chunk, len(part[0]), blocks))
            for i, part in enumerate(parts)
        ]
    )


@by_kernels
def test_equals_a_scan_in_float64(kernels: Any) -> None:
    inputs = inputs_of(70)
    found = in_chunks(kernels, inputs, caches_of(), 70, [3, 1, 5])
    state = torch.zeros(STATE, CHANNELS).double()
    expected = []
    for x, dt, b, c in zip(*(part.double() for part in inputs), strict=True):
        state = (dt * A_NC).exp() * state + dt * b[:, None] * x
        expected.append((c[:, None] * state).sum(0) + SKIP_C * x)
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=1e-5, atol=1e-5)


@by_kernels
@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_chunks_do_not_matter(kernels: Any, chunk: int) -> None:
    inputs = inputs_of(70)
    expected = in_chunks(kernels, inputs, caches_of(), 70, [3, 1, 5])
    assert torch.equal(in_chunks(kernels, inputs, caches_of(), chunk, [2, 4, 1]), expected)


@by_kernels
def test_company_and_padding_do_not_matter_and_steps_may_run_again(kernels: Any) -> None:
    inputs = inputs_of(20)
    others = inputs_of(37, seed=1)
    expected = in_chunks(kernels, inputs, caches_of(), 20, [1])
    caches = caches_of()
    scan(kernels, tuple(part[:9] for part in inputs), caches, (0, 9, [2, 0]))  # type: ignore[arg-type]
    padding = inputs_of(5, seed=2)
    padding[0][:] = torch.nan
    both = tuple(
        torch.cat((mine[9:], other, pad))
        for mine, other, pad in zip(inputs, others, padding, strict=True)
    )
    for _ in range(2):
        found = scan(kernels, both, caches, (9, 11, [2, 0]), (0, 37, [4, 3]))  # type: ignore[arg-type]
        assert torch.equal(found[:11], expected[9:])
        assert not found[48:].any()


@by_kernels
def test_null_blocks_are_neither_read_nor_written(kernels: Any) -> None:
    """A prefill leaves only the needed states.

    Those of all tiles but the last ones are continued by hand.
    """
    inputs = inputs_of(70)
    caches = caches_of()
    found = in_chunks(kernels, inputs, caches, 70, [0, 0, 5])
    assert torch.equal(found, in_chunks(kernels, inputs, caches_of(), 70, [3, 1, 5]))
    assert all(cache[:5].isnan().all() for cache in caches)


@by_kernels
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, -0.0, 1e38])
def test_hostile_values_stay_in_their_channel(kernels: Any, value: float) -> None:
    inputs = inputs_of(40)
    hostile = inputs_of(40)
    hostile[0][3, 7] = value
    found, expected = (
        in_chunks(kernels, each, caches_of(), 11, [1, 2]) for each in (hostile, inputs)
    )
    others = torch.arange(CHANNELS) != 7
    assert torch.equal(found[:, others], expected[:, others])
    assert torch.equal(found[:3], expected[:3])


@by_kernels
@pytest.mark.parametrize("share", [1, 8, 20, 24])
def test_a_share_of_the_channels_has_the_same_bits(kernels: Any, share: int) -> None:
    """This includes the convolution.

    torch computes its SiLU differently at the end of a row.
    """
    x, dt, b, c = inputs_of(40)
    plan = kernels.plan_tiles(*step_of([(0, 40, [1, 2])]))
    weight = torch.randn(CHANNELS, 4, generator=torch.Generator().manual_seed(3))
    kept = slice(0, share)

    def run(part: slice) -> Tensor:
        width = len(SKIP_C[part])
        caches = tuple(torch.zeros(8, n, 1, width) for n in (BLOCK, 1, BLOCK // TILE, BLOCK, BLOCK))
        conv = caches[0], torch.zeros(8, BLOCK // TILE, 3, width)
        y = kernels.causal_conv(x[:, part], weight[part], None, True, conv, plan)
        states = torch.zeros(8, BLOCK // TILE, STATE, width)
        rows = states, caches[3], caches[4], torch.zeros(8, BLOCK, 1, STATE)
        return kernels.selective_scan(y, dt[:, part], A_NC[:, part], b, c, SKIP_C[part], rows, plan)

    assert torch.equal(run(kept), run(slice(None))[:, kept])


@needs_native
def test_native_bits_are_those_of_any_instruction_set_and_threads() -> None:
    """They are close to the reference's; subnormal numbers count as zero."""
    # so that threads share channels
    state = 5
    width = 8300
    random = torch.Generator().manual_seed(5)
    x, dt = (torch.randn(70, width, generator=random) for _ in range(2))
    b, c = (torch.randn(70, state, generator=random) for _ in range(2))
    a = -torch.rand(state, width, generator=random) * 90
    skip = torch.randn(width, generator=random)
    x[3, 7] = torch.nan
    x[5, 8] = torch.inf
    x[2, 9] = 1e-42
    dt[3, 10] = torch.inf

    def run(kernels: Any) -> list[Tensor]:
        caches = tuple(torch.zeros(8, *shape) for shape in (
            (BLOCK // TILE, state, width), (BLOCK, 1, width), (BLOCK, 1, width), (BLOCK, 1, state)
        ))  # fmt: skip
        found = []
        for start, stop in ((0, 40), (40, 41), (41, 70)):
            plan = kernels.plan_tiles(*step_of([(start, stop - start, [3, 1, 5])]))
            part = slice(start, stop)
            found.append(
                kernels.selective_scan(
                    x[part], dt[part].abs(), a, b[part], c[part], skip, caches, plan
                )
            )
        return [torch.cat(found), *caches]

    expected = run(REFERENCE)
    found = []
    for isa in ISAS:
        MODULE.use_isa(isa)
        for threads in (1, 2, 3):
            MODULE.set_threads([-1] * threads)
            found.append(run(native_recurrence))
            for ours, theirs in zip(found[-1], found[0], strict=True):
                assert torch.equal(ours.nan_to_num(7e7), theirs.nan_to_num(7e7)), (isa, threads)
    for ours, theirs in zip(found[0], expected, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        torch.testing.assert_close(
            ours.nan_to_num(0, 0, 0), theirs.nan_to_num(0, 0, 0), rtol=1e-5, atol=1e-5
        )
