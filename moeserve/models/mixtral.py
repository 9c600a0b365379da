"""Mixtral (8x7B, 8x22B): top-2 experts, with renormalized softmax weights. In checkpoints, w1 is
the gate projection, w3 the up projection and w2 the down projection.

Source: arXiv 2401.04088.
"""

from moeserve.blocks.weights import FUSED, Names, per_expert
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule

EXPERTS = (per_expert("block_sparse_moe.experts", gate="w1", up="w3", down="w2"), FUSED)


def _spec_fields(config: Fields) -> family.SpecFields:
    mixer = family.attention(config, rule=family.same_window(config, family.sliding_window(config)))
    experts = family.moe(config, size_key="intermediate_size", router=RouterRule(renormalize=True))
    return {"layers": family.layers(config, mixer, experts)}


FAMILY = family.Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=32000,
        hidden=4096,
        intermediate=14336,
        layers=32,
        heads=32,
        kv_heads=8,
        positions=131072,
        experts=8,
        top_k=2,
    )
    | {"eos_token_id": 2, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    names=Names(
        experts=EXPERTS,
        spelled={"mlp.gate.weight": ("block_sparse_moe.gate.weight", "mlp.gate.weight")},
    ),
)
