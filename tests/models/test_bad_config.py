"""A bad config.json is rejected quickly, with the key, its value and the remedy."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from moeserve.errors import CheckpointError
from moeserve.models.hf_config import read_model_spec
from tests.loader.conftest import GRANITE_HYBRID, LLAMA, QWEN3_MOE, WriteConfig

QWEN3_NEXT = LLAMA | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
KIMI_LINEAR = LLAMA | {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
LING_3 = LLAMA | {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "head_dim": 16,
    "layer_group_size": 2,
}
GLM_5_NEXT = LLAMA | {
    "architectures": ["Glm5NextForCausalLM"],
    "model_type": "glm5_next_text",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
}
HY_4 = LLAMA | {
    "architectures": ["HYV4ForCausalLM"],
    "model_type": "hy_v4",
    "q_lora_rank": 48,
}
MINIMAX_M3 = LLAMA | {
    "architectures": ["MiniMaxM3VLForCausalLM"],
    "model_type": "minimax_m3_vl_text",
    "hidden_act": "swigluoai",
}
BEAM = LLAMA | {"architectures": ["BeamForCausalLM"], "model_type": "beam", "n_group": 1}
INKLING = LLAMA | {"architectures": ["InklingForCausalLM"], "model_type": "inkling_text"}
DOTS1 = LLAMA | {"architectures": ["Dots1ForCausalLM"], "model_type": "dots1"}
NEMOTRON = {
    **LLAMA,
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_act": "silu",
}
GRANITE_SWA = LLAMA | {
    "architectures": ["GraniteMoeSWAForCausalLM"],
    "model_type": "granitemoe_swa",
}
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        LLAMA,
        {"architectures": ["Qwen3MoEForCausalLM"]},
        "listed in docs/models.md, such as Qwen3Moe, ",
    ),
    (LLAMA, {"architectures": "LlamaForCausalLM"}, "architectures"),
    (LLAMA, {"architectures": []}, "architectures"),
    (LLAMA, {"architectures": [["LlamaForCausalLM"]]}, "architectures"),
    (LLAMA, {"architectures": ..., "model_type": "gpt2"}, "'gpt2'"),
    (LLAMA, {"architectures": ..., "model_type": ...}, "architectures is missing"),
    (LLAMA, {"model_type": "qwen3"}, "fix one of the two"),
    (LLAMA, {"model_type": ["llama"]}, "model_type"),
    (
        LLAMA,
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "supported: compressed-tensors, fp8",
    ),
    (LLAMA, {"quantization_config": {"quant_method": "exl3", "bits": 4}}, "only ExLlamaV3 (EXL3)"),
    (LLAMA, {"quantization": {"group_size": 64, "bits": 4, "mode": "affine"}}, "the format of MLX"),
    (LLAMA, {"quantization_config": {"group_size": 64, "bits": 4}}, "pass the original model, or"),
    (LLAMA, {"compression_config": {"x": 1}}, "config_groups is None; it must have a group"),
    (LLAMA, {"per_layer_config": {"0": {}}}, "per_layer_config"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
    (LLAMA, {"hidden_act": None}, "hidden_act"),
    (LLAMA, {"vocab_size": -5}, "vocab_size is -5; it must be an integer from 1"),
    (LLAMA, {"vocab_size": 2**40}, "vocab_size"),
    (LLAMA, {"vocab_size": 10**400}, "vocab_size"),
    (LLAMA, {"vocab_size": "96"}, "vocab_size is '96'"),
    (LLAMA, {"vocab_size": 96.0}, "vocab_size"),
    (LLAMA, {"vocab_size": True}, "vocab_size is True"),
    (LLAMA, {"vocab_size": None}, "vocab_size is None"),
    (LLAMA, {"vocab_size": "9" * 10_000}, "..."),
    (LLAMA, {"num_hidden_layers": 10**6}, "num_hidden_layers"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers"),
    (
        LLAMA,
        {"num_attention_heads": 5},
        "num_key_value_heads is 2; it must divide num_attention_heads (5)",
    ),
    (LLAMA, {"num_key_value_heads": 3}, "it must divide"),
    (LLAMA, {"num_key_value_heads": 8}, "num_key_value_heads"),
    (LLAMA, {"hidden_size": 66}, "num_attention_heads (4) must divide it"),
    (LLAMA, {"hidden_size": 60}, "must be even"),
    (LLAMA, {"head_dim": 15}, "must be even"),
    (LLAMA, {"head_dim": -16}, "head_dim"),
    (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps"),
    (LLAMA, {"rms_norm_eps": 1e300}, "rms_norm_eps"),
    (LLAMA, {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    (LLAMA, {"max_position_embeddings": 0}, "max_position_embeddings"),
    (LLAMA, {"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
    (LLAMA, {"attention_bias": "no"}, "attention_bias"),
    (LLAMA, {"mlp_bias": 0}, "mlp_bias"),
    (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "supported: float32, bfloat16, float16"),
    (LLAMA, {"dtype": 16}, "dtype is 16"),
    (LLAMA, {"sliding_window": 128}, "no sliding window"),
    (LLAMA, {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
    (LLAMA, {"layer_types": 3}, "layer_types"),
    (
        LLAMA,
        {"eos_token_id": [1, 2.0]},
        "eos_token_id is [1, 2.0]; it must be one token id, a list of them, or null",
    ),
    (LLAMA, {"eos_token_id": True}, "eos_token_id"),
    (LLAMA, {"eos_token_id": "</s>"}, "eos_token_id"),
    (LLAMA, {"eos_token_id": list(range(96)) * 10}, "eos_token_id"),
    (
        QWEN3_MOE,
        {"num_experts": 10**9},
        "num_experts is 1000000000; it must be an integer from 1 to 4096",
    ),
    (QWEN3_MOE, {"num_experts": 0}, "num_experts"),
    (QWEN3_MOE, {"num_local_experts": 16}, "num_experts is 8; but num_local_experts is 16"),
    (
        QWEN3_MOE,
        {"num_experts_per_tok": 9},
        "num_experts_per_tok is 9; it must be an integer from 1 to 8",
    ),
    (QWEN3_MOE, {"moe_intermediate_size": -48}, "moe_intermediate_size"),
    (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    (
        QWEN3_MOE,
        {"mlp_only_layers": [2]},
        "mlp_only_layers is [2]; it must be a list of integers from 0 to 1",
    ),
    (QWEN3_MOE, {"mlp_only_layers": [True]}, "mlp_only_layers"),
    (QWEN3_MOE, {"norm_topk_prob": "no"}, "norm_topk_prob"),
    (QWEN3_MOE, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
    (QWEN3_MOE, {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    (
        {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
        {"layer_types": ["sliding_attention", "full_attention"]},
        "sliding layers need use_sliding_window",
    ),
    (
        {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
        {"layer_types": ["full_attention"]},
        "for each of 2 layers",
    ),
    (
        {**LLAMA, "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe"},
        {"logits_scaling": 0},
        "logits_scaling",
    ),
    (
        {**LLAMA, "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe"},
        {"attention_multiplier": None},
        "attention_multiplier",
    ),
    (
        GRANITE_HYBRID,
        {"mamba_n_heads": 7},
        "mamba_n_heads is 7; it must divide mamba_expand * hidden_size",
    ),
    (
        GRANITE_HYBRID,
        {"mamba_d_head": 24},
        "mamba_d_head is 24; with these mamba_n_heads and mamba_expand it is 32",
    ),
    (
        GRANITE_HYBRID,
        {"mamba_n_groups": 3},
        "mamba_n_groups is 3; it must divide mamba_n_heads (4)",
    ),
    (
        GRANITE_HYBRID,
        {"mamba_conv_bias": False},
        "mamba_conv_bias is False; only True is supported",
    ),
    (
        GRANITE_HYBRID,
        {"time_step_limit": [0.1]},
        "time_step_limit is [0.1]; it must be a list of two numbers",
    ),
    (GRANITE_HYBRID, {"time_step_limit": [2, 1.0]}, "time_step_limit"),
    (GRANITE_HYBRID, {"time_step_limit": None}, "time_step_limit"),
    (GRANITE_HYBRID, {"layer_types": ["mamba", "sliding_attention"]}, "layer_types"),
    (GRANITE_SWA, {"layer_rope_theta": [1e-300, 0]}, "it must list 0 or a number from 1 to 1e+12"),
    (GRANITE_SWA, {"layer_rope_theta": [1e4]}, "it must list 0 or a number from 1 to 1e+12"),
    (GRANITE_SWA, {"sliding_window": None}, "sliding layers need a number of tokens"),
    (
        NEMOTRON,
        {"hybrid_override_pattern": "EM"},
        "layer 0 (moe) must follow an attention or Mamba layer",
    ),
    (
        NEMOTRON,
        {"hybrid_override_pattern": "M*E-"},
        "hybrid_override_pattern is 'M*E-'; layer 3 (mlp)",
    ),
    (
        NEMOTRON,
        {"hybrid_override_pattern": "MX"},
        "hybrid_override_pattern is 'MX'; it must list one of",
    ),
    (NEMOTRON, {"hybrid_override_pattern": ""}, "hybrid_override_pattern"),
    (NEMOTRON, {"layers_block_type": ["mamba", "mamba", "attention", 3]}, "layers_block_type"),
    (NEMOTRON, {"n_groups": 3}, "n_groups is 3; it must divide mamba_num_heads (128)"),
    (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; supported: relu2"),
    (NEMOTRON, {"moe_latent_size": 32}, "moe_latent_size"),
    (NEMOTRON, {"use_conv_bias": False}, "use_conv_bias"),
    (
        {**LLAMA, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"},
        {"clip_qkv": -1},
        "clip_qkv",
    ),
    (
        QWEN3_NEXT,
        {"linear_num_value_heads": 6},
        "linear_num_value_heads is 6; linear_num_key_heads (4) must divide it",
    ),
    (
        QWEN3_NEXT,
        {"linear_conv_kernel_dim": 1},
        "linear_conv_kernel_dim is 1; it must be an integer from 2 to 16",
    ),
    (
        QWEN3_NEXT,
        {"layer_types": ["linear_attention", "sliding_attention"]},
        "list one of linear_attention, full",
    ),
    (KIMI_LINEAR, {"mla_use_nope": False}, "mla_use_nope is False; only True is supported"),
    (KIMI_LINEAR, {"moe_router_activation_func": "softmax"}, "only 'sigmoid' is supported"),
    (
        KIMI_LINEAR,
        {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [2]}},
        (
            "linear_attn_config.kda_layers is [2]; "
            "it and full_attn_layers must list each of layers 1 to 2 once"
        ),
    ),
    (
        KIMI_LINEAR,
        {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [0]}},
        "linear_attn_config.kda_layers is [0]; it must be a list of integers from 1 to 2",
    ),
    (
        KIMI_LINEAR,
        {"linear_attn_config": {"head_dim": "128"}},
        "linear_attn_config.head_dim is '128'",
    ),
    (LING_3, {"layer_group_size": 3}, "layer_group_size is 3; it must divide num_hidden_layers"),
    (LING_3, {"no_kda_lora": False}, "no_kda_lora is False; only True is supported"),
    (LING_3, {"expert_swiglu_limit_list": [0.0, 7.0]}, "limits of activations are not supported"),
    (LING_3, {"expert_swiglu_limit_list": 7}, "expert_swiglu_limit_list is 7; limits of act"),
    (LING_3, {"gated_attention_proj_granularity_type": "element_wise"}, "only 'head_wise'"),
    (GLM_5_NEXT, {"index_kpool_always_select_tail": False}, "only True is supported"),
    (GLM_5_NEXT, {"index_kpool": 12}, "index_kpool is 12; it must divide 16"),
    (GLM_5_NEXT, {"index_topk": 40}, "index_topk is 40; index_kpool (16) must divide it"),
    (GLM_5_NEXT, {"qk_rope_head_dim": 64}, "qk_rope_head_dim is 64; only 0 is supported"),
    (
        GLM_5_NEXT,
        {
            "layer_types": ["linear_attention", "indexed_attention"],
            "indexer_types": ["full", "shared"],
        },
        "the first layer must be full (layer 1)",
    ),
    (HY_4, {"enable_ihc": False}, "enable_ihc is False; only True is supported"),
    (HY_4, {"gating_type": "headwise"}, "only 'elementwise' is supported"),
    (HY_4, {"layer_types": ["full_attention"] * 2}, "list one of indexed_attention"),
    (HY_4, {"swiglu_limit": 0}, "swiglu_limit is 0; it must be a number other than 0"),
    (
        BEAM,
        {"rope_parameters": {"sliding_attention": {}, "full_attention": False}},
        "rope_parameters is False; it must be an object or null",
    ),
    (MINIMAX_M3, {"moe_layer_freq": 1}, "moe_layer_freq is 1; it must be a list of integers"),
    (
        MINIMAX_M3,
        {"sparse_attention_config": {"sparse_attention_freq": 1}},
        "sparse_attention_config.sparse_attention_freq is 1; it must be a list of integers",
    ),
    (
        MINIMAX_M3,
        {"sparse_attention_config": {"use_sparse_attention": False}},
        "use_sparse_attention is False; only True is supported",
    ),
    (
        MINIMAX_M3,
        {
            "sparse_attention_config": {
                "sparse_attention_freq": [0, 1],
                "sparse_disable_index_value": [1, 0],
            }
        },
        "sparse_disable_index_value is [1, 0]; it must be 1 for each sparse layer",
    ),
    (
        INKLING,
        {"inference_moe_w13_interleaved": False},
        "inference_moe_w13_interleaved is False; only True is supported",
    ),
    (DOTS1, {"max_window_layers": None}, "max_window_layers is None; it must be an integer"),
    (DOTS1, {"max_window_layers": "1"}, "max_window_layers is '1'"),
]


@pytest.mark.parametrize(
    ("base", "changes", "says"), BAD, ids=[f"{i}-{next(iter(b[1]))}" for i, b in enumerate(BAD)]
)
def test_bad_config_is_refused_with_key_and_remedy(
    base: dict[str, Any], changes: dict[str, Any], says: str, write_config: WriteConfig
) -> None:
    model_dir = write_config(base, **changes)
    began = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read_model_spec(model_dir)
    assert time.process_time() - began < 10
    assert says in str(caught.value)
    assert str(model_dir / "config.json") in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"vocab_size": NaN}',
        b'{"vocab_size": 1e999}',
        b"\xff\xfe{}",
        b"[" * 200_000,
    ],
    ids=["empty", "cut", "list", "null", "nan", "infinite", "utf16", "deep"],
)
def test_a_file_that_is_no_config_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_spec(tmp_path)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_model_spec(tmp_path)
