"""Native row kernels against their references, on every instruction set of this machine, with 1 to
3 threads.

Where the reference's order of operations is the kernel's, bits must agree. Elsewhere the sums of a
row are added in another order, which costs a few units in the last place, and 16-bit results may
then round to their neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.moe.all2all.layout import Grouping, group_rows, weighted_sum
from moeserve.moe.routing import Routing
from moeserve.ops import elementwise, native_rows
from moeserve.ops.elementwise import HeadRule, qk_norm_rope_cache
from moeserve.ops.inputs import RopeCacheInputs, from_entries, to_entries
from moeserve.ops.native import native
from moeserve.ops.rules import RELU2, SWIGLU, Activation, RouterRule
from moeserve.runner.sampling import noise
from moeserve.runner.sampling.rows import row_keys

_module: Any = native()
_isas = [] if _module is None else _module.supported_isas()
pytestmark = pytest.mark.skipif(not _isas, reason="no native kernels for this machine")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Score = Literal["softmax", "softmax_selected", "sigmoid", "sparsemixer"]
RENORMALIZED = RouterRule(renormalize=True)
GELU = Activation(kind="gelu_tanh")
TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
}  # one step of the dtype


@pytest.fixture(autouse=True, params=_isas or ["none"])
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    best = _module.serving_isa()
    _module.use_isa(request.param)
    yield
    _module.use_isa(best)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    _module.set_threads([-1] * request.param)
    yield
    _module.set_threads([-1])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1, pad: int = 3) -> Tensor:
    """Rows at odd addresses, with a stride that is not their width, between NaN."""
    wide = torch.full((*shape[:-1], shape[-1] + pad), torch.nan, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    wide[..., 1 : 1 + shape[-1]] = torch.randn(shape, generator=generator).to(dtype)
    return wide[..., 1 : 1 + shape[-1]]


@pytest.fixture(autouse=True)
def nan_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs hold NaN (or nonsense) before a kernel writes them."""

    def filled(*size: Any, **options: Any) -> Tensor:
        out = torch.empty(*size, **options)
        return out.fill_(torch.nan if out.is_floating_point() else -77)

    monkeypatch.setattr(native_rows, "_empty", filled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 8, 31, 64, 100, 2048, 4097])
def test_norms(width: int, dtype: torch.dtype) -> None:
    x = random(5, width, dtype=dtype)
    residual = random(5, width, dtype=dtype, seed=2, pad=1)
    weight = torch.rand(width) + 0.5
    close = {"rtol": TOLERANCE[dtype], "atol": 1e-6}
    torch.testing.assert_close(
        native_rows.rms_norm(x, weight, 1e-6), elementwise.rms_norm(x, weight, 1e-6), **close
    )
    normed, total = native_rows.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    expected, expected_total = elementwise.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, **close)
    assert torch.equal(normed, native_rows.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 90, 333])
