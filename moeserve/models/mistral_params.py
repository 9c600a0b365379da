"""Mistral's own format of a checkpoint (Mistral-Large-3): params.json instead of config.json, in keys of its own.

Source: github.com/mistralai/mistral-inference.
"""

from pathlib import Path
from typing import Any

from moeserve.loader.files import Fields

_LENGTH = "original_max_position_embeddings"
_KEYS = {
    "dim": "hidden_size", "hidden_dim": "intermediate_size", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "n_layers": "num_hidden_layers", "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}  # fmt: skip
_MOE = {
    "expert_hidden_dim": "moe_intermediate_size", "first_k_dense_replace": "first_k_dense_replace",
    "num_expert_groups": "n_group", "num_expert_groups_per_tok": "topk_group", "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
    "routed_scale": "routed_scaling_factor",
}  # fmt: skip
_YARN = {"alpha": "beta_slow", "beta": "beta_fast", "factor": "factor", _LENGTH: _LENGTH}


def as_config(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Returns what params.json says in the keys of config.json. Raises CheckpointError for a model of another kind."""
    params = Fields(path, values, {"moe": None, "yarn": None, "llama_4_scaling": None, "rope_theta": 10_000.0})
    moe, yarn, scaling = (
        Fields(path, params.section(key), {}, f"{key}.") for key in ("moe", "yarn", "llama_4_scaling")
    )
    moe.only(route_every_n=1)
    yarn.only(apply_scale=False)
    for key in ("qk_nope_head_dim", "q_lora_rank"):
        params.raw(key)  # nothing else is published in this format alone
    params.unsupported("quantization", "Mistral's own fp8 is not read; use the release in bfloat16")
    scaling.only(original_max_position_embeddings=yarn.raw(_LENGTH))
    config = {
        _KEYS.get(key, key): value for key, value in values.items() if key not in ("moe", "yarn", "llama_4_scaling")
    }
    config |= {name: moe.raw(key) for key, name in _MOE.items()}
    config["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": params.raw("rope_theta"),
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": scaling.values.get("beta"),
        **{name: yarn.raw(key) for key, name in _YARN.items()},
    }
    return config | {"architectures": ["MistralLarge3ForCausalLM"], "eos_token_id": 2}
