"""Small checkpoints written by safetensors, and a valid config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
QWEN3_MOE: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
GRANITE_HYBRID: dict[str, Any] = {
    **LLAMA,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "mamba_n_heads": 4,
}

WriteConfig = Callable[..., Path]


@pytest.fixture
def write_config(tmp_path: Path) -> WriteConfig:
    """Return write_config(base, key=value, ...), which returns a model directory.

    A value of `...` omits the key.
    """

    def write(base: dict[str, Any] = LLAMA, **changes: Any) -> Path:
        values = {key: value for key, value in {**base, **changes}.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return tmp_path

    return write


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Return a few tensors of each supported dtype, one of them empty."""
    torch.manual_seed(0)
    return {
        "a.f32": torch.randn(5, 7),
        "b.bf16": torch.randn(6, 4, 8).bfloat16(),
        "c.f16": torch.randn(33).half(),
        "d.empty": torch.empty(0, 3),
        "e.bf16": torch.randn(16, 16).bfloat16(),
    }


@pytest.fixture
def small_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path
