"""Recurrent layers' kernels: the reference is the recurrence, and chunks of any sizes have its
bits; native ones are close to it, and have the same bits on every instruction set and any number of
threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.ops import native_recurrence, recurrence
from moeserve.ops.probe import host_step
from moeserve.ops.rules import TILE

from .isas import ISAS, MODULE, needs_native

pytestmark = pytest.mark.usefixtures("usual_native")
IMPLEMENTATIONS = [recurrence, pytest.param(native_recurrence, marks=needs_native)]
LENGTHS = 37, 16, 5  # of requests: three tiles, one that is full, one that is not
CHUNKS = [
    (64,),
    (1,),
    (16,),
    (5, 11, 1, 20),
    (17, 3),
]  # tokens of each request in a step, over and over


@dataclass(frozen=True)
class Shape:
    """A recurrence: its heads, widths, and whether it has beta, the delta rule."""

    groups: int
    heads: int
    d: int
    v: int
    decays: int
    delta: bool
    block_size: int = 16


SHAPES = {
    "gated delta": Shape(1, 2, 32, 80, 1, True),
    "decays by channel": Shape(2, 2, 19, 24, 19, True, 32),
    "no delta rule": Shape(1, 3, 12, 7, 1, False, 64),
    "linear attention": Shape(2, 4, 64, 33, 64, False, 32),
}
by_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs_of(
    shape: Shape, length: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k, v, log decay and beta of a request."""
    k = F.normalize(values(length, shape.groups, shape.d, seed=seed), dim=2)
    decay = -F.softplus(values(length, shape.heads, shape.decays, seed=seed + 1))
    beta = values(length, shape.heads, seed=seed + 2).sigmoid() if shape.delta else None
    q, v = (
        values(length, *of, seed=seed + 3)
        for of in ((shape.groups, shape.d), (shape.heads, shape.v))
    )
    return q, k, v, decay, beta


