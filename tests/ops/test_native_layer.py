"""Half a layer in one native call has the bits of the calls that it joins."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.all2all.layout import group_rows, grouped_rows, weighted_sum
from moeserve.moe.experts.base import ExpertWeights
from moeserve.moe.experts.native import NativeExperts, PackedNative
from moeserve.moe.routing import Router
from moeserve.ops import native_latent, native_layer, native_rows
from moeserve.ops.elementwise import HeadRule
from moeserve.ops.inputs import HeadShape, RopeCacheInputs, RowContext, to_entries
from moeserve.ops.latent import LatentRule
from moeserve.ops.native import native
from moeserve.ops.native_layer import NativeLinear
from moeserve.ops.pick import pick_ops
from moeserve.ops.probe import host_step
from moeserve.ops.rules import RELU2, SWIGLU, Activation, RouterRule

pytestmark = pytest.mark.skipif(not native_rows.AVAILABLE, reason="needs the compiled extension")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTH = 72
HEADS = 6
KV_HEADS = 2
DIM = 24
BLOCK = 16


@pytest.fixture(params=[1, 3], autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every result also lands in memory that holds NaN."""
    module: Any = native()
    for part in (native_layer, native_latent):
        monkeypatch.setattr(
            part, "_empty", lambda *size, **how: torch.empty(*size, **how).fill_(math.nan)
        )
    module.set_threads([-1] * request.param)
    yield
    module.set_threads([-1])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 0.5).to(dtype)


