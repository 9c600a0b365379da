"""Write small random checkpoints of every family of tests/families.py in their published form."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.families import FAMILIES, LIGHTNING, MODEL_CLASSES, SMALL
from tests.lara_mini import make_lara_mini, without_sinks
from tests.lightning import add_lightning
from tests.published_form import PUBLISHED

# Name of a parameter -> range of its elements
SPREADS = {
    "alpha": (-0.3, 0.3),  # log factors of rotary frequencies
    "global_scale": (0.5, 1.5),
    "query": (-1.0, 1.0),  # of residual connections
    "static_weight": (-0.5, 0.5),  # of dynamic convolutions
    "balancing_biases": (-0.1, 0.1),
    "hidden_states_scale": (0.5, 1.5),
    "input_hidden_states_scale": (0.5, 1.5),
    "residual_scale": (0.5, 1.5),
    "router_states_scale": (0.5, 1.5),
    "base": (-1.0, 1.0),
    "hc_base": (-1.0, 1.0),
    "hc_scale": (0.5, 1.5),
    "index_kpool_compress_ape": (-0.5, 0.5),
    "index_kpool_compress_gate": (-0.5, 0.5),
}
# Slow decays; see `randomise`.
BOUNDED_DECAYS = {"A_log": (-0.5, 0.5), "dt_bias": (-7.0, -2.0)}


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    reference: Any  # the transformers model, fp32


def write_checkpoint(name: str, path: Path, **overrides: Any) -> Checkpoint:
    """Write a family's checkpoint to `path`; `overrides` change the text model's config."""
    import transformers  # imported here because it is slow

    class_name, options = FAMILIES[name]
    suffix = "ForConditionalGeneration" if "text_config" in options else "ForCausalLM"
    if nested := options.get("text_config"):
        options = {**options, "text_config": {**SMALL, **nested, **overrides}}
    else:
        options = {**SMALL, **options, **overrides}
    # transformers changes `rope_parameters`, which tests/families.py shares among families.
    config = getattr(transformers, class_name + "Config")(**deepcopy(options))
    torch.manual_seed(sum(name.encode()))
    model_class = MODEL_CLASSES.get(name, class_name.removesuffix("Text") + suffix)
    model = getattr(transformers, model_class)(config).eval()
    if name in LIGHTNING:
        add_lightning(model, LIGHTNING[name])
    if name == "lara_mini":
        make_lara_mini(model)
    randomise(model)
    if name == "lara_mini":
        without_sinks(model)
    model.save_pretrained(path)
    if name in PUBLISHED:
        config_file = path / "config.json"
        weights_file = path / "model.safetensors"
        config, tensors = PUBLISHED[name](
            json.loads(config_file.read_text()), load_file(weights_file)
        )
        config_file.write_text(json.dumps(config))
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, weights_file)
        if name == "mistral_large_3":
            config_file.rename(path / "params.json")
            weights_file.rename(path / "consolidated.safetensors")
    return Checkpoint(path, model)


def randomise(model: torch.nn.Module) -> None:
    """Randomize norms, biases, sinks and scales, which start as ones and zeros."""
    # The norms of these models multiply by 1 + weight.
    shifted = ("MiniMaxM3", "Qwen3Next", "Qwen3_5", "Qwen4Exp", "Step")
    around_zero = float(type(model).__name__.startswith(shifted))
    # Log decays of these models are a bound times a sigmoid.
    bounded_decays = type(model).__name__.startswith(("BailingHybrid", "Glm5Next"))
    ranges = SPREADS | (BOUNDED_DECAYS if bounded_decays else {})
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            kind = name.rpartition(".")[2]
            if kind in ranges:
                tensor.uniform_(*ranges[kind])
            elif kind.endswith("bias"):
                selects = "correction" in kind or kind == "expert_bias"
                tensor.normal_(0, 0.1 if selects else 0.3)
            elif "norm" in name.replace("norm_attn_norm.attn", "") or kind in (
                "sinks",
                "scale",
                "per_expert_scale",
                "layer_scalar",
                "D",
            ):
                tensor.uniform_(0.5, 1.5).sub_(around_zero)
            elif kind == "tid2eid":
                config: Any = model.config
                scores = torch.rand(len(tensor), config.n_routed_experts)
                tensor.copy_(scores.argsort(-1)[:, : tensor.shape[1]])
            elif kind == "A_log":
                # Slow decay, so that states matter for long and sums of log decays stay accurate.
                tensor.uniform_(-5.0, 0.0)
            elif kind == "weight" and not tensor.any():  # routers of some families
                tensor.normal_(0, 0.15)
