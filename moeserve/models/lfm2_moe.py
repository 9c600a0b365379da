"""LFM2-MoE: short convolutions, attention in some layers, dense first layers, and a sigmoid router.

Source: LFM2 Technical Report (arXiv 2511.23404).
"""

from moeserve.blocks.short_conv import ShortConv
from moeserve.blocks.weights import ExpertNames, Names, per_expert
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule

_KINDS = ("conv", "full_attention")
_SWIGLU = {"gate": "w1", "up": "w3", "down": "w2"}  # Llama's name of a projection -> LFM2's


def _spec_fields(config: Fields) -> family.SpecFields:
    attention = family.attention(config, qk_norm="head")
    conv = ShortConv(
        channels=config.integer("hidden_size", 1, family.MAX_WIDTH),
        conv=config.integer("conv_L_cache", 2, family.MAX_CONV),
        bias=config.boolean("conv_bias"),
    )
    mixers = [
        attention if kind == "full_attention" else conv
        for kind in family.layer_types(config, known=_KINDS)
    ]
    router = RouterRule(
        score="sigmoid",
        bias=config.boolean("use_expert_bias"),
        renormalize=config.boolean("norm_topk_prob"),
        epsilon=1e-6,
        scale=config.number("routed_scaling_factor", 0, family.MAX_MULTIPLIER),
    )
    blocks = family.first_dense(
        config, family.moe(config, router=router), family.dense(config), key="num_dense_layers"
    )
    return {"layers": family.layers(config, mixers, blocks)}


FAMILY = family.Family(
    architecture="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=65536,
        hidden=2048,
        intermediate=7168,
        layers=32,
        heads=32,
        kv_heads=8,
        positions=128000,
        experts=32,
        top_k=4,
        expert_size=1792,
    )
    | {
        "conv_L_cache": 3,
        "conv_bias": False,
        "eos_token_id": 2,
        "num_dense_layers": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "use_expert_bias": True,
    },
    names=Names(
        norm="embedding_norm.weight",
        experts=(
            per_expert("feed_forward.experts", gate="w1", up="w3", down="w2"),
            ExpertNames(
                gate_up="feed_forward.experts.gate_up_proj", down="feed_forward.experts.down_proj"
            ),
        ),
        spelled={
            "input_layernorm.weight": ("operator_norm.weight",),
            "post_attention_layernorm.weight": ("ffn_norm.weight",),
            "self_attn.q_norm.weight": ("self_attn.q_layernorm.weight",),
            "self_attn.k_norm.weight": ("self_attn.k_layernorm.weight",),
            "self_attn.o_proj.weight": ("self_attn.out_proj.weight",),
            "mlp.gate.weight": ("feed_forward.gate.weight",),
            "mlp.gate.e_score_correction_bias": ("feed_forward.expert_bias",),
            **{f"mlp.{x}_proj.weight": (f"feed_forward.{y}.weight",) for x, y in _SWIGLU.items()},
        },
    ),
    aliases={"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"},
)
