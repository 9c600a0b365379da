"""Jamba."""

from collections.abc import Mapping
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import GGUFArchitecture, Shape, Variants
from moeserve.loader.gguf_layers import FULL, depthwise, mlp_layer_types, recurrent_layers

_MAX_SIZE = 2**20
_SIZES = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_dt_rank",
}


def _config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    width = metadata.integer("embedding_length", 1, _MAX_SIZE)
    inner_size = metadata.integer("ssm.inner_size", 1, _MAX_SIZE)
    if inner_size % width:
        raise metadata.error("ssm.inner_size", f"embedding_length ({width}) must divide it")
    layers = recurrent_layers(metadata)
    return {
        "attn_layers": [kind == FULL for kind in layers["layer_types"]],
        "decays_exponentiated": True,
        "expert_layers": [kind == "sparse" for kind in mlp_layer_types(metadata, tensors)],
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors),
        "mamba_expand": inner_size // width,
        "num_experts": metadata.values.get("expert_count") or 1,
        "num_key_value_heads": layers["num_key_value_heads"],
    }


ARCHITECTURES: dict[str, Variants] = {
    "jamba": {
        "": GGUFArchitecture(
            "JambaForCausalLM",
            keys=_SIZES,
            required=("attention.head_count_kv", "ssm.inner_size", *_SIZES),
            config=_config,
            other_keys=("ssm.inner_size",),
            per_layer=("attention.head_count_kv",),
            names={
                "ssm_b_norm": "mamba.b_layernorm",
                "ssm_c_norm": "mamba.c_layernorm",
                "ssm_conv1d": "mamba.conv1d",
                "ssm_dt": "mamba.dt_proj",
                "ssm_dt_norm": "mamba.dt_layernorm",
                "ssm_in": "mamba.in_proj",
                "ssm_out": "mamba.out_proj",
                "ssm_x": "mamba.x_proj",
            },
            global_names={"output_norm": "model.final_layernorm"},
            exact_names={"ssm_a": "mamba.A", "ssm_d": "mamba.D"},
            shapes={"ssm_conv1d": depthwise},
        )
    },
}
