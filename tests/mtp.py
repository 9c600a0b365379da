"""Small checkpoints with an MTP head, and a torch reference of the head.

transformers has no such heads: the head's layer is the only layer of a model of its own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeserve.blocks.weights import MTPNames
from moeserve.models.hf_config import read_model_spec
from moeserve.models.registry import FAMILIES as OURS
from tests.checkpoints import Checkpoint, randomise, write_checkpoint
from tests.families import FAMILIES, SLIDING, SMALL, Options

# Options of the model with only the head's layer, where they differ from the checkpoint's.
LAYER: dict[str, Options] = {
    "deepseek_v3": {"first_k_dense_replace": 0},
    "deepseek_v32": {"mlp_layer_types": ["sparse"]},
    "glm_moe_dsa": {"mlp_layer_types": ["sparse"], "indexer_types": ["full"]},
    "glm4_moe_lite": {"mlp_layer_types": ["sparse"]},
    "glm4_moe": {"first_k_dense_replace": 0},
    "qwen3_next": {"layer_types": ["full_attention"]},
    "qwen3_5_moe": {"layer_types": ["full_attention"]},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "mimo_v2_flash": {"layer_types": [SLIDING], "mlp_layer_types": ["dense"]},
    "hy_v4": {
        "layer_types": ["indexed_attention"],
        "mlp_layer_types": ["sparse"],
        "hc_mult": 1,
        "hc_magnitude": 2.0,
        "hc_eps": 0.0,
    },
    "glm5_next": {
        "layer_types": ["indexed_attention"],
        "mlp_layer_types": ["sparse"],
        "hc_mult": 1,
        "indexer_types": ["full"],
        "hc_eps": 0.0,
    },
    "bailing_hybrid": {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]},
    "qwen4_exp_text": {},  # see tests/streams_mtp.py
    "deepseek_v4": {},  # likewise
}
STREAMS = ("qwen4_exp_text", "deepseek_v4")  # families whose head reads several residual streams
# The class of that model, if it is not a ForCausalLM
LAYER_CLASSES = {"glm5_next": "Glm5NextTextModel"}
# Keys that config.json needs for the head, if transformers does not write them.
KEYS: dict[str, Options] = {
    **{name: {"mtp_num_hidden_layers": 1} for name in ("qwen3_moe", "qwen3_5_moe", "qwen3_next")},
    **{name: {"num_nextn_predict_layers": 1} for name in ("glm_moe_dsa", "glm4_moe_lite")},
}
SPELLED = {  # parts of tensor names: transformers' -> published
    "mimo_v2_flash": {
        "self_attn.sinks": "self_attn.attention_sink_bias",
        "post_attention": "pre_mlp",
    },
}


@dataclass
class Head:
    """An MTP head beside its model, in fp32."""

    path: Path
    target: Any
    layer: Any  # a model whose layer and last norm are the head's
    embed_norm: Any
    hidden_norm: Any
    product: Tensor

    @torch.no_grad()
    def inputs(self, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """Return the layer's inputs, W [norm(embedding), norm(hidden)]."""
        embedded = self.target.get_input_embeddings()(torch.tensor(tokens))
        return torch.cat((self.embed_norm(embedded), self.hidden_norm(hidden)), -1) @ self.product.T

    @torch.no_grad()
    def hidden(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.layer(inputs_embeds=inputs[None]).last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.target.lm_head(hidden).float()
        return logits

    @torch.no_grad()
    def target_hidden(self, tokens: Sequence[int]) -> Tensor:
        found: Tensor = text_model(self.target)(torch.tensor([tokens])).last_hidden_state[0]
        return found


def text_model(model: Any) -> Any:
    return getattr(model.model, "language_model", model.model)


def write_mtp_checkpoint(name: str, path: Path, **overrides: Any) -> Head:
    """Write the checkpoint of a family with an MTP head."""
    import transformers

    if name in STREAMS:
        from tests.streams_mtp import write_streams_mtp_checkpoint

        return write_streams_mtp_checkpoint(name, path, **overrides)

    checkpoint: Checkpoint = write_checkpoint(name, path, **overrides)
    target = checkpoint.reference
    options = FAMILIES[name][1]
    options = {
        **SMALL,
        **options.get("text_config", options),
        **overrides,
        "num_hidden_layers": 1,
        **LAYER[name],
    }
    config = type(text_model(target).config)(**options)
    config._attn_implementation = text_model(target).config._attn_implementation
    torch.manual_seed(1)
    class_name = FAMILIES[name][0]
    one = getattr(transformers, LAYER_CLASSES.get(name, class_name + "ForCausalLM"))(config).eval()
    randomise(one)
    if config.to_dict().get("hc_mult") == 1:
        _close_connections(one)
    layer = getattr(one, "model", one)
    hidden_size = config.hidden_size
    norms = [copy.deepcopy(layer.norm) for _ in range(2)]
    for norm in norms:
        norm.weight.data += torch.rand(hidden_size) - 0.5
    product = torch.randn(hidden_size, 2 * hidden_size) * 0.15

    spec = read_model_spec(path)
    names: MTPNames = OURS[spec.architecture].names.mtp
    begin, theirs = (part.format(spec.num_layers) for part in (names.begin, names.layer))
    tensors = {
        f"{begin}{names.embed_norm}.weight": norms[0].weight.data,
        f"{begin}{names.hidden_norm}.weight": norms[1].weight.data,
        f"{begin}{names.norm}.weight": layer.norm.weight.data,
        f"{begin}{names.merge}.weight": product,
    }
    for key, tensor in layer.layers[0].state_dict().items():
        for old, new in SPELLED.get(name, {}).items():
            key = key.replace(old, new)
        tensors[theirs + key] = tensor
    file = path / "model.safetensors"
    save_file(
        {key: tensor.contiguous() for key, tensor in (load_file(file) | tensors).items()}, file
    )
    _add_keys(path, KEYS.get(name, {}))
    return Head(path, target, layer, norms[0], norms[1], product)


def _close_connections(model: Any) -> None:
    """Turn hyper-connections of one stream into a plain residual stream: all weights are 1."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith((".fn", ".hc_fn", ".base", ".hc_base")):
                tensor.zero_()
            if name.endswith((".base", ".hc_base")):
                tensor[0] = 100.0  # of the block's input: sigmoid; of its output: 2 sigmoid


def _add_keys(path: Path, keys: Options) -> None:
    config = json.loads((path / "config.json").read_text())
    (config.get("text_config") or config).update(keys)
    (path / "config.json").write_text(json.dumps(config))
