"""Logits and greedy tokens of every family against transformers, in fp32 and, loosely, in the
16-bit dtypes.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moeserve.models.hf_config import read_model_spec
from tests.families import architecture

from .conftest import FAMILIES, Driver
from .test_bits import RECURRENT

MIXED = ("gemma4", "deepseek_v3", "mimo_v2_flash", "step3p5")  # that need most of what mixers can
PROMPT = torch.randint(0, 250, (150,), generator=torch.Generator().manual_seed(1)).tolist()


def compare(checkpoint: Any, prompt: list[int], new_tokens: int, **options: Any) -> None:
    """Chunked prefill and decode against one full pass of transformers over the same tokens."""
    driver = Driver(checkpoint.path, **options)
    logits = [driver.prefill("a", prompt, 61)]
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(int(logits[-1][-1].argmax()))
        logits.append(driver.step([("a", tokens[-1:])])[0])
    ours = torch.cat(logits)
    with torch.no_grad():
        theirs = checkpoint.reference(torch.tensor([tokens])).logits[0]
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    recurs = any(
        rule.tile for rule in driver.spec.kv_rules
    )  # transformers sums over 64 tokens there
    assert error.max() <= (2e-5 if recurs else 1e-5), error.max()
    # the same 64 tokens: transformers, fed our tokens, would have chosen each of them
    assert theirs.argmax(-1)[len(prompt) - 1 : -1].tolist() == tokens[len(prompt) :]


@pytest.mark.parametrize("name", FAMILIES)
def test_fp32_logits_and_greedy_tokens(name: str, make_checkpoint: Any) -> None:
    checkpoint = make_checkpoint(name)
    compare(checkpoint, PROMPT, 64)
    assert read_model_spec(checkpoint.path).architecture == architecture(name)


@pytest.mark.full("models", keep=1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/runner has this on the GPU")
@pytest.mark.parametrize(
    "name", ["qwen2_moe", "olmoe", "granite_moe", "llama", "glm_moe_dsa", *MIXED, *RECURRENT]
)
def test_interpreted_triton_kernels(name: str, make_checkpoint: Any) -> None:
    compare(make_checkpoint(name, **RECURRENT.get(name, {})), PROMPT[:64], 2, kernels="triton")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        (
            "qwen3_moe",
            {"tie_word_embeddings": True, "mlp_only_layers": [0], "norm_topk_prob": False},
        ),
        ("qwen3_moe", {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 0}),
        ("qwen2_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
        ("mixtral", {"sliding_window": 40, "tie_word_embeddings": True}),
        ("granite_moe", {"tie_word_embeddings": True}),
        (
            "qwen3",
            {
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": 70,
                "use_sliding_window": True,
            },
        ),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy", "attention_bias": True}),
        ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
        ("gemma4_text", {"enable_moe_block": False, "attention_k_eq_v": False}),
        ("granite_moe_shared", {"shared_intermediate_size": 0}),
        (
            "granite_moe_hybrid",
            {
                "position_embedding_type": "rope",
                "mamba_n_groups": 1,
                "num_local_experts": 0,
                "time_step_limit": [0.0, math.inf],
                "layer_types": ["mamba", "attention", "mamba"],
            },
        ),
        (
            "lfm2_moe",
            {
                "conv_bias": True,
                "use_expert_bias": False,
                "norm_topk_prob": False,
                "conv_L_cache": 4,
            },
        ),
        (
            "jamba",
            {
                "mamba_proj_bias": True,
                "mamba_conv_bias": False,
                "mamba_d_conv": 3,
                "mamba_dt_rank": "auto",
            },
        ),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "rope_theta": 5e5,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
    ],
)
def test_fp32_variants(name: str, overrides: dict[str, Any], make_checkpoint: Any) -> None:
    compare(make_checkpoint(name, **overrides), PROMPT, 8)


@pytest.mark.full("models", keep=4)
@pytest.mark.parametrize("name", [*MIXED, *(name for name in FAMILIES if name not in MIXED)])
def test_fp32_by_torch(name: str, make_checkpoint: Any) -> None:
    compare(make_checkpoint(name), PROMPT, 8, kernels="torch")


@pytest.mark.parametrize("block_size", [4, 48, 128])
def test_any_block_size(block_size: int, make_checkpoint: Any) -> None:
    compare(make_checkpoint("qwen3_moe"), PROMPT, 4, block_size=block_size)


@pytest.mark.full("models", keep="each")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_16_bit_dtypes_are_close(name: str, dtype: torch.dtype, make_checkpoint: Any) -> None:
    """A top-k choice may flip on rounding, so typical rows count, not the worst."""
    checkpoint = make_checkpoint(name)
    ours = Driver(checkpoint.path, dtype).prefill("a", PROMPT, 64)
    with torch.no_grad():
        theirs = checkpoint.reference(torch.tensor([PROMPT])).logits[0]
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert error.median() < (0.06 if dtype == torch.bfloat16 else 0.015), error.median()
