"""Queries and latents of latent attention: interpreted against torch, and compiled for sm_90."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moeserve.kernels.latent import latent_rope_cache
from moeserve.ops import latent as plain
from moeserve.ops.inputs import HeadShape, RopeCacheInputs
from moeserve.ops.pick import pick_ops
from moeserve.ops.probe import host_step
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE
from tests.kernels.test_qk_norm_rope_cache import angles, close

NAN = float("nan")


def test_latent_rope_cache_example() -> None:
    cos = torch.zeros((1, 1, 2), device=DEVICE)
    sin = torch.tensor([[[-1.0, 1.0]]], device=DEVICE)
    q = torch.tensor([[[1.0, 1, 0]]], device=DEVICE)
    kv = torch.tensor([[3.0, 1, 0]], device=DEVICE)
    cache = torch.zeros((2, 16, 1, 3), device=DEVICE)
    q_THC = torch.full((1, 1, 3), 9.0, device=DEVICE)
    slots = torch.tensor([17], device=DEVICE)
    norm = torch.full((1,), 5.0, device=DEVICE)
    rule = plain.LatentRule(1, 1, 2, 1, 2.0, 0.0, norm)
    assert latent_rope_cache(
        q, kv, rule, RopeCacheInputs(cos, sin, slots), cache, q_THC
    ).tolist() == [[[2]]]
    assert q_THC.tolist() == [[[9, 0, 2]]]
    assert cache[1, 1].tolist() == [[5, 0, 1]]
    assert cache.count_nonzero() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "nope", "rope", "rank"), [(3, 24, 8, 40), (20, 128, 64, 96), (1, 8, 2, 16)]
)
def test_latent_rope_cache(heads: int, nope: int, rope: int, rank: int, dtype: torch.dtype) -> None:
    """Strided tokens, one of them padding full of NaN, one in a slot below 0; huge, tiny and zero
    latents, a NaN.
    """
    random = torch.Generator().manual_seed(rank)
    tokens = 7
    real = 6
    q = torch.randn((tokens, heads * (nope + rope) + 5), generator=random).to(dtype)[:, :-5]
    kv = torch.randn((tokens, rank + rope + 3), generator=random).to(dtype)[:, 3:]
    kv[1] *= 1e4
    kv[2] *= 1e-3
    kv[3, :rank] = 0
    kv[4, 1] = NAN
    q[4, -1] = NAN
    kv[real:] = NAN
    q[real:] = NAN
    rule = plain.LatentRule(heads, nope, rope, rank, 0.3, 1e-6, torch.rand(rank, generator=random))
    cos, sin = angles(tokens, rope, random)
    slots = torch.tensor([17, 3, 40, 32, 33, -1])
    cache = torch.randn((3, 16, 1, rank + rope), generator=random).to(dtype)
    room = torch.randn((tokens, heads, rank + rope), generator=random).to(dtype)
    theirs = cache.clone(), room.clone()
    args = q.unflatten(1, (heads, -1)), kv, rule, RopeCacheInputs(cos, sin, slots[:-1]), *theirs
    wanted = plain.latent_rope_cache(*args)
    mine = cache.clone().to(DEVICE), room.clone().to(DEVICE)
    moved: list[Any] = [x.to(DEVICE) for x in (args[0], kv, rule.norm_L, cos, sin, slots)]
    there = replace(rule, norm_L=moved[2]), RopeCacheInputs(*moved[3:])
    got = latent_rope_cache(*moved[:2], *there, *mine)
    precision = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(
        got[:real].cpu(), wanted[:real], rtol=precision, atol=0, equal_nan=True
    )
    found_cache, found_room = (x.cpu() for x in mine)
    assert torch.equal(found_room[..., :rank], room[..., :rank])
    near = {"rtol": precision, "atol": 2 * precision, "equal_nan": True}
    torch.testing.assert_close(found_room[:real, :, rank:], theirs[1][:real, :, rank:], **near)
    assert found_room[real:, :, rank:].count_nonzero() + got[real:].count_nonzero() == 0
    rows = found_cache.flatten(0, 1)[:, 0]
    expected = theirs[0].flatten(0, 1)[:, 0]
    assert rows.isnan().nonzero().tolist() == expected.isnan().nonzero().tolist() != []
    for part in (slice(rank), slice(rank, None)):
        close(rows[:, part].nan_to_num(), expected[:, part].nan_to_num(), precision)
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[slots[:-1]] = False
    assert torch.equal(rows[untouched], cache.flatten(0, 1)[untouched, 0])


def test_no_tokens() -> None:
    empty = torch.zeros((0, 1, 2), device=DEVICE)
    cache = torch.zeros((1, 16, 1, 6), device=DEVICE)
    rule = plain.LatentRule(3, 3, 2, 4, 1.0, 0.0, torch.ones(4, device=DEVICE))
    found = latent_rope_cache(
        torch.zeros((0, 3, 5), device=DEVICE),
        torch.zeros((0, 6), device=DEVICE),
        rule,
        RopeCacheInputs(empty, empty, torch.arange(0, device=DEVICE)),
        cache,
        torch.zeros((0, 3, 6), device=DEVICE),
    )
    assert found.shape == (0, 3, 3)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the table is made for the processor here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_table_packs_heads(dtype: torch.dtype) -> None:
    """The weight is a non-contiguous slice of a larger one; results go to slices of wider rows."""
    kv_b = torch.randn((3, 20, 32), generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = kv_b[:, :12].transpose(1, 2)
    x = torch.randn((5, 4, 12), generator=torch.Generator().manual_seed(1)).to(dtype)[:, 1:]
    out = torch.full((5, 3, 40), NAN, dtype=dtype)
    product = pick_ops("cpu", dtype, "triton").pack_heads(weight)
    assert product(x, out=out[..., :32]).data_ptr() == out.data_ptr()
    wanted = torch.einsum("thk,hnk->thn", x.double(), weight.double()).to(dtype)
    near = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out[..., :32], wanted, **near)
    torch.testing.assert_close(product(x), wanted, **near)
    assert out[..., 32:].isnan().all()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the table is made for the processor here")
def test_absorbed_attention_is_the_plain_table_s() -> None:
    """The whole chain of both tables, for a row that is prefilled in two chunks and one that
    decodes.
    """
    heads = 6
    nope = 24
    rope = 8
    rank = 32
    v = 16
    random = torch.Generator().manual_seed(3)
    rule = plain.LatentRule(heads, nope, rope, rank, 0.2, 1e-6, torch.rand(rank, generator=random))
    up = torch.randn((heads, rank, nope), generator=random) * 0.2
    down = torch.randn((heads, v, rank), generator=random) * 0.2
    blocks = torch.tensor([[3, 1, 5], [2, 0, 0]])
    caches = {kernels: torch.full((6, 16, 1, rank + rope), NAN) for kernels in ("torch", "triton")}
    for starts, offsets in (([0, 0], [0, 30, 36]), ([30, 6], [0, 5, 6])):
        tokens = offsets[-1]
        q = torch.randn((tokens, heads, nope + rope), generator=random)
        kv, (cos, sin) = (
            torch.randn((tokens, rank + rope), generator=random),
            angles(tokens, rope, random),
        )
        where = [
            (row, at)
            for row in (0, 1)
            for at in range(starts[row], starts[row] + offsets[row + 1] - offsets[row])
        ]
        slots = torch.tensor([int(blocks[row, at // 16]) * 16 + at % 16 for row, at in where])
        group, step = host_step(blocks, 16, starts, offsets)
        on_device = (
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(offsets, dtype=torch.int32),
        )
        results = []
        for kernels, cache in caches.items():
            ops = pick_ops("cpu", torch.float32, kernels)  # type: ignore[arg-type]
            plan = ops.plan_attention(
                group,
                replace(step, rows_on_device=on_device),
                HeadShape(heads, 1, rank + rope, rank),
            )
            absorbed = torch.full((tokens, heads, rank + rope), NAN)
            rest = ops.latent_rope_cache(
                q, kv, rule, RopeCacheInputs(cos, sin, slots), cache, absorbed
            )
            ops.pack_heads(up)(rest, out=absorbed[..., :rank])
            latents = ops.attention(absorbed, cache, cache[..., :rank], plan)
            results.append(ops.pack_heads(down)(latents.unflatten(1, (heads, rank))))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def _case(heads: int, kind: str) -> Case:
    pointers = dict.fromkeys(("q_ptr", "kv_ptr", "cache_ptr", "absorbed_ptr", "out_ptr"), kind)
    pointers |= dict.fromkeys(("norm_ptr", "cos_ptr", "sin_ptr"), "*fp32")
    strides = dict.fromkeys(("q_stride", "kv_stride", "absorbed_stride"), "i32")
    numbers = {
        "slot_mapping_ptr": "*i64",
        "num_real": "i32",
        "scale": "fp32",
        "eps": "fp32",
        **strides,
    }
    sizes = {"HEADS": heads, "NOPE": 128, "ROPE": 64, "RANK": 512}
    blocks = {"BLOCK_H": 16, "BLOCK_N": 128, "BLOCK_P": 64, "BLOCK_L": 512}
    return Case("latent:latent_rope_cache_kernel", pointers | numbers, sizes | blocks, [*strides])


@pytest.mark.full("aot")
def test_latent_rope_cache_compiles_for_hopper() -> None:
    reports = compile_all([_case(128, "*bf16"), _case(16, "*fp16")])
    assert all(report.stack_bytes == 0 and report.registers <= 128 for report in reports), reports
