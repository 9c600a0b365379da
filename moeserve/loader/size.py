"""The size of a model: parameters in all, and those that one token uses."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.loader.spec import ModelSpec, StoredFormat

_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}  # of a quantised weight without scales
_USUAL_GROUP = 64  # of int4 weights that are quantised on loading
_MOST_GROUP = 128  # of int4 weights: GPUs have the scales of larger groups several times


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers of parameters. active: those that compute one token, without the embedding table."""

    total: int
    active: int


def model_size(spec: ModelSpec) -> ModelSize:
    """Counts the matrices of a model; norms and biases are a rounding error (< 0.1 %).

    Qwen3-30B-A3B (D 2048, 48 layers, E 128, K 8, I 768) -> about 30.5e9 and 3.0e9
    """
    width, heads = spec.hidden_size, spec.num_heads * spec.head_dim
    attention = width * (2 * heads + 2 * spec.num_kv_heads * spec.head_dim)
    expert = 3 * width * spec.expert_size
    every_token = width * spec.num_experts + 3 * width * spec.shared_expert_size
    head = spec.vocab_size * width
    total = head if spec.tie_embeddings else 2 * head
    active = head
    for layer in range(spec.num_layers):
        if layer < len(spec.moe_layers) and spec.moe_layers[layer]:
            total += attention + every_token + spec.num_experts * expert
            active += attention + every_token + spec.experts_per_token * expert
        else:
            total += attention + 3 * width * spec.intermediate_size
            active += attention + 3 * width * spec.intermediate_size
    return ModelSize(total, active)


def bytes_per_weight(spec: ModelSpec, asked: str | None, itemsize: int) -> float:
    """Bytes of a linear layer's weight in memory, scales included. asked: the kind it becomes on loading."""
    form = spec.stored
    if form is None and asked == "int4":
        form = StoredFormat(kind="int4", group=_USUAL_GROUP)
    if form is None:
        return _BYTES.get(asked or "", itemsize)
    group = min(form.group or _MOST_GROUP, _MOST_GROUP) if form.kind == "int4" else form.group
    return _BYTES[form.kind] + ((8 if form.zeros else 4) / group if group else 0.0)
