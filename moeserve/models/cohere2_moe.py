"""Command A+ (Cohere2-MoE): attention and experts run in parallel on the same normed input. Three
of four layers have a sliding window and a rotary embedding; the fourth has full attention without
position encoding.

Source: huggingface.co/CohereLabs/command-a-plus-05-2026.
"""

from dataclasses import replace

from moeserve.blocks.feed_forward import Dense
from moeserve.engine.kv_rule import KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.spec import NormSpec
from moeserve.ops.rules import RouterRule


def _spec_fields(config: Fields) -> family.SpecFields:
    count = family.num_layers(config)
    num_dense = config.integer("first_k_dense_replace", 0, count)
    # Every n-th layer has full attention, counted separately in the dense layers and the others.
    dense_interval = config.integer("prefix_dense_sliding_window_pattern", 1, family.MAX_LAYERS)
    interval = config.integer("sliding_window_pattern", 1, family.MAX_LAYERS)
    default = (
        family.alternating(config, every=dense_interval)[:num_dense]
        + family.alternating(config, every=interval)[: count - num_dense]
    )
    kinds = family.layer_types(config, default=default)
    averages = config.choice("shared_expert_combination_strategy", ("average", "sum")) == "average"
    size = config.integer("intermediate_size", 1, family.MAX_WIDTH)
    shared = family.shared_experts(config, key="num_shared_experts", size_key="intermediate_size")
    sigmoid = config.choice("expert_selection_fn", ("softmax", "sigmoid")) == "sigmoid"
    router = RouterRule(
        score="sigmoid" if sigmoid else "softmax_selected",
        renormalize=sigmoid and config.boolean("norm_topk_prob"),
        scale=0.5 if shared and averages else 1.0,
    )
    if shared and averages:  # the mean of routed and shared experts: both are halved
        shared = replace(shared, scale=0.5)
    experts = family.moe(config, size_key="intermediate_size", router=router, shared=shared)
    mlp = Dense(
        size=config.optional_integer("prefix_dense_intermediate_size", 1, family.MAX_WIDTH) or size
    )
    blocks = family.listed_moe(config, experts, mlp)
    with_rope = family.attention(
        config, rope={"interleaved": True}, **family.attention_bias(config)
    )
    sliding = replace(
        with_rope, rule=KVRule(window=config.integer("sliding_window", 1, family.MAX_POSITION))
    )
    mixers = []
    for kind, block in zip(kinds, blocks, strict=True):
        if kind == "sliding_attention":
            mixers.append(sliding)
        elif block is mlp and dense_interval == 1:
            mixers.append(with_rope)
        else:
            mixers.append(replace(with_rope, rope=None))
    centred = config.raw("rms_norm_eps") is None
    return {
        "layers": family.layers(config, mixers, blocks, parallel=True),
        "num_mtp_layers": family.mtp_layers(config),
        "norm": NormSpec(centred=centred),
        "norm_eps": config.number("layer_norm_eps" if centred else "rms_norm_eps", 0, 1.0),
        "logits_divisor": 1 / config.number("logit_scale", 0, 1e6),
    }


FAMILY = family.Family(
    architecture="Cohere2MoeForCausalLM",
    model_type="cohere2_moe",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=256000,
        hidden=8192,
        intermediate=22528,
        layers=40,
        heads=64,
        kv_heads=None,
        positions=8192,
        experts=8,
        top_k=2,
    )
    | {
        "eos_token_id": 255001,
        "expert_selection_fn": "softmax",
        "first_k_dense_replace": 0,
        "head_dim": 128,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "num_shared_experts": 0,
        "prefix_dense_intermediate_size": None,
        "prefix_dense_sliding_window_pattern": 1,
        "rms_norm_eps": None,
        "shared_expert_combination_strategy": "average",
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
    },
)
