"""Mixtral (8x7B, 8x22B): top-2 of softmax, renormalised. w1 is the gate, w3 the up and w2 the down projection.

Source: arXiv 2401.04088.
"""

from __future__ import annotations

from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.spec import RouterSpec
from moeserve.models.config_parts import MAX_POSITION, every_layer_moe, same_window, sizes
from moeserve.models.family import FUSED, ExpertNames, Family, Names


def _fields(config: Fields, num_layers: int) -> dict[str, Any]:
    window = config.optional_integer("sliding_window", 1, MAX_POSITION)
    return {
        **every_layer_moe(config, num_layers),
        **same_window(config, num_layers, window),
        "router": RouterSpec(renormalize=True),
    }


FAMILY = Family(
    "MixtralForCausalLM",
    "mixtral",
    _fields,
    sizes(32000, 4096, 14336, 32, 32, 8, 131072)
    | {
        "eos_token_id": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
    },
    Names(
        experts=(
            ExpertNames(
                gate="block_sparse_moe.experts.{}.w1.weight",
                up="block_sparse_moe.experts.{}.w3.weight",
                down="block_sparse_moe.experts.{}.w2.weight",
            ),
            FUSED,
        ),
        router=("block_sparse_moe.gate.weight", "mlp.gate.weight"),
    ),
)
