"""Bytes, operations and seconds of a step, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moeserve.config import config_of
from moeserve.plan.hardware import DEVICES, LINKS
from moeserve.plan.memory import rank_weights
from moeserve.plan.roofline import ExpertShares, Roofline, Shape, shape_of
from tests.specs import make_spec

QWEN3_30B = make_spec(
    num_layers=48,
    moe_layers=[True] * 48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    experts_per_token=8,
    expert_size=768,
    hidden_size=2048,
    vocab_size=151936,
    dtype="bfloat16",
    architecture="Qwen3MoeForCausalLM",
    max_position=40960,
)
# One that does at once what it is told: 1 byte and 1 operation a second, and nothing beside them.
PLAIN = replace(
    DEVICES["h100"],
    bytes_per_s=1.0,
    flops=1.0,
    read_share=1.0,
    dense_share=1.0,
    expert_share=1.0,
    attention_share=1.0,
    overlap=1.0,
    in_situ=1.0,
    launch_s=0.0,
    host_s=0.0,
    host_row_s=0.0,
)


def roofline(device: Any = PLAIN, **settings: Any) -> Roofline:
    zipf = settings.pop("zipf", 0.0)
    return Roofline(QWEN3_30B, config_of("model", **settings), device, LINKS["ib400"], 8, zipf)


def plan(*rows: tuple[int, int, bool]) -> Any:
    starts, counts, samples = zip(*rows, strict=True)
    return SimpleNamespace(
        starts_R=np.array(starts, np.int32),
        counts_R=np.array(counts, np.int32),
        samples_R=np.array(samples),
    )


def test_a_plan_is_counted() -> None:
    found = shape_of(plan((9, 1, True), (0, 4, False)), (None, 4))
    assert found == Shape(5, 2, 1, (10 + 4, 5 + 4), (10 + 1 + 2 + 3 + 4, 4 + 4 * 2.5))


def test_counts_of_long_contexts_do_not_overflow() -> None:
    assert shape_of(plan((1_000_000, 8192, True)), (None,)).num_pairs[0] == 8192 * (
        1_000_000 + 8193 / 2
    )


def test_weights_are_those_of_the_published_model() -> None:
    weights = rank_weights(QWEN3_30B, config_of("model"))
    assert weights.total_bytes == pytest.approx(61.06e9, rel=1e-3)
    assert weights.expert_params == 3 * 2048 * 768
    assert rank_weights(QWEN3_30B, config_of("model", dp=8)).num_local_experts == 16
    assert (
        rank_weights(QWEN3_30B, config_of("model", dp=8, redundant_experts=8)).num_local_experts
        == 17
    )
    assert rank_weights(QWEN3_30B, config_of("model", dp=8, ep="off")).num_local_experts == 128


def test_tensor_parallel_ranks_share_the_dense_layers() -> None:
    """All but the routers, 2048 x 128, which each of them has, and norms, which are small."""
    whole, half = (rank_weights(QWEN3_30B, config_of("model", tp=tp)).dense_params for tp in (1, 2))
    routers = 48 * 2048 * 128
    assert half - routers == pytest.approx((whole - routers) / 2, rel=1e-3)


def test_terms_are_bytes_and_operations() -> None:
    """One token that sees 1,000 positions: every weight but seven eighths... of the experts is read
    once.
    """
    cost = roofline()
    terms = cost.terms([Shape(1, 1, 1, (1000.0,), (1000.0,))])
    assert terms["attention"] == pytest.approx(max(1000 * 98_304, 48 * 1000 * 2 * 32 * 256))
    assert terms["experts"] == pytest.approx(48 * 8 * 3 * 2048 * 768 * 2)
    assert terms["LM head"] == pytest.approx(2 * 2048 * 151936)
    assert terms["all2all"] == terms["tp gathers"] == terms["launch"] == 0.0
    many = cost.terms([Shape(100_000, 1, 0, (0.0,), (0.0,))])
    assert many["experts"] == pytest.approx(2 * 48 * 8 * 3 * 2048 * 768 * 100_000)
    assert many["LM head"] == 0.0


def test_distinct_experts_follow_the_number_of_tokens() -> None:
    even = ExpertShares(128, 8, 1, 0, 0.0)
    for tokens in (1, 8, 32, 64):
        assert even.num_used(tokens) == pytest.approx(128 * (1 - (1 - 8 / 128) ** tokens), rel=2e-3)
    assert ExpertShares(128, 8, 8, 0, 0.0).num_used(1e6) == pytest.approx(16)
    assert even.imbalance == 1.0


def test_redundant_experts_even_out_a_skewed_load() -> None:
    skewed, replicated = (
        ExpertShares(256, 8, 32, redundant, 1.0).imbalance for redundant in (0, 32)
    )
    assert 1.0 <= replicated < skewed


def test_rows_that_travel_farther_take_longer() -> None:
    shape = Shape(128, 128, 128, (128e3,), (128e3,))
    seconds = [
        roofline(DEVICES["h100"], dp=dp, dbo="off").terms([shape] * dp)["all2all"]
        for dp in (8, 16, 32, 64)
    ]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_micro_batches_are_taken_only_where_they_save_time() -> None:
    many, few = (Shape(n, n, n, (n * 1e3,), (n * 1e3,)) for n in (4096, 8))
    for shape in (many, few):
        auto, off = (
            roofline(DEVICES["h100"], dp=32, dbo=dbo).seconds([shape] * 32)
            for dbo in ("auto", "off")
        )
        assert (auto < 0.97 * off) if shape is many else (auto == off)
