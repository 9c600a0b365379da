"""Norms, rotary, activations, router: the docstrings' examples, slow references, and bits that
belong to the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import pytest
import torch
from torch import Tensor

from moeserve.ops import elementwise as e
from moeserve.ops.inputs import RopeCacheInputs, entry_width, from_entries, to_entries
from moeserve.ops.rules import RELU2, SWIGLU, Activation, RouterRule

Score = Literal[
    "softmax", "softmax_selected", "sigmoid", "sigmoid_selected", "sqrt_softplus", "sparsemixer"
]
SCORES = get_args(Score)
ACTIVATIONS = [
    SWIGLU,
    Activation(kind="gelu_tanh"),
    Activation(alpha=1.702, limit=7.0, up_shift=1.0),
]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_examples() -> None:
    ones = torch.ones(2)
    assert e.rms_norm(torch.tensor([[3.0, 4.0]]), ones, 0.0)[0].tolist() == pytest.approx(
        [0.8485, 1.1314], abs=1e-4
    )
    normed, total = e.add_rms_norm(
        torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]]), ones, 0.0
    )
    assert total.tolist() == [[3.0, 4.0]]
    assert normed[0].tolist() == pytest.approx([0.8485, 1.1314], abs=1e-4)
    quarter = torch.tensor([0.0]), torch.tensor([1.0])
    cos = torch.cat((quarter[0], quarter[0]))[None, None]
    sin = torch.cat((-quarter[1], quarter[1]))[None, None]
    assert e.rotary(torch.tensor([[[1.0, 0.0]]]), cos, sin)[0, 0].tolist() == [0.0, 1.0]
    assert e.act_mul(torch.tensor([[1.0, 2.0]]), SWIGLU, 1).item() == pytest.approx(
        1.4621, abs=1e-4
    )
    hostile = torch.tensor([[-3.0, 2.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-30]])
    expected = torch.tensor([[0.0, 4.0, 0.0, torch.inf, 0.0, torch.nan, 0.0]])
    torch.testing.assert_close(
        e.act_mul(hostile, RELU2, 1), expected, rtol=0, atol=0, equal_nan=True
    )
    assert list(e.row_pieces(5, 32_768, 2)) == [slice(0, 4), slice(4, 5)]
    ids, weights = e.route(torch.tensor([[0.0, math.log(3), 0.0]]), 2, RouterRule())
    assert ids.tolist() == [[1, 0]]
    assert weights[0].tolist() == pytest.approx([0.6, 0.2])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
@pytest.mark.parametrize("width", [64, 72, 320])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_activations_and_norms_keep_their_bits(
    width: int, dtype: torch.dtype, activation: Activation, threads: int
) -> None:
    x = torch.randn(1500, 2 * width, generator=torch.Generator().manual_seed(2)).to(dtype)
    weight = torch.rand(2 * width) + 0.5
    whole = e.act_mul(x, activation, threads)
    normed = e.rms_norm(x, weight, 1e-6)
    for first, rows in ((0, 1), (7, 2), (100, 33), (499, 999), (1, 1499)):
        part = slice(first, first + rows)
        assert torch.equal(e.act_mul(x[part], activation, threads), whole[part]), rows
        assert torch.equal(e.rms_norm(x[part], weight, 1e-6), normed[part]), rows
    gates = torch.randn(1500, e.LANES)
    assert torch.equal(e.sigmoid_gate(gates, threads)[40:41], e.sigmoid_gate(gates[40:41], threads))
    assert e.sigmoid_gate(gates, threads)[3].item() == pytest.approx(gates[3, 0].sigmoid().item())


@pytest.mark.parametrize("function", [e.exp, e.sigmoid, e.silu, e.softplus])
@pytest.mark.parametrize("rows", [1, 400])
def test_shares_of_columns_keep_their_bits(function: Callable[[Tensor], Tensor], rows: int) -> None:
    """Ranks have such slices, however narrow; none may take torch's scalar tail."""
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(2)) * 8
    x[0, :5] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    whole = function(x)
    for tp in (2, 3, 8, 96):
        parts = torch.cat([function(part) for part in x.chunk(tp, 1)], 1)
        assert torch.equal(parts.view(torch.int32), whole.view(torch.int32)), tp


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
@pytest.mark.parametrize("width", [90, 192, 1000, 66_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_columns_of_activations_keep_their_bits(
    width: int, dtype: torch.dtype, activation: Activation, threads: int
) -> None:
    """Bits must not depend on how ranks divide the columns.

    So no slice may take torch's scalar code where another does not.
    """
    gate, up = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(4)).to(dtype)
    whole = e.act_mul(torch.cat((gate, up), 1), activation, threads)
    for size in (2, 3, 8):
        parts = [
            e.act_mul(torch.cat(pair, 1), activation, threads)
            for pair in zip(gate.tensor_split(size, 1), up.tensor_split(size, 1), strict=True)
        ]
        assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("width", [8, 72, 512, 40_000])
def test_pieces_split_between_rows(width: int, threads: int) -> None:
    for rows in (0, 1, 2, 7, 100, 999):
        pieces = list(e.row_pieces(rows, width, threads))
        assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(rows))
        for piece in pieces:
            size = piece.stop - piece.start
            assert (
                size % min(threads, math.ceil(size * width / e.TORCH_GRAIN)) == 0
                or size == 1 < width / e.TORCH_GRAIN
            )


