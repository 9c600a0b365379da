"""Rewrite small checkpoints as their authors publish them, where transformers differs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests import lara_mini, lightning
from tests.families import ARCHITECTURES, FULL, LIGHTNING, LLAMA3, SLIDING, SMALL, Options

# Tensors of MiniMax-01 that transformers writes and its authors do not
_DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
Tensors = dict[str, Tensor]
Rewrite = Callable[[Options, Tensors], tuple[Options, Tensors]]


def _with_mtp(names: str, *, layer: int | None = None) -> Rewrite:
    """Return a function that adds tensors of an MTP layer, which a loader must ignore."""
    prefix = "" if layer is None else f"model.layers.{layer}."
    return lambda config, tensors: (
        config,
        tensors | {prefix + name: torch.ones(2, 2) for name in names.split()},
    )


def _bailing_moe(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """Ling and Ring 2.0, which transformers lacks: they compute what GLM-4.5 does."""
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


def _bailing_lightning(name: str) -> Rewrite:
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


def _bailing_moe_v3(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """Ling 3.0: the hub's keys, of which transformers renames some."""
    names = {
        "linear_head_dim": "head_dim", "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
    }  # fmt: skip
    derived = ("head_dim", "layer_types", "mlp_layer_types", "linear_num_heads",
               "linear_conv_kernel_dim")  # fmt: skip
    config = {names.get(k, k): value for k, value in config.items() if k not in derived} | {
        "architectures": ["BailingMoeV3ForCausalLM"], "no_kda_lora": True, "use_qk_norm": True,
        "gated_attention_proj_granularity_type": "head_wise", "score_function": "sigmoid",
        "moe_shared_expert_intermediate_size": 48, "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32", "use_bias": False, "use_qkv_bias": False,
        "partial_rotary_factor": 0.5,
    }  # fmt: skip
    return config, tensors | {"model.layers.2.eh_proj.weight": torch.ones(2, 2)}


