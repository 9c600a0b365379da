"""Families whose files have few keys and tensors of their own."""

from __future__ import annotations

from typing import Any

import gguf
import torch
from torch import Tensor

from tests.gguf_families.group import Config, Group, rope_freqs

_KEYS = {
    "num_hidden_layers": "block_count", "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "head_dim": "attention.key_length",
    "num_experts": "expert_count", "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale", "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count", "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}  # fmt: skip


def _metadata(family: str, config: dict[str, Any]) -> dict[str, Any]:
    arch = _FAMILIES[family]
    values = {key: config[name] for name, key in _KEYS.items() if config.get(name) is not None}
    if arch in ("qwen3moe", "qwen2moe", "olmoe"):
        values.pop("expert_weights_norm", None)
    if arch == "qwen3vlmoe":
        sections = config["rope_parameters"]["mrope_section"]
        values |= {"n_deepstack_layers": 1, "rope.dimension_sections": [*sections, 0]}
    rope = config.get("rope_parameters") or {}
    values["rope.freq_base"] = float(rope.get("rope_theta", config.get("rope_theta", 1e4)))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if "attention.key_length" in values:
        values["attention.value_length"] = head
    if arch == "gpt-oss":
        values |= {"attention.sliding_window": config["sliding_window"]}
    if arch in ("gpt-oss", "minimax-m2"):
        values["expert_feed_forward_length"] = config["intermediate_size"]
    if arch in ("llama", "granitemoe"):
        values |= {"rope.dimension_count": head, "vocab_size": config["vocab_size"]}
    if arch == "minimax-m2":
        values["rope.dimension_count"] = config["rotary_dim"]
    if rope.get("rope_type") == "yarn":
        values |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }  # fmt: skip
    return values


def _permuted(tensor: Tensor, heads: int) -> Tensor:
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _tensors(  # noqa: C901
    family: str, config: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    arch = _FAMILIES[family]
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    experts: dict[str, dict[int, Tensor]] = {}
    found: list[tuple[str, Tensor]] = []

    def put(theirs: str, tensor: Tensor) -> None:
        new = names.get_name(
            theirs.replace("e_score_correction_bias", "e_score_correction.bias"),
            try_suffixes=(".weight", ".bias"),
        )
        assert new is not None, theirs
        found.append((new, tensor))

    for theirs, tensor in tensors.items():
        if theirs.startswith("model.visual."):
            continue
        theirs = theirs.replace("model.language_model.", "model.")
        if arch == "qwen3vlmoe" and "experts." in theirs:
            tensor = tensor.mT
        head, _, last = theirs.rpartition(".")
        if "q_proj" in theirs and arch in ("llama", "granitemoe"):
            put(theirs, _permuted(tensor, config["num_attention_heads"]))
        elif "k_proj" in theirs and arch in ("llama", "granitemoe"):
            put(theirs, _permuted(tensor, config["num_key_value_heads"]))
        elif ".experts." in theirs and (parts := theirs.split(".experts."))[1][0].isdigit():
            number, _, rest = parts[1].partition(".")
            experts.setdefault(f"{parts[0]}.experts.{rest}", {})[int(number)] = tensor
        elif theirs.endswith("experts.gate_up_proj"):
            gate, up = (
                (tensor.mT[:, ::2], tensor.mT[:, 1::2]) if arch == "gpt-oss" else tensor.chunk(2, 1)
            )
            put(f"{head}.gate_proj.weight", gate)
            put(f"{head}.up_proj.weight", up)
        elif theirs.endswith("experts.gate_up_proj_bias"):
            put(f"{head}.gate_proj.bias", tensor[:, ::2])
            put(f"{head}.up_proj.bias", tensor[:, 1::2])
        elif theirs.endswith("experts.down_proj_bias"):
            put(f"{head}.down_proj.bias", tensor)
        elif theirs.endswith("experts.down_proj"):
            put(f"{theirs}.weight", tensor.mT if arch == "gpt-oss" else tensor)
        elif theirs.endswith("input_linear.weight"):
            block = theirs.split(".")[2]
            which = "shexp" if "shared_mlp" in theirs else "exps"
            for part, half in zip(("gate", "up"), tensor.chunk(2, -2), strict=True):
                found.append((f"blk.{block}.ffn_{part}_{which}.weight", half))
        else:
            put(theirs + ".weight" if last == "sinks" else theirs, tensor)
    for theirs, each in experts.items():
        put(theirs, torch.stack([each[i] for i in range(len(each))]))
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        found.append(("rope_freqs.weight", rope_freqs(rope, size)))
    return dict(found)


_FAMILIES = {  # family of tests/families.py -> architecture in GGUF
    "qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "mixtral": "llama", "llama": "llama",
    "qwen2": "qwen2", "qwen3": "qwen3", "olmoe": "olmoe", "granite_moe": "granitemoe",
    "granite_moe_shared": "granitemoe", "gpt_oss": "gpt-oss", "dots1": "dots1",
    "minimax_m2": "minimax-m2", "qwen3_vl_moe": "qwen3vlmoe",
}  # fmt: skip
# config overrides: values that llama.cpp assumes, because it has no key for them
_OPTIONS: dict[str, Config] = {
    "gpt_oss": {"swiglu_limit": 7.0},
    "dots1": {"sliding_window": None},
    "olmoe": {"clip_qkv": None},
}  # fmt: skip
GROUP = Group(_FAMILIES, _metadata, _tensors, _OPTIONS)
