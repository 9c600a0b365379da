"""Nemotron-H and Nemotron 3. A layer is a mixer or a feed-forward block."""

from collections.abc import Mapping
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import (
    SHARED_SIZE,
    SIGMOID,
    GGUFArchitecture,
    Shape,
    Variants,
)
from moeserve.loader.gguf_architectures import mamba2
from moeserve.loader.gguf_layers import FULL, RECURRENT, layer_values, recurrent_layers

_MAX_SIZE = 2**20
_NORM = "attention.layer_norm_epsilon"
_RMS_NORM = "attention.layer_norm_rms_epsilon"
_SIZE = "feed_forward_length"


def _config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    heads = metadata.integer(mamba2.HEADS, 1, _MAX_SIZE)
    inner_size = metadata.integer("ssm.inner_size", 1, _MAX_SIZE)
    if inner_size % heads:
        raise metadata.error("ssm.inner_size", f"{mamba2.HEADS} ({heads}) must divide it")
    layers = recurrent_layers(metadata)
    sizes = layer_values(metadata, _SIZE)
    if any(type(size) is not int or size < 0 for size in sizes) or len({*sizes} - {0}) > 1:
        raise metadata.error(_SIZE, "it must be 0 or the same integer for each layer")
    block = "moe" if metadata.values.get("expert_count") else "mlp"
    kinds = []
    for kind, size in zip(layers["layer_types"], sizes, strict=True):
        if kind == FULL and size:
            raise metadata.error(_SIZE, "it must be 0 for layers with KV heads")
        kinds.append(block if kind == RECURRENT and size else kind)
    return {
        "decays_exponentiated": True,
        "intermediate_size": max(sizes),
        # As in llama.cpp, the other key's value is that of an MTP layer if the file has both.
        "layer_norm_epsilon": metadata.values.get(_RMS_NORM, metadata.raw(_NORM)),
        "layer_types": None,
        "layers_block_type": kinds,
        "mamba_head_dim": inner_size // heads,
        "num_key_value_heads": layers["num_key_value_heads"],
    }


_NEMOTRON_H = GGUFArchitecture(
    "NemotronHForCausalLM",
    keys={
        _NORM: "layer_norm_epsilon",
        "moe_latent_size": "moe_latent_size",
        SHARED_SIZE: "moe_shared_expert_intermediate_size",
        "ssm.conv_kernel": "conv_kernel",
        "ssm.group_count": "n_groups",
        "ssm.state_size": "ssm_state_size",
        mamba2.HEADS: "mamba_num_heads",
    },
    required=("attention.head_count_kv", _SIZE, mamba2.HEADS, *mamba2.SIZES),
    gating=SIGMOID,
    interleaved_rope=True,
    norm_key=_NORM,
    config=_config,
    other_keys=("rope.dimension_count", "ssm.inner_size"),  # there is no rotary embedding
    per_layer=("attention.head_count_kv", _SIZE),
    model="backbone.",
    names=mamba2.NAMES | {"attn_norm": "norm"},
    global_names={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
    mtp_layer="mtp.layers.{}.",  # not supported
    mtp_names={
        f"nextn.{name}": f"mtp.{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")
    },
    exact_names=mamba2.EXACT_NAMES,
    shapes=mamba2.SHAPES,
)
ARCHITECTURES: dict[str, Variants] = {
    "nemotron_h": {"": _NEMOTRON_H},
    "nemotron_h_moe": {"": _NEMOTRON_H},
}
