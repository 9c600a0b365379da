"""The router's kernel: interpreted against both references, and compiled for sm_90."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from moeserve.kernels.route import route
from moeserve.ops import elementwise
from moeserve.ops.rules import RouterRule
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE

V3 = RouterRule(
    score="sigmoid", renormalize=True, groups=8, kept_groups=4, epsilon=1e-20, scale=2.5
)
RENORMALIZED = RouterRule(renormalize=True)
SHAPES = [(0, 4, 2), (1, 1, 1), (3, 5, 5), (4, 60, 4), (2, 128, 8), (1, 1024, 32)]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*invalid value:RuntimeWarning"
)  # NumPy, which interprets


def logits_of(tokens: int, experts: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Steps of 1/4: many ties, and different logits have different scores; rows are strided."""
    wide = (
        torch.randint(
            -24, 24, (tokens, experts + 3), generator=torch.Generator().manual_seed(experts)
        )
        / 4
    )
    return wide[:, :experts].to(DEVICE, dtype) if tokens else torch.empty(0, experts, device=DEVICE)


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[0], expected[0])
    assert found[0].dtype == torch.int32
    torch.testing.assert_close(found[1], expected[1], rtol=2e-6, atol=1e-9)


def test_route_example() -> None:
    ids, weights = route(torch.tensor([[0.0, math.log(3), 0.0]], device=DEVICE), 2, RouterRule())
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[0.6, 0.2]]))
    bias = torch.tensor([0.0, 0.0, 1.0], device=DEVICE)
    ids, weights = route(
        torch.zeros(1, 3, device=DEVICE), 1, RouterRule(score="sigmoid", bias=True), bias
    )
    assert (ids.tolist(), weights.tolist()) == ([[2]], [[0.5]])


@pytest.mark.full("kernels", keep="each")
@pytest.mark.parametrize(
    "rule", [RENORMALIZED, RouterRule(), RouterRule(score="softmax_selected")], ids=repr
)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES)
def test_route(tokens: int, experts: int, top_k: int, rule: RouterRule) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = logits_of(tokens, experts, dtype)
        check(route(logits, top_k, rule), elementwise.route(logits, top_k, rule))


@pytest.mark.full("kernels", keep="each")
@pytest.mark.parametrize(
    ("rule", "experts", "top_k"),
    [
        (V3, 256, 8),
        (V3, 40, 20),
        (RouterRule(score="sigmoid", renormalize=True, floor=2.5, scale=2.0), 6, 3),
        (RouterRule(groups=3, kept_groups=1, group_score="max"), 15, 5),
        (RouterRule(score="softmax_selected", groups=4, kept_groups=3, group_score="max"), 12, 4),
        (RouterRule(groups=4, kept_groups=2, group_score="max", scale=16.0), 4, 2),
        (RouterRule(score="sigmoid_selected", groups=4, kept_groups=3, renormalize=True), 12, 4),
        (RouterRule(score="sparsemixer", jitter=0.01), 16, 2),
        (RouterRule(score="sparsemixer", jitter=0.3), 7, 3),
    ],
    ids=repr,
)
@pytest.mark.parametrize("biased", [False, True])
def test_route_by_every_rule(rule: RouterRule, experts: int, top_k: int, biased: bool) -> None:
    logits = logits_of(4, experts)
    bias = logits_of(1, experts)[0] / 8 if biased else None
    scale = logits_of(1, experts)[0] + 10 if biased else None
    check(
        route(logits, top_k, rule, bias, scale), elementwise.route(logits, top_k, rule, bias, scale)
    )


def test_the_bias_moves_choices_and_not_weights() -> None:
    """Group 1 wins by its best two together, though group 0 has the best expert; the bias then
    lifts group 0.
    """
    logits = torch.tensor([[4.0, -9.0, 2.0, 2.0]], device=DEVICE)
    rule = RouterRule(score="sigmoid", groups=2)
    assert route(logits, 2, rule)[0].tolist() == [[2, 3]]
    ids, weights = route(logits, 2, rule, torch.tensor([0.0, 3.0, 0.0, 0.0], device=DEVICE))
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(weights, logits.sigmoid()[:, [1, 0]])


@pytest.mark.parametrize("score", ["softmax", "softmax_selected", "sigmoid", "sparsemixer"])
def test_no_number_is_no_harm(
    score: Literal["softmax", "softmax_selected", "sigmoid", "sparsemixer"],
) -> None:
    """Ids are valid and differ, and other rows are what they are alone."""
    logits = torch.zeros(4, 10, device=DEVICE)
    logits[0, 3] = logits[1] = math.nan
    logits[2] = -math.inf
    rule = RouterRule(score=score, renormalize=True, groups=2)
    for ids, weights in (route(logits, 4, rule), route(logits, 4, replace(rule, groups=1))):
        assert all(len({*row}) == 4 and min(row) >= 0 and max(row) < 10 for row in ids.tolist())
        assert score == "sparsemixer" or weights[3].tolist() == [0.25] * 4
        assert ids[3].tolist() == [0, 1, 2, 3]


def test_padding_is_not_read() -> None:
    logits = logits_of(5, 20)
    ids, weights = route(logits[:2], 3, RENORMALIZED)
    logits[2:] = math.nan
    for num_tokens in (2, torch.tensor([2], dtype=torch.int32, device=DEVICE)):
        some_ids, some_weights = route(logits, 3, RENORMALIZED, None, None, num_tokens)
        assert torch.equal(some_ids[:2], ids)
        assert torch.equal(some_weights[:2], weights)
        assert (some_ids[2:] == -1).all()
        assert (some_weights[2:] == 0).all()


@pytest.mark.full("aot")
def test_route_compiles_for_hopper() -> None:
    signature = {
        "logits_ptr": "*bf16",
        "num_tokens_ptr": "*i32",
        "ids_ptr": "*i32",
        "weights_ptr": "*fp32",
        "num_tokens": "i32",
        "row_stride": "i32",
        "num_groups": "i32",
        "group_size": "i32",
        "epsilon": "fp32",
        "scale": "fp32",
        "floor": "fp32",
        "band": "fp32",
    }
    qwen = {
        "K": 8,
        "SCORE": "softmax",
        "RENORMALIZE": True,
        "KEEP": 0,
        "GROUP_TOP": 2,
        "GROUPS": 1,
        "SIZE": 128,
    }
    deepseek = {
        "K": 8,
        "SCORE": "sigmoid",
        "RENORMALIZE": True,
        "KEEP": 4,
        "GROUP_TOP": 2,
        "GROUPS": 8,
        "SIZE": 32,
    }
    plain = {"CHOICES": 8, "expert_scale_ptr": None}
    phi = {**qwen, "K": 2, "SCORE": "sparsemixer", "RENORMALIZE": False, "SIZE": 16}
    cases = [
        Case("route:route_kernel", signature, {"bias_ptr": None, **plain, **qwen}, num_warps=1),
        Case(
            "route:route_kernel",
            {"bias_ptr": "*fp32", **signature},
            {**plain, **deepseek},
            num_warps=1,
        ),
        Case(
            "route:route_kernel",
            {"expert_scale_ptr": "*fp32", **signature},
            {"bias_ptr": None, "CHOICES": 2, **phi},
            num_warps=1,
        ),
    ]
    for report in compile_all(cases):
        assert report.stack_bytes == 0
        assert report.registers <= 128
