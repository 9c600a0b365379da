"""Mixtral (8x7B, 8x22B): top-2 of softmax, renormalised. w1 is the gate, w3 the up and w2 the down projection."""

from __future__ import annotations

from moeserve.models.checkpoint import FUSED, ExpertNames, Names
from moeserve.models.family import Family

FAMILY = Family(
    "MixtralForCausalLM",
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
