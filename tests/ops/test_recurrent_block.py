"""Gated delta nets and Mamba-2 in one native call.

They are close to layers of separate steps in plain torch. Bits are the same in chunks, in any
batch, beside padding, on every instruction set, and with any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.gated_delta import GatedDelta
from moeserve.blocks.gated_delta_layer import GatedDeltaLayer
from moeserve.blocks.kinds import build_mixer
from moeserve.blocks.mamba2 import Mamba2
from moeserve.blocks.mamba2_layer import Mamba2Layer
from moeserve.comm.tensor import ALONE
from moeserve.comm.world import World
from moeserve.moe.placement.placement import Placement
from moeserve.ops.inputs import RowContext
from moeserve.ops.pick import pick_ops
from moeserve.ops.probe import host_step
from moeserve.ops.rules import TILE
from moeserve.ops.table import Ops

from .isas import ISAS, MODULE, needs_native
from .test_recurrence import CHUNKS, LENGTHS, cached, equal, steps, tables, values

pytestmark = [needs_native, pytest.mark.usefixtures("usual_native")]
WIDTH = 24
SIZE = 32
KINDS: dict[str, GatedDelta | Mamba2] = {
    "gated delta": GatedDelta(
        num_k_heads=2,
        num_v_heads=4,
        k_dim=19,
        v_dim=40,
        conv=4,
        inputs_by_head=False,
        gates_by_head=False,
    ),
    "one group": Mamba2(
        num_heads=3, num_groups=1, state_dim=24, head_dim=17, conv=4, time_limit=(0.0, float("inf"))
    ),
    "two groups": Mamba2(
        num_heads=4, num_groups=2, state_dim=16, head_dim=32, conv=3, time_limit=(0.3, 0.9)
    ),
}
by_kind = pytest.mark.parametrize("kind", KINDS)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def layer(kind: str, ops: Ops, **other: Tensor) -> GatedDeltaLayer | Mamba2Layer:
    """A layer with the same weights whatever the operations; some of its heads decay by e^-50 and
    more in a token.

    other: parameters in place of the usual ones.
    """
    spec = KINDS[kind]

    def weight(columns: int, width: int, seed: int) -> Tensor:
        return (values(columns, width, seed=seed) * width**-0.5).to(ops.dtype)

    if isinstance(spec, GatedDelta):
        _, heads, qk, v = spec.local(1)
        channels = qk + v
        columns = qk + 2 * v
        norm = spec.v_dim
        own = {"gates": weight(2 * heads, WIDTH, 2)}
    else:
        _, heads, v, shared = spec.local(1)
        channels = v + 2 * shared
        columns = 2 * (v + shared) + heads
        norm = v
        own = {"conv_bias": values(channels, seed=7), "skip": values(heads, seed=8)}
    params: dict[str, Any] = own | {
        "in": weight(columns, WIDTH, 1), "conv": values(channels, spec.conv, seed=3)[:, None],
        "decay": torch.logspace(-3, 2, heads).log(), "dt_bias": values(heads, seed=4),
        "norm": 1 + values(norm, seed=5), "out": weight(WIDTH, v, 6), **other,
    }  # fmt: skip
    placement = Placement.initial(0, 1, 1)
    build = Builder(WIDTH, 1e-6, SIZE, params, ops, World(), ALONE, placement, plan_moe=pytest.fail)
    built = build_mixer(spec, build, "", 0)
    assert isinstance(built, GatedDeltaLayer | Mamba2Layer)
    assert not params
    return built


def caches_of(kind: str, num_blocks: int) -> tuple[Tensor, ...]:
    """The caches of a layer's convolution and recurrence, full of NaN but for the null block."""
    parts = [
        cached(
            num_blocks, SIZE, rows=(tensor.heads, tensor.width), tiles=(tensor.heads, tensor.width)
        )[tensor.per_tile]
        for tensor in KINDS[kind].cache(1)
    ]
    assert [part.shape[1] for part in parts[:3]] == [SIZE, SIZE // TILE, SIZE // TILE]
    return tuple(parts)


def run(
    kind: str, ops: Ops, lengths: Sequence[int], chunks: Sequence[int], *, padding: int = 0,
    spoilt: int | None = None, first: int = 0,
) -> list[Tensor]:  # fmt: skip
    """Return each request's outputs and then the caches, computed in steps from strided rows.

    `spoilt` is a token of the first request that is NaN, and `first` is that request's seed.
    """
    block = layer(kind, ops)
    x = [
        values(length, WIDTH, seed=20 + first + i).to(ops.dtype) for i, length in enumerate(lengths)
    ]
    if spoilt is not None:
        x[0][spoilt] = torch.nan
    blocks = tables(lengths, SIZE)
    caches = caches_of(kind, int(blocks.max()) + 1)
    out = [list[Tensor]() for _ in lengths]
    for starts, counts in steps(lengths, chunks):
        offsets = [0, *torch.tensor(counts).cumsum(0).tolist()]
        plan = ops.plan_tiles(*host_step(blocks, SIZE, starts, offsets))
        wide = torch.full((offsets[-1] + padding, WIDTH + 8), torch.nan, dtype=ops.dtype)
        wide[: offsets[-1], 8:] = torch.cat(
            [x[i][s : s + n] for i, (s, n) in enumerate(zip(starts, counts, strict=True))]
        )
        y_TD = block(wide[:, 8:], plan, caches, RowContext(len(wide)))
        for request_out, part in zip(out, y_TD[: offsets[-1]].split(counts), strict=True):
            request_out.append(part)
    return [*(torch.cat(parts) for parts in out), *caches]


@by_kind
@by_dtype
def test_it_is_the_layer_of_separate_steps(kind: str, dtype: torch.dtype) -> None:
    ours, theirs = (
        run(kind, pick_ops("cpu", dtype, name), LENGTHS, (64,)) for name in ("native", "torch")
    )
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    for mine, reference in zip(ours, theirs, strict=True):
        assert torch.equal(mine.isnan(), reference.isnan())
        mine = mine.nan_to_num().double()
        reference = reference.nan_to_num().double()
        assert (mine - reference).abs().max() <= tolerance * reference.abs().max()


@by_kind
@by_dtype
def test_bits_depend_on_the_request_alone(kind: str, dtype: torch.dtype) -> None:
    ops = pick_ops("cpu", dtype, "native")
    whole = run(kind, ops, LENGTHS, (64,))
    for chunks in CHUNKS[1:]:
        assert equal(run(kind, ops, LENGTHS, chunks, padding=3), whole), chunks
    for i, length in enumerate(LENGTHS):
        assert equal(run(kind, ops, [length], (9,), first=i)[:1], whole[i : i + 1])
    spoilt = run(kind, ops, LENGTHS, (20,), spoilt=18)
    assert equal(spoilt[1:3], whole[1:3])
    assert equal([spoilt[0][:18]], [whole[0][:18]])
    assert spoilt[0][18:].isnan().any(1).all()


@by_kind
def test_bits_are_those_of_any_instruction_set_and_threads(kind: str) -> None:
    # enough for threads to share
    lengths = [200, *LENGTHS]
    found = list[list[Tensor]]()
    ops = pick_ops("cpu", torch.float32, "native")
    for isa in ISAS:
        if "bf16" in isa:
            continue  # it is AVX-512 in fp32
        MODULE.use_isa(isa)
        for threads in (1, 2, 3):
            MODULE.set_threads([-1] * threads)
            found.append(run(kind, ops, lengths, (128,)))
            assert equal(found[-1], found[0]), (isa, threads)


@by_kind
def test_bits_are_those_of_any_number_of_threads_where_all_steps_are_shared(kind: str) -> None:
    """There are so many tokens that threads share the small steps too.

    These are the gates of time and the norms of queries and keys.
    """
    lengths = [4500, 40, 1]
    ops = pick_ops("cpu", torch.float32, "native")
    expected = run(kind, ops, lengths, (128,))
    MODULE.set_threads([-1] * 3)
    assert equal(run(kind, ops, lengths, (5000,), padding=300), expected)


@by_kind
def test_what_does_not_fit_is_not_read(kind: str) -> None:
    ops = pick_ops("cpu", torch.float32, "native")
    block = layer(kind, ops)
    caches = caches_of(kind, 3)
    plan = ops.plan_tiles(*host_step(tables([5], SIZE), SIZE, [0], [0, 5]))
    for shape in ((4, WIDTH), (5, WIDTH - 1)):  # fewer rows than tokens; narrower than the weights
        with pytest.raises(AssertionError):
            block(torch.zeros(shape), plan, caches, RowContext(shape[0]))
    channels = len(block.conv_CK)
    columns = block.inputs.matrix.columns
    for name, misfit in (
        ("in", torch.zeros(columns - 1, WIDTH)),
        ("conv", torch.zeros(channels, 1, TILE + 2)),  # K is at most 17
        ("out", torch.zeros(WIDTH, block.out.part.matrix.depth + 1)),
    ):
        with pytest.raises(AssertionError):
            layer(kind, ops, **{name: misfit})


@by_kind
def test_small_numbers_stay_what_they_are_for_others(kind: str) -> None:
    """Threads that took numbers below the smallest normal one as 0 in a recurrence do so nowhere
    else.
    """
    ops = pick_ops("cpu", torch.float32, "native")
    small = torch.full((512, 1024), 1e-40)
    for threads in (1, 3):
        MODULE.set_threads([-1] * threads)
        run(kind, ops, [200], (200,))
        assert (small[0] * 0.5).all()  # by this thread
        weight = torch.full((1024,), 1e-40)
        assert ops.rms_norm(torch.ones(512, 1024), weight, 0.0).all()  # by all
