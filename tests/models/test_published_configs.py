"""config.json files of published models.

Every key is read or known to change nothing, and the number of parameters is the authors'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from moeserve.errors import CheckpointError
from moeserve.models.hf_config import read_model_spec
from moeserve.models.spec import model_size

FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
S = "sliding_attention"
F = "full_attention"
# config.json without what every model has or needs; billions of parameters in all, and of one token
RELEASES: dict[str, tuple[dict[str, Any], float, float]] = {
    "DeepSeek-V3.1": (
        {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
            "vocab_size": 129280,
            "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
            "ep_size": 1, "aux_loss_alpha": 0.001, "first_k_dense_replace": 3, "hidden_size": 7168,
            "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
            "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
            "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
            "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
            "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "quantization_config": FP8, "rope_theta": 10000, "routed_scaling_factor": 2.5,
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                             "type": "yarn"},
            "scoring_func": "sigmoid", "seq_aux": True, "topk_group": 4, "topk_method": "noaux_tc",
            "v_head_dim": 128,
        },
        671, 36.6,
    ),
    "DeepSeek-V3.2": (
        {
            "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
            "vocab_size": 129280, "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
            "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168, "index_head_dim": 128,
            "index_n_heads": 64, "index_topk": 2048, "intermediate_size": 18432,
            "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048,
            "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
            "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "quantization_config": {**FP8, "scale_fmt": "ue8m0"}, "rms_norm_eps": 1e-6,
            "rope_theta": 10000, "routed_scaling_factor": 2.5,
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                             "type": "yarn"},
            "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
            "v_head_dim": 128,
        },
        671, 37,
    ),
    "DeepSeek-V4-Flash": (
        {
            "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
            "vocab_size": 129280, "bos_token_id": 0, "eos_token_id": 1,
            "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "compress_rope_theta": 160000,
            "expert_dtype": "fp4", "hc_eps": 1e-6, "hc_mult": 4, "hc_sinkhorn_iters": 20,
            "head_dim": 512, "hidden_size": 4096, "index_head_dim": 128, "index_n_heads": 64,
            "index_topk": 512, "max_position_embeddings": 1048576, "moe_intermediate_size": 2048,
            "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_attention_heads": 64, "num_experts_per_tok": 6, "num_hash_layers": 3,
            "num_hidden_layers": 43, "num_key_value_heads": 1, "num_nextn_predict_layers": 1,
            "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024, "qk_rope_head_dim": 64,
            "quantization_config": {**FP8, "scale_fmt": "ue8m0"}, "rms_norm_eps": 1e-6,
            "rope_theta": 10000, "routed_scaling_factor": 1.5,
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 16,
                             "original_max_position_embeddings": 65536, "type": "yarn"},
            "scoring_func": "sqrtsoftplus", "sliding_window": 128, "swiglu_limit": 10.0,
            "topk_method": "noaux_tc",
        },
        284, 13,
    ),
    "GLM-5": (
        {
            "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
            "vocab_size": 154880, "attention_bias": False, "eos_token_id": [154820, 154827, 154829],
            "ep_size": 1, "first_k_dense_replace": 3, "head_dim": 64, "hidden_size": 6144,
            "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
            "indexer_rope_interleave": True, "intermediate_size": 12288, "kv_lora_rank": 512,
            "max_position_embeddings": 202752, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
            "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 78,
            "num_key_value_heads": 64, "num_nextn_predict_layers": 1, "q_lora_rank": 2048,
            "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-5, "rope_interleave": True,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
            "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 1,
            "topk_method": "noaux_tc", "v_head_dim": 256,
        },
        744, 40,
    ),
    "DeepSeek-V2-Lite": (
        {
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
            "vocab_size": 102400, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1,
            "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
            "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
            "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
            "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
            "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "rope_theta": 10000,
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
                             "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
                             "type": "yarn"},
            "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
            "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
        },
        15.7, 2.45,
    ),
    "Kimi-K2-Instruct": (
        {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2",
            "vocab_size": 163840,
            "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
            "ep_size": 1, "first_k_dense_replace": 1, "hidden_size": 7168,
            "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 131072,
            "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1,
            "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61,
            "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": FP8,
            "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-6,
            "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                             "type": "yarn"},
            "scoring_func": "sigmoid", "seq_aux": True, "topk_group": 1, "topk_method": "noaux_tc",
            "v_head_dim": 128,
        },
        1026, 31.7,
    ),
    "GLM-4.5-Air": (
        {
            "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 151552,
            "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128,
            "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072,
            "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
            "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
            "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
            "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
            "topk_group": 1, "use_qk_norm": False, "eos_token_id": [151329, 151336, 151338],
        },
        106, 12.5,
    ),
    "gpt-oss-20b": (
        {
            "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088,
            "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880,
            "initial_context_length": 4096, "intermediate_size": 2880, "layer_types": [S, F] * 12,
            "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
            "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
            "rms_norm_eps": 1e-5, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0,
                                                   "factor": 32.0, "truncate": False,
                             "original_max_position_embeddings": 4096, "rope_type": "yarn"},
            "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
            "router_aux_loss_coef": 0.9,
        },
        20.9, 3.6,
    ),
    "Llama-4-Scout": (
        {
            "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
            "image_token_index": 200092,
            "text_config": {
                "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8192,
                "attn_temperature_tuning": 4, "attn_scale": 0.1, "floor_scale": 8192,
                "for_llm_compressor": False, "head_dim": 128, "hidden_size": 5120,
                "interleave_moe_layer_step": 1, "intermediate_size": 8192,
                "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760,
                "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1,
                "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16,
                "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
                "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                                 "original_max_position_embeddings": 8192, "rope_type": "llama3"},
                "torch_dtype": "bfloat16", "use_qk_norm": True, "vocab_size": 202048,
                "eos_token_id": [200001, 200007, 200008],
            },
            "vision_config": {"model_type": "llama4_vision_model"},
        },
        107.8, 17.2,
    ),
    "MiniMax-M2": (
        {
            "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2",
            "vocab_size": 200064,
            "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
            "attn_type_list": [1] * 62, "head_dim": 128, "hidden_size": 3072,
            "intermediate_size": 1536, "layernorm_full_attention_beta": 1.0,
            "max_position_embeddings": 196608, "mlp_intermediate_size": 8192,
            "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8,
            "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
            "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6,
            "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid",
            "shared_intermediate_size": 0, "use_mtp": True, "use_qk_norm": True,
            "use_routing_bias": True,
        },
        229, 9.8,
    ),
    "ERNIE-4.5-21B-A3B": (
        {
            "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe",
            "vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288,
            "max_position_embeddings": 131072, "moe_capacity": [64, 64, 64], "moe_gate": "topk",
            "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": 28,
            "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
            "moe_num_shared_experts": 2, "moe_use_aux_free": True, "num_attention_heads": 20,
            "num_hidden_layers": 28, "num_key_value_heads": 4, "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-5, "rope_theta": 500000, "tie_word_embeddings": True,
            "use_bias": False,
        },
        21.8, 3.2,
    ),
    "ERNIE-4.5-VL-28B-A3B": (
        {
            "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
            "model_type": "ernie4_5_moe_vl", "vocab_size": 103424, "freq_allocation": 20,
            "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072,
            "moe_gate": "topk", "moe_intermediate_size": [1536, 512], "moe_k": 6,
            "moe_layer_end_index": [29, 28], "moe_layer_interval": 1,
            "moe_layer_start_index": [1, 1], "moe_num_experts": [64, 64],
            "moe_num_shared_experts": 2, "moe_use_aux_free": True, "num_attention_heads": 20,
            "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
            "rope_3d": True, "rope_scaling": {"type": "default", "mrope_section": [22, 22, 20]},
            "rope_theta": 500000, "tie_word_embeddings": True, "use_bias": False,
            "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1280, "num_heads": 16},
        },
        21.8, 3.2,  # without the experts for pictures
    ),
    "GLM-4.5V": (
        {
            "architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe",
            "text_config": {
                "model_type": "glm4v_moe_text", "vocab_size": 151552, "attention_bias": True,
                "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 4096,
                "intermediate_size": 10944, "max_position_embeddings": 65536,
                "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
                "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
                "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
                "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0,
                "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
                "rope_theta": 10000.0, "topk_group": 1, "use_qk_norm": False,
            },
            "vision_config": {"depth": 24, "hidden_size": 1536, "num_heads": 12},
        },
        107, 13.0,
    ),
    "Hunyuan-A13B": (
        {
            "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe",
            "vocab_size": 128167, "attention_bias": False, "attention_head_dim": 128,
            "head_dim": 128, "hidden_size": 4096, "intermediate_size": 3072,
            "max_position_embeddings": 32768, "mlp_bias": False,
            "moe_intermediate_size": [3072] * 32, "moe_layer_num_skipped": 0, "moe_topk": [8] * 32,
            "num_attention_heads": 32, "num_experts": 64, "num_hidden_layers": 32,
            "num_key_value_heads": 8, "num_shared_expert": [1] * 32, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": True,
            "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0,
                             "mscale": 1.0, "mscale_all_dim": 1.0, "type": "dynamic"},
            "use_cla": False, "use_mixed_mlp_moe": True, "use_qk_norm": True,
        },
        80.4, 13.2,
    ),
    "Ling-flash-2.0": (
        {
            "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe",
            "vocab_size": 157184,
            "auto_map": {"AutoModelForCausalLM": "modeling_bailing_moe_v2.BailingMoeV2ForCausalLM"},
            "embedding_dropout": 0.0, "first_k_dense_replace": 1, "head_dim": 128,
            "hidden_size": 4096, "intermediate_size": 9216, "max_position_embeddings": 32768,
            "max_window_layers": 20, "moe_intermediate_size": 1024,
            "moe_router_enable_expert_bias": True, "n_group": 8,
            "moe_shared_expert_intermediate_size": 1024, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
            "num_hidden_layers": 32, "num_key_value_heads": 4, "num_nextn_predict_layers": 0,
            "num_shared_experts": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6,
            "rope_scaling": None, "rope_theta": 600000, "routed_scaling_factor": 2.5,
            "score_function": "sigmoid", "topk_group": 4, "use_bias": False, "use_qk_norm": True,
            "use_qkv_bias": False,
        },
        103, 5.5,
    ),
    "Phi-3.5-MoE-instruct": (
        {
            "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "vocab_size": 32064,
            "auto_map": {"AutoModelForCausalLM": "modeling_phimoe.PhiMoEForCausalLM"},
            "attention_bias": True, "hidden_size": 4096, "input_jitter_noise": 0.01,
            "intermediate_size": 6400, "lm_head_bias": True, "max_position_embeddings": 131072,
            "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
            "num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
            "router_jitter_noise": 0.01,
            "rope_scaling": {
                "type": "longrope", "original_max_position_embeddings": 4096,
                "long_factor": [1.0 + i / 4 for i in range(64)], "long_mscale": 1.243163121016122,
                "short_factor": [1.0] * 64, "short_mscale": 1.243163121016122,
            },
            "sliding_window": 131072,
        },
        41.9, 6.5,
    ),
    "Step-3.5-Flash": (
        {
            "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "vocab_size": 128896,
            "auto_map": {"AutoModelForCausalLM": "modeling_step3p5.Step3p5ForCausalLM"},
            "hidden_size": 4096, "attention_other_setting": {"attention_type": S,
                                                             "num_attention_heads": 96,
                                                             "num_attention_groups": 8,
                                        "head_dim": 128},
            "head_dim": 128, "intermediate_size": 11264, "layer_types": [F, S, S, S] * 12,
            "max_position_embeddings": 262144, "moe_every_n_layer": 1,
            "moe_intermediate_size": 1280, "moe_layers_enum": ",".join(map(str, range(3, 45))),
            "moe_num_experts": 288, "moe_router_activation": "sigmoid",
            "moe_router_scaling_factor": 3.0, "moe_top_k": 8, "need_fp32_gate": True,
            "norm_expert_weight": True, "num_attention_groups": 8, "num_attention_heads": 64,
            "num_hidden_layers": 45, "num_nextn_predict_layers": 3,
            "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12, "rms_norm_eps": 1e-5,
            "rope_theta": [5e6, 1e4, 1e4, 1e4] * 12, "share_expert_dim": 1280,
            "rope_scaling": {"rope_type": "llama3", "factor": 2.0,
                             "original_max_position_embeddings": 131072, "low_freq_factor": 1.0,
                             "high_freq_factor": 32.0},
            "sink": False, "sliding_window": 512,
            "swiglu_limits": [0.0] * 43 + [7.0] * 2 + [0.0] * 3,
            "swiglu_limits_shared": [0.0] * 44 + [16.0] + [0.0] * 3,
            "use_head_wise_attn_gate": True, "use_moe": True, "use_moe_router_bias": True,
            "use_qk_norm": True, "use_rope_layers": [], "yarn_only_types": [F],
            "zero_centered": True,
        },
        196, 11.0,
    ),
    "MiMo-V2-Flash": (
        {
            "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash",
            "vocab_size": 152576,
            "auto_map": {"AutoModelForCausalLM": "modeling_mimo_v2_flash.MiMoV2FlashForCausalLM"},
            "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True,
            "attention_bias": False, "attention_chunk_size": 128, "attention_value_scale": 0.707,
            "head_dim": 192, "hidden_size": 4096, "hybrid_block_size": None,
            "hybrid_layer_pattern": [0] + ([1] * 5 + [0]) * 7 + [1] * 4 + [0],
            "intermediate_size": 16384, "layernorm_epsilon": 1e-5,
            "max_position_embeddings": 262144, "moe_intermediate_size": 2048,
            "moe_layer_freq": [0] + [1] * 47, "n_group": 1, "n_routed_experts": 256,
            "n_shared_experts": None, "norm_topk_prob": True, "num_attention_heads": 64,
            "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
            "partial_rotary_factor": 0.334, "quantization_config": FP8, "rope_theta": 5000000,
            "routed_scaling_factor": None, "scoring_func": "sigmoid", "sliding_window": 128,
            "sliding_window_size": 128, "swa_head_dim": 192, "swa_num_attention_heads": 64,
            "swa_num_key_value_heads": 8, "swa_rope_theta": 10000, "swa_v_head_dim": 128,
            "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128,
        },
        309, 15.0,
    ),
    "Nemotron-3-Nano-30B-A3B": (
        {
            "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
            "vocab_size": 131072,
            "auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"},
            "attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "expand": 2,
            "head_dim": 128, "hidden_size": 2688,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "intermediate_size": 1856, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64,
            "mamba_hidden_act": "silu", "mamba_num_heads": 64, "mamba_proj_bias": False,
            "max_position_embeddings": 262144, "mlp_bias": False, "mlp_hidden_act": "relu2",
            "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
            "n_group": 1, "n_groups": 8, "n_routed_experts": 128, "n_shared_experts": 1,
            "norm_eps": 1e-5, "norm_topk_prob": True, "num_attention_heads": 32,
            "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2,
            "num_logits_to_keep": 1, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True,
            "residual_in_fp32": False, "rope_theta": 10000, "routed_scaling_factor": 2.5,
            "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False,
            "time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001,
            "topk_group": 1, "use_bias": False, "use_conv_bias": True,
        },
        31.6, 3.2,
    ),
    "Granite-4.0-H-Small": (
        {
            "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
            "vocab_size": 100352, "attention_bias": False, "attention_dropout": 0.0,
            "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "hidden_act": "silu",
            "hidden_size": 4096, "init_method": "mup", "intermediate_size": 768,
            "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
            "logits_scaling": 16, "mamba_chunk_size": 256, "mamba_conv_bias": True,
            "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
            "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False,
            "max_position_embeddings": 131072, "normalization_function": "rmsnorm",
            "num_attention_heads": 32, "num_experts_per_tok": 10, "num_hidden_layers": 40,
            "num_key_value_heads": 8, "num_local_experts": 72, "position_embedding_type": "nope",
            "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None,
            "rope_theta": 10000, "shared_intermediate_size": 1536, "tie_word_embeddings": True,
        },
        32, 9,
    ),
    "Gemma-4-26B-A4B": (
        {
            "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
            "image_token_id": 258880, "tie_word_embeddings": True,
            "text_config": {
                "model_type": "gemma4_text", "attention_bias": False, "attention_k_eq_v": True,
                "enable_moe_block": True, "final_logit_softcapping": 30.0, "global_head_dim": 512,
                "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2816,
                "hidden_size_per_layer_input": 0, "intermediate_size": 2112,
                "layer_types": ([S] * 5 + [F]) * 5, "max_position_embeddings": 262144,
                "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128,
                "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8,
                "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6, "sliding_window": 1024,
                "top_k_experts": 8,
                "rope_parameters": {
                    F: {
                        "partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
                        "rope_type": "proportional",
                    },
                    S: {"rope_theta": 10000.0, "rope_type": "default"},
                },
                "use_bidirectional_attention": "vision", "use_double_wide_mlp": False,
                "vocab_size": 262144,
            },
            "vision_config": {"model_type": "gemma4_vision"},
        },
        25.2, 3.9,
    ),
    "Qwen3-Next-80B-A3B": (
        {
            "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
            "vocab_size": 151936, "attention_bias": False, "decoder_sparse_step": 1,
            "full_attention_interval": 4, "head_dim": 256, "hidden_size": 2048,
            "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512,
            "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
            "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
            "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_scaling": None,
            "rope_theta": 10000000, "shared_expert_intermediate_size": 512,
            "use_sliding_window": False,
        },
        79.7, 3.6,
    ),
    "Qwen3.5-35B-A3B": (
        {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
            "image_token_id": 248056, "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_5_moe_text", "attention_bias": False, "attn_output_gate": True,
                "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256,
                "hidden_size": 2048, "layer_types": (["linear_attention"] * 3 + [F]) * 10,
                "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
                "linear_num_value_heads": 32, "linear_value_head_dim": 128,
                "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
                "mlp_only_layers": [], "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1,
                "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
                "num_hidden_layers": 40, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
                "shared_expert_intermediate_size": 512,
                "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
                                    "rope_type": "default", "rope_theta": 10000000,
                                    "partial_rotary_factor": 0.25},
                "vocab_size": 248320,
            },
            "vision_config": {"model_type": "qwen3_5_moe"},
        },
        34.7, 3.0,
    ),
    "Ling-2.6-flash": (
        {
            "architectures": ["BailingMoeV2_5ForCausalLM"], "model_type": "bailing_hybrid",
            "vocab_size": 157184,
            "auto_map": {
                "AutoModelForCausalLM": "modeling_bailing_moe_v2_5.BailingMoeV2_5ForCausalLM",
            },
            "embedding_dropout": 0.0, "first_k_dense_replace": 1, "group_norm_size": 4,
            "head_dim": 128, "hidden_size": 4096, "intermediate_size": 9216, "kv_lora_rank": 512,
            "layer_group_size": 8, "max_position_embeddings": 131072, "max_window_layers": 20,
            "moe_intermediate_size": 1024, "moe_router_enable_expert_bias": True,
            "moe_shared_expert_intermediate_size": 1024, "n_group": 8, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
            "num_hidden_layers": 32, "num_key_value_heads": 32, "num_kv_heads_for_linear_attn": 32,
            "num_nextn_predict_layers": 1, "num_shared_experts": 1, "partial_rotary_factor": 0.5,
            "q_lora_rank": 1536, "qk_head_dim": 192, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_interleave": True,
            "rope_scaling": None, "rope_theta": 6000000, "rotary_dim": 64,
            "routed_scaling_factor": 2.5, "router_dtype": "fp32", "score_function": "sigmoid",
            "topk_group": 4, "use_bias": False, "use_qk_norm": True, "use_qkv_bias": False,
            "v_head_dim": 128,
        },
        104, 6.8,
    ),
    "Ring-mini-linear-2.0": (
        {
            "architectures": ["BailingMoeLinearV2ForCausalLM"], "model_type": "bailing_moe_linear",
            "vocab_size": 157184, "eos_token_id": 156892, "first_k_dense_replace": 1,
            "group_norm_size": 4, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 5120,
            "layer_group_size": 5, "linear_silu": False, "max_position_embeddings": 131072,
            "moe_intermediate_size": 512, "moe_router_enable_expert_bias": True,
            "moe_shared_expert_intermediate_size": 512, "n_group": 8, "norm_topk_prob": True,
            "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
            "num_hidden_layers": 20, "num_key_value_heads": 4, "num_nextn_predict_layers": 0,
            "num_shared_experts": 1, "partial_rotary_factor": 0.5, "rope_theta": 600000,
            "routed_scaling_factor": 2.5, "score_function": "sigmoid", "topk_group": 4,
            "use_bias": False, "use_qk_norm": True, "use_qkv_bias": False,
        },
        16.4, 1.28,
    ),
    "Jamba-v0.1": (
        {
            "architectures": ["JambaForCausalLM"], "model_type": "jamba", "vocab_size": 65536,
            "attention_dropout": 0.0, "attn_layer_offset": 4, "attn_layer_period": 8,
            "bos_token_id": 1, "calc_logits_for_entire_prompt": False, "eos_token_id": 2,
            "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu",
            "hidden_size": 4096, "intermediate_size": 14336, "mamba_conv_bias": True,
            "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2,
            "mamba_inner_layernorms": True, "mamba_proj_bias": False, "n_ctx": 262144,
            "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
            "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
            "use_mamba_kernels": True,
        },
        51.6, 11.8,
    ),
    "LFM2-8B-A1B": (
        {
            "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "vocab_size": 65536,
            "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "eos_token_id": 7,
            "hidden_size": 2048, "intermediate_size": 7168, "max_position_embeddings": 128000,
            "moe_intermediate_size": 1792, "norm_eps": 1e-5, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32,
            "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
            "layer_types": [F if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
            "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "tie_embedding": True,
            "use_expert_bias": True,
        },
        8.3, 1.5,
    ),
    "Kimi-Linear-48B-A3B": (
        {
            "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear",
            "vocab_size": 163840,
            "auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
            "first_k_dense_replace": 1, "head_dim": 72, "hidden_size": 2304,
            "intermediate_size": 9216, "kv_lora_rank": 512,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
                "kda_layers": [
                    1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26,
                ],
                "short_conv_kernel_size": 4,
            },
            "mla_use_nope": True, "model_max_length": 1048576, "moe_intermediate_size": 1024,
            "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
            "num_attention_heads": 32, "num_expert_group": 1, "num_experts": 256,
            "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32,
            "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5,
            "rope_scaling": None, "rope_theta": 10000.0, "routed_scaling_factor": 2.446,
            "topk_group": 1, "use_grouped_topk": True, "v_head_dim": 128,
        },
        49.1, 3.0,
    ),
    "MiniMax-Text-01": (
        {
            "architectures": ["MiniMaxText01ForCausalLM"], "model_type": "minimax_text_01",
            "attn_type_list": ([0] * 7 + [1]) * 10, "attention_dropout": 0.0, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 9216,
            **{
                f"layernorm_{block}_{factor}": 3.5565588200778455 if factor == "alpha" else 1.0
                for block in ("full_attention", "linear_attention", "mlp")
                for factor in ("alpha", "beta")
            },
            "max_position_embeddings": 10240000, "num_attention_heads": 64,
            "num_experts_per_tok": 2, "num_hidden_layers": 80, "num_key_value_heads": 8,
            "num_local_experts": 32, "postnorm": True, "rms_norm_eps": 1e-5,
            "rope_theta": 10000000, "rotary_dim": 64, "router_jitter_noise": 0.0,
            "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None,
            "tie_word_embeddings": False, "vocab_size": 200064,
        },
        456, 45.9,
    ),
    "DBRX": (
        {
            "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "d_model": 6144,
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "",
                            "rope_theta": 500000},
            "emb_pdrop": 0.0, "max_seq_len": 32768, "n_heads": 48, "n_layers": 40,
            "ffn_config": {"ffn_hidden_size": 10752, "model_type": "", "moe_jitter_eps": 0.01,
                           "moe_loss_weight": 0.05, "moe_num_experts": 16, "moe_top_k": 4},
            "tie_word_embeddings": False, "vocab_size": 100352,
        },
        132, 36,
    ),
    "LongCat-Flash": (
        {
            "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash",
            "vocab_size": 131072, "attention_bias": False, "attention_method": "MLA",
            "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12288, "hidden_size": 6144,
            "kv_lora_rank": 512, "max_position_embeddings": 131072, "mla_scale_kv_lora": True,
            "mla_scale_q_lora": True, "moe_topk": 12, "n_routed_experts": 512,
            "num_attention_heads": 64, "num_layers": 28, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5,
            "rope_theta": 10000000.0, "routed_scaling_factor": 6.0, "v_head_dim": 128,
            "zero_expert_num": 256, "zero_expert_type": "identity",
        },
        560, 31.3,  # with 12 experts per token; on average, a third of them have no weights
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASES)
def test_the_release_is_read_and_counted(name: str, tmp_path: Path) -> None:
    config, total, active = RELEASES[name]
    (tmp_path / "config.json").write_bytes(
        msgspec.json.encode({"torch_dtype": "bfloat16", **config})
    )
    size = model_size(read_model_spec(tmp_path))
    assert size.total / 1e9 == pytest.approx(total, rel=0.02)
    assert size.active / 1e9 == pytest.approx(active, rel=0.08)


CHANGES: dict[str, dict[str, Any]] = {
    "MiniMax-M2": {
        "scoring_func": "softmax", "use_routing_bias": False, "use_qk_norm": False,
        "qk_norm_type": "per_head", "shared_intermediate_size": 8,
        "attn_type_list": [0] * 7 + [1] * 55,
    },
    "Step-3.5-Flash": {
        "norm_expert_weight": False, "zero_centered": False, "use_qk_norm": False,
        "use_head_wise_attn_gate": False, "sink": True, "use_moe": False, "use_rope_layers": [0, 1],
        "yarn_only_types": [S], "rope_theta": [5e6, 1e4, 1e4, 2e4] * 12,
        "partial_rotary_factors": [0.5] * 3,
    },
    "MiMo-V2-Flash": {"hybrid_layer_pattern": [2] * 48, "moe_layer_freq": [0, 1, 1]},
    "DeepSeek-V3.1": {"qk_rope_head_dim": 63},
    "MiniMax-Text-01": {
        "postnorm": False, "shared_intermediate_size": 8, "num_attention_heads": 48,
    },
    "LongCat-Flash": {
        "attention_method": "GQA", "router_bias": True, "zero_expert_type": "copy",
        "head_dim": 32, "norm_topk_prob": True,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, changes in CHANGES.items() for key in changes]
)
def test_a_key_that_would_change_the_numbers_is_refused(
    name: str, key: str, tmp_path: Path
) -> None:
    """One that only the authors' own code reads, and that leaves most tensors as they are."""
    config = {**RELEASES[name][0], "torch_dtype": "bfloat16", key: CHANGES[name][key]}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    with pytest.raises(CheckpointError, match=rf"{key} is .+; (only .* is supported|it must)"):
        read_model_spec(tmp_path)
