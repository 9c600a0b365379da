"""Granite 3 MoE, with and without a shared expert, and Granite 4 with Mamba-2 layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import SHARED_SIZE, GGUFArchitecture, Shape, Variants
from moeserve.loader.gguf_architectures import mamba2
from moeserve.loader.gguf_layers import recurrent_layers

_MAX_SIZE = 2**20

MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}
_GRANITE_MOE = GGUFArchitecture(
    "GraniteMoeForCausalLM",
    keys=MULTIPLIERS,
    defaults={
        "attention_multiplier": None,  # 1 / sqrt(head_dim)
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
    },
    required=("logit_scale",),
    interleaved_rope=True,
)


def _hybrid(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the keys of Granite 4. Without experts, the shared expert is the dense MLP."""
    width = metadata.integer("embedding_length", 1, _MAX_SIZE)
    inner_size = metadata.integer("ssm.inner_size", 1, _MAX_SIZE)
    if inner_size % width:
        raise metadata.error("ssm.inner_size", f"embedding_length ({width}) must divide it")
    num_experts = metadata.values.get("expert_count", 0)
    dense = {} if num_experts else {"shared_intermediate_size": metadata.raw("feed_forward_length")}
    has_rope = metadata.values.get("rope.scaling.finetuned", True)
    return {
        **dense,
        **recurrent_layers(metadata),
        "decays_exponentiated": True,
        "mamba_expand": inner_size // width,
        "num_local_experts": num_experts,
        "position_embedding_type": "rope" if has_rope else "nope",
    }


_GRANITE_4 = replace(
    _GRANITE_MOE,
    architecture="GraniteMoeHybridForCausalLM",
    keys=MULTIPLIERS
    | {
        SHARED_SIZE: "shared_intermediate_size",
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.group_count": "mamba_n_groups",
        "ssm.state_size": "mamba_d_state",
        mamba2.HEADS: "mamba_n_heads",
    },
    required=("logit_scale", "attention.head_count_kv", mamba2.HEADS, *mamba2.SIZES),
    shared="shared_mlp",
    config=_hybrid,
    other_keys=("ssm.inner_size",),
    per_layer=("attention.head_count_kv",),
    names=mamba2.NAMES,
    exact_names=mamba2.EXACT_NAMES,
    shapes=mamba2.SHAPES,
)
_DENSE_MLP = {f"ffn_{x}": f"shared_mlp.{x}_proj" for x in ("gate", "up", "down")}
ARCHITECTURES: dict[str, Variants] = {
    "granitehybrid": {
        "expert_count": replace(_GRANITE_4, required=(*_GRANITE_4.required, SHARED_SIZE)),
        "": replace(
            _GRANITE_4,
            required=(*_GRANITE_4.required, "feed_forward_length"),
            names=mamba2.NAMES | _DENSE_MLP,
        ),
    },
    "granitemoe": {
        SHARED_SIZE: replace(
            _GRANITE_MOE,
            architecture="GraniteMoeSharedForCausalLM",
            keys=MULTIPLIERS | {SHARED_SIZE: "shared_intermediate_size"},
            shared="shared_mlp",
        ),
        "": _GRANITE_MOE,
    },
}
