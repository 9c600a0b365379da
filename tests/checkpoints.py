"""Write small random checkpoints of every family of tests/families.py in their published form."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.families import FAMILIES, LIGHTNING, SMALL
from tests.lightning import add_lightning
from tests.published_form import PUBLISHED


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
    model = getattr(transformers, class_name.removesuffix("Text") + suffix)(config).eval()
    if name in LIGHTNING:
        add_lightning(model, LIGHTNING[name])
    randomise(model)
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
    around_zero = float(type(model).__name__.startswith(("Qwen3Next", "Qwen3_5", "Step")))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            kind = name.rpartition(".")[2]
            if kind.endswith("bias"):
                selects = "correction" in kind or kind == "expert_bias"
                tensor.normal_(0, 0.1 if selects else 0.3)
            elif "norm" in name or kind in (
                "sinks",
                "scale",
                "per_expert_scale",
                "layer_scalar",
                "D",
            ):
                tensor.uniform_(0.5, 1.5).sub_(around_zero)
            elif kind == "A_log":
                # Slow decay, so that states matter for long and sums of log decays stay accurate.
                tensor.uniform_(-5.0, 0.0)
            elif kind == "weight" and not tensor.any():  # routers of some families
                tensor.normal_(0, 0.15)
