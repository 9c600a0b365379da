"""A checkpoint with nothing but experts, fused or one tensor per expert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moeserve.models.spec import ModelSpec
from tests.specs import make_spec

E = 8
D = 32
I = 24  # noqa: E741
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def spec_of(**changes: Any) -> ModelSpec:
    """Return a spec with two MoE layers among four."""
    return make_spec(
        **{
            "architecture": "Qwen3MoeForCausalLM",
            "vocab_size": 8,
            "hidden_size": D,
            "num_layers": 4,
            "num_heads": 1,
            "head_dim": 8,
            "max_position": 8,
            "norm_eps": 1e-5,
            "num_experts": E,
            "experts_per_token": 3,
            "expert_size": I,
            "moe_layers": (False, True, False, True),
            **changes,
        }
    )


SPEC = spec_of()


def write_experts(
    folder: Path, dtype: torch.dtype, fused: bool, *, seed: int = 0, poison: float | None = None
) -> tuple[Tensor, Tensor]:
    """Write model.safetensors and return its contents.

    These are w13 [L, E, 2I, D] and w2 [L, E, D, I] of the two MoE layers.
    """
    make = torch.Generator().manual_seed(seed)
    w13 = (torch.randn(2, E, 2 * I, D, generator=make) * 0.3).to(dtype)
    w2 = (torch.randn(2, E, D, I, generator=make) * 0.3).to(dtype)
    if poison is not None:
        w13[:, :, 1] = poison
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate((1, 3)):
        prefix = f"model.layers.{layer}.mlp.experts."
        if fused:
            tensors |= {
                prefix + "gate_up_proj": w13[index].clone(),
                prefix + "down_proj": w2[index].clone(),
            }
            continue
        for expert in range(E):
            gate, up = w13[index, expert].chunk(2)
            for name, weight in (("gate", gate), ("up", up), ("down", w2[index, expert])):
                tensors[f"{prefix}{expert}.{name}_proj.weight"] = weight.clone()
    save_file(tensors, folder / "model.safetensors")
    return w13, w2
