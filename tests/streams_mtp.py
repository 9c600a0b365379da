"""MTP heads of models with several residual streams (moeserve/models/streams_mtp.py)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import randomise, write_checkpoint
from tests.mtp import Head, text_model

_PARTS = ("fn", "base", "scale")  # of a hyper-connection


@dataclass
class StreamsHead(Head):
    """An MTP head whose hidden states are all residual streams, [T, S * D]."""

    embed_product: Tensor  # `product` is that of the streams

    @torch.no_grad()
    def inputs(self, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        embedded = self.target.get_input_embeddings()(torch.tensor(tokens))
        token = self.embed_norm(embedded) @ self.embed_product.T
        normed: Tensor = self.hidden_norm(hidden)
        streams = normed.view(len(hidden), -1, token.shape[-1])
        merged: Tensor = streams @ self.product.T + token[:, None]
        return merged.flatten(1)

    @torch.no_grad()
    def hidden(self, inputs: Tensor) -> Tensor:
        count = len(inputs)
        positions = torch.arange(count).expand(3, 1, count)
        streams: Tensor = self.layer.layers[0](
            inputs[None],
            position_embeddings=self.layer.rotary_emb(inputs[None], positions),
            attention_mask=torch.ones(count, count, dtype=torch.bool).tril()[None, None],
        )
        return streams[0]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.target.lm_head(self.layer.hyper_connection_mixer(hidden)).float()
        return logits

    @torch.no_grad()
    def target_hidden(self, tokens: Sequence[int]) -> Tensor:
        model = text_model(self.target)
        seen: list[Tensor] = []
        hook = model.hyper_connection_mixer.register_forward_pre_hook(
            lambda module, inputs: seen.append(inputs[0][0])
        )
        model(torch.tensor([tokens]))
        hook.remove()
        return seen[0]


@dataclass
class HyperHead(StreamsHead):
    """The head of DeepSeek-V4, whose norm of hidden states is that of each stream."""

    @torch.no_grad()
    def inputs(self, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        embedded = self.target.get_input_embeddings()(torch.tensor(tokens))
        token = self.embed_norm(embedded) @ self.embed_product.T
        streams: Tensor = self.hidden_norm(hidden.view(len(hidden), -1, token.shape[-1]))
        merged: Tensor = streams @ self.product.T + token[:, None]
        return merged.flatten(1)

    @torch.no_grad()
    def hidden(self, inputs: Tensor) -> Tensor:
        config = self.layer.config
        count = len(inputs)
        streams: Tensor = inputs.view(1, count, config.hc_mult, -1)
        positions = torch.arange(count)
        distance = positions[:, None] - positions
        hidden = (distance < 0) | (distance >= config.sliding_window)
        mask = torch.zeros(count, count).masked_fill(hidden, -torch.inf)
        angles = {
            kind: self.layer.rotary_emb(streams, position_ids=positions[None], layer_type=kind)
            for kind in ("main", "compress")
        }
        streams = self.layer.layers[0](
            streams,
            position_embeddings=angles,
            position_ids=positions[None],
            attention_mask=mask[None, None],
        )
        return streams[0].flatten(1)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        streams = hidden.view(1, len(hidden), self.layer.config.hc_mult, -1)
        logits: Tensor = self.target.lm_head(self.layer.norm(self.layer.hc_head(streams)))[0]
        return logits.float()

    @torch.no_grad()
    def target_hidden(self, tokens: Sequence[int]) -> Tensor:
        seen: list[Tensor] = []
        hook = self.target.model.hc_head.register_forward_pre_hook(
            lambda module, inputs: seen.append(inputs[0][0].flatten(1))
        )
        self.target(torch.tensor([tokens]))
        hook.remove()
        return seen[0]


def write_hyper_mtp_checkpoint(name: str, path: Path, **overrides: Any) -> HyperHead:
    """Write the checkpoint of DeepSeek-V4 with an MTP head."""
    target = write_checkpoint(name, path, **overrides).reference
    options = target.config.to_dict() | {
        "num_hidden_layers": 1,
        "layer_types": ["sliding_attention"],
        "mlp_layer_types": ["moe"],
    }
    torch.manual_seed(1)
    one = type(target)(type(target.config).from_dict(options)).eval()
    randomise(one)
    layer = one.model
    width = one.config.hidden_size
    norms = [copy.deepcopy(layer.norm) for _ in range(2)]
    for norm in norms:
        norm.weight.data = torch.rand(width) + 0.5
    products = [torch.randn(width, width) * 0.15 for _ in range(2)]
    tensors = {
        "enorm.weight": norms[0].weight.data,
        "hnorm.weight": norms[1].weight.data,
        "e_proj.weight": products[0],
        "h_proj.weight": products[1],
        "norm.weight": layer.norm.weight.data,
        **{f"hc_head_{part}": getattr(layer.hc_head, f"hc_{part}").data for part in _PARTS},
        **layer.layers[0].state_dict(),
    }
    file = path / "model.safetensors"
    both = load_file(file) | {f"mtp.0.{key}": tensor for key, tensor in tensors.items()}
    save_file({key: tensor.contiguous() for key, tensor in both.items()}, file)
    return HyperHead(path, target, layer, norms[0], norms[1], products[1], products[0])


def write_streams_mtp_checkpoint(name: str, path: Path, **overrides: Any) -> StreamsHead:
    """Write the checkpoint of a family with an MTP head."""
    if name == "deepseek_v4":
        return write_hyper_mtp_checkpoint(name, path, **overrides)
    target = write_checkpoint(name, path, mtp_num_hidden_layers=1, **overrides).reference
    model = text_model(target)
    options = model.config.to_dict() | {
        "num_hidden_layers": 1,
        "layer_types": ["indexed_attention"],
        "ple_layer_ids": [],
    }
    config = type(model.config).from_dict(options)
    config._attn_implementation = model.config._attn_implementation
    torch.manual_seed(1)
    layer = type(model)(config).eval()
    one = type(target)(config).eval()
    one.model = layer
    randomise(one)
    width = config.hidden_size
    embed_norm, hidden_norm = (
        type(layer.layers[0].self_attn.q_norm)(size, eps=config.rms_norm_eps)
        for size in (width, width * config.hc_count)
    )
    for norm in (embed_norm, hidden_norm):
        norm.weight.data = torch.rand_like(norm.weight) - 0.5
    products = [torch.randn(width, width) * 0.15 for _ in range(2)]
    tensors = {
        "mtp.pre_fc_norm_embedding.weight": embed_norm.weight.data,
        "mtp.pre_fc_norm_hidden.weight": hidden_norm.weight.data,
        "mtp.fc_embedding.weight": products[0],
        "mtp.fc_hidden.weight": products[1],
    }
    for key, tensor in layer.state_dict().items():
        if key.startswith(("layers.", "hyper_connection_mixer.")):
            tensors[f"mtp.{key}"] = tensor
    file = path / "model.safetensors"
    save_file({key: x.contiguous() for key, x in (load_file(file) | tensors).items()}, file)
    return StreamsHead(path, target, layer, embed_norm, hidden_norm, products[1], products[0])
