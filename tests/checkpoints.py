"""Small random checkpoints of every family, as they are published: most as transformers writes
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import lightning
from tests.lightning import add_lightning

Options = dict[str, Any]
Tensors = dict[str, Tensor]
SMALL: Options = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 1024,
    "initializer_range": 0.15, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS: Options = {"num_experts": 8, "num_experts_per_tok": 3}
LIGHTNING = {
    "bailing_moe_linear_v2": 32,
    "bailing_moe_v2_5": 16,
}  # rows with such layers: widths of their heads
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
INDEXED: Options = {
    "index_n_heads": 16,
    "index_head_dim": 24,
}  # with few heads all products of some scores are below 0
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
    "axk1": ("AXK1", {**LATENT, "n_group": 4, "topk_group": 2}),
    "glm4_moe": (
        "Glm4Moe",
        {**ROUTED, "attention_bias": True, "use_qk_norm": True, "head_dim": 32},
    ),
    "bailing_moe": (
        "Glm4Moe",
        {**ROUTED, "use_qk_norm": True, "head_dim": 32, "n_group": 4, "topk_group": 2},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16},
    ),
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
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            "text_config": {
                **QWEN_NEXT,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e6,
                                    "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2],
                                    "mrope_interleaved": True},
            },
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
            **ROUTED, "head_dim": 32,
            "layers_block_type": ["linear_attention", "moe", "linear_attention", FULL, "mlp"],
            "moe_shared_expert_intermediate_size": 80, "n_group": 4, "topk_group": 2,
            "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 4, "ssm_state_size": 24,
            "time_step_min": 0.3, "num_hidden_layers": 5, "time_step_limit": [0.0, 9.0],
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
    "hy_v3": ("HYV3", {**EXPERTS, "moe_intermediate_size": 48, "head_dim": 32}),
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
    "jamba": (
        "Jamba",
        {
            **EXPERTS, "num_hidden_layers": 3, "attn_layer_period": 5, "attn_layer_offset": 0,
            "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8,
            "mamba_dt_rank": 6,
        },
    ),
    "qwen2": ("Qwen2", {}),
    "mistral": ("Mistral", {"sliding_window": 40, "head_dim": 32}),
}  # fmt: skip


# with one dense family, each kind of router and norm of an attention without further options: for
# tests that are slow
FEW = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granite_moe", "llama", "qwen3")


# rows whose checkpoint does not name the class that wrote it
ARCHITECTURES = {
    "bailing_moe": "BailingMoeV2ForCausalLM",
    "bailing_moe_linear_v2": "BailingMoeLinearV2ForCausalLM",
    "bailing_moe_v2_5": "BailingMoeV2_5ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "mistral_large_3": "MistralLarge3ForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
}


def architecture(name: str) -> str:
    """Returns the architecture of a row."""
    class_name, options = FAMILIES[name]
    suffix = "ForConditionalGeneration" if "text_config" in options else "ForCausalLM"
    return ARCHITECTURES.get(name, class_name.removesuffix("Text") + suffix)


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    reference: Any  # the transformers model, fp32


def write_checkpoint(name: str, path: Path, **overrides: Any) -> Checkpoint:
    """Writes the checkpoint of a row with `overrides` (of the text model) to `path`."""
    import transformers  # slow to import: only where a checkpoint is written

    class_name, options = FAMILIES[name]
    suffix = "ForConditionalGeneration" if "text_config" in options else "ForCausalLM"
    if nested := options.get("text_config"):
        options = {**options, "text_config": {**SMALL, **nested, **overrides}}
    else:
        options = {**SMALL, **options, **overrides}
    config = getattr(transformers, class_name + "Config")(**options)
    torch.manual_seed(sum(name.encode()))
    model = getattr(transformers, class_name.removesuffix("Text") + suffix)(config).eval()
    if name in LIGHTNING:
        add_lightning(model, LIGHTNING[name])
    randomise(model)
    model.save_pretrained(path)
    if name in PUBLISHED:
        config_file = path / "config.json"
        weights_file = path / "model.safetensors"
        config, tensors = PUBLISHED[name](
            json.loads(config_file.read_text()), load_file(weights_file)
        )
        config_file.write_text(json.dumps(config))
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, weights_file)
        if name == "mistral_large_3":
            config_file.rename(path / "params.json")
            weights_file.rename(path / "consolidated.safetensors")
    return Checkpoint(path, model)


def randomise(model: torch.nn.Module) -> None:
    """Norms, biases, sinks and scales start as ones and zeros; make them matter."""
    around_zero = float(
        type(model).__name__.startswith(("Qwen3Next", "Qwen3_5", "Step"))
    )  # whose norms multiply by 1 + weight
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            kind = name.rpartition(".")[2]
            if kind.endswith("bias"):
                selects = "correction" in kind or kind == "expert_bias"
                tensor.normal_(0, 0.1 if selects else 0.3)
            elif "norm" in name or kind in (
                "sinks",
                "scale",
                "per_expert_scale",
                "layer_scalar",
                "D",
            ):
                tensor.uniform_(0.5, 1.5).sub_(around_zero)
            elif (
                kind == "A_log"
            ):  # states last: they are read long after, and sums of log decays stay accurate
                tensor.uniform_(-5.0, 0.0)
            elif kind == "weight" and not tensor.any():  # routers of some families
                tensor.normal_(0, 0.15)


def _with_mtp(
    names: str, *, layer: int | None = None
) -> Callable[[Options, Tensors], tuple[Options, Tensors]]:
    """Adds tensors of layers for multi-token prediction, which are to be ignored."""
    prefix = "" if layer is None else f"model.layers.{layer}."
    return lambda config, tensors: (
        config,
        tensors | {prefix + name: torch.ones(2, 2) for name in names.split()},
    )


def _bailing_moe(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """Ling and Ring 2.0, which transformers has not: the arithmetic is GLM-4.5's."""
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            others = (tensors[name.replace(".q_proj.", f".{x}_proj.")] for x in "kv")
            tensor = torch.cat((tensor, *others))
        for old, new in {
            "embed_tokens": "word_embeddings", "self_attn.q_proj": "attention.query_key_value",
            "self_attn.o_proj": "attention.dense", "self_attn.q_norm": "attention.query_layernorm",
            "self_attn.k_norm": "attention.key_layernorm",
            "gate.e_score_correction_bias": "gate.expert_bias", "self_attn.": "attention.",
        }.items():  # fmt: skip
            name = name.replace(old, new)
        renamed[name] = tensor
    kept = (*SMALL, "n_group", "topk_group", "head_dim", "num_experts_per_tok",
            "moe_intermediate_size", "dtype", "first_k_dense_replace", "norm_topk_prob",
            "routed_scaling_factor", "rms_norm_eps", "kv_lora_rank", "q_lora_rank",
            "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # fmt: skip
    rope = config["rope_parameters"]
    config = {key: config[key] for key in kept if key in config} | {
        "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "num_experts": 8,
        "num_shared_experts": 1, "use_qk_norm": True, "use_qkv_bias": False, "use_bias": False,
        "partial_rotary_factor": 0.5, "rope_theta": rope["rope_theta"],
        "rope_scaling": None, "moe_router_enable_expert_bias": True, "score_function": "sigmoid",
        "auto_map": {"AutoModelForCausalLM": "modeling_bailing_moe_v2.BailingMoeV2ForCausalLM"},
    }  # fmt: skip
    return config, renamed


def _bailing_lightning(name: str) -> Callable[[Options, Tensors], tuple[Options, Tensors]]:
    """Ling 2.6 and Ring-linear 2.0."""

    def published(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
        config, tensors = _bailing_moe(config, tensors)
        return config | {
            "architectures": [ARCHITECTURES[name]], "head_dim": LIGHTNING[name],
            "model_type": "bailing_hybrid" if "kv_lora_rank" in config else "bailing_moe_linear",
            "layer_group_size": lightning.GROUP, "group_norm_size": lightning.NORM_GROUPS,
            "linear_silu": False,
        }, tensors  # fmt: skip

    return published


def _kimi_k25(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """Kimi-K2 as the text part of a multimodal checkpoint."""
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
        "dtype": config["dtype"], "text_config": config | {"model_type": "kimi_k2"},
        "vision_config": {},
    }  # fmt: skip
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    return config, tensors | {"vision_tower.patch_embed.proj.weight": torch.ones(2, 2)}


def _mistral_large_3(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """Mistral's own format: params.json, and names of its own."""
    renamed: Tensors = {}
    names = {
        "model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.norm": "norm",
        "model.layers": "layers", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "self_attn": "attention", "q_a_proj": "wq_a",
        "q_a_layernorm": "q_a_norm", "q_b_proj": "wq_b", "kv_a_proj_with_mqa": "wkv_a_with_mqa",
        "kv_a_layernorm": "kv_a_norm", "kv_b_proj": "wkv_b", "o_proj": "wo",
        "mlp.shared_experts": "shared_experts", "mlp.gate.weight": "gate.weight", "gate_proj": "w1",
        "down_proj": "w2", "up_proj": "w3", "mlp": "feed_forward",
    }  # fmt: skip
    for name, tensor in tensors.items():
        layer = ".".join(name.split(".")[1:3])
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                renamed |= {
                    f"{layer}.experts.{expert}.w1.weight": gate,
                    f"{layer}.experts.{expert}.w3.weight": up,
                }
        elif name.endswith("experts.down_proj"):
            renamed |= {
                f"{layer}.experts.{expert}.w2.weight": down for expert, down in enumerate(tensor)
            }
        else:
            for old, new in names.items():
                name = name.replace(old, new)
            renamed[name] = tensor
    rope = config["rope_parameters"]
    length = rope["original_max_position_embeddings"]
    params = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"], "n_kv_heads": config["num_key_value_heads"],
        "hidden_dim": config["intermediate_size"], "tied_embeddings": False,
        "norm_eps": config["rms_norm_eps"], "rope_theta": rope["rope_theta"],
        "moe": {
            "expert_hidden_dim": config["moe_intermediate_size"], "expert_parallel": 1,
            "expert_model_parallel": 1, "first_k_dense_replace": config["first_k_dense_replace"],
            "num_expert_groups": 1, "num_shared_experts": 1, "num_expert_groups_per_tok": 1,
            "num_experts": config["n_routed_experts"], "route_every_n": 1,
            "num_experts_per_tok": config["num_experts_per_tok"],
            "routed_scale": config["routed_scaling_factor"],
        },
        "yarn": {"alpha": 1, "beta": 32, "apply_scale": False, "factor": rope["factor"],
                 "original_max_position_embeddings": length},
        "llama_4_scaling": {
            "beta": rope["llama_4_scaling_beta"], "original_max_position_embeddings": length,
        },
    } | {key: config[key] for key in ("head_dim", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
                                      "vocab_size", "qk_rope_head_dim", "v_head_dim",
                                      "max_position_embeddings")}  # fmt: skip
    return params, renamed


def _step3p5(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """Step-3.5: the text part of Step-3.7, with an MTP layer in every per-layer list."""
    text = config["text_config"]
    rope = [text["rope_parameters"][kind] for kind in [*text["layer_types"], SLIDING]]
    full = text["rope_parameters"][FULL]
    kept = (*SMALL, "head_dim", "sliding_window", "moe_intermediate_size", "share_expert_dim",
            "rms_norm_eps", "moe_router_scaling_factor")  # fmt: skip
    config = {key: text[key] for key in kept if key in text and key != "num_key_value_heads"} | {
        "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "dtype": "float32",
        "num_attention_groups": text["num_key_value_heads"], "moe_num_experts": 8, "moe_top_k": 3,
        "num_nextn_predict_layers": 1, "layer_types": [*text["layer_types"], SLIDING],
        "moe_layers_enum": "1,2,3", "swiglu_limits": [*text["swiglu_limits"], 0.0],
        "swiglu_limits_shared": [*text["swiglu_limits_shared"], 0.0],
        "rope_theta": [each["rope_theta"] for each in rope],
        "partial_rotary_factors": [each["partial_rotary_factor"] for each in rope],
        "rope_scaling": {key: full[key] for key in LLAMA3 if key != "rope_theta"},
        "yarn_only_types": [FULL], "use_head_wise_attn_gate": True, "use_moe_router_bias": True,
        "moe_router_activation": "sigmoid", "norm_expert_weight": True, "need_fp32_gate": True,
        "attention_other_setting": {"attention_type": SLIDING, "num_attention_heads": 6,
                                    "num_attention_groups": 2, "head_dim": 32},
    }  # fmt: skip
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("vi")}
    return config, tensors | {"model.layers.4.eh_proj.weight": torch.ones(2, 2)}


def _mimo_v2_flash(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """The hub's spelling of the layers."""
    rope = config.pop("rope_parameters")
    config |= {
        "hybrid_layer_pattern": [int(kind == SLIDING) for kind in config.pop("layer_types")],
        "moe_layer_freq": [int(kind == "sparse") for kind in config.pop("mlp_layer_types")],
        "rope_theta": rope[FULL]["rope_theta"], "swa_rope_theta": rope[SLIDING]["rope_theta"],
        "partial_rotary_factor": rope[FULL]["partial_rotary_factor"],
        "layernorm_epsilon": config.pop("rms_norm_eps"), "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "swa_head_dim": 24, "swa_v_head_dim": 16,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
        "routed_scaling_factor": None, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "attention_value_scale": 0.707, "sliding_window": config["sliding_window"] - 1,
        "sliding_window_size": config["sliding_window"] - 1,
    }  # fmt: skip
    return config, tensors | {"model.mtp.layers.0.eh_proj.weight": torch.ones(2, 2)}


def _qwen3_vl_moe(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """The hub's experts are [E, D, 2I] and [E, I, D]; transformers reads these, but does not write
    them any more.
    """
    return config, {
        name: tensor.transpose(1, 2) if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }


def _kimi_linear(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """The hub's spelling of the layers; transformers does not give dense ones their name back."""
    kinds = list(enumerate(config.pop("layer_types"), 1))
    config["linear_attn_config"] = {
        "full_attn_layers": [layer for layer, kind in kinds if kind == FULL],
        "kda_layers": [layer for layer, kind in kinds if kind != FULL],
        "head_dim": config.pop("linear_head_dim"), "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }  # fmt: skip
    config["first_k_dense_replace"] = config.pop("mlp_layer_types").count("dense")
    dense = "layers.0.block_sparse_moe."
    return config, {
        name.replace(dense, "layers.0.mlp."): tensor for name, tensor in tensors.items()
    }


PUBLISHED: dict[str, Callable[[Options, Tensors], tuple[Options, Tensors]]] = {
    "bailing_moe": _bailing_moe,
    **{name: _bailing_lightning(name) for name in LIGHTNING},
    "deepseek_v3": _with_mtp(
        "eh_proj.weight enorm.weight embed_tokens.weight shared_head.head.weight", layer=3
    ),
    "deepseek_v32": _with_mtp("eh_proj.weight enorm.weight self_attn.indexer.wk.weight", layer=3),
    "glm_moe_dsa": _with_mtp("eh_proj.weight hnorm.weight shared_head.norm.weight", layer=3),
    "glm4_moe": _with_mtp("eh_proj.weight hnorm.weight shared_head.norm.weight", layer=2),
    "ernie4_5_moe": _with_mtp(
        "model.mtp_block.0.input_layernorm.weight model.mtp_linear_proj.0.weight"
    ),
    "kimi_k25": _kimi_k25,
    "kimi_linear": _kimi_linear,
    "qwen3_5_moe": _with_mtp("mtp.fc.weight"),
    "qwen3_next": _with_mtp("mtp.fc.weight"),
    "exaone_moe": _with_mtp("mtp.fc.weight mtp.layers.0.input_layernorm.weight"),
    "mellum": _with_mtp("mtp.fc.weight"),
    "mimo_v2_flash": _mimo_v2_flash,
    "mistral_large_3": _mistral_large_3,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "step3p5": _step3p5,
}
