"""Small random checkpoints of every family, as transformers writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 1024, "initializer_range": 0.15, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "moe_intermediate_size": 32, "head_dim": 32, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {**EXPERTS, "clip_qkv": 2.0}),
    "granite_moe": (
        "GraniteMoe",
        {
            "num_local_experts": 8, "num_experts_per_tok": 3, "embedding_multiplier": 6.0, "attention_multiplier": 0.1,
            "residual_multiplier": 0.3, "logits_scaling": 4.0,
        },
    ),
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    reference: Any  # the transformers model, fp32


def randomise(model: torch.nn.Module) -> None:
    """Norms and biases start as ones and zeros; make them matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
