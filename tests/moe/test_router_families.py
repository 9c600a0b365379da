"""Routers of families: `RouterRule`, filled in from a family's config, chooses and weighs as
transformers does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.ops import elementwise, native_rows
from moeserve.ops.rules import RouterRule

D = 32
E = 16
T = 200
GROUPED = {
    "n_routed_experts": E,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}


def v3(config: Any) -> RouterRule:
    """The rule of DeepSeek-V3 and those that took it over."""
    return RouterRule(
        score="sigmoid",
        bias=True,
        groups=config.n_group,
        kept_groups=config.topk_group,
        renormalize=config.norm_topk_prob,
        epsilon=1e-20,
        scale=config.routed_scaling_factor,
        fp32=True,
    )


def deepseek_v2(config: Any) -> RouterRule:
    groups = (
        (config.n_group, config.topk_group)
        if config.topk_method == "group_limited_greedy"
        else (1, 1)
    )
    return RouterRule(
        groups=groups[0],
        kept_groups=groups[1],
        group_score="max",
        scale=config.routed_scaling_factor,
        fp32=True,
    )


def mistral4(config: Any) -> RouterRule:
    return RouterRule(
        groups=config.n_group,
        kept_groups=config.topk_group,
        renormalize=config.norm_topk_prob,
        epsilon=1e-20,
        scale=config.routed_scaling_factor,
    )


def afmoe(config: Any) -> RouterRule:
    return RouterRule(
        score="sigmoid", bias=True, renormalize=True, epsilon=1e-20, scale=config.route_scale
    )


def kolibri(config: Any) -> RouterRule:
    return RouterRule(
        score="sigmoid_selected", bias=True, renormalize=config.norm_topk_prob, fp32=True
    )


def ernie(config: Any) -> RouterRule:
    return RouterRule(bias=True, renormalize=True, floor=config.moe_norm_min, fp32=True)


def phimoe(config: Any) -> RouterRule:
    return RouterRule(score="sparsemixer", jitter=config.router_jitter_noise)


def step(config: Any) -> RouterRule:
    return RouterRule(
        score="sigmoid", bias=True, renormalize=True, scale=config.moe_router_scaling_factor
    )


def usual(router: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights, ids) of a router with its bias inside."""
    if bias is not None:
        inside = router.moe_statics if hasattr(router, "moe_statics") else router
        inside.e_score_correction_bias.data.copy_(bias)
    logits, weights, ids = router(x)
    return logits, weights, ids


