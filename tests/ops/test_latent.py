"""Latent attention: the absorbed form against transformers, and bits independent of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.ops import native_rows
from moeserve.ops.inputs import HeadShape, RopeCacheInputs
from moeserve.ops.latent import LatentRule
from moeserve.ops.native import native
from moeserve.ops.native_layer import NativeHeads, NativeLinear
from moeserve.ops.pick import pick_ops
from moeserve.ops.probe import host_step
from moeserve.ops.quantized import Quantized
from moeserve.ops.table import Ops

SIZE = 16  # tokens of a block


@pytest.fixture(params=["torch", "auto"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return pick_ops("cpu", torch.float32, request.param)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(positions: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    turns = positions[:, None, None] * 10_000.0 ** -(torch.arange(dim // 2) * 2 / dim)
    return torch.cat((turns.cos(),) * 2, -1), torch.cat((-turns.sin(), turns.sin()), -1)


def test_a_layer_is_transformers_own(ops: Ops) -> None:
    """One row in three chunks; transformers computes it at once and not absorbed."""
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

    heads = 5
    nope = 24
    rope = 16
    rank = 40
    v = 32
    width = 72
    tokens = 90
    config = DeepseekV3Config(
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=v,
        rope_interleave=False,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = theirs.DeepseekV3Attention(config, 0).eval()
    torch.nn.init.uniform_(layer.kv_a_layernorm.weight, 0.5, 1.5)
    x = random(tokens, width)
    cos, sin = angles(torch.arange(tokens), rope)
    plain_sin = torch.cat((sin[..., rope // 2 :],) * 2, -1)
    mask = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        expected = layer(x[None], (cos[:, 0][None], plain_sin[:, 0][None]), mask)[0][0]
        kv_b = layer.kv_b_proj.weight.view(heads, nope + v, rank)
        up = ops.pack_heads(kv_b[:, :nope].transpose(1, 2))
        down = ops.pack_heads(kv_b[:, nope:])
        rule = LatentRule(
            heads,
            nope,
            rope,
            rank,
            layer.scaling,
            layer.kv_a_layernorm.variance_epsilon,
            layer.kv_a_layernorm.weight,
        )
        cache = torch.full((8, SIZE, 1, rank + rope), torch.nan)
        blocks = torch.tensor([[3, 1, 7, 2, 6, 5]])
        slots = torch.tensor([int(blocks[0, p // SIZE]) * SIZE + p % SIZE for p in range(tokens)])
        parts = []
        for start, end in ((0, 50), (50, 89), (89, 90)):
            plan = ops.plan_attention(
                *host_step(blocks, SIZE, [start], [0, end - start]),
                HeadShape(heads, 1, rank + rope, rank),
            )
            part = slice(start, end)
            q = layer.q_proj(x[part]).view(-1, heads, nope + rope)
            kv = layer.kv_a_proj_with_mqa(x[part])
            q_THC = torch.full((end - start, heads, rank + rope), torch.nan)
            q_nope = ops.latent_rope_cache(
                q, kv, rule, RopeCacheInputs(cos[part], sin[part], slots[part]), cache, q_THC
            )
            up(q_nope, out=q_THC[..., :rank])
            o = ops.attention(q_THC, cache, cache[..., :rank], plan).unflatten(1, (heads, rank))
            parts.append(layer.o_proj(down(o).flatten(1)))
    assert (torch.cat(parts) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "width", "depth"), [(3, 40, 24), (2, 512, 128), (1, 17, 9), (4, 128, 512)]
)
def test_products_of_heads(heads: int, width: int, depth: int, dtype: torch.dtype) -> None:
    """Strided rows and results, none at all, and the same bits in any company."""
    for kernels in ("torch", "auto"):
        ops = pick_ops("cpu", dtype, kernels)  # type: ignore[arg-type]
        weight = random(heads, depth, width, dtype=dtype).transpose(1, 2)
        x = random(70, heads + 1, depth + 3, seed=1, dtype=dtype)[:, 1:, 2:-1]
        product = ops.pack_heads(weight)
        expected = torch.einsum("thk,hnk->thn", x.double(), weight.double())
        whole = product(x)
        assert whole.shape == expected.shape
        error = (whole.double() - expected).abs().max() / expected.abs().max()
        assert error < {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
        for first, last in ((0, 0), (0, 1), (3, 10), (5, 69)):
            out = torch.full((last - first, heads, width + 5), torch.nan, dtype=dtype)
            assert product(x[first:last], out=out[..., 2:-3]).shape == (last - first, heads, width)
            assert torch.equal(out[..., 2:-3], whole[first:last])
            assert out[..., :2].isnan().all()
            assert out[..., -3:].isnan().all()


@pytest.mark.skipif(not native_rows.AVAILABLE, reason="needs the compiled extension")
@pytest.mark.parametrize(("kind", "group"), [("int8", 0), ("int4", 32), ("fp8", 64), ("fp8", 0)])
@pytest.mark.parametrize("threads", [1, 3])
def test_native_products_of_quantized_heads_are_those_of_linear_layers(
    kind: Any, group: int, threads: int
) -> None:
    heads = 3
    width = 40
    depth = 192
    module: Any = native()
    module.set_threads([-1] * threads)
    weight = Quantized.empty(kind, group, False, torch.bfloat16, (heads, width, depth))
    weight.values.copy_(torch.randint(0, 15 if kind == "int4" else 120, weight.shape))
    weight.scales.copy_(random(*weight.scales.shape, seed=3).abs())
    x = random(70, heads, depth, dtype=torch.bfloat16)
    product = NativeHeads(weight)
    whole = product(x)
    for head in range(heads):
        assert torch.equal(whole[:, head], NativeLinear(weight[head])(x[:, head]))
    assert torch.equal(product(x[20:27]), whole[20:27])
    module.set_threads([-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_and_latents(dtype: torch.dtype) -> None:
    """Two of seven rows are padding and write no entry; NaN does not affect other rows' bits."""
    tokens = 7
    real = 5
    heads = 3
    nope = 24
    rope = 8
    rank = 40
    rule = LatentRule(heads, nope, rope, rank, 0.3, 1e-5, random(rank, seed=2).abs())
    q = random(tokens, heads * (nope + rope) + 1, dtype=dtype)
    kv = random(tokens, rank + rope + 9, dtype=dtype)
    kv[3, 2] = torch.nan
    q = q[:, 1:].unflatten(1, (heads, -1))
    kv = kv[:, : rank + rope]
    cos, sin = angles(torch.arange(tokens) + 30, rope)
    slots = torch.tensor([17, 3, 40, 0, 39])
    results = []
    for kernels in ("torch", "auto"):
        ops = pick_ops("cpu", dtype, kernels)  # type: ignore[arg-type]
        cache = torch.zeros(4, SIZE, 1, rank + rope, dtype=dtype)
        out = torch.full((tokens, heads, 48), 7, dtype=dtype)
        results.append(
            (
                ops.latent_rope_cache(q, kv, rule, RopeCacheInputs(cos, sin, slots), cache, out),
                out,
                cache,
            )
        )
        assert (out[..., :rank] == 7).all()
        assert int((cache != 0).any(-1).sum()) == real
        one = torch.zeros_like(cache), torch.full_like(out[4:5], 7)
        at = RopeCacheInputs(cos[4:5], sin[4:5], slots[4:5])
        alone = ops.latent_rope_cache(q[4:5], kv[4:5], rule, at, one[0], one[1])
        assert torch.equal(alone[0], results[-1][0][4])
        assert torch.equal(one[1][0], out[4])
        assert torch.equal(one[0].view(64, -1)[39], cache.view(64, -1)[39])
    (q_nope, out, cache), found = results
    assert torch.equal(found[0], q_nope)
    assert torch.equal(found[1], out)
    torch.testing.assert_close(
        found[2], cache, rtol=1e-2 if dtype != torch.float32 else 2e-6, atol=1e-6, equal_nan=True
    )
    assert torch.equal(found[2][..., rank:], cache[..., rank:])
    latents = kv[:real, :rank].double()
    wanted = latents / (latents.square().mean(-1, keepdim=True) + 1e-5).sqrt() * rule.norm_L
    torch.testing.assert_close(
        cache.view(64, -1)[slots, :rank].double(),
        wanted,
        rtol=1e-2 if dtype != torch.float32 else 1e-5,
        atol=1e-6,
        equal_nan=True,
    )
