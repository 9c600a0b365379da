"""A model of 1.5 billion random parameters whose text repeats, for a given acceptance of drafts.

Its blocks compute like any others but add next to nothing to the residual stream, so the next token
is a function of the last one. Token t is followed by t + 1 on a loop of LOOP tokens, with a
probability that the temperature sets; otherwise by any other token, after which the loop continues
elsewhere. A prompt that contains the loop is a file, and the answer is that file with edits.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.grammar import synthetic

LOOP = 1500
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 128_256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 128_000,
}
RIGHT_AT_1 = 0.95  # probability that t + 1 follows t at temperature 1
_NOTHING = 1e-5


def temperature_of(right: float) -> float:
    """Return the temperature at which t + 1 follows t with probability `right`."""
    return gap(RIGHT_AT_1) / gap(right)


def gap(right: float) -> float:
    """Return how far the logit of t + 1 is above all others, which are equal."""
    return math.log(CONFIG["vocab_size"] - 1) + math.log(right / (1 - right))


def write_model(folder: Path, layers: int = CONFIG["num_hidden_layers"]) -> Path:
    """Write config.json, tokenizer.json and bf16 weights: 3.1 GB with all 24 layers."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    synthetic().save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator).mul_(std).bfloat16()

    hidden = config["hidden_size"]
    head_dim = config["head_dim"]
    size = config["moe_intermediate_size"]
    base_LH = torch.randn(LOOP, hidden, generator=generator)
    base_LH /= base_LH.square().mean(1, keepdim=True).sqrt()
    head_VH = torch.zeros(config["vocab_size"], hidden)
    head_VH[:LOOP] = base_LH.roll(1, 0) * gap(RIGHT_AT_1) / hidden
    embed_VH = base_LH[torch.arange(config["vocab_size"]) % LOOP]
    weights = {
        "model.embed_tokens.weight": embed_VH.bfloat16(),
        "lm_head.weight": head_VH.bfloat16(),
        "model.norm.weight": torch.ones(hidden).bfloat16(),
    }
    widths = {
        "q": config["num_attention_heads"],
        "k": config["num_key_value_heads"],
        "v": config["num_key_value_heads"],
    }
    for layer in (f"model.layers.{i}." for i in range(layers)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{name}.weight"] = torch.ones(hidden).bfloat16()
        for name, heads in widths.items():
            weights[f"{layer}self_attn.{name}_proj.weight"] = random(
                heads * head_dim, hidden, std=hidden**-0.5
            )
        for name in ("q_norm", "k_norm"):
            weights[f"{layer}self_attn.{name}.weight"] = torch.ones(head_dim).bfloat16()
        weights[f"{layer}self_attn.o_proj.weight"] = random(
            hidden, widths["q"] * head_dim, std=_NOTHING
        )
        weights[f"{layer}mlp.gate.weight"] = random(config["num_experts"], hidden, std=hidden**-0.5)
        for expert in (f"{layer}mlp.experts.{i}." for i in range(config["num_experts"])):
            weights[f"{expert}gate_proj.weight"] = random(size, hidden, std=hidden**-0.5)
            weights[f"{expert}up_proj.weight"] = random(size, hidden, std=hidden**-0.5)
            weights[f"{expert}down_proj.weight"] = random(hidden, size, std=_NOTHING)
    save_file(weights, folder / "model.safetensors")
    return folder
