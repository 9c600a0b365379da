"""Lara Mini: Qwen3.5's gated delta nets, whose inputs are one product, beside Qwen3's attention.
Layers with a sliding window have a rotary embedding; those with full attention have none.

Source: huggingface.co/translated/Lara-4-Mini-Base.
"""

from dataclasses import replace

from moeserve.blocks.attention import Attention
from moeserve.blocks.feed_forward import MoE, SharedExpert
from moeserve.blocks.gated_delta import GatedDelta
from moeserve.blocks.weights import Names
from moeserve.engine.kv_rule import KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.qwen3_next import gated_delta
from moeserve.ops.rules import RouterRule

_PATTERN = (
    "linear_attention",
    "sliding_attention",
    "linear_attention",
    "full_attention",
    "sliding_attention",
)


def _mixers(config: Fields) -> list[Attention | GatedDelta]:
    """Return the mixer of each layer."""
    mixer = family.attention(config, qk_norm="head", **family.attention_bias(config))
    window = config.integer("sliding_window", 1, family.MAX_POSITION)
    of_kind: dict[str, Attention | GatedDelta] = {
        "linear_attention": gated_delta(config, inputs_in_one=True),
        "sliding_attention": replace(mixer, rule=KVRule(window=window)),
        "full_attention": family.without_rope(mixer),
    }
    default = [_PATTERN[i % len(_PATTERN)] for i in range(family.num_layers(config))]
    kinds = family.layer_types(config, known=tuple(of_kind), default=default)
    return [of_kind[kind] for kind in kinds]


def _experts(config: Fields) -> MoE:
    router = RouterRule(renormalize=config.boolean("norm_topk_prob"), fp32=True)
    size = config.integer("shared_expert_intermediate_size", 1, family.MAX_WIDTH)
    return family.moe(config, router=router, shared=SharedExpert(size=size))


def _spec_fields(config: Fields) -> family.SpecFields:
    return {"layers": family.layers(config, _mixers(config), _experts(config))}


FAMILY = family.Family(
    architecture="LaraMiniForCausalLM",
    model_type="lara_mini",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=151936,
        hidden=1024,
        intermediate=0,
        layers=34,
        heads=16,
        kv_heads=4,
        positions=131072,
        experts=128,
        top_k=4,
        expert_size=512,
    )
    | {
        "eos_token_id": 151643,
        "head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "shared_expert_intermediate_size": 512,
        "sliding_window": 512,
        "tie_word_embeddings": True,
    },
    names=Names(spelled={"linear_attn.norm.weight": ("linear_attn.out_norm.weight",)}),
)
