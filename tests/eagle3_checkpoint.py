"""Small random EAGLE-3 heads for the checkpoints of tests/checkpoints.py, and a torch reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "draft_vocab_size": 100,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True},
}


def write_eagle3(
    path: Path, *, target_size: int = 64, num_aux: int = 2, **changes: Any
) -> dict[str, Tensor]:
    """Write a head and return its tensors.

    `changes` are changes of its config; a value of `...` omits the key.
    """
    config = {key: value for key, value in {**HEAD, **changes}.items() if value is not ...}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(
        json.dumps(_nested(config) if config.pop("nested", False) else config)
    )
    rng = torch.Generator().manual_seed(5)
    size = config["hidden_size"]
    inner = config["intermediate_size"]
    vocab = config["vocab_size"]
    heads, kv = (
        config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value")
    )
    drafts = config.get("draft_vocab_size") or vocab
    shapes = {
        "fc.weight": (size, num_aux * target_size),
        "lm_head.weight": (drafts, size),
        "norm.weight": (size,),
    }
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (num_aux * target_size,)
    for i in range(config["num_hidden_layers"]):
        inputs = 1 if i else 2
        name = f"layers.{i}" if config["num_hidden_layers"] > 1 else "midlayer"
        products = {
            "self_attn.q_proj": (heads, inputs * size),
            "self_attn.k_proj": (kv, inputs * size),
            "self_attn.v_proj": (kv, inputs * size),
            "self_attn.o_proj": (size, heads),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
            "input_layernorm": (size,),
            "post_attention_layernorm": (size,),
            **({} if i else {"hidden_norm": (size,)}),
        }
        shapes |= {f"{name}.{product}.weight": shape for product, shape in products.items()}
    tensors = {
        name: torch.rand(shape, generator=rng) + 0.5
        if len(shape) == 1
        else 0.15 * torch.randn(shape, generator=rng)
        for name, shape in shapes.items()
    }
    if drafts < vocab:
        ids = torch.randperm(vocab, generator=rng)[:drafts].sort().values
        tensors["d2t"] = ids - torch.arange(drafts)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(tensors, path / "model.safetensors")
    return tensors


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config in the layout of the speculators library.

    There, heads start with normed hidden states by default.
    """
    outer = {
        key: config[key]
        for key in ("draft_vocab_size", "norm_before_fc", "tie_word_embeddings", "torch_dtype")
    }
    layer = {
        key: value
        for key, value in config.items()
        if key not in (*outer, "architectures", "eagle_config")
    }
    aux_layers = {"eagle_aux_hidden_state_layer_ids": [1, 2]}
    return {
        "architectures": ["Eagle3Speculator"],
        **outer,
        **aux_layers,
        "transformer_layer_config": layer,
    }


class Reference:
    """Computes a head on a whole sequence from position 0."""

    def __init__(
        self, tensors: dict[str, Tensor], embed_VD: Tensor, config: dict[str, Any]
    ) -> None:
        self.tensors = {
            name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()
        }
        self.embed_VD = embed_VD
        self.config = {**HEAD, **config}

    def combine(self, aux_TA: Tensor) -> Tensor:
        if self.config.get("norm_before_fc"):
            aux_TA = self._norm(aux_TA, "input_norm")
        return linear(aux_TA, self.tensors["fc.weight"])

    def forward(self, ids_T: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [T, V] and the next hidden states [T, D].

        Logits outside the draft vocabulary are -inf.
        """
        t = self.tensors
        normed = self._norm(hidden_TD, "layers.0.hidden_norm")
        x = (
            normed
            if self.config.get("norm_before_residual", "nested" in self.config)
            else hidden_TD
        )
        for i in range(self.config["num_hidden_layers"]):
            name = f"layers.{i}."
            both = self._norm(x if i else self.embed_VD[ids_T], name + "input_layernorm")
            x = x + self._attention(
                both if i else torch.cat((both, normed), 1), name + "self_attn."
            )
            y = self._norm(x, name + "post_attention_layernorm")
            gate, up = (linear(y, t[f"{name}mlp.{half}_proj.weight"]) for half in ("gate", "up"))
            x = x + linear(silu(gate) * up, t[name + "mlp.down_proj.weight"])
        logits_Td = linear(self._norm(x, "norm"), t["lm_head.weight"])
        if "d2t" not in t:
            return logits_Td, x
        logits_TV = torch.full((len(x), self.config["vocab_size"]), -torch.inf)
        logits_TV[:, torch.arange(len(t["d2t"])) + t["d2t"]] = logits_Td
        return logits_TV, x

    def _norm(self, x_TD: Tensor, name: str) -> Tensor:
        return rms_norm(
            x_TD, x_TD.shape[1:], self.tensors[name + ".weight"], self.config["rms_norm_eps"]
        )

    def _attention(self, x_TK: Tensor, name: str) -> Tensor:
        dim = self.config["head_dim"]
        q, k, v = (
            linear(x_TK, self.tensors[f"{name}{part}_proj.weight"])
            .view(len(x_TK), -1, dim)
            .transpose(0, 1)
            for part in "qkv"
        )
        angles = torch.outer(
            torch.arange(len(x_TK)), self.config["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        )
        cos, sin = (part.repeat(1, 2) for part in (angles.cos(), angles.sin()))

        def rotated(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat((-second, first), -1) * sin

        out = scaled_dot_product_attention(
            rotated(q), rotated(k), v, is_causal=True, enable_gqa=True
        )
        return linear(out.transpose(0, 1).flatten(1), self.tensors[name + "o_proj.weight"])