def scattered(counts: tuple[int, ...], starts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return requests' block tables and the slots of their new tokens."""
    blocks = (1 + torch.randperm(39, generator=torch.Generator().manual_seed(9)))[: 8 * len(counts)]
    blocks = blocks.view(len(counts), 8).contiguous()
    places = [
        (row, start + i)
        for row, (start, n) in enumerate(zip(starts, counts, strict=True))
        for i in range(n)
    ]
    return blocks, torch.tensor(
        [int(blocks[row, p // BLOCK]) * BLOCK + p % BLOCK for row, p in places]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("counts", "starts"), [((1,), (0,)), ((1, 1, 1), (5, 40, 2)), ((70, 1), (3, 60))]
)
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("extras", [False, True])
def test_attention(
    counts: tuple[int, ...],
    starts: tuple[int, ...],
    norms: bool,
    extras: bool,
    rounded: bool,
    dtype: torch.dtype,
) -> None:
    """`extras` are the optional parts of a layer."""
    both = HEADS + KV_HEADS
    tokens = sum(counts)
    v_dim = 40 if extras else DIM
    columns = both * DIM + KV_HEADS * v_dim
    qkv = NativeLinear(random(columns, WIDTH, dtype=dtype), random(columns, seed=1))
    out = NativeLinear(random(WIDTH, HEADS * v_dim, dtype=dtype, seed=2))
    rule = HeadRule(HEADS, KV_HEADS, 0.3, 1e-6, random(both, DIM, seed=3) if norms else None, 0.4)
    sinks = None
    soft_cap = 0.0
    if extras:
        rule = replace(rule, v_dim=v_dim, norm_last=True, norm_values=True)
        sinks = random(HEADS, seed=10)
        soft_cap = 0.5
    x = random(tokens, WIDTH + 5, dtype=dtype, seed=4)[:, :WIDTH]
    cos = random(tokens, 1, DIM, seed=5)
    sin = random(tokens, 1, DIM, seed=6)
    kv_dtype = torch.int8 if rounded else dtype
    caches = [
        to_entries(random(40, BLOCK, KV_HEADS, width, seed=width), kv_dtype)
        for width in (DIM, v_dim)
    ]
    blocks, slots = scattered(counts, starts)
    step = host_step(
        blocks, BLOCK, starts, [0, *itertools.accumulate(counts)], chunk=50 if extras else None
    )
    plan = native_layer.plan_attention(*step, HeadShape(HEADS, KV_HEADS, DIM, v_dim))

    k, v = (cache.clone() for cache in caches)
    at = RopeCacheInputs(cos, sin, slots)
    q = native_rows.qk_norm_rope_cache(qkv(x), rule, at, (k, v))
    attended = native_layer.attention(q, k, v, plan, sinks_H=sinks, soft_cap=soft_cap)
    for last, expected in ((None, attended), (out, out(attended))):
        block_k, block_v = (cache.clone() for cache in caches)
        block = native_layer.AttentionBlock(qkv, last, rule, DIM, dtype, sinks, soft_cap)
        assert torch.equal(block(x, at, (block_k, block_v), plan), expected)
        assert torch.equal(block_k, k)
        assert torch.equal(block_v, v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("counts", "starts"), [((1,), (0,)), ((1, 1, 1), (5, 40, 2)), ((70, 1), (3, 60))]
)
@pytest.mark.parametrize("compressed", [False, True])
def test_latent_attention(
    counts: tuple[int, ...], starts: tuple[int, ...], compressed: bool, dtype: torch.dtype
) -> None:
    nope = 16
    rope = 8
    rank = 40
    v_dim = 24
    tokens = sum(counts)
    rule = LatentRule(HEADS, nope, rope, rank, 0.3, 1e-6, random(rank, seed=1))
    latents = NativeLinear(
        random(rank + rope, WIDTH, dtype=dtype, seed=2), random(rank + rope, seed=3)
    )
    narrow = None
    if compressed:
        narrow = (
            NativeLinear(random(36, WIDTH, dtype=dtype, seed=4), random(36, seed=5)),
            random(36, seed=6),
        )
    queries = NativeLinear(
        random(HEADS * (nope + rope), 36 if compressed else WIDTH, dtype=dtype, seed=7)
    )
    up = native_layer.NativeHeads(random(HEADS, rank, nope, dtype=dtype, seed=8))
    down = native_layer.NativeHeads(random(HEADS, v_dim, rank, dtype=dtype, seed=9))
    out = NativeLinear(random(WIDTH, HEADS * v_dim, dtype=dtype, seed=10))
    x = random(tokens, WIDTH + 5, dtype=dtype, seed=11)[:, :WIDTH]
    cos = random(tokens, 1, rope, seed=12)
    sin = random(tokens, 1, rope, seed=13)
    cache = random(40, BLOCK, 1, rank + rope, dtype=dtype, seed=14)
    blocks, slots = scattered(counts, starts)
    step = host_step(blocks, BLOCK, starts, [0, *itertools.accumulate(counts)])
    plan = native_layer.plan_attention(*step, HeadShape(HEADS, 1, rank + rope, rank))

    written = cache.clone()
    q_THC = torch.full((tokens, HEADS, rank + rope), math.nan, dtype=dtype)
    q = queries(native_rows.rms_norm(narrow[0](x), narrow[1], rule.eps) if narrow else x)
    at = RopeCacheInputs(cos, sin, slots)
    q_THn = native_rows.latent_rope_cache(
        q.view(tokens, HEADS, -1), latents(x), rule, at, written, q_THC
    )
    up(q_THn, out=q_THC[..., :rank])
    attended = native_layer.attention(q_THC, written, written[..., :rank], plan)
    values = down(attended.view(tokens, HEADS, rank)).flatten(1)
    for last, expected in ((None, values), (out, out(values))):
        block_cache = cache.clone()
        block = native_latent.LatentBlock(narrow, queries, latents, up, down, last, rule, dtype)
        assert torch.equal(block(x, at, block_cache, plan), expected)
        assert torch.equal(block_cache, written)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 7, 130])
@pytest.mark.parametrize(
    "activation", [SWIGLU, Activation(alpha=1.7, limit=0.2, up_shift=1.0), RELU2], ids=repr
)
def test_mlp(activation: Activation, tokens: int, dtype: torch.dtype) -> None:
    inner = 40
    both = activation.parts * inner
    gate_up = NativeLinear(random(both, WIDTH, dtype=dtype, seed=1), random(both, seed=2))
    down = NativeLinear(random(WIDTH, inner, dtype=dtype, seed=3), random(WIDTH, seed=4))
    x = random(tokens, WIDTH + 5, dtype=dtype, seed=5)[:, :WIDTH]
    block = native_layer.GatedMLPBlock(gate_up, down, activation, dtype)
    assert torch.equal(block(x), down(native_rows.act_mul(gate_up(x), activation)))


RULES = [
    RouterRule(renormalize=True),
    RouterRule(),
    RouterRule(score="softmax_selected"),
    RouterRule(
        score="sigmoid", bias=True, groups=3, kept_groups=2, renormalize=True, scale=2.5, fp32=True
    ),
    RouterRule(score="sparsemixer", jitter=0.01),
    RouterRule(score="sigmoid", on_input=True),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 130])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_experts(tokens: int, rule: RouterRule, dtype: torch.dtype) -> None:
    experts = 12
    hidden = 40
    top_k = 1 if rule.on_input else 3
    gate = NativeLinear(random(experts, WIDTH, dtype=torch.float32 if rule.fp32 else dtype))
    bias, scale = (
        (random(experts, seed=4).abs(), random(experts, seed=5)) if rule.bias else (None, None)
    )
    router = Router(gate, top_k, rule, pick_ops("cpu", dtype, "native"), bias, scale)
    activation = (
        Activation(alpha=1.7, limit=1.0, up_shift=1.0)
        if rule.bias
        else RELU2
        if rule.renormalize
        else SWIGLU
    )
    kernel = NativeExperts(activation=activation)
    both = activation.parts * hidden
    w13 = random(experts, both, WIDTH, dtype=dtype, seed=1)
    w2 = random(experts, WIDTH, hidden, dtype=dtype, seed=2)
    biases = (
        (random(experts, both, seed=6), random(experts, WIDTH, seed=7))
        if rule.bias
        else (None, None)
    )
    packed = kernel.pack(ExpertWeights(w13, w2, *biases))
    x = random(tokens, WIDTH, dtype=dtype, seed=3)
    expected, counts = separately(x, router, kernel, packed)
    block = kernel.fuse(router)
    padded = torch.cat((x, torch.full_like(x[:2], math.nan)))
    for num_tokens in (0, tokens):
        with_padding, _ = block(padded, packed, num_tokens)
        assert torch.equal(with_padding[:num_tokens], expected[:num_tokens])
        assert not with_padding[num_tokens:].any()
    found, found_counts = block(x, packed, tokens)
    assert torch.equal(found, expected)
    assert np.array_equal(found_counts, counts)
    assert found_counts.sum() == tokens * top_k


def separately(
    x: Tensor, router: Router, kernel: NativeExperts, packed: PackedNative
) -> tuple[Tensor, Any]:
    routing = router(x, RowContext(len(x)))
    if router.rule.on_input:
        x, routing = routing.on_input(x)
    rows = group_rows(routing.ids_TK, len(packed.bytes_eB))
    inbound = Inbound(
        Layout.GROUPED, grouped_rows(x, rows, router.top_k), rows.counts_e, rows.counts_e.cumsum()
    )
    y = torch.empty_like(inbound.x)
    kernel.run(inbound, packed, y)
    return weighted_sum(y, rows, routing, torch.empty_like(x)), rows.counts_e


def test_wrong_sizes_are_refused() -> None:
    router = NativeLinear(random(4, WIDTH))
    with pytest.raises(ValueError, match="cannot choose 5 of 4 experts"):
        native_layer.ExpertsBlock(router, 5, RouterRule(), torch.float32)
