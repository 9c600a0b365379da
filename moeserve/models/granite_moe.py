"""GraniteMoE (granite-3.0-1b-a400m, 3b-a800m): softmax over the chosen experts only, experts fused per layer, and
multipliers on embeddings, attention scores, residual branches and logits."""

from __future__ import annotations

from moeserve.models.checkpoint import ExpertNames, Names
from moeserve.models.family import Family

FAMILY = Family(
    "GraniteMoeForCausalLM",
    Names(
        experts=(
            ExpertNames(gate_up="block_sparse_moe.input_linear.weight", down="block_sparse_moe.output_linear.weight"),
            ExpertNames(gate_up="block_sparse_moe.experts.gate_up_proj", down="block_sparse_moe.experts.down_proj"),
        ),
        router=("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
    ),
)
