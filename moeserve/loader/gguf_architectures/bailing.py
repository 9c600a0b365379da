"""Ling and Ring 2.0."""

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


def _biases(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    return {
        "use_qkv_bias": "blk.0.attn_qkv.bias" in tensors,
        "use_bias": "blk.0.attn_output.bias" in tensors,
    }


ARCHITECTURES: dict[str, Variants] = {
    "bailingmoe2": {
        "": GGUFArchitecture(
            "BailingMoeV2ForCausalLM",
            keys={
                "expert_shared_count": "num_shared_experts",
                SHARED_SIZE: "moe_shared_expert_intermediate_size",
            },
            defaults={"num_shared_experts": 0},
            gating=SIGMOID,
            config=_biases,
            names={
                "attn_qkv": "attention.query_key_value",
                "layer_output_norm": "final_layernorm",  # of an MTP layer
            },
            global_names={"token_embd": "model.word_embeddings"},
        )
    },
}
