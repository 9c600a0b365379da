"""gpt-oss (20b, 120b): a sliding window of 128 tokens in every second layer, a learned attention
sink per head, biases in all projections, and experts with interleaved gate and up rows.

Source: arXiv 2508.10925.
"""

from dataclasses import replace

from moeserve.blocks.weights import FUSED, Names
from moeserve.engine.kv_rule import KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import Activation, RouterRule

_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _spec_fields(config: Fields) -> family.SpecFields:
    full = family.attention(config, sinks=True, **family.attention_bias(config))
    sliding = replace(
        full, rule=KVRule(window=config.integer("sliding_window", 1, family.MAX_POSITION))
    )
    kinds = family.layer_types(config, default=family.alternating(config, every=2))
    activation = Activation(
        alpha=config.number("swiglu_alpha", 0, 100.0),
        limit=config.number("swiglu_limit", 0, 1e6),
        up_shift=1.0,
    )
    router = RouterRule(score="softmax_selected")
    experts = family.moe(
        config,
        size_key="intermediate_size",
        router=router,
        activation=activation,
        bias=True,
        router_bias=True,
    )
    mixers = [sliding if kind == "sliding_attention" else full for kind in kinds]
    return {"layers": family.layers(config, mixers, experts)}


FAMILY = family.Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=201088,
        hidden=2880,
        intermediate=2880,
        layers=36,
        heads=64,
        kv_heads=8,
        positions=131072,
        experts=128,
        top_k=4,
    )
    | {
        "attention_bias": True,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _ROPE,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    names=Names(
        experts=(replace(FUSED, transposed=True, by_turns=True),),
        spelled={"mlp.gate.weight": ("mlp.router.weight",), "mlp.gate.bias": ("mlp.router.bias",)},
    ),
)
