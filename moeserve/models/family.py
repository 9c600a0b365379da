"""What a family's file is made of: `Family` says how its config.json becomes a spec and how its checkpoints name
tensors; the functions read keys that several families share into fields of ModelSpec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moeserve.loader.files import Fields

MAX_LAYERS = 1000
MAX_WIDTH = 2**20
MAX_POSITION = 2**27
_MAX_EXPERTS = 4096
MAX_MULTIPLIER = 1e6
SpecFields = dict[str, Any]  # of ModelSpec, by name
QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096}


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """One spelling of the routed experts, relative to `model.layers.N.`; `{}` stands for the expert's id.

    gate, up, down: one tensor per expert. gate_up, down: all experts in one tensor, [E, 2I, D] and [E, D, I].
    """

    down: str
    gate: str = ""
    up: str = ""
    gate_up: str = ""


PER_EXPERT = ExpertNames(
    gate="mlp.experts.{}.gate_proj.weight",
    up="mlp.experts.{}.up_proj.weight",
    down="mlp.experts.{}.down_proj.weight",
)
FUSED = ExpertNames(gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj")


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a family's MoE tensors; all other tensors have the same names in every family.

    experts: the spellings of its checkpoints, the usual one first. router: likewise.
    """

    experts: tuple[ExpertNames, ...] = (PER_EXPERT, FUSED)
    router: tuple[str, ...] = ("mlp.gate.weight",)


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    architecture, model_type: as config.json has them. fields(config, number of layers): the fields of ModelSpec that
    not all families share. defaults: the values where config.json is silent, those of the family's configuration class
    in transformers 5.
    """

    architecture: str
    model_type: str
    fields: Callable[[Fields, int], SpecFields]
    defaults: dict[str, Any]
    names: Names = field(default_factory=Names)


def _experts(config: Fields, size_key: str) -> SpecFields:
    keys = [key for key in ("num_experts", "num_local_experts") if key in config.values]
    if len(keys) == 2 and config.values[keys[0]] != config.values[keys[1]]:
        raise config.error(keys[0], f"but {keys[1]} is {config.values[keys[1]]!r}; remove one of the two")
    num_experts = config.integer(keys[0] if keys else "num_experts", 1, _MAX_EXPERTS)
    return {
        "num_experts": num_experts,
        "experts_per_token": config.integer("num_experts_per_tok", 1, num_experts),
        "expert_size": config.integer(size_key, 1, MAX_WIDTH),
    }


def every_layer_moe(config: Fields, num_layers: int) -> SpecFields:
    """Reads a model whose layers all have experts."""
    return {"moe_layers": (True,) * num_layers, **_experts(config, "intermediate_size")}


def every_layer_dense(config: Fields, num_layers: int) -> SpecFields:
    """Reads a model whose layers are all dense."""
    return {
        "moe_layers": (False,) * num_layers,
        "intermediate_size": config.integer("intermediate_size", 1, MAX_WIDTH),
    }


def some_layers_moe(config: Fields, num_layers: int) -> SpecFields:
    """Reads Qwen's layers: every `decoder_sparse_step`-th one except `mlp_only_layers` has experts."""
    step = config.integer("decoder_sparse_step", 1, MAX_LAYERS)
    dense = set(config.integers("mlp_only_layers", 0, num_layers - 1))
    return {
        "moe_layers": tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        "intermediate_size": config.integer("intermediate_size", 1, MAX_WIDTH),
        **_experts(config, "moe_intermediate_size"),
    }


def same_window(config: Fields, num_layers: int, window: int | None) -> SpecFields:
    """Gives all layers one window. Refuses a config that names other kinds of layers."""
    types = config.values.get("layer_types")
    if types is not None and types != ["full_attention"] * num_layers:
        raise config.error("layer_types", "this architecture has one kind of attention; remove this key")
    return {"windows": (window,) * num_layers}


def no_window(config: Fields, num_layers: int) -> SpecFields:
    """Refuses a sliding window."""
    config.unsupported("sliding_window", "this architecture has no sliding window; set it to null")
    return same_window(config, num_layers, None)


def window_per_layer(config: Fields, num_layers: int, slides: Callable[[int, int], bool]) -> SpecFields:
    """Reads Qwen's windows: `layer_types` names sliding layers; without it `slides(layer, max_window_layers)` does."""
    window = switched_window(config)
    types = config.raw("layer_types")
    if types is None:
        first_or_last = config.integer("max_window_layers", 0, 2**31)
        sliding = [window is not None and slides(i, first_or_last) for i in range(num_layers)]
    else:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
            raise config.error("layer_types", f"it must list one of {', '.join(known)} for each of {num_layers} layers")
        sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding) and window is None:
        raise config.error("layer_types", "sliding layers need use_sliding_window true and a sliding_window")
    return {"windows": tuple(window if slides_here else None for slides_here in sliding)}


def switched_window(config: Fields) -> int | None:
    """Reads `sliding_window` where `use_sliding_window` is true, else None."""
    if not config.boolean("use_sliding_window"):
        return None
    return config.optional_integer("sliding_window", 1, MAX_POSITION)


def attention_bias(config: Fields) -> SpecFields:
    """Reads whether qkv and out have biases."""
    bias = config.boolean("attention_bias")
    return {"qkv_bias": bias, "out_bias": bias}


def sizes(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int | None, positions: int
) -> dict[str, Any]:
    """Defaults of the keys that every family has."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
    }