def _hy_v4(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """Hy4 as transformers computes it, with the key that makes it rotate half-split pairs."""
    return config | {"rope_interleave": False}, tensors


def _interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Reorder the last 8 rows of each head from the half layout to adjacent pairs."""
    rest = tensor.shape[1:]
    by_head = tensor.view(heads, -1, *rest)
    rotated = by_head[:, -8:].reshape(heads, 2, 4, *rest).transpose(1, 2).flatten(1, 2)
    return torch.cat((by_head[:, :-8], rotated), 1).flatten(0, 1)


def _hy_v4_vl(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """Hy4 as the text part of a multimodal checkpoint, with the hub's names of tensors.

    transformers 5.23 lacks this class, which rotates adjacent pairs.
    """
    names = {
        "hc_pre.hc_attn_layer.": "hc_attn_layer.hc_pre.", "hc_pre.hc_head.": "hc_head.",
        "hc_pre.hc_mlp_layer.": "hc_mlp_layer.hc_pre.", "mlp.linear_gate": "mlp.gate_proj",
        "shared_experts.linear_gate": "shared_experts.gate_proj",
    }  # fmt: skip
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        heads = {"q_b_proj": 4, "kv_a_proj": 1, "wq_b": 16, "wk": 1, "k_norm": 1}
        rotated = next((count for part, count in heads.items() if f".{part}" in name), 0)
        renamed[name] = _interleaved(tensor, rotated) if rotated else tensor
    others = ("model.mtp_layers.0.eh_proj.weight", "vit.embeddings.patch_embedding.bias")
    return {
        "architectures": ["HYV4VLForConditionalGeneration"], "model_type": "hy_v4_vl",
        "dtype": config["dtype"], "text_config": config | {"model_type": "hy_v4_vl_text"},
        "vision_config": {},
    }, renamed | {name: torch.ones(2, 2) for name in others}  # fmt: skip


def _glm5_next_text(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """GLM-5.3's text model alone."""
    prefix = "model.language_model."
    text = {
        name.replace(prefix, "model."): tensor for name, tensor in tensors.items()
        if name.startswith((prefix, "lm_head."))
    }  # fmt: skip
    own = {"architectures": ["Glm5NextForCausalLM"], "dtype": config["dtype"]}
    return config["text_config"] | own, text


def _kimi_k25(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """Kimi-K2 as the text part of a multimodal checkpoint."""
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
        "dtype": config["dtype"], "text_config": config | {"model_type": "kimi_k2"},
        "vision_config": {},
    }  # fmt: skip
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    return config, tensors | {"vision_tower.patch_embed.proj.weight": torch.ones(2, 2)}


def _deepseek_v4(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """DeepSeek-V4's older keys, and names without a prefix. The rates of entries stay, because the
    published ones are too large for a short prompt.
    """
    ratios = {
        "sliding_attention": 0,
        "compressed_sparse_attention": 4,
        "heavily_compressed_attention": 128,
    }
    modern = (
        "layer_types",
        "mlp_layer_types",
        "partial_rotary_factor",
        "rope_parameters",
        "intermediate_size",
    )
    scaling = config["rope_parameters"]["compress"]
    num_hashed = config["mlp_layer_types"].count("hash_moe")
    legacy = {
        "compress_ratios": [*(ratios[kind] for kind in config["layer_types"]), 0],
        "num_hash_layers": num_hashed,
        "num_nextn_predict_layers": 1,
        "rope_scaling": {
            "type": "yarn", "factor": scaling["factor"], "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": scaling["original_max_position_embeddings"],
        },
        "topk_method": "noaux_tc",
    }  # fmt: skip
    config = {key: value for key, value in config.items() if key not in modern} | legacy
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.").replace("embed_tokens", "embed")
        name = name.replace("hc_head.hc_", "hc_head_").replace(".attn.norm.", ".attn.kv_norm.")
        renamed[name] = tensor
    return config, renamed | {"mtp.0.e_proj.weight": torch.ones(2, 2)}


def _lara_mini(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """Lara Mini, which tests/lara_mini.py makes of Flint."""
    kinds = [
        "linear_attention" if i in lara_mini.DELTA_LAYERS else kind
        for i, kind in enumerate(config["layer_types"])
    ]
    other = ("intermediate_size", "decoder_sparse_step", "mlp_only_layers")
    config = {key: value for key, value in config.items() if key not in other} | {
        "architectures": ["LaraMiniForCausalLM"], "model_type": "lara_mini", "layer_types": kinds,
        **lara_mini.SIZES,
    }  # fmt: skip
    prefixes = tuple(f"model.layers.{i}.self_attn." for i in lara_mini.DELTA_LAYERS)
    return config, {
        name.replace("self_attn", "linear_attn") if name.startswith(prefixes) else name: tensor
        for name, tensor in tensors.items()
        if not name.endswith("softmax_offset")
    }


_SARVAM = {  # keys of Sarvam's configurations
    "num_experts": 8, "num_shared_experts": 1, "score_function": "sigmoid", "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
}  # fmt: skip


def _sarvam_moe(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """Sarvam-30B: Ling's keys and names of tensors."""
    _, tensors = _bailing_moe(config, tensors)
    theta = config["rope_parameters"]["rope_theta"]
    other = ("n_routed_experts", "n_shared_experts", "attention_bias", "rope_parameters")
    return {key: value for key, value in config.items() if key not in other} | _SARVAM | {
        "architectures": ["SarvamMoEForCausalLM"], "model_type": "sarvam_moe",
        "use_qkv_bias": False, "use_bias": False, "rope_theta": theta, "rope_scaling": None,
    }, tensors  # fmt: skip


def _sarvam_mla(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """Sarvam-105B: DeepSeek-V3's names of tensors, and keys of its own."""
    rope = config["rope_parameters"]
    scaling = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
    other = ("n_routed_experts", "n_shared_experts", "rope_parameters")
    return {key: value for key, value in config.items() if key not in other} | _SARVAM | {
        "architectures": ["SarvamMLAForCausalLM"], "model_type": "sarvam_mla",
        "head_dim": config["kv_lora_rank"] + config["qk_rope_head_dim"], "q_head_dim": 24,
        "rope_scaling": {"type": "deepseek_yarn", **scaling}, "rope_theta": rope["rope_theta"],
        "num_nextn_predict_layers": 0,
    }, tensors  # fmt: skip


def _mistral_large_3(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """Mistral's own format: params.json and its names of tensors."""
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
        "rope_scaling": {key: full[key] for key in LLAMA3 if key in full and key != "rope_theta"},
        "yarn_only_types": [FULL], "use_head_wise_attn_gate": True, "use_moe_router_bias": True,
        "moe_router_activation": "sigmoid", "norm_expert_weight": True, "need_fp32_gate": True,
        "attention_other_setting": {"attention_type": SLIDING, "num_attention_heads": 6,
                                    "num_attention_groups": 2, "head_dim": 32},
    }  # fmt: skip
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("vi")}
    return config, tensors | {"model.layers.4.eh_proj.weight": torch.ones(2, 2)}


def _mimo_v2_flash(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """The hub's keys for kinds of layers, RoPE and sliding windows."""
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


def _granite_moe_hybrid(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """The releases' names of kinds of layers."""
    names = {"linear_attention": "mamba", FULL: "attention"}
    return config | {"layer_types": [names[kind] for kind in config["layer_types"]]}, tensors


def _nemotron_h_dense(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """The releases' pattern of layers, without keys of experts."""
    letters = {"linear_attention": "M", FULL: "*", "mlp": "-"}
    kinds = config.pop("layers_block_type")
    config = {key: value for key, value in config.items() if "moe" not in key and "exp" not in key}
    return config | {
        "expand": 2, "hybrid_override_pattern": "".join(letters[kind] for kind in kinds),
        "num_hidden_layers": len(kinds),
    }, tensors  # fmt: skip


def _qwen3_vl_moe(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """The hub's experts [E, D, 2I] and [E, I, D], which transformers reads but no longer writes."""
    return config, {
        name: tensor.transpose(1, 2) if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }


def _inkling(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """The text part of a multimodal checkpoint, with interleaved gates, and the hub's keys."""
    names = {
        "lm_head": "model.llm.unembed", "model.embed_tokens.embed_norm": "model.llm.embed_norm",
        "model.embed_tokens": "model.llm.embed", "model.norm": "model.llm.norm",
        "model.layers": "model.llm.layers", ".input_layernorm": ".attn_norm",
        "post_attention_layernorm": "mlp_norm", "self_attn.": "attn.", "q_proj": "wq_du",
        "k_proj": "wk_dv", "v_proj": "wv_dv", "r_proj": "wr_du", "o_proj": "wo_ud",
        "sconv.conv1d": "sconv", "experts.gate_up_proj": "experts.w13_weight",
        "shared_experts.down_proj": "shared_experts.shared_w2_weight",
        "experts.down_proj": "experts.w2_weight", "mlp.down_proj": "mlp.w2_md",
        "mlp.gate.e_score_correction_bias": "mlp.gate.bias",
    }  # fmt: skip
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        if ".up_proj" in name:
            continue
        if ".gate_proj" in name:
            both = torch.stack((tensor, tensors[name.replace("gate_proj", "up_proj")]), -2)
            tensor = both.flatten(-3, -2)
            name = name.replace("shared_experts.gate_proj", "shared_experts.shared_w13_weight")
            name = name.replace("mlp.gate_proj", "mlp.w13_dn")
        elif name.endswith("experts.gate_up_proj"):
            tensor = torch.stack(tensor.chunk(2, 1), 2).flatten(1, 2)
        elif name == "lm_head.weight":
            tensor = tensor[: config["unpadded_vocab_size"]]
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    text = dict(config)
    text |= {
        "dense_intermediate_size": text["intermediate_size"],
        "intermediate_size": text.pop("moe_intermediate_size"),
        "local_layer_ids": [i for i, kind in enumerate(text.pop("layer_types"))
                            if kind == "hybrid_sliding"],
        "dense_mlp_idx": text.pop("mlp_layer_types").count("dense"),
        "sconv_kernel_size": text.pop("conv_kernel_size"),
        "model_max_length": text.pop("max_position_embeddings"), "use_sconv": True,
        "shared_expert_sink": True, "use_embed_norm": True, "use_gate_bias": True,
    }  # fmt: skip
    config = {
        "architectures": ["InklingForConditionalGeneration"], "model_type": "inkling_mm_model",
        "dtype": config["dtype"], "text_config": text, "vision_config": {}, "audio_config": {},
        "mtp_config": {"num_nextn_predict_layers": 1},
    }  # fmt: skip
    others = ("model.mtp.layers.0.mlp_norm.weight", "model.visual.layers.linear_0.weight")
    return config, renamed | {name: torch.ones(2, 2) for name in others}


def _kimi_linear(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """The hub's keys for kinds of layers, and its names of dense MLPs."""
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


def _qwen4_exp(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
    """Qwen3.8-Flash-Next, whose layer types have another name in transformers."""
    types = [FULL if kind == "indexed_attention" else kind for kind in config["layer_types"]]
    return config | {"layer_types": types}, tensors


# Family -> function that rewrites (config, tensors) as transformers writes them into the published
# form.
def _minimax_01(name: str) -> Rewrite:
    """MiniMax-01 and M1: the authors' keys."""

    def published(config: Options, tensors: Tensors) -> tuple[Options, Tensors]:
        factors = {
            f"layernorm_{theirs}_{factor}": config.pop(f"{ours}_{factor}_factor")
            for theirs, ours in (
                ("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp")
            )
            for factor in ("alpha", "beta")
        }  # fmt: skip
        rope = config.pop("rope_parameters")
        kinds = config.pop("layer_types")
        tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith(_DECAYS)}
        return config | factors | {
            "architectures": [ARCHITECTURES[name]], "model_type": name, "postnorm": True,
            "attn_type_list": [int(kind == FULL) for kind in kinds], "rotary_dim": 32,
            "rope_theta": rope["rope_theta"], "shared_intermediate_size": 0,
            "shared_moe_mode": "sigmoid",
        }, tensors  # fmt: skip

    return published


PUBLISHED: dict[str, Rewrite] = {
    "bailing_moe": _bailing_moe,
    **{name: _bailing_lightning(name) for name in LIGHTNING},
    "bailing_moe_v3": _bailing_moe_v3,
    "deepseek_v4": _deepseek_v4,
    "deepseek_v3": _with_mtp(
        "eh_proj.weight enorm.weight embed_tokens.weight shared_head.head.weight", layer=3
    ),
    "deepseek_v32": _with_mtp("eh_proj.weight enorm.weight self_attn.indexer.wk.weight", layer=3),
    "glm_moe_dsa": _with_mtp("eh_proj.weight hnorm.weight shared_head.norm.weight", layer=3),
    "glm4_moe": _with_mtp("eh_proj.weight hnorm.weight shared_head.norm.weight", layer=2),
    "ernie4_5_moe": _with_mtp(
        "model.mtp_block.0.input_layernorm.weight model.mtp_linear_proj.0.weight"
    ),
    "granite_moe_hybrid": _granite_moe_hybrid,
    "glm5_next_text": _glm5_next_text,
    "hy_v4": _hy_v4,
    "hy_v4_vl": _hy_v4_vl,
    "kimi_k25": _kimi_k25,
    "inkling": _inkling,
    "kimi_linear": _kimi_linear,
    "nemotron_h_dense": _nemotron_h_dense,
    "qwen3_5_moe": _with_mtp("mtp.fc.weight"),
    "qwen3_next": _with_mtp("mtp.fc.weight"),
    "qwen4_exp": _with_mtp("mtp.fc_hidden.weight"),
    "qwen4_exp_text": _qwen4_exp,
    "exaone_moe": _with_mtp("mtp.fc.weight mtp.layers.0.input_layernorm.weight"),
    "lara_mini": _lara_mini,
    "mellum": _with_mtp("mtp.fc.weight"),
    "mimo_v2_flash": _mimo_v2_flash,
    "minimax_m1": _minimax_01("minimax_m1"),
    "minimax_text_01": _minimax_01("minimax_text_01"),
    "mistral_large_3": _mistral_large_3,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "sarvam_mla": _sarvam_mla,
    "sarvam_moe": _sarvam_moe,
    "step3p5": _step3p5,
}
