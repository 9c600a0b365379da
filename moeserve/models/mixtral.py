"""Mixtral (8x7B, 8x22B): top-2 of softmax, renormalised. w1 is the gate, w3 the up and w2 the down projection.

Source: arXiv 2401.04088.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _fields(config: Fields, num_layers: int) -> family.SpecFields:
    window = config.optional_integer("sliding_window", 1, family.MAX_POSITION)
    return {
        **family.every_layer_moe(config, num_layers),
        **family.same_window(config, num_layers, window),
        "router": RouterRule(renormalize=True),
    }


FAMILY = family.Family(
    "MixtralForCausalLM",
    "mixtral",
    _fields,
    family.sizes(32000, 4096, 14336, 32, 32, 8, 131072)
    | {
        "eos_token_id": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
    },
    family.Names(
        experts=(
            family.ExpertNames(
                gate="block_sparse_moe.experts.{}.w1.weight",
                up="block_sparse_moe.experts.{}.w3.weight",
                down="block_sparse_moe.experts.{}.w2.weight",
            ),
            family.FUSED,
        ),
        router=("block_sparse_moe.gate.weight", "mlp.gate.weight"),
    ),
)