def given_bias(router: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    logits, weights, ids = router(x, bias)
    return logits, weights, ids


def llama4(router: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    scores, logits = router(x)
    weights, ids = scores.topk(router.top_k, dim=-1)
    return logits, weights, ids


def step_scaled(router: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The block multiplies what its experts return."""
    logits, weights, ids = usual(router, x, bias)
    return logits, weights * 3.0, ids


def gemma4(router: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    logits = router.proj(router.norm(x) * router.scale * router.scalar_root_size)
    _, weights, ids = router(x)
    return logits, weights, ids


@dataclass(frozen=True)
class Family:
    """One router of transformers. of: its (logits, weights, ids) for rows x and a bias."""

    module: str
    router: str
    config: str
    settings: dict[str, Any]
    rule: Callable[[Any], RouterRule]
    of: Callable[[Any, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]] = usual


FAMILIES = [
    Family("deepseek_v2", "DeepseekV2TopkRouter", "DeepseekV2Config", GROUPED, deepseek_v2),
    Family(
        "deepseek_v2", "DeepseekV2TopkRouter", "DeepseekV2Config",
        {**GROUPED, "topk_method": "group_limited_greedy"}, deepseek_v2,
    ),
    Family("deepseek_v3", "DeepseekV3TopkRouter", "DeepseekV3Config", GROUPED, v3),
    Family(
        "deepseek_v3", "DeepseekV3TopkRouter", "DeepseekV3Config",
        {**GROUPED, "norm_topk_prob": False}, v3,
    ),
    Family(
        "glm4_moe", "Glm4MoeTopkRouter", "Glm4MoeConfig",
        {**GROUPED, "n_group": 1, "topk_group": 1}, v3,
    ),
    Family("dots1", "Dots1TopkRouter", "Dots1Config", {**GROUPED, "norm_topk_prob": True}, v3),
    Family("mimo_v2_flash", "MiMoV2FlashTopkRouter", "MiMoV2FlashConfig", GROUPED, v3),
    Family(
        "bailing_hybrid", "BailingHybridTopkRouter", "BailingHybridConfig",
        {**GROUPED, "num_local_experts": E, "n_group": 8, "topk_group": 4}, v3,
    ),
    Family("mistral4", "Mistral4TopkRouter", "Mistral4Config", GROUPED, mistral4),
    Family(
        "minimax_m2", "MiniMaxM2TopKRouter", "MiniMaxM2Config",
        {"num_local_experts": E, "num_experts_per_tok": 4},
        lambda config: RouterRule(score="sigmoid", bias=True, renormalize=True), given_bias,
    ),
    Family(
        "gpt_oss", "GptOssTopKRouter", "GptOssConfig",
        {"num_local_experts": E, "num_experts_per_tok": 4},
        lambda config: RouterRule(score="softmax_selected"),
    ),
    Family(
        "llama4", "Llama4Router", "Llama4TextConfig",
        {"num_local_experts": E, "num_experts_per_tok": 1},
        lambda config: RouterRule(score="sigmoid", on_input=True), llama4,
    ),
    Family(
        "ernie4_5_moe", "Ernie4_5_MoeTopKRouter", "Ernie4_5_MoeConfig",
        {"moe_num_experts": E, "moe_k": 4}, ernie
    ),
    Family(
        "hunyuan_v1_moe", "HunYuanMoEV1Gate", "HunYuanMoEV1Config",
        {"num_experts": E, "moe_topk": 4}, lambda config: RouterRule(renormalize=True, fp32=True),
    ),
    Family(
        "phimoe", "PhimoeTopKRouter", "PhimoeConfig",
        {"num_local_experts": E, "router_jitter_noise": 0.1}, phimoe,
    ),
    Family(
        "step3p7", "Step3p7TopKRouter", "Step3p7TextConfig",
        {"n_routed_experts": E, "num_experts_per_tok": 4, "moe_router_scaling_factor": 3.0}, step,
        step_scaled,
    ),
    Family(
        "afmoe", "AfmoeTokenChoiceRouter", "AfmoeConfig",
        {"num_experts": E, "num_experts_per_tok": 4, "route_scale": 2.8}, afmoe,
        lambda router, x, bias: given_bias(router, x[None], bias),
    ),
    Family(
        "flint", "FlintTopKRouter", "FlintConfig", {"num_experts": E, "num_experts_per_tok": 4},
        lambda config: RouterRule(score="sigmoid", renormalize=True, fp32=True),
    ),
    *(
        Family(
            "kolibri1", "Kolibri1TopKRouter", "Kolibri1Config",
            {"num_experts": E, "num_experts_per_tok": 4, "norm_topk_prob": renormalize}, kolibri,
        )
        for renormalize in (False, True)
    ),
    Family(
        "gemma4", "Gemma4TextRouter", "Gemma4TextConfig", {"num_experts": E, "top_k_experts": 4},
        lambda config: RouterRule(renormalize=True), gemma4,
    ),
]  # fmt: skip


def make(family: Family) -> tuple[Any, Any]:
    """(config, router) with random weights."""
    folder = f"transformers.models.{family.module}"
    of_config = getattr(import_module(f"{folder}.configuration_{family.module}"), family.config)
    config = of_config(hidden_size=D, **family.settings)
    router = getattr(import_module(f"{folder}.modeling_{family.module}"), family.router)(
        config
    ).eval()
    for parameter in router.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
    return config, router


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        yield


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.module)
def test_choices_and_weights(family: Family) -> None:
    config, router = make(family)
    rule = family.rule(config)
    bias = torch.randn(E) * 0.3 if rule.bias else None
    logits, weights, ids = family.of(router, torch.randn(T, D) * 0.5, bias)
    top_k = ids.shape[1]
    rule.check(E, top_k)
    scale = getattr(router, "per_expert_scale", None)
    for route in (elementwise.route, native_rows.route)[: 1 + native_rows.AVAILABLE]:
        found_ids, found = route(logits, top_k, rule, bias, scale)
        found_ids, order = found_ids.long().sort(-1)
        assert torch.equal(found_ids, ids.sort(-1).values)
        torch.testing.assert_close(
            found.gather(-1, order), weights.gather(-1, ids.argsort(-1)), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.module)
def test_products_in_fp32(family: Family) -> None:
    """A bf16 model's router multiplies in fp32 if the rule says so, and only then."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        config, router = make(family)
    finally:
        torch.set_default_dtype(before)
    rule = family.rule(config)
    x = torch.randn(T, D, dtype=torch.bfloat16)
    logits, _, _ = family.of(router, x, torch.zeros(E) if rule.bias else None)
    weight = next(parameter for parameter in router.parameters() if parameter.shape == (E, D))
    assert torch.equal(logits.float(), F.linear(x.float(), weight.float())) == rule.fp32
