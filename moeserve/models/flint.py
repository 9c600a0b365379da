"""Flint: Qwen3's attention with attention sinks, a sigmoid router without bias, and an ungated
shared expert. Most layers have a sliding window; the others have no position encoding.

Source: huggingface.co/RecursiveSI/flint.
"""

from dataclasses import replace

from moeserve.blocks.attention import Attention
from moeserve.blocks.feed_forward import MoE, SharedExpert
from moeserve.blocks.weights import Names
from moeserve.engine.kv_rule import FULL, KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _mixers(config: Fields) -> list[Attention]:
    """Return the mixer of each layer."""
    bias = family.attention_bias(config)
    mixer = family.attention(config, qk_norm="head", sinks=True, **bias)
    window = config.integer("sliding_window", 1, family.MAX_POSITION)
    sliding = replace(mixer, rule=KVRule(window=window))
    full = family.without_rope(replace(mixer, rule=FULL))
    count = family.num_layers(config)
    default = [
        "full_attention" if i < 2 or i % 4 == 1 or i == count - 1 else "sliding_attention"
        for i in range(count)
    ]
    kinds = family.layer_types(config, default=default)
    return [sliding if kind == "sliding_attention" else full for kind in kinds]


def _experts(config: Fields) -> MoE:
    renormalize = config.boolean("norm_topk_prob")
    router = RouterRule(score="sigmoid", renormalize=renormalize, fp32=True)
    size = config.integer("shared_expert_intermediate_size", 1, family.MAX_WIDTH)
    return family.moe(config, router=router, shared=SharedExpert(size=size))


def _spec_fields(config: Fields) -> family.SpecFields:
    blocks = family.some_layers_moe(config, _experts(config))
    return {"layers": family.layers(config, _mixers(config), blocks)}


FAMILY = family.Family(
    architecture="FlintForCausalLM",
    model_type="flint",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=150144,
        hidden=2048,
        intermediate=6144,
        layers=49,
        heads=32,
        kv_heads=4,
        positions=262144,
        experts=256,
        top_k=6,
        expert_size=512,
    )
    | {
        "head_dim": 128,
        "mlp_only_layers": [0, 1],
        "shared_expert_intermediate_size": 1024,
        "sliding_window": 513,
    },
    names=Names(spelled={"self_attn.sinks": ("self_attn.softmax_offset",)}),
)