def test_activations(width: int, dtype: torch.dtype) -> None:
    x = random(4, 2 * width, dtype=dtype)
    x[0, 0] = 1e4
    x[1, width - 1] = -1e4
    x[2, 0] = math.inf
    exact = torch.nn.functional.silu(x[:, :width].double()) * x[:, width:].double()
    torch.testing.assert_close(
        native_rows.act_mul(x, SWIGLU), exact.to(dtype), rtol=TOLERANCE[dtype], atol=1e-30
    )
    gates = native_rows.sigmoid_gate(x)
    torch.testing.assert_close(gates, elementwise.sigmoid_gate(x, 1), rtol=1e-6, atol=1e-30)
    parts = [
        native_rows.act_mul(
            torch.cat((x[:, i : i + 1], x[:, width + i : width + i + 1]), 1), SWIGLU
        )
        for i in range(width)
    ]
    assert torch.equal(torch.cat(parts, 1), native_rows.act_mul(x, SWIGLU)), (
        "a column depends on its place"
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_nan_and_infinity_stay_alone(dtype: torch.dtype) -> None:
    x = random(6, 64, dtype=dtype)
    weight = torch.ones(64)
    clean = (
        native_rows.rms_norm(x, weight, 1e-6),
        native_rows.act_mul(x, SWIGLU),
        *native_rows.route(x, 4, RENORMALIZED),
    )
    x[1, 3] = math.nan
    x[3, 40] = math.inf
    x[4, 63] = -math.inf
    found = (
        native_rows.rms_norm(x, weight, 1e-6),
        native_rows.act_mul(x, SWIGLU),
        *native_rows.route(x, 4, RENORMALIZED),
    )
    for before, after in zip(clean, found, strict=True):
        assert torch.equal(before[[0, 2, 5]], after[[0, 2, 5]])
    assert found[0][1].isnan().all()
    assert torch.equal(found[0].isnan(), elementwise.rms_norm(x, weight, 1e-6).isnan())
    assert torch.equal(found[1].isnan(), elementwise.act_mul(x, SWIGLU, 1).isnan())
    torch.testing.assert_close(
        native_rows.act_mul(x, RELU2),
        elementwise.act_mul(x, RELU2, 1),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


def test_threads_and_batch_change_no_bit(threads: None) -> None:
    x = random(300, 256, dtype=torch.bfloat16)
    weight = torch.rand(256)
    kernels = (
        lambda rows: native_rows.rms_norm(rows, weight, 1e-6),
        lambda rows: native_rows.add_rms_norm(rows.clone(), rows.clone(), weight, 1e-6)[0],
        lambda rows: native_rows.act_mul(rows, SWIGLU),
        lambda rows: native_rows.act_mul(rows, GELU),
        lambda rows: native_rows.route(rows, 8, RENORMALIZED)[1],
        lambda rows: native_rows.argmax(rows.float())[1],
    )
    for kernel in kernels:
        whole = kernel(x)
        for first, last in ((0, 1), (3, 4), (5, 17), (100, 299)):
            assert torch.equal(kernel(x[first:last].clone()), whole[first:last])


def case_of(
    dtype: torch.dtype, dim: int, *, norms: bool, clip: float, normed: bool, **more: Any
) -> tuple[Tensor, HeadRule, Tensor, Tensor, Tensor, Tensor | None]:
    tokens = 9
    heads = 6
    groups = 2
    qkv = random(tokens, (heads + groups) * dim + groups * more.get("v_dim", dim), dtype=dtype)
    angles = torch.rand(tokens, 1, dim // 2) * 6
    cos = torch.cat((angles.cos(),) * 2, -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    weights = torch.rand(heads + groups, dim) + 0.5 if norms else None
    rule = HeadRule(heads, groups, 0.31, 1e-5, weights, clip, **more)
    given = random(tokens, heads + groups, dim).contiguous() if normed else None
    return qkv, rule, cos, sin, torch.tensor([17, 3, 40, 0, 39, 8, 9]), given


def bits_of(x: Tensor) -> Tensor:
    return x if x.dtype == torch.int8 else x.nan_to_num(9e3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dim", [8, 24, 64, 72, 128])
@pytest.mark.parametrize(
    ("norms", "clip", "normed", "more"),
    [
        (False, math.inf, False, {}),
        (True, math.inf, False, {}),
        (False, 0.7, False, {"v_dim": 40}),
        (True, 0.9, False, {"norm_last": True}),
        (False, 0.7, True, {}),
        (True, math.inf, True, {"norm_last": True, "norm_values": True, "v_dim": 33}),
    ],
)
def test_qk_norm_rope_cache(
    dim: int,
    dtype: torch.dtype,
    norms: bool,
    clip: float,
    normed: bool,
    more: dict[str, Any],
    rounded: bool,
) -> None:
    """Two of the nine rows are padding: their queries are computed, their keys and values go
    nowhere.
    """
    qkv, rule, cos, sin, slots, given = case_of(
        dtype, dim, norms=norms, clip=clip, normed=normed, **more
    )
    empty = [torch.full((6, 7, 2, width), torch.nan) for width in (dim, more.get("v_dim", dim)) * 2]
    caches = [to_entries(cache, torch.int8 if rounded else dtype) for cache in empty]
    at = RopeCacheInputs(cos, sin, slots)
    found = native_rows.qk_norm_rope_cache(qkv, rule, at, tuple(caches[:2]), given), *caches[:2]
    expected = qk_norm_rope_cache(qkv, rule, at, tuple(caches[2:]), given), *caches[2:]
    for mine, reference in zip(found, expected, strict=True):
        if norms:
            tolerance = 0.05 if mine.dtype == torch.int8 else 1e-5  # one step of a scale
            a = from_entries(mine)
            b = from_entries(reference)
            torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=tolerance, equal_nan=True)
        else:
            assert torch.equal(bits_of(mine), bits_of(reference))
    assert int(from_entries(caches[0]).isnan().any(-1).sum()) == (42 - 7) * 2
    one = RopeCacheInputs(*(part[4:5] for part in at))
    part = None if given is None else given[4:5]
    alone = native_rows.qk_norm_rope_cache(qkv[4:5].clone(), rule, one, tuple(caches[:2]), part)
    assert torch.equal(alone[0], found[0][4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_cells_are_the_references(dtype: torch.dtype) -> None:
    """Inputs are extreme values.

    They are zeros, denormals, the smallest and largest numbers, halves between steps, infinity and
    NaN.
    """
    heads = torch.zeros(8, 24)
    heads[1, 5] = 1e-45
    heads[2, 3] = -3e-38
    heads[3] = torch.randn(24, generator=torch.Generator().manual_seed(0)) * 3e-43
    heads[4] = torch.linspace(-3e38, 3e38, 24)
    heads[5] = torch.arange(24) + 0.5
    heads[5, 0] = 127.0
    heads[6, 7] = -torch.inf
    heads[7, 23] = torch.nan
    qkv = heads.to(dtype).repeat(1, 3)
    rule = HeadRule(1, 1, 1.0, 1e-6)
    ones = torch.ones(8, 1, 24)
    caches = [torch.full((8, 1, 1, 28), 77, dtype=torch.int8) for _ in range(4)]
    at = RopeCacheInputs(ones, 0 * ones, torch.arange(8))
    native_rows.qk_norm_rope_cache(qkv, rule, at, tuple(caches[:2]))
    qk_norm_rope_cache(qkv, rule, at, tuple(caches[2:]))
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])
    assert caches[1][5].flatten()[:6].tolist() == [127, 2, 2, 4, 4, 6]
    values = from_entries(caches[1]).view(8, 24)
    wanted = qkv[:, 48:].float()
    finite = wanted.isfinite().all(1)
    assert torch.equal(values.isnan(), ~finite[:, None].expand(8, 24))
    error = (values - wanted)[finite].abs()
    step = wanted[finite].abs().amax(1, keepdim=True) / 127
    assert (error <= 0.5001 * step + 1e-43).all()


@pytest.mark.parametrize("experts", [5, 8, 60, 64, 128, 300, 512])
@pytest.mark.parametrize("score", ["softmax", "softmax_selected", "sigmoid", "sparsemixer"])
def test_route_chooses_as_the_reference(experts: int, score: Score) -> None:
    """Coarse logits: many ties, also of 0 and -0. Ids must agree exactly, weights up to the order
    of sums.
    """
    top_k = min(32, experts)
    for dtype in DTYPES:
        logits = (random(50, experts, dtype=dtype) * 4).round().to(dtype) / 4
        logits[3] = 0.0
        logits[3, ::2] = -0.0
        for renormalize in (True, False):
            rule = RouterRule(score=score, renormalize=renormalize)
            ids, weights = native_rows.route(logits, top_k, rule)
            expected_ids, expected_weights = elementwise.route(logits, top_k, rule)
            assert torch.equal(ids, expected_ids)
            torch.testing.assert_close(weights, expected_weights, rtol=3e-6, atol=1e-12)


@pytest.mark.parametrize("score", ["softmax", "softmax_selected", "sigmoid", "sparsemixer"])
def test_route_survives_what_is_not_finite(score: Score) -> None:
    """Rows that softmax makes NaN throughout may choose anyone, but distinct ones that exist; a
    sigmoid may flip a NaN's sign, which its place depends on."""
    values = torch.tensor([math.inf, -math.inf, 0.0, 1.0, math.nan])
    logits = values[
        torch.randint(
            0, 4 if score == "sigmoid" else 5, (200, 11), generator=torch.Generator().manual_seed(1)
        )
    ]
    ids, weights = native_rows.route(logits, 5, RouterRule(score=score, renormalize=True))
    expected_ids, expected_weights = elementwise.route(
        logits, 5, RouterRule(score=score, renormalize=True)
    )
    assert all(len(set(row)) == 5 and set(row) <= set(range(11)) for row in ids.tolist())
    assert torch.equal(weights.isnan(), expected_weights.isnan())
    same = ~weights[:, 0].isnan() if score == "softmax" else slice(None)
    assert torch.equal(ids[same], expected_ids[same])
    all_bits = torch.full((1, 9), -1, dtype=torch.int32).view(
        torch.float32
    )  # the NaN with every bit set
    assert native_rows.route(all_bits, 9, RouterRule(score="softmax_selected"))[0].tolist() == [
        list(range(9))
    ]


@pytest.mark.parametrize(
    "rule",
    [
        RouterRule(
            score="sigmoid", groups=6, kept_groups=2, renormalize=True, epsilon=1e-20, scale=2.5
        ),
        RouterRule(groups=3, kept_groups=2, group_score="max", scale=16.0),
        RouterRule(score="sigmoid", renormalize=True, floor=2.5),
        RouterRule(score="softmax_selected", groups=2),
        RouterRule(score="sparsemixer", jitter=0.2, groups=2),
    ],
    ids=repr,
)
@pytest.mark.parametrize("biased", [False, True])
def test_route_by_every_rule(rule: RouterRule, biased: bool) -> None:
    """Coarse logits and biases: many ties of experts and of groups."""
    experts = 60
    bias, scale = (
        ((random(2, experts, seed=9) * 2).round() / 4).contiguous() if biased else (None, None)
    )
    for dtype in DTYPES:
        logits = (random(50, experts, dtype=dtype) * 4).round().to(dtype) / 4
        ids, weights = native_rows.route(logits, 4, rule, bias, scale)
        expected_ids, expected_weights = elementwise.route(logits, 4, rule, bias, scale)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights, rtol=3e-6, atol=1e-12)


def test_route_refuses_more_than_there_are() -> None:
    with pytest.raises(ValueError, match="cannot choose 6 of 5 experts"):
        native_rows.route(torch.zeros(1, 5), 6, RENORMALIZED)


@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouping_and_sums_of_pairs(tokens: int, dtype: torch.dtype, threads: None) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, 13, (tokens, 4), generator=generator, dtype=torch.int32)
    x = random(tokens, 130, dtype=dtype)
    weights = torch.rand(tokens, 4, generator=generator)
    expected = group_rows(ids, 13)
    found = Grouping(*native_rows.group_pairs(ids, 13))
    assert torch.equal(found.order_P, expected.order_P)
    assert torch.equal(found.place_N, expected.place_N)
    assert np.array_equal(found.counts_e, expected.counts_e)
    rows = native_rows.rows_of_pairs(x, found.order_P, 4)
    assert torch.equal(rows, x.index_select(0, expected.order_P // 4))
    out = native_rows.sum_pairs(
        rows, found.place_N, weights, torch.full_like(x.contiguous(), torch.nan)
    )
    assert torch.equal(
        out, weighted_sum(rows, expected, Routing(ids, weights), torch.empty_like(out))
    )


def test_ids_outside_are_refused() -> None:
    with pytest.raises(IndexError, match="expert id 5"):
        native_rows.group_pairs(torch.tensor([[1, 5]], dtype=torch.int32), 5)
    for wrong in (-1, 4):
        with pytest.raises(IndexError, match="of 4"):
            native_rows.embedding(torch.tensor([0, wrong]), torch.zeros(4, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype: torch.dtype) -> None:
    table = random(50, 33, dtype=dtype).contiguous()
    ids = torch.tensor([49, 0, 7, 7])
    assert torch.equal(native_rows.embedding(ids, table), elementwise.embedding(ids, table))


def test_indices_with_gaps_between_them_are_refused() -> None:
    with pytest.raises(AssertionError):
        native_rows.embedding(torch.arange(10)[::2], torch.zeros(10, 2))


@pytest.mark.parametrize("ids", [-1, 0, 3])
def test_ten_thousand_tokens_to_one_expert_or_to_none(ids: int) -> None:
    ids_TK = torch.full((10_000, 8), ids, dtype=torch.int32)
    found = Grouping(*native_rows.group_pairs(ids_TK, 4))
    expected = group_rows(ids_TK, 4)
    assert torch.equal(found.order_P, torch.arange(80_000 if ids >= 0 else 0))
    assert torch.equal(
        found.place_N, torch.arange(80_000) if ids >= 0 else torch.full((80_000,), -1)
    )
    assert (
        found.counts_e.tolist()
        == [80_000 if ids == e else 0 for e in range(4)]
        == expected.counts_e.tolist()
    )
    x = (random(10_000, 8) * 4).round()  # sums of whole eighths are exact
    rows = native_rows.rows_of_pairs(x, found.order_P, 8)
    out = native_rows.sum_pairs(
        rows, found.place_N, torch.full((10_000, 8), 0.125), torch.full_like(x, torch.nan)
    )
    assert torch.equal(out, x if ids >= 0 else torch.zeros_like(x))


@pytest.mark.parametrize("width", [1, 9, 511, 512, 513, 4100, 32_000])
def test_argmax(width: int) -> None:
    x = random(40, width).round(decimals=1)
    x[0] = -math.inf
    x[1] = 0.0
    x[2, width // 2] = math.inf
    for row, column in ((3, 0), (4, width - 1), (5, width // 3)):
        x[row, column] = math.nan
    x[5, width - 1] = math.nan
    peak, column = native_rows.argmax(x)
    expected = x.max(dim=-1)
    assert torch.equal(column, expected.indices)
    assert torch.equal(peak.nan_to_num(9e9), expected.values.nan_to_num(9e9))


@pytest.mark.parametrize("vocab", [64, 100, 4096, 50_000])
@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0, 30.0])
def test_races_have_the_reference_winner(vocab: int, spread: float) -> None:
    rows = 200 if vocab < 10_000 else 12
    gumbel = noise.Gumbel(vocab, torch.device("cpu"))
    x = random(rows, vocab) * spread + 5
    x[1] = x[1].sort().values
    low, high = torch.from_numpy(row_keys(np.arange(rows, dtype=np.uint64) * 77, np.arange(rows)))
    winner = native_rows.race(x, low, high, gumbel.token_hash)
    padded = torch.nn.functional.pad(x, (0, -vocab % 64), value=-math.inf)
    expected = (padded + gumbel(low, high)).argmax(dim=1)
    decided = winner >= 0
    assert int(decided.sum()) > 0.99 * rows
    assert torch.equal(winner[decided], expected[decided])
    assert torch.equal(native_rows.race(padded, low, high, gumbel.token_hash), winner)


def test_race_over_some_blocks() -> None:
    gumbel = noise.Gumbel(4096, torch.device("cpu"))
    blocks = torch.stack([torch.randperm(64)[:5].sort().values for _ in range(30)])
    x = random(30, 320)
    x[:, ::3] = -math.inf
    low, high = torch.from_numpy(row_keys(np.arange(30, dtype=np.uint64), np.arange(30)))
    winner = native_rows.race(x, low, high, gumbel.token_hash, blocks)
    assert torch.equal(winner, (x + gumbel(low, high, blocks)).argmax(dim=1))


def test_race_leaves_hard_cases_to_the_reference() -> None:
    gumbel = noise.Gumbel(128, torch.device("cpu"))
    x = torch.zeros(4, 128)
    x[0, 5] = math.nan
    x[1, 5] = math.inf
    x[2] = -math.inf
    zeros = torch.zeros(4, dtype=torch.int32)
    assert native_rows.race(x, zeros, zeros, gumbel.token_hash).tolist()[:3] == [-1, -1, -1]
    x = torch.full((1, 128), -math.inf)
    x[0, [3, 90]] = -gumbel(zeros[:1], zeros[:1])[0, [3, 90]]  # both scores are 0
    assert native_rows.race(x, zeros[:1], zeros[:1], gumbel.token_hash).item() == -1
    x[0, 90] = x[0, 90] + 0.01
    assert native_rows.race(x, zeros[:1], zeros[:1], gumbel.token_hash).item() == 90


def exp(x: Tensor) -> Tensor:
    y = torch.full_like(x, torch.nan)
    _module.exp(x.data_ptr(), y.data_ptr(), len(x))
    return y


def test_exp_over_a_dense_sweep() -> None:
    """Within 2 units in the last place where the result is a normal number; never falling by more
    than one.
    """
    x = torch.cat((torch.linspace(-87.3, 88.7, 1_500_000), torch.linspace(-0.01, 0.01, 200_001)))
    y = exp(x)
    exact = x.double().exp()
    unit = torch.exp2(exact.log2().floor() - 23)
    assert ((y.double() - exact).abs() / unit).max() < 2
    ordered = exp(torch.linspace(-104.5, 89.0, 1_500_001)).view(torch.int32)
    assert int((ordered[1:] - ordered[:-1]).min()) >= -1
    edges = torch.tensor([-math.inf, -1e30, -104.0, 0.0, -0.0, 89.0, math.inf, math.nan])
    assert exp(edges)[:-1].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, math.inf, math.inf]
    assert exp(edges)[-1].isnan()
    small = torch.linspace(-103.9, -87.4, 100_000)
    assert (
        (exp(small).double() - small.double().exp()).abs()
        <= 1.5 * 2.0**-149 + 3e-7 * small.double().exp()
    ).all()


def test_silu_over_a_dense_sweep() -> None:
    x = torch.linspace(-80, 80, 1_000_001)
    pairs = torch.stack((x, torch.ones_like(x)), 1)
    exact = x.double() / (1 + (-x.double()).exp())
    found = native_rows.act_mul(pairs, SWIGLU)[:, 0].double()
    assert ((found - exact).abs() <= 4 * 2.0**-24 * exact.abs()).all()
