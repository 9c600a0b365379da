"""Qwen3-Next: three of four layers are gated delta nets; the fourth has attention with an output
gate. Norm weights are stored minus 1.

Qwen3.5-MoE: the same layers, with separate tensors for the inputs of gated delta nets. Only its
text model is supported, for which the three axes of its rotary embedding are the same. Checkpoints
with the text model alone have an architecture of their own.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moeserve.blocks.attention import Attention
from moeserve.blocks.gated_delta import GatedDelta
from moeserve.blocks.mixer import Mixer
from moeserve.blocks.weights import QWEN_MTP, Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.qwen2 import experts
from moeserve.models.spec import LayerSpec, NormSpec


def gated_attention(config: Fields) -> Attention:
    """Read attention whose output gates are in `q_proj`."""
    options = {"rope": {"partial": True}, **family.attention_bias(config)}
    return family.attention(config, qk_norm="head", gate="element", gate_in_q=True, **options)


def _mixers(config: Fields, *, inputs_by_head: bool, gates_by_head: bool) -> list[Mixer]:
    """Return the mixer of each layer. inputs_by_head, gates_by_head: see `GatedDelta`."""
    delta_net = gated_delta(config, inputs_by_head=inputs_by_head, gates_by_head=gates_by_head)
    return by_layer_type(config, gated_attention(config), delta_net)


def gated_delta(config: Fields, **options: Any) -> GatedDelta:
    """Read a gated delta net. options: other fields of `GatedDelta`."""
    k_heads = config.integer("linear_num_key_heads", 1, family.MAX_HEADS)
    v_heads = config.integer("linear_num_value_heads", 1, family.MAX_HEADS)
    if v_heads % k_heads:
        raise config.error(
            "linear_num_value_heads", f"linear_num_key_heads ({k_heads}) must divide it"
        )
    return GatedDelta(
        num_k_heads=k_heads,
        num_v_heads=v_heads,
        k_dim=config.integer("linear_key_head_dim", 1, family.MAX_WIDTH),
        v_dim=config.integer("linear_value_head_dim", 1, family.MAX_WIDTH),
        conv=config.integer("linear_conv_kernel_dim", 2, family.MAX_CONV),
        # "linear_value_heads_tiled" comes from GGUF files (loader/gguf_architectures).
        tiled=config.values.get("linear_value_heads_tiled") is True,
        decay_tensor=family.decay_tensor(config),
        **options,
    )


def by_layer_type(
    config: Fields,
    full: Mixer,
    delta_net: GatedDelta,
    full_types: Sequence[str] = ("full_attention",),
) -> list[Mixer]:
    """Return the mixer of each layer: `full` for the layer types `full_types`."""
    interval = config.integer("full_attention_interval", 1, family.MAX_LAYERS)
    default = [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention"
        for i in range(family.num_layers(config))
    ]
    kinds = family.layer_types(config, known=("linear_attention", *full_types), default=default)
    return [delta_net if kind == "linear_attention" else full for kind in kinds]


def _qwen3_next(config: Fields) -> family.SpecFields:
    block = experts(config, renormalize=config.boolean("norm_topk_prob"))
    # "linear_inputs_by_head" comes from GGUF files, like a number of MTP layers.
    inputs_by_head = config.values.get("linear_inputs_by_head") is not False
    mixers = _mixers(config, inputs_by_head=inputs_by_head, gates_by_head=True)
    has_mtp = config.values.get("num_nextn_predict_layers") != 0
    return {
        "layers": family.layers(config, mixers, family.some_layers_moe(config, block)),
        "norm": NormSpec(shift=family.norm_shift(config)),
        "mtp": LayerSpec(mixer=gated_attention(config), feed_forward=block) if has_mtp else None,
    }


def _qwen3_5(config: Fields) -> family.SpecFields:
    layers = _mixers(config, inputs_by_head=False, gates_by_head=False)
    block = experts(config, renormalize=True)
    has_mtp = family.mtp_layers(config, key="mtp_num_hidden_layers")
    return {
        "layers": family.layers(config, layers, block),
        "norm": NormSpec(shift=family.norm_shift(config)),
        "mtp": LayerSpec(mixer=gated_attention(config), feed_forward=block) if has_mtp else None,
    }


_SHARED_DEFAULTS = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": 512,
}
NEXT = family.Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    fields=_qwen3_next,
    defaults=family.sizes(
        vocab=151936,
        hidden=2048,
        intermediate=5632,
        layers=48,
        heads=16,
        kv_heads=2,
        positions=32768,
        experts=512,
        top_k=10,
        expert_size=512,
    )
    | _SHARED_DEFAULTS,
    names=Names(foreign=("mtp.",), mtp=QWEN_MTP),
)
QWEN3_5 = family.Family(
    architecture="Qwen3_5MoeForConditionalGeneration",
    model_type="qwen3_5_moe",
    fields=_qwen3_5,
    defaults=family.sizes(
        vocab=248320,
        hidden=2048,
        intermediate=512,
        layers=40,
        heads=16,
        kv_heads=2,
        positions=32768,
        experts=256,
        top_k=8,
        expert_size=512,
    )
    | _SHARED_DEFAULTS
    | {"mtp_num_hidden_layers": 0},
    names=Names(model="model.language_model.", foreign=("model.visual.", "mtp."), mtp=QWEN_MTP),
    text="text_config",
)
QWEN3_5_TEXT = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    names=replace(QWEN3_5.names, model="model.", foreign=("mtp.",)),
    text="",
)
