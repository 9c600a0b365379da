"""MiniMax-M2 (M2, M2.1, M2.5, M2.7): queries and keys are normed over all heads together, and a
sigmoid router adds a bias per expert for the choice.

Source: huggingface.co/MiniMaxAI/MiniMax-M2.
"""

from dataclasses import replace

from moeserve.blocks.weights import Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.mixtral import EXPERTS
from moeserve.ops.rules import RouterRule


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(
        scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True, qk_norm_type="per_layer"
    )
    config.only(shared_intermediate_size=0, attn_type_list=[1] * family.num_layers(config))
    rotated = config.optional_integer("rotary_dim", 2, 4096)
    if rotated is not None:
        factor = rotated / config.integer("head_dim", 2, 4096)
        config = replace(config, values={"partial_rotary_factor": factor, **config.values})
    mixer = family.attention(
        config, rule=family.no_window(config), rope={"partial": True}, qk_norm="full"
    )
    experts = family.moe(
        config,
        size_key="intermediate_size",
        router=RouterRule(score="sigmoid", bias=True, renormalize=True),
    )
    return {"layers": family.layers(config, mixer, experts)}


FAMILY = family.Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=200064,
        hidden=3072,
        intermediate=1536,
        layers=62,
        heads=48,
        kv_heads=8,
        positions=196608,
        experts=256,
        top_k=8,
    )
    | {"eos_token_id": 200020, "head_dim": 128, "rotary_dim": None, "rope_theta": 5_000_000.0},
    names=Names(
        experts=EXPERTS,
        spelled={
            "mlp.gate.weight": ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
            "mlp.gate.e_score_correction_bias": (
                "block_sparse_moe.e_score_correction_bias",
                "mlp.e_score_correction_bias",
            ),
        },
    ),
)