def slow_route(
    logits: list[float], k: int, score: str, renormalize: bool
) -> tuple[list[int], list[float]]:
    def softmax(values: list[float]) -> list[float]:
        terms = [math.exp(v - max(values)) for v in values]
        return [t / sum(terms) for t in terms]

    if score == "sparsemixer":
        return slow_sparsemixer(logits, k, renormalize)
    scores = softmax(logits) if score == "softmax" else logits
    if score == "sigmoid":
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    elif score == "sqrt_softplus":
        scores = [math.sqrt(math.log1p(math.exp(value))) for value in logits]
    ids = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
    weights = [scores[i] for i in ids]
    if score == "softmax_selected":
        weights = softmax(weights)
    elif score == "sigmoid_selected":
        weights = [1 / (1 + math.exp(-value)) for value in weights]
    return ids, [w / sum(weights) for w in weights] if renormalize else weights


def slow_sparsemixer(
    logits: list[float], k: int, renormalize: bool
) -> tuple[list[int], list[float]]:
    ids: list[int] = []
    weights: list[float] = []
    for _ in range(k):
        left = [i for i in range(len(logits)) if i not in ids]
        best = min(left, key=lambda i: (-logits[i], i))
        peak = logits[best]
        near = [
            i
            for i in left
            if logits[i] == peak or (peak - logits[i]) / max(abs(logits[i]), peak) <= 0
        ]
        weights.append(1 / sum(math.exp(logits[i] - peak) for i in near))
        ids.append(best)
    return ids, [w / sum(weights) for w in weights] if renormalize else weights


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("score", SCORES)
def test_router_agrees_with_plain_python(score: Score, renormalize: bool, threads: int) -> None:
    """Small integers as logits: many ties, also between 0 and -0."""
    logits = torch.randint(-2, 3, (60, 11), generator=torch.Generator().manual_seed(3)).float()
    logits[::2] *= -1.0
    rule = RouterRule(score=score, renormalize=renormalize)
    ids, weights = e.route(logits, 4, rule)
    for row in range(60):
        expected_ids, expected_weights = slow_route(logits[row].tolist(), 4, score, renormalize)
        assert ids[row].tolist() == expected_ids
        assert weights[row].tolist() == pytest.approx(expected_weights)
    for row in range(60):
        alone = e.route(logits[row : row + 1], 4, rule)
        assert torch.equal(alone[0][0], ids[row])
        assert torch.equal(alone[1][0], weights[row])


def test_groups_that_are_out_stay_out() -> None:
    """However negative the biased scores of the best groups are; and ties go to the first group,
    then expert.
    """
    logits = torch.zeros(2, 6)
    bias = torch.tensor([-8.0, -9.0, -7.0, -9.5, -8.0, -8.0])
    for group_score, expected in (("max", [2, 3]), ("top2", [4, 5])):
        rule = RouterRule(score="sigmoid", groups=3, kept_groups=1, group_score=group_score)  # type: ignore[arg-type]
        ids, weights = e.route(logits, 2, rule, bias)
        assert ids.tolist() == [expected] * 2
        assert weights.tolist() == [[0.5, 0.5]] * 2
        assert e.route(logits, 2, rule, torch.zeros(6))[0].tolist() == [[0, 1]] * 2


def test_sums_and_scales_of_weights() -> None:
    logits = torch.zeros(1, 4)
    scale = torch.tensor([1.0, 3.0, 1.0, 1.0])
    for rule, expected in (
        (RouterRule(score="sigmoid"), 0.5),
        (RouterRule(score="sigmoid", scale=2.0), 1.0),
        (RouterRule(score="sigmoid", renormalize=True), 0.5),
        (RouterRule(score="sigmoid", renormalize=True, epsilon=1.0), 0.25),
        (RouterRule(score="sigmoid", renormalize=True, floor=2.0, scale=4.0), 1.0),
        (RouterRule(score="sparsemixer", jitter=0.01), 0.25),
    ):
        ids, weights = e.route(logits, 2, rule, None, scale)
        assert ids.tolist() == [[0, 1]]
        second = expected * 4 / 3 if rule.score == "sparsemixer" else expected
        assert weights[0].tolist() == pytest.approx([expected, 3 * second])


