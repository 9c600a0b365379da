"""The model families that tests cover: transformers' class and a small config for each.

tests/checkpoints.py writes a random checkpoint of any of them.
"""

from __future__ import annotations

from typing import Any

Options = dict[str, Any]
SMALL: Options = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 1024,
    "initializer_range": 0.15, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS: Options = {"num_experts": 8, "num_experts_per_tok": 3}
LIGHTNING = {  # families with lightning attention: the head dimension of those layers
    "bailing_moe_linear_v2": 32,
    "bailing_moe_v2_5": 16,
}
FULL = "full_attention"
SLIDING = "sliding_attention"
YARN: Options = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}
LLAMA3: Options = {
    "rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
ROUTED: Options = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
    "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip
LATENT: Options = {
    **ROUTED, "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 32,
    "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
LONGCAT_KEYS = (
    "n_routed_experts", "num_key_value_heads", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
INDEXED: Options = {
    "index_n_heads": 16,  # with fewer, every product of some scores would be negative
    "index_head_dim": 24,
}
VISION: Options = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
MISTRAL4: Options = {
    **LATENT, "routed_scaling_factor": 1.0,
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}  # fmt: skip
LLAMA4: Options = {
    "num_hidden_layers": 4, "head_dim": 16, "intermediate_size_mlp": 80, "num_local_experts": 8,
    "interleave_moe_layer_step": 2, "attention_chunk_size": 64, "floor_scale": 16,
    "rope_parameters": LLAMA3,
}  # fmt: skip
GEMMA4: Options = {
    "num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL], "num_experts": 8,
    "top_k_experts": 3, "moe_intermediate_size": 48, "enable_moe_block": True, "head_dim": 16,
    "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "sliding_window": 40, "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
STEP: Options = {
    "num_hidden_layers": 4, "head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "share_expert_dim": 80, "moe_intermediate_size": 48,
    "layer_types": [FULL, SLIDING, SLIDING, SLIDING], "sliding_window": 40,
    "num_sliding_attention_heads": 6, "moe_router_scaling_factor": 3.0, "moe_layers_enum": "1,2,3",
    "pad_token_id": 0, "swiglu_limits": [0.0, 0.0, 0.5, 0.5],
    "swiglu_limits_shared": [0.9, 0.0, 0.0, 0.7],
    "rope_parameters": {
        FULL: {**LLAMA3, "partial_rotary_factor": 0.5},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip
GRANITE: Options = {
    "num_local_experts": 8, "num_experts_per_tok": 3, "embedding_multiplier": 6.0,
    "attention_multiplier": 0.1, "residual_multiplier": 0.3, "logits_scaling": 4.0,
}  # fmt: skip
QWEN_NEXT: Options = {
    **EXPERTS, "num_hidden_layers": 4, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48, "head_dim": 32, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
}  # fmt: skip
QWEN3_5: Options = {
    **QWEN_NEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5,
                        "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}  # fmt: skip
MINIMAX_M3: Options = {
    "num_hidden_layers": 3, "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3,
    "dense_intermediate_size": 80, "shared_intermediate_size": 48, "swiglu_limit": 0.7,
    "mlp_layer_types": ["dense", "sparse", "sparse"], "rotary_dim": 16,
    "layer_types": [FULL, "minimax_m3_sparse", "minimax_m3_sparse"], "index_n_heads": 2,
    "index_head_dim": 32, "index_block_size": 8, "index_topk_blocks": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
MINIMAX_01: Options = {
    "num_hidden_layers": 3, "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3,
    "layer_types": ["linear_attention", FULL, "linear_attention"], "full_attn_alpha_factor": 1.5,
    "full_attn_beta_factor": 0.8, "linear_attn_alpha_factor": 1.4, "linear_attn_beta_factor": 0.9,
    "mlp_alpha_factor": 1.6, "mlp_beta_factor": 0.7,
}  # fmt: skip
# With few index heads, some groups would have scores of 0.
QWEN4_EXP: Options = {
    **QWEN3_5, "layer_types": ["linear_attention", FULL, "linear_attention", FULL],
    "hc_count": 3, "hc_lowrank": 24, "indexer_n_heads": 16, "indexer_kv_heads": 1,
    "indexer_head_dim": 24, "indexer_budget": 48, "indexer_compress_ratio": 4,
    "ple_layer_ids": [1, 3], "ple_embed_dim": 48, "ngram_size": 3, "heads_per_ngram": 3,
    "ngram_vocab_size_base": 100, "make_ngram_vocab_size_divisible_by": 16, "split_ngram_parts": 5,
    "eos_token_id": 98,  # the test's prompt has it twice, because it ends n-grams
}  # fmt: skip
INKLING: Options = {
    "num_hidden_layers": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 48, "n_shared_experts": 2, "head_dim": 32, "swa_head_dim": 16,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "sliding_window_size": 40,
    "d_rel": 8, "rel_extent": 64, "log_scaling_n_floor": 20, "route_scale": 2.0,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "logits_mup_width_multiplier": 2.0,
}  # fmt: skip
INKLING2: Options = {
    **{
        key: value for key, value in INKLING.items()
        if key not in ("logits_mup_width_multiplier", "mlp_layer_types", "n_shared_experts")
    },
    "unpadded_vocab_size": 256, "n_layers_per_attn_res_block": 2, "rel_l2_clip_threshold": 2.0,
    "qk_l2_clip_threshold": 5.0, "mlp_gate_softcap": 0.5, "mlp_up_softcap": 0.7,
    "final_logit_softcapping": 3.0, "initializer_range": 0.05,
}  # fmt: skip
NEMOTRON_H: Options = {
    "head_dim": 32, "mamba_num_heads": 8, "n_groups": 4, "ssm_state_size": 24, "time_step_min": 0.3,
    "time_step_limit": [0.0, 9.0],
}  # fmt: skip
LING_3: Options = {
    **{key: value for key, value in LATENT.items() if key not in ("n_routed_experts",)},
    "num_local_experts": 8, "q_lora_rank": None, "head_dim": 12, "layer_group_size": 2,
    "num_hidden_layers": 4, "n_group": 4, "topk_group": 2,
}  # fmt: skip
HY_V4: Options = {
    **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}, **INDEXED,
    "index_topk": 48, "v_head_dim": 32, "swiglu_limit": 0.7, "hc_magnitude": 1.5, "hc_eps": 1e-3,
    "rms_norm_eps": 1e-6,  # that of norms of latents in transformers
}  # fmt: skip
GLM5_NEXT: Options = {
    **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}, **INDEXED,
    "num_hidden_layers": 3, "qk_rope_head_dim": 0, "v_head_dim": 24, "index_head_dim": 32,
    "index_kpool": 4, "index_topk": 48, "swiglu_limit": 0.7, "hc_eps": 1e-3, "hc_sinkhorn_iters": 3,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    "indexer_types": ["shared", "full", "shared"], "linear_head_dim": 12, "linear_num_heads": 4,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip
GLM5_NEXT_VL: Options = {
    "text_config": GLM5_NEXT, "image_token_id": 250, "video_token_id": 251,
    "vision_config": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": 64, "image_size": 28, "projection_intermediate_size": 16,
    },
}  # fmt: skip
DEEPSEEK_V4: Options = {
    "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 32, "partial_rotary_factor": 0.5,
    "q_lora_rank": 48, "o_groups": 2, "o_lora_rank": 24, "sliding_window": 24,
    "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "index_n_heads": 16, "index_head_dim": 24,
    "index_topk": 6, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
    "intermediate_size": 48, "n_shared_experts": 1, "swiglu_limit": 0.7,
    "num_nextn_predict_layers": 0, "hc_sinkhorn_iters": 3,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
# Family -> (prefix of the transformers class, options of its config besides SMALL).
FAMILIES: dict[str, tuple[str, Options]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {**EXPERTS, "moe_intermediate_size": 32, "head_dim": 32, "norm_topk_prob": True},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {**EXPERTS, "clip_qkv": 2.0}),
    "granite_moe": ("GraniteMoe", GRANITE),
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **LATENT, "n_shared_experts": 2, "topk_method": "group_limited_greedy", "n_group": 4,
            "topk_group": 2, "norm_topk_prob": False,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **LATENT, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 1,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v32": (
        "DeepseekV32",
        {
            **LATENT, **INDEXED, "n_group": 4, "topk_group": 2, "index_topk": 48,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v4": ("DeepseekV4", DEEPSEEK_V4),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {
            **LATENT, **INDEXED, "index_topk": 48, "v_head_dim": 32,
            "indexer_types": ["full", "shared", "full"],
        },
    ),
    "kimi_k25": ("DeepseekV3", {**LATENT, "n_group": 1, "topk_group": 1}),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, "v_head_dim": 32}),
    "mistral4": ("Mistral4", MISTRAL4),
    "mistral3": (
        "Mistral3",
        {
            "text_config": {**MISTRAL4, "model_type": "mistral4"}, "image_token_index": 250,
            "vision_config": {
                **VISION, "model_type": "pixtral", "head_dim": 8, "patch_size": 14,
                "image_size": 28,
            },
        },
    ),
    "mistral_large_3": ("Mistral4", MISTRAL4),
    "mistral_large4": (
        "MistralLarge4",
        {
            "text_config": {
                **{key: value for key, value in LATENT.items() if key not in ("q_lora_rank",)},
                **INDEXED, "num_hidden_layers": 5, "index_topk": 48, "n_group": 4, "topk_group": 2,
                "no_rope_layers": [1, 0, 1, 0, 1], "kv_source_layers": [0, 1, 0, 1, 4],
                "indexer_types": ["full", "shared", "full", "full", "shared"],
                "final_logit_softcapping": 3.0, "initializer_range": 0.05,
            },
            "vision_config": {
                **VISION, "model_type": "pixtral", "head_dim": 8, "patch_size": 14,
                "image_size": 28,
            },
        },
    ),
    "axk1": ("AXK1", {**LATENT, "n_group": 4, "topk_group": 2}),
    "glm4_moe": (
        "Glm4Moe",
        {**ROUTED, "attention_bias": True, "use_qk_norm": True, "head_dim": 32},
    ),
    "glm4v_moe": (
        "Glm4vMoe",
        {
            "text_config": {
                **ROUTED, "head_dim": 32,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                    "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]},
            },
            "vision_config": {
                "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
                "out_hidden_size": 64, "image_size": 28,
            },
            "image_token_id": 250, "video_token_id": 251, "image_start_token_id": 252,
            "image_end_token_id": 253, "video_start_token_id": 254, "video_end_token_id": 255,
        },
    ),
    "bailing_moe": (
        "Glm4Moe",
        {**ROUTED, "use_qk_norm": True, "head_dim": 32, "n_group": 4, "topk_group": 2},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16},
    ),
    "minimax_m3_text": ("MiniMaxM3VLText", MINIMAX_M3),
    "minimax_m3": (
        "MiniMaxM3VL",
        {
            "text_config": MINIMAX_M3, "projector_hidden_size": 16,
            "vision_config": {**VISION, "image_size": 28, "patch_size": 14},
        },
    ),
    "beam": (
        "Beam",
        {
            **EXPERTS, "num_hidden_layers": 4, "moe_intermediate_size": 48, "head_dim": 32,
            "layer_types": [SLIDING, FULL, SLIDING, FULL], "sliding_window": 40, "n_group": 4,
            "topk_group": 2, "final_logit_softcapping": 3.0,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "rms_norm_eps": 1e-3,
        },
    ),
    "inkling_text": ("InklingText", INKLING),
    "inkling2_text": ("Inkling2Text", INKLING2),
    "inkling2": (
        "Inkling2",
        {
            "text_config": INKLING2,
            "vision_config": {
                **VISION, "patch_size": 4, "posemb_grid_size": 4, "projection_hidden_dim": 16,
                "text_hidden_size": 64,
            },
        },
    ),
    "inkling": ("InklingText", {**INKLING, "vocab_size": 260, "unpadded_vocab_size": 256}),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 40,
            "swiglu_limit": 0.7, "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "llama4_text": ("Llama4Text", LLAMA4),
    "llama4": (
        "Llama4",
        {
            "text_config": LLAMA4, "image_token_index": 250,
            "vision_config": {
                **VISION, "vision_output_dim": 16, "projector_input_dim": 16,
                "projector_output_dim": 16, "image_size": 28,
            },
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"num_hidden_layers": 3, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 48},
    ),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoe",
        {
            "text_config": {
                "num_hidden_layers": 3, "moe_num_experts": 8, "moe_k": 3,
                "moe_intermediate_size": [48, 24],
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                    "mrope_section": [2, 2, 4]},
            },
            "vision_config": {
                "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
            },
            "tie_word_embeddings": False, "image_token_id": 250, "video_token_id": 251,
            "image_start_token_id": 252, "image_end_token_id": 253, "video_start_token_id": 254,
            "video_end_token_id": 255,
        },
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {
            "num_experts": 8, "moe_topk": 3, "head_dim": 32,
            "rope_parameters": {
                "rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4,
            },
        },
    ),
    "dots1": (
        "Dots1",
        {
            **ROUTED, "n_shared_experts": 2, "head_dim": 32, "first_k_dense_replace": 1,
            "sliding_window": 40, "max_window_layers": 1,
        },
    ),
    "phimoe": (
        "Phimoe",
        {
            "num_local_experts": 8, "attention_bias": True, "lm_head_bias": True,
            "router_jitter_noise": 0.1,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4,
                "short_factor": [1.0 + i / 8 for i in range(8)],
                "long_factor": [1.0 + i for i in range(8)], "short_mscale": 1.1, "long_mscale": 1.2,
                "original_max_position_embeddings": 1024,
            },
        },
    ),
    "step3p7": (
        "Step3p7",
        {"text_config": STEP, "vision_config": {**VISION, "image_size": 28}, "image_token_id": 250},
    ),
    "step3p5": (
        "Step3p7",
        {"text_config": STEP, "vision_config": {**VISION, "image_size": 28}, "image_token_id": 250},
    ),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {
            "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": 48, "head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 1,
            "sliding_window": 40, "layer_types": [FULL, SLIDING, SLIDING],
        },
    ),
    "afmoe": (
        "Afmoe",
        {
            **EXPERTS, "num_hidden_layers": 4, "moe_intermediate_size": 48, "head_dim": 32,
            "sliding_window": 40, "route_scale": 1.5, "mup_enabled": True,
        },
    ),
    "gemma4_text": ("Gemma4Text", GEMMA4),
    "gemma4": (
        "Gemma4",
        {
            "text_config": GEMMA4, "tie_word_embeddings": True, "image_token_id": 250,
            "video_token_id": 251, "audio_token_id": 252,
            "vision_config": {
                **VISION, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16,
            },
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            "text_config": {
                **EXPERTS, "moe_intermediate_size": 48, "head_dim": 32,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e6,
                                    "mrope_section": [8, 4, 4], "mrope_interleaved": True},
            },
            "vision_config": {
                "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
                "out_hidden_size": 64, "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            "image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252,
            "vision_end_token_id": 253,
        },
    ),
    "qwen3_next": ("Qwen3Next", {**QWEN_NEXT, "partial_rotary_factor": 0.25}),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", {**QWEN3_5, "num_experts_per_tok": 4}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            "text_config": QWEN3_5,
            "vision_config": {
                "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
                "out_hidden_size": 64, "num_position_embeddings": 16,
            },
            "image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252,
            "vision_end_token_id": 253,
        },
    ),
    "qwen4_exp_text": (
        "Qwen4ExpText",
        {**QWEN4_EXP, "output_gate_type": "sigmoid", "hc_lowrank": 32},
    ),
    "qwen4_exp": (
        "Qwen4Exp",
        {
            "text_config": QWEN4_EXP,
            "vision_config": {
                "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
                "out_hidden_size": 64, "num_position_embeddings": 16,
            },
            "image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252,
            "vision_end_token_id": 253,
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            **{
                key: value for key, value in LATENT.items()
                if key not in ("n_routed_experts", "q_lora_rank")
            },
            "num_local_experts": 8, "layer_types": ["linear_attention", FULL, "linear_attention"],
            "linear_head_dim": 12, "linear_num_heads": 4, "n_group": 4, "topk_group": 2,
        },
    ),
    "granite_moe_shared": ("GraniteMoeShared", {**GRANITE, "shared_intermediate_size": 48}),
    "granite_moe_swa": (
        "GraniteMoeSWA",
        {
            **GRANITE, "num_hidden_layers": 5, "shared_intermediate_size": 48, "sliding_window": 40,
            "layer_rope_theta": [1e4, 0, 5e5, 1e4, 0],
        },
    ),
    "granite_moe_hybrid": (
        "GraniteMoeHybrid",
        {
            **GRANITE, "num_hidden_layers": 3, "shared_intermediate_size": 48, "mamba_n_heads": 8,
            "mamba_n_groups": 2, "mamba_d_state": 24,
            "layer_types": ["linear_attention", FULL, "linear_attention"],
            "time_step_limit": [0.3, 2.0],
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **ROUTED, **NEMOTRON_H, "num_hidden_layers": 5, "mamba_head_dim": 12,
            "layers_block_type": ["linear_attention", "moe", "linear_attention", FULL, "mlp"],
            "moe_shared_expert_intermediate_size": 80, "n_group": 4, "topk_group": 2,
        },
    ),
    "nemotron_h_dense": (
        "NemotronH",
        {
            **NEMOTRON_H, "num_hidden_layers": 4, "mamba_head_dim": 16,
            "layers_block_type": ["linear_attention", "mlp", FULL, "mlp"],
        },
    ),
    "flex_olmo": ("FlexOlmo", EXPERTS),
    "solar_open": ("SolarOpen", {**ROUTED, "head_dim": 32}),
    "exaone_moe": (
        "ExaoneMoe",
        {
            **EXPERTS, "num_hidden_layers": 4, "moe_intermediate_size": 48, "sliding_window": 40,
            "head_dim": 32,
        },
    ),
    "cohere2_moe": (
        "Cohere2Moe",
        {
            **EXPERTS, "num_hidden_layers": 5, "head_dim": 16, "sliding_window": 40,
            "num_shared_experts": 2, "expert_selection_fn": "sigmoid", "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 80, "logit_scale": 0.5,
        },
    ),
    "glm5_next": ("Glm5Next", GLM5_NEXT_VL),
    "glm5_next_text": ("Glm5Next", GLM5_NEXT_VL),  # see tests/published_form.py
    "hy_v3": ("HYV3", {**EXPERTS, "moe_intermediate_size": 48, "head_dim": 32}),
    "hy_v4": ("HYV4", HY_V4),
    "hy_v4_vl": ("HYV4", HY_V4),  # see tests/published_form.py
    "mellum": (
        "Mellum",
        {
            **EXPERTS, "moe_intermediate_size": 48, "head_dim": 32, "layer_types": [FULL, SLIDING],
            "sliding_window": 40,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            **EXPERTS, "num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"],
            "moe_intermediate_size": 48, "num_dense_layers": 1, "routed_scaling_factor": 1.5,
        },
    ),
    "bailing_moe_v2_5": (
        "DeepseekV3",
        {**LATENT, "num_hidden_layers": 4, "n_group": 4, "topk_group": 2},
    ),
    "bailing_moe_linear_v2": (
        "Glm4Moe",
        {
            **ROUTED, "num_hidden_layers": 3, "use_qk_norm": True, "head_dim": 32, "n_group": 4,
            "topk_group": 2,
        },
    ),
    "bailing_hybrid": ("BailingHybrid", LING_3),
    "bailing_moe_v3": ("BailingHybrid", {**LING_3, "num_hidden_layers": 2}),
    "jamba": (
        "Jamba",
        {
            **EXPERTS, "num_hidden_layers": 3, "attn_layer_period": 5, "attn_layer_offset": 0,
            "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8,
            "mamba_dt_rank": 6,
        },
    ),
    "zaya": (
        "Zaya",
        {
            "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 1, "head_dim": 16,
            "moe_intermediate_size": 48, "router_hidden_size": 24, "lm_head_bias": True,
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 40,
            "pad_token_id": 0, "initializer_range": 0.4,  # so that some tokens get no expert
            "rope_parameters": {
                "hybrid": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
                "hybrid_sliding": {
                    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                },
            },
        },
    ),
    "longcat_flash": (
        "LongcatFlash",
        {
            **{key: value for key, value in LATENT.items() if key in LONGCAT_KEYS},
            "num_hidden_layers": 4, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 48,
            "moe_topk": 3, "zero_expert_num": 4, "head_dim": 8, "routed_scaling_factor": 3.0,
        },
    ),
    "jetmoe": (
        "JetMoe",
        {
            "num_local_experts": 8, "num_experts_per_tok": 3, "kv_channels": 16,
            "num_attention_heads": 6, "rms_norm_eps": 0.05,  # of the last norm alone
        },
    ),
    "dbrx": (
        "Dbrx",
        {
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 3},
            "d_model": 64,  # its class needs it before hidden_size
        },
    ),
    "minimax": ("MiniMax", MINIMAX_01),
    "minimax_text_01": ("MiniMax", MINIMAX_01),
    "minimax_m1": ("MiniMax", MINIMAX_01),
    "laguna": (
        "Laguna",
        {
            **EXPERTS, "num_hidden_layers": 3, "moe_intermediate_size": 48, "head_dim": 32,
            "shared_expert_intermediate_size": 40, "layer_types": [FULL, SLIDING, SLIDING],
            "sliding_window": 40, "num_attention_heads_per_layer": [4, 6, 2],
            "moe_routed_scaling_factor": 2.5, "moe_router_logit_softcapping": 1.5,
            "rope_parameters": {
                FULL: {**YARN, "partial_rotary_factor": 0.5},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            },
        },
    ),
    "flint": (
        "Flint",
        {
            **EXPERTS, "num_hidden_layers": 5, "moe_intermediate_size": 48, "head_dim": 32,
            "shared_expert_intermediate_size": 40, "sliding_window": 40,
            "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING], "mlp_only_layers": [0],
        },
    ),
    "kolibri1": (
        "Kolibri1",
        {
            **EXPERTS, "num_hidden_layers": 3,
            "moe_intermediate_size": 48, "head_dim": 32, "shared_expert_intermediate_size": 40,
            "sliding_window": 40, "layer_types": [SLIDING, FULL, SLIDING],
        },
    ),
    "lara_mini": (
        "Flint",
        {
            **EXPERTS, "num_hidden_layers": 4, "moe_intermediate_size": 48, "head_dim": 32,
            "shared_expert_intermediate_size": 40, "sliding_window": 40, "mlp_only_layers": [],
            "layer_types": [FULL, SLIDING, FULL, FULL], "tie_word_embeddings": True,
        },
    ),
    "sarvam_moe": (
        "Glm4Moe",
        {
            **ROUTED, "use_qk_norm": True, "head_dim": 32,
            "rope_parameters": {"rope_theta": 8e6, "partial_rotary_factor": 1.0},
        },
    ),
    "sarvam_mla": (
        "DeepseekV3",
        {
            **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "qwen2": ("Qwen2", {}),
    "mistral": ("Mistral", {"sliding_window": 40, "head_dim": 32}),
}  # fmt: skip

# For slow tests: one dense family, and every kind of router and of attention norm.
FEW = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granite_moe", "llama", "qwen3")

# The architecture that config.json names, where it is not the transformers class that wrote it.
ARCHITECTURES = {
    "bailing_moe": "BailingMoeV2ForCausalLM",
    "bailing_moe_linear_v2": "BailingMoeLinearV2ForCausalLM",
    "bailing_moe_v2_5": "BailingMoeV2_5ForCausalLM",
    "bailing_moe_v3": "BailingMoeV3ForCausalLM",
    "glm5_next_text": "Glm5NextForCausalLM",
    "hy_v4_vl": "HYV4VLForConditionalGeneration",
    "inkling": "InklingForConditionalGeneration",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "minimax_m3": "MiniMaxM3SparseForConditionalGeneration",
    "minimax_m1": "MiniMaxM1ForCausalLM",
    "minimax_text_01": "MiniMaxText01ForCausalLM",
    "lara_mini": "LaraMiniForCausalLM",
    "mistral_large_3": "MistralLarge3ForCausalLM",
    "sarvam_mla": "SarvamMLAForCausalLM",
    "sarvam_moe": "SarvamMoEForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
}
# The transformers class of a model, where its name is not the prefix with the usual suffix.
MODEL_CLASSES = {"minimax_m3": "MiniMaxM3SparseForConditionalGeneration"}


def architecture(name: str) -> str:
    """Return the architecture that the family's config.json names."""
    class_name, options = FAMILIES[name]
    suffix = "ForConditionalGeneration" if "text_config" in options else "ForCausalLM"
    return ARCHITECTURES.get(name, class_name.removesuffix("Text") + suffix)