def cached(
    num_blocks: int, size: int, *, rows: Sequence[int], tiles: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return a cache of tokens and one of tile borders.

    They are full of NaN except for the null block.
    """
    both = (
        torch.full((num_blocks, size, *rows), torch.nan),
        torch.full((num_blocks, size // TILE, *tiles), torch.nan),
    )
    for cache in both:
        cache[0] = 0
    return both


def caches_of(shape: Shape, num_blocks: int) -> tuple[Tensor, ...]:
    """Return the caches of states, k, u and s."""
    size = shape.block_size
    h = shape.heads
    k, states = cached(num_blocks, size, rows=(shape.groups, shape.d), tiles=(h, shape.d * shape.v))
    u, s = (
        cached(num_blocks, size, rows=(h, width), tiles=(1,))[0]
        for width in (shape.v, shape.decays)
    )
    return states, k, u, s


def tables(lengths: Sequence[int], size: int, null: Sequence[int] = ()) -> Tensor:
    """Return requests' block tables; those of `null` have null blocks."""
    width = max(-(-length // size) for length in lengths)
    blocks = (
        1 + torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(0))
    ).view(-1, width)
    blocks[list(null)] = 0
    return blocks


def steps(lengths: Sequence[int], chunks: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the starts and lengths of all requests' parts in each step."""
    starts = [0] * len(lengths)
    for i in range(1000):
        counts = [
            min(chunks[i % len(chunks)], length - start)
            for start, length in zip(starts, lengths, strict=True)
        ]
        if not any(counts):
            return
        yield list(starts), counts
        starts = [start + count for start, count in zip(starts, counts, strict=True)]


def run(
    kernels: Any,
    shape: Shape,
    lengths: Sequence[int],
    chunks: Sequence[int],
    padding: int = 0,
    **more: Any,
) -> list[Tensor]:
    """Return each request's o [T, H, v] and then the caches, computed in steps.

    With `twice`, each step runs again.
    """
    inputs = [
        inputs_of(shape, length, 10 * i + more.get("seed", 0)) for i, length in enumerate(lengths)
    ]
    for request, token in more.get("spoilt", ()):
        inputs[request][2][token] = torch.nan
    blocks = tables(lengths, shape.block_size, more.get("null", ()))
    caches = caches_of(shape, int(blocks.max()) + 1 + len(lengths))
    out: list[list[Tensor]] = [[] for _ in lengths]
    for starts, counts in steps(lengths, chunks):
        offsets = [0, *torch.tensor(counts).cumsum(0).tolist()]
        plan = kernels.plan_tiles(*host_step(blocks, shape.block_size, starts, offsets))
        parts: list[list[Tensor]] = [[] for _ in inputs[0]]
        for request, start, count in zip(inputs, starts, counts, strict=True):
            for part, x in zip(parts, request, strict=True):
                if x is not None:
                    part.append(x[start : start + count])
        args = [
            F.pad(torch.cat(part), (*[0] * (2 * part[0].dim() - 1), padding)) if part else None
            for part in parts
        ]
        for _ in range(1 + more.get("twice", False)):
            o_THv = kernels.recurrence(*args, caches, plan)
        assert not o_THv[offsets[-1] :].any()
        for request_out, part_o in zip(out, o_THv[: offsets[-1]].split(counts), strict=True):
            request_out.append(part_o)
    return [*(torch.cat(parts) for parts in out), *caches]


def equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(
        torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7)) for a, b in zip(ours, theirs, strict=True)
    )


def sequential(shape: Shape, length: int, seed: int) -> Tensor:
    """The recurrence as it is written, in double precision."""
    *first, beta = inputs_of(shape, length, seed)
    q, k, v, decay = (x.double() for x in first)
    serve = shape.heads // shape.groups
    out = []
    state = torch.zeros(shape.heads, shape.d, shape.v, dtype=torch.float64)
    for t in range(length):
        q_Hd, k_Hd = (x[t].repeat_interleave(serve, 0) for x in (q, k))
        state = state * decay[t].exp()[:, :, None]
        u = v[t]
        if beta is not None:
            u = beta[t].double()[:, None] * (u - torch.einsum("hdv,hd->hv", state, k_Hd))
        state = state + k_Hd[:, :, None] * u[:, None]
        out.append(torch.einsum("hdv,hd->hv", state, q_Hd))
    return torch.stack(out)


def close(ours: Tensor, reference: Tensor) -> bool:
    return bool((ours.double() - reference.double()).abs().max() <= 1e-5 * reference.abs().max())


@by_shape
@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_it_is_the_recurrence(kernels: Any, shape: Shape) -> None:
    for i, o_THv in enumerate(run(kernels, shape, LENGTHS, (64,))[: len(LENGTHS)]):
        assert close(o_THv, sequential(shape, LENGTHS[i], 10 * i))


@by_shape
@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_chunks_padding_and_running_again_change_no_bit(kernels: Any, shape: Shape) -> None:
    """Neither of results nor of caches; null blocks stay as they are, and requests with them get
    the same results.
    """
    whole = run(kernels, shape, LENGTHS, (64,))
    assert not any(cache[0].any() for cache in whole[3:])
    for chunks in CHUNKS[1:] if kernels is native_recurrence else CHUNKS[3:]:
        assert equal(
            run(kernels, shape, LENGTHS, chunks, padding=3, twice=chunks == (17, 3)), whole
        ), chunks
    uncached = run(kernels, shape, LENGTHS, (64,), null=(0, 2))
    assert equal(uncached[:3], whole[:3])
    assert not any(cache[0].any() for cache in uncached[3:])
    for i, length in enumerate(LENGTHS[1:]):  # alone
        alone = run(kernels, shape, [length], (9,), seed=10 * (i + 1))[0]
        assert equal([alone], whole[i + 1 : i + 2])


@by_shape
@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_nan_stays_in_its_request_and_after_its_token(kernels: Any, shape: Shape) -> None:
    good = run(kernels, shape, LENGTHS, (20,))
    spoilt = run(kernels, shape, LENGTHS, (20,), spoilt=[(0, 18)])
    assert equal(spoilt[1:3], good[1:3])
    assert equal([spoilt[0][:18]], [good[0][:18]])
    assert spoilt[0][18:].isnan().any(2).any(1).all()


@needs_native
@by_shape
def test_native_bits_are_those_of_any_instruction_set_and_threads(shape: Shape) -> None:
    shape = replace(shape, v=shape.v + 64)  # so that threads share heads
    reference = run(recurrence, shape, LENGTHS, (64,))
    found = []
    for isa in ISAS:
        MODULE.use_isa(isa)
        for threads in (1, 2, 3):
            MODULE.set_threads([-1] * threads)
            found.append(run(native_recurrence, shape, LENGTHS, (64,)))
            assert equal(found[-1], found[0]), (isa, threads)
    for ours, theirs in zip(found[0], reference, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert close(ours.nan_to_num(), theirs.nan_to_num())


@needs_native
def test_inputs_may_be_parts_of_wider_rows_and_expanded() -> None:
    shape = SHAPES["gated delta"]
    q, k, v, decay, beta = inputs_of(shape, 20, 1)
    assert beta is not None
    decay = decay[:1].expand_as(decay)
    blocks = tables([20], 16)
    plan = native_recurrence.plan_tiles(*host_step(blocks, 16, [0], [0, 20]))

    def wide(x: Tensor) -> Tensor:
        padded = torch.full((20, x[0].numel() + 5), torch.nan)
        padded[:, 2:-3] = x.flatten(1)
        return padded[:, 2:-3].view(x.shape)

    caches = [caches_of(shape, 3) for _ in range(2)]
    strided = native_recurrence.recurrence(
        wide(q), wide(k), wide(v), decay, wide(beta), caches[0], plan
    )
    plain = native_recurrence.recurrence(q, k, v, decay.contiguous(), beta, caches[1], plan)
    assert equal([strided, *caches[0]], [plain, *caches[1]])


@dataclass(frozen=True)
class Conv:
    """A convolution and the type of its inputs."""

    channels: int
    inputs: int
    bias: bool
    silu: bool
    dtype: torch.dtype = torch.float32
    block_size: int = 16


CONVS = [
    Conv(300, 4, bias=False, silu=True),
    Conv(19, 4, bias=True, silu=True, dtype=torch.bfloat16, block_size=32),
    Conv(8, 2, bias=True, silu=False, dtype=torch.float16, block_size=64),
    Conv(33, 17, bias=False, silu=False),
]


def convolve(
    kernels: Any,
    conv: Conv,
    lengths: Sequence[int],
    chunks: Sequence[int],
    padding: int = 0,
    **more: Any,
) -> list[Tensor]:
    """Return each request's results and both caches, computed in steps from strided rows."""
    weight = values(conv.channels, conv.inputs, seed=1)
    bias = values(conv.channels, seed=2) if conv.bias else None
    x = [
        values(length, conv.channels, seed=5 + i).to(conv.dtype) for i, length in enumerate(lengths)
    ]
    for request, token in more.get("spoilt", ()):
        x[request][token] = torch.nan
    blocks = tables(lengths, conv.block_size, more.get("null", ()))
    channels = conv.channels
    caches = cached(
        int(blocks.max()) + 1,
        conv.block_size,
        rows=(1, channels),
        tiles=(conv.inputs - 1, channels),
    )
    out: list[list[Tensor]] = [[] for _ in lengths]
    for starts, counts in steps(lengths, chunks):
        offsets = [0, *torch.tensor(counts).cumsum(0).tolist()]
        plan = kernels.plan_tiles(*host_step(blocks, conv.block_size, starts, offsets))
        wide = torch.full((offsets[-1] + padding, channels + 3), torch.nan, dtype=conv.dtype)
        wide[: offsets[-1], 1:-2] = torch.cat(
            [x[i][s : s + n] for i, (s, n) in enumerate(zip(starts, counts, strict=True))]
        )
        for _ in range(1 + more.get("twice", False)):
            y_TC = kernels.causal_conv(wide[:, 1:-2], weight, bias, conv.silu, caches, plan)
        assert not y_TC[offsets[-1] :].any()
        for request_out, part in zip(out, y_TC[: offsets[-1]].split(counts), strict=True):
            request_out.append(part)
    return [*(torch.cat(parts) for parts in out), *caches]


@pytest.mark.parametrize("conv", CONVS)
@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_convolutions(kernels: Any, conv: Conv) -> None:
    """Results are torch's.

    Chunks, padding, null blocks and a second run change no bit, and NaN stays in its request.
    """
    whole = convolve(kernels, conv, LENGTHS, (64,))
    weight = values(conv.channels, conv.inputs, seed=1)
    bias = values(conv.channels, seed=2) if conv.bias else None
    for i, length in enumerate(LENGTHS):
        x_CT = values(length, conv.channels, seed=5 + i).to(conv.dtype).double().T
        y = F.conv1d(
            F.pad(x_CT, (conv.inputs - 1, 0)),
            weight.double()[:, None],
            None if bias is None else bias.double(),
            groups=conv.channels,
        ).T
        assert close(whole[i], F.silu(y) if conv.silu else y)
    for chunks in CHUNKS[1:]:
        assert equal(
            convolve(kernels, conv, LENGTHS, chunks, padding=2, twice=chunks == (17, 3)), whole
        ), chunks
    assert equal(convolve(kernels, conv, LENGTHS, (64,), null=(0, 1, 2))[:3], whole[:3])
    spoilt = convolve(kernels, conv, LENGTHS, (20,), spoilt=[(0, 18)])
    assert equal(spoilt[1:3], whole[1:3])
    assert equal([spoilt[0][:18]], [whole[0][:18]])
    assert torch.equal(
        spoilt[0].isnan().any(1).nonzero()[:, 0], torch.arange(18, min(37, 18 + conv.inputs))
    )


@needs_native
@pytest.mark.parametrize("conv", CONVS)
def test_native_convolutions_on_any_instruction_set_and_threads(conv: Conv) -> None:
    conv = replace(conv, channels=conv.channels + 4096)
    found = []
    for isa in ISAS:
        MODULE.use_isa(isa)
        for threads in (1, 2, 3):
            MODULE.set_threads([-1] * threads)
            found.append(convolve(native_recurrence, conv, LENGTHS, (64,)))
            assert equal(found[-1], found[0]), (isa, threads)
