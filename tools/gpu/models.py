"""Shapes of published models that run with random weights, and the bytes that their steps read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers_floor import Case, Rates, cache_bytes, floor_tokens_per_s
from moeserve.config import config_of
from moeserve.models.hf_config import read_model_spec
from moeserve.plan.memory import rank_weights

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
    "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": 151_645,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "dtype": "bfloat16",
    "vocab_size": 201_088, "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
    "hidden_size": 2880, "intermediate_size": 2880, "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "hidden_act": "silu",
    "max_position_embeddings": 131_072, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "rms_norm_eps": 1e-5, "rope_theta": 150_000,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "truncate": False,
                     "original_max_position_embeddings": 4096, "rope_type": "yarn"},
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "eos_token_id": 200_002,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
}  # fmt: skip
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "dtype": "bfloat16",
    "vocab_size": 102_400, "first_k_dense_replace": 1, "hidden_size": 2048,
    "intermediate_size": 10_944, "kv_lora_rank": 512, "max_position_embeddings": 163_840,
    "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10_000, "hidden_act": "silu",
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
                     "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
                     "type": "yarn"},
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1,
    "topk_method": "greedy", "v_head_dim": 128, "tie_word_embeddings": False,
    "eos_token_id": 100_001,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "eos_token_id": None, "dtype": "float32",
}  # fmt: skip
SMALL_QWEN3 = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
SMALL_GPT_OSS = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
SMALL_V2 = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
FP8_BLOCKS = {
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
}
BATCHES = (1, 64, 256)
MXFP4_BYTES = 0.5 + 1 / 32


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine to measure."""

    config: Mapping[str, Any]  # the model's config.json
    small: Mapping[str, Any]  # changes to it that make it small for a smoke run
    settings: Mapping[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = BATCHES
    prefill: bool = True  # whether prefill is measured
    alone: bool = False  # check that a batch does not change a request's bits


_BATCH = {"determinism": "batch"}
ENGINES: Mapping[str, Engine] = {
    "qwen3": Engine(QWEN3_30B_A3B, SMALL_QWEN3),
    "gpt_oss": Engine(GPT_OSS_20B, SMALL_GPT_OSS),
    "v2_lite": Engine(DEEPSEEK_V2_LITE, SMALL_V2),
    "qwen3_batch": Engine(QWEN3_30B_A3B, SMALL_QWEN3, _BATCH, (64,), False, True),
    "qwen3_fp8": Engine(
        {**QWEN3_30B_A3B, **FP8_BLOCKS}, SMALL_QWEN3, _BATCH, BATCHES[:2], False, True
    ),
    "qwen3_int4": Engine(
        QWEN3_30B_A3B, SMALL_QWEN3, {**_BATCH, "quantization": "int4"}, BATCHES[:2], False, True
    ),
}


def step_bytes(folder: Path, settings: Mapping[str, Any], batch: int, position: int) -> float:
    """Return the bytes that a decode step must read, with even routing.

    For MXFP4 the bytes are those of its files, which have 8-bit scales, not those of the kernels
    here.
    """
    spec = read_model_spec(folder)
    weights = rank_weights(spec, config_of(folder, **settings))
    touched = spec.num_experts * (1 - (1 - spec.experts_per_token / spec.num_experts) ** batch)
    size = 4 if spec.dtype == "float32" else 2
    is_mxfp4 = any((form.kind, form.group) == ("fp4", 32) for form in spec.stored)
    expert_bytes = spec.expert_weights * MXFP4_BYTES if is_mxfp4 else weights.expert_bytes
    read = (
        weights.dense_bytes + weights.head_bytes + weights.num_moe_layers * touched * expert_bytes
    )
    return read + batch * sum(cache_bytes(layer.mixer, position, size) for layer in spec.layers)


def prompt_flops(folder: Path, length: int) -> float:
    """Return the operations per token of a prompt of `length` tokens."""
    return 1e9 / floor_tokens_per_s(
        read_model_spec(folder), Case("", 1, length, 1), Rates(1.0, 1.0)
    )