@pytest.mark.parametrize("score", SCORES)
def test_router_survives_infinities_and_nan(score: Score) -> None:
    logits = torch.tensor([[float("nan")] * 5, [float("inf"), 0, 0, 0, 0], [-float("inf")] * 5])
    ids, _ = e.route(logits, 3, RouterRule(score=score, renormalize=True))
    assert ((ids >= 0) & (ids < 5)).all()
    assert all(len(set(row)) == 3 for row in ids.tolist())


def test_new_keys_and_values_reach_their_cells() -> None:
    k_cache = torch.zeros(4, 8, 2, 16)
    v_cache = torch.zeros(4, 8, 2, 16)
    k = torch.randn(3, 2, 16)
    v = torch.randn(3, 2, 16)
    e.write_kv(k, v, k_cache, v_cache, torch.tensor([9, 31, 10]))
    assert torch.equal(k_cache[1, 1], k[0])
    assert torch.equal(v_cache[3, 7], v[1])
    assert torch.equal(v_cache[1, 2], v[2])
    assert int((k_cache != 0).sum()) == 3 * 32


@pytest.mark.parametrize("v_dim", [None, 16, 40])
@pytest.mark.parametrize("norm_last", [False, True])
def test_heads_on_their_way_to_attention(v_dim: int | None, norm_last: bool) -> None:
    """Norms before or after the rotation, values of another width and normalised, in double
    precision.
    """
    heads = 4
    groups = 2
    dim = 24
    tokens = 5
    real = 3
    v = v_dim or dim
    random = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, (heads + groups) * dim + groups * v + 3, generator=random)[:, :-3]
    norms = torch.rand(heads + groups, dim, generator=random) + 0.5
    angles = torch.rand(tokens, 1, dim // 2) * 6
    cos = torch.cat((angles.cos(),) * 2, -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    rule = e.HeadRule(
        heads,
        groups,
        0.3,
        1e-3,
        norms,
        v_dim=v_dim,
        norm_last=norm_last,
        norm_values=v_dim is not None,
    )
    k = torch.zeros(2, 4, groups, dim)
    values = torch.zeros(2, 4, groups, v)
    slots = torch.tensor([6, 0, 3])
    q = e.qk_norm_rope_cache(qkv, rule, RopeCacheInputs(cos, sin, slots), (k, values))

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()

    def turn(x: torch.Tensor) -> torch.Tensor:
        return x * cos.double() + x.roll(dim // 2, -1) * sin.double()

    qk = qkv[:, : (heads + groups) * dim].double().view(tokens, -1, dim)
    qk = norm(turn(qk)) * norms if norm_last else turn(norm(qk) * norms)
    own = qkv[:real, (heads + groups) * dim :].double().view(real, groups, v)
    torch.testing.assert_close(q.double(), qk[:, :heads] * 0.3, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        k.view(8, groups, dim)[slots].double(), qk[:real, heads:], rtol=1e-5, atol=1e-6
    )
    wanted = norm(own) if v_dim else own
    torch.testing.assert_close(
        values.view(8, groups, v)[slots].double(), wanted, rtol=1e-5, atol=1e-6
    )
    assert int((values != 0).any(-1).sum()) == real * groups


def test_int8_cells() -> None:
    x = torch.tensor(
        [[[50.0, -127.0, 0.0, 62.5]], [[0.0, 0.0, 0.0, 0.0]], [[1.0, torch.inf, 0.0, 2.0]]]
    )
    entries = to_entries(x, torch.int8)
    assert entries.shape == (3, 1, entry_width(4, torch.int8))
    assert from_entries(entries)[0, 0].tolist() == [50, -127, 0, 62]  # halves go to even numbers
    assert from_entries(to_entries(x / 100, torch.int8))[0, 0].tolist() == pytest.approx(
        [0.5, -1.27, 0.0, 0.62], abs=0.01
    )
    assert not from_entries(entries)[1].any()
    assert from_entries(entries)[2].isnan().all()
    assert entry_width(4, torch.bfloat16) == 4
    assert torch.equal(from_entries(to_entries(x, torch.bfloat16)), x.bfloat16())
