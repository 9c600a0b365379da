"""Phi-3.5-MoE, Phi-mini-MoE, Phi-tiny-MoE: two experts per token, chosen by SparseMixer; layer
norms with biases; LongRoPE.

Source: arXiv 2409.12136, 2404.14219.
"""

from dataclasses import replace

from moeserve.blocks.weights import Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.mixtral import EXPERTS
from moeserve.models.spec import NormSpec
from moeserve.ops.rules import RouterRule


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(num_experts_per_tok=2)
    rule = family.same_window(config, family.sliding_window(config))
    mixer = family.attention(
        config, rule=rule, rope={"extra_kinds": ("longrope",)}, **family.attention_bias(config)
    )
    router = RouterRule(score="sparsemixer", jitter=config.number("router_jitter_noise", 0, 1.0))
    experts = family.moe(config, size_key="intermediate_size", router=router)
    return {
        "layers": family.layers(config, mixer, experts),
        "head_bias": config.boolean("lm_head_bias"),
        "norm": NormSpec(centred=True, bias=True),
    }


FAMILY = family.Family(
    architecture="PhimoeForCausalLM",
    model_type="phimoe",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=32064,
        hidden=4096,
        intermediate=6400,
        layers=32,
        heads=32,
        kv_heads=8,
        positions=131072,
        experts=16,
        top_k=2,
    )
    | {
        "eos_token_id": 2,
        "lm_head_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "router_jitter_noise": 0.01,
    },
    names=Names(
        experts=EXPERTS,
        spelled={"mlp.gate.weight": ("block_sparse_moe.gate.weight", "mlp.router.weight")},
    ),
)
PHI_MOE = replace(FAMILY, architecture="PhiMoEForCausalLM")
