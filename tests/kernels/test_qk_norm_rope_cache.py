"""QK-norm, RoPE and KV write in one kernel: interpreted against torch, compiled for sm_90."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import next_power_of_2

from moeserve.kernels.qk_norm_rope_cache import qk_norm_rope_cache
from moeserve.ops import elementwise as plain
from moeserve.ops.inputs import RopeCacheInputs, entry_width, from_entries
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE

NAN = float("nan")
ONE = plain.HeadRule(1, 1, 1.0, 0.0)  # a head of queries and one of keys


def angles(tokens: int, dim: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    turns = torch.rand((tokens, 1, dim // 2), generator=random) * 6
    return torch.cat((turns.cos(), turns.cos()), -1), torch.cat((-turns.sin(), turns.sin()), -1)


def close(got: Tensor, wanted: Tensor, precision: float) -> None:
    """Relative to the largest magnitude of each head."""
    largest = wanted.float().abs().amax(-1, keepdim=True).clamp(min=1e-30)
    torch.testing.assert_close(
        got.float() / largest, wanted.float() / largest, rtol=0, atol=precision
    )


def test_qk_norm_rope_cache_example() -> None:
    cos = torch.zeros((1, 1, 2), device=DEVICE)
    sin = torch.tensor([[[-1.0, 1.0]]], device=DEVICE)
    qkv = torch.tensor([[1.0, 0, 1, 0, 3, 4]], device=DEVICE)
    k = torch.zeros((2, 16, 1, 2), device=DEVICE)
    v = torch.zeros((2, 16, 1, 2), device=DEVICE)
    at = RopeCacheInputs(cos, sin, torch.tensor([17], device=DEVICE))
    q = qk_norm_rope_cache(qkv, plain.HeadRule(1, 1, 2.0, 0.0), at, (k, v))
    assert q.tolist() == [[[0, 2]]]
    assert k[1, 1].tolist() == [[0, 1]]
    assert v[1, 1].tolist() == [[3, 4]]
    assert k.count_nonzero() + v.count_nonzero() == 3


CASES: list[tuple[int, int, int, dict[str, Any]]] = [
    (4, 2, 8, {}),
    (7, 1, 24, {"norms": True}),
    (32, 4, 128, {"norms": True, "clip": 0.5}),
    (3, 3, 80, {"normed": True, "clip": 1.0}),
    (40, 40, 64, {}),
    (6, 2, 48, {"v_dim": 32, "norm_values": True}),
    (5, 5, 24, {"v_dim": 8, "norms": True, "norm_last": True, "clip": 0.7, "norm_values": True}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "options"), CASES)
def test_qk_norm_rope_cache(
    heads: int, kv_heads: int, dim: int, options: dict[str, Any], int8: bool, dtype: torch.dtype
) -> None:
    """Rows are strided, one is padding full of NaN, and heads are huge, tiny and zero.

    Slots that are not written keep their contents.
    """
    random = torch.Generator().manual_seed(dim)
    both = heads + kv_heads
    tokens = 5
    real = 4
    v_dim = options.get("v_dim", dim)
    qkv = torch.randn((tokens, both * dim + kv_heads * v_dim + 3), generator=random).to(dtype)[
        :, :-3
    ]
    qkv[1] *= 1e4
    qkv[2] *= 1e-3
    qkv[3, -v_dim:] = 0
    qkv[real:] = NAN
    flags = {name: value for name, value in options.items() if name not in ("norms", "normed")}
    norms = torch.rand((both, dim), generator=random) if "norms" in options else None
    rule = plain.HeadRule(heads, kv_heads, dim**-0.5, 1e-6, norms, **flags)
    normed = torch.randn((tokens, both, dim), generator=random) if "normed" in options else None
    cos, sin = angles(tokens, dim, random)
    slot_mapping = torch.tensor([17, 3, 40, 32])
    cache_dtype = torch.int8 if int8 else dtype
    k, v = (
        torch.randint(
            -100, 100, (3, 16, kv_heads, entry_width(width, cache_dtype)), generator=random
        ).to(cache_dtype)
        for width in (dim, v_dim)
    )
    wanted_k = k.clone()
    wanted_v = v.clone()
    at = RopeCacheInputs(cos, sin, slot_mapping)
    wanted = plain.qk_norm_rope_cache(qkv, rule, at, (wanted_k, wanted_v), normed)
    got_k = k.clone().to(DEVICE)
    got_v = v.clone().to(DEVICE)
    moved = [None if t is None else t.to(DEVICE) for t in (rule.norms, normed)]
    there = RopeCacheInputs(*(part.to(DEVICE) for part in at))
    got = qk_norm_rope_cache(
        qkv.to(DEVICE), replace(rule, norms=moved[0]), there, (got_k, got_v), moved[1]
    )
    precision = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    close(got[:real].cpu(), wanted[:real], precision)
    assert got[real:].count_nonzero() == 0
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[slot_mapping] = False
    for mine, theirs, before in ((got_k.cpu(), wanted_k, k), (got_v.cpu(), wanted_v, v)):
        assert torch.equal(mine.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])
        ours = mine.flatten(0, 1)[slot_mapping]
        others = theirs.flatten(0, 1)[slot_mapping]
        if int8:  # a share that is nearly halfway may go either way
            largest = from_entries(others).abs().amax(-1, keepdim=True)
            assert ((from_entries(ours) - from_entries(others)).abs() <= largest * 1.01 / 127).all()
            assert (ours[..., :-4] == others[..., :-4]).float().mean() > 0.99
        else:
            close(ours, others, precision)


def test_int8_heads_that_are_not_finite_become_nan() -> None:
    qkv = torch.ones((3, 24), device=DEVICE)
    qkv[0, 21] = NAN
    qkv[1, 16] = -torch.inf
    cos = torch.ones((3, 1, 8), device=DEVICE)
    sin = torch.zeros((3, 1, 8), device=DEVICE)
    k, v = (torch.zeros((1, 16, 1, 12), dtype=torch.int8, device=DEVICE) for _ in range(2))
    qk_norm_rope_cache(qkv, ONE, RopeCacheInputs(cos, sin, torch.arange(3, device=DEVICE)), (k, v))
    heads = from_entries(v[0, :3, 0].cpu())
    assert heads[:2].isnan().all()
    assert (heads[2] == 1).all()


def test_cells_below_zero_are_not_written() -> None:
    qkv = torch.ones((2, 24), device=DEVICE)
    cos = torch.ones((2, 1, 8), device=DEVICE)
    kv = torch.zeros((2, 3, 16, 1, 8), device=DEVICE)
    at = RopeCacheInputs(cos, cos, torch.tensor([-1, 20], device=DEVICE))
    qk_norm_rope_cache(qkv, ONE, at, (kv[0, 1:], kv[1, 1:]))
    assert kv.count_nonzero() == 16
    assert (kv[1, 2, 4] == 1).all()


def test_no_tokens() -> None:
    empty = torch.zeros((0, 1, 8), device=DEVICE)
    cache = torch.zeros((1, 16, 1, 8), device=DEVICE)
    at = RopeCacheInputs(empty, empty, torch.arange(0, device=DEVICE))
    q = qk_norm_rope_cache(torch.zeros((0, 24), device=DEVICE), ONE, at, (cache, cache))
    assert q.shape == (0, 1, 8)


def _case(
    heads: int, kv_heads: int, dim: int, v_dim: int, norms: bool, int8: bool, flags: bool = False
) -> Case:
    """flags: norms come last, and values have one."""
    cache = "*i8" if int8 else "*bf16"
    signature = {
        "qkv_ptr": "*bf16",
        "qk_ptr": "*bf16",
        "q_ptr": "*bf16",
        "k_ptr": cache,
        "v_ptr": cache,
    }
    signature |= {
        "cos_ptr": "*fp32",
        "sin_ptr": "*fp32",
        "slot_mapping_ptr": "*i64",
        "scale": "fp32",
        "eps": "fp32",
    }
    signature |= dict.fromkeys(("num_real", "stride", "qk_stride"), "i32")
    block_d = next_power_of_2(dim)
    sizes = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "D": dim,
        "V_D": v_dim,
        "PAST": 4 * int8,
        "BLOCK_D": block_d,
    }
    constants: dict[str, object] = {**sizes, "CLIP": None, "NORM_LAST": flags, "NORM_VALUES": flags}
    constants |= {
        "BLOCK_H": 2048 // block_d,
        "BLOCK_G": min(kv_heads, 2048 // block_d),
        "BLOCK_V": v_dim,
    }
    signature |= {"weights_ptr": "*fp32"} if norms else {}
    signature |= {"k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"} if int8 else {}
    for optional in ("weights_ptr", "k_scales_ptr", "v_scales_ptr"):
        if optional not in signature:
            constants[optional] = None
    return Case(
        "qk_norm_rope_cache:qk_norm_rope_cache_kernel",
        signature,
        constants,
        ("stride", "qk_stride"),
    )


@pytest.mark.full("aot")
def test_qk_norm_rope_cache_compiles_for_hopper() -> None:
    reports = compile_all(
        [
            _case(32, 4, 128, 128, True, False),
            _case(64, 8, 64, 64, False, False),
            _case(32, 4, 128, 128, True, True),
            _case(64, 4, 192, 128, False, False),
            _case(16, 2, 512, 512, True, False, flags=True),
        ]
    )
    assert all(report.stack_bytes == 0 and report.registers <= 128 for report in reports), reports
