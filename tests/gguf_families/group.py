"""What the modules of groups have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Config = dict[str, Any]  # config.json; of multimodal models, with the text model's keys
Tensors = dict[str, Tensor]
# Name within a layer -> GGUF name
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
GLOBAL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_KEYS = {  # the first key that config.json has
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("prefix_dense_intermediate_size", "intermediate_size"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
}
_GATING = {"softmax": 1, "sigmoid": 2}


@dataclass(frozen=True)
class Group:
    """Families, by their names in tests/families.py."""

    architectures: Mapping[str, str]  # family -> architecture in GGUF
    # (family, config.json) -> metadata, by keys without the architecture
    metadata: Callable[[str, Config], dict[str, Any]]
    # (family, config.json, tensors of the safetensors file) -> tensors by GGUF names
    tensors: Callable[[str, Config, Tensors], Tensors]
    # family -> config overrides: values that llama.cpp assumes, because it has no key for them
    options: Mapping[str, Config] = field(default_factory=dict)


def text_metadata(config: Config, num_mtp_layers: int = 0) -> dict[str, Any]:
    """Return the keys that the converters of all text models write."""
    values: dict[str, Any] = {"block_count": config["num_hidden_layers"] + num_mtp_layers}
    for key, names in _KEYS.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if value is not None:
            values[key] = value
    rope = {"rope_theta": config.get("rope_theta"), **rope_of(config)}
    if rope.get("rope_type") == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
        optional = {
            "attention_factor": "yarn_attn_factor",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        values |= {
            f"rope.scaling.{key}": float(rope[name])
            for name, key in optional.items()
            if rope.get(name) is not None
        }
    elif rope.get("rope_type") == "longrope":
        values["rope.scaling.type"] = "longrope"
    if rope["rope_theta"] is not None:
        values["rope.freq_base"] = float(rope["rope_theta"])
    sliding = (config.get("rope_parameters") or {}).get("sliding_attention", {})
    if sliding:
        values["rope.freq_base_swa"] = float(sliding["rope_theta"])
    names = ("score_function", "scoring_func", "score_func", "moe_router_activation")
    score = next((config[name] for name in names if config.get(name)), None)
    if score or (score := config.get("expert_selection_fn")):
        values["expert_gating_func"] = _GATING[score]
    return values


def rope_of(config: Config) -> dict[str, Any]:
    """Return the rotary embedding, of layers with full attention if they differ."""
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return dict(rope.get("full_attention", rope))


def renamed(
    tensors: Tensors, layer_names: Mapping[str, str], global_names: Mapping[str, str] = GLOBAL_NAMES
) -> Tensors:
    """Return tensors by GGUF names.

    layer_names: name within a layer -> GGUF name, both without ".weight" and the like. Names that
    are longer by an ending need no entry of their own.
    """
    found = {}
    for name, tensor in tensors.items():
        new_name = _new_name(name, layer_names, global_names)
        assert new_name is not None, name
        assert new_name not in found, name
        found[new_name] = tensor
    return found


def _new_name(
    name: str, layer_names: Mapping[str, str], global_names: Mapping[str, str]
) -> str | None:
    base, dot, ending = name.rpartition(".")
    if name.startswith("model.layers."):
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        if rest in layer_names:
            return f"blk.{layer}.{layer_names[rest]}"
        base, dot, ending = rest.rpartition(".")
        return f"blk.{layer}.{layer_names[base]}{dot}{ending}" if base in layer_names else None
    return f"{global_names[base]}{dot}{ending}" if base in global_names else None


def with_stacked_experts(tensors: Tensors) -> Tensors:
    """Return the tensors with those of experts stacked, as "experts.gate_proj.weight".

    `experts.3.gate_proj.weight` is one expert's; `experts.gate_up_proj` has gates first.
    """
    found: Tensors = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        begin, middle, rest = name.partition(".experts.")
        number, _, product = rest.partition(".")
        if number.isdigit():
            experts.setdefault(f"{begin}{middle}{product}", {})[int(number)] = tensor
        elif middle and rest == "gate_up_proj":
            gate, up = tensor.chunk(2, 1)
            found[f"{begin}{middle}gate_proj.weight"] = gate
            found[f"{begin}{middle}up_proj.weight"] = up
        elif middle and rest == "down_proj":
            found[f"{name}.weight"] = tensor
        else:
            found[name] = tensor
    for name, parts in experts.items():
        found[name] = torch.stack([parts[i] for i in range(len(parts))])
    return found


def rope_freqs(rope: dict[str, Any], size: int, computed_in: torch.dtype = torch.float32) -> Tensor:
    """Return Llama 3.1's factor for each wavelength of `size` rotated elements, in fp32."""
    freqs = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    freqs = freqs.to(computed_in)
    length = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for freq in freqs:
        wave = 2 * torch.pi / freq
        smooth = (length / wave - low) / (high - low)
        if wave < length / high:
            factors.append(1.0)
        elif wave > length / low:
            factors.append(float(rope["factor"]))
        else:
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors, dtype=torch.float32)
