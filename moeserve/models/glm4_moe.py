"""GLM-4.5, 4.6 and 4.7: DeepSeek-V3's experts with grouped-query attention, whose rotary embedding
covers half of each head.

Of GLM-4.5V and 4.6V, only the text model is supported, for which the three axes of its rotary
embedding are the same.

Source: arXiv 2508.06471, 2507.01006.
"""

from dataclasses import replace

from moeserve.loader.fields import Fields
from moeserve.models import family


def _spec_fields(config: Fields) -> family.SpecFields:
    mixer = family.attention(
        config,
        rule=family.no_window(config),
        rope={"partial": True},
        qkv_bias=config.boolean("attention_bias"),
        qk_norm="head" if config.boolean("use_qk_norm") else "none",
    )
    experts = family.moe(
        config, router=family.deepseek_router(config), shared=family.shared_experts(config)
    )
    blocks = family.first_dense(config, experts, family.dense(config))
    return family.with_mtp(config, family.layers(config, mixer, blocks))


def _glm4v_moe(config: Fields) -> family.SpecFields:
    """Return the fields of GLM-4.5V. Layers for multi-token prediction are not loaded."""
    config.only(use_qk_norm=False)
    return _spec_fields(config) | {"mtp": None}


FAMILY = family.Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=151552,
        hidden=4096,
        intermediate=10944,
        layers=46,
        heads=96,
        kv_heads=8,
        positions=131072,
        experts=128,
        top_k=8,
        expert_size=1408,
    )
    | {
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "use_qk_norm": False,
    },
)
VISION = replace(
    FAMILY.inside(
        architecture="Glm4vMoeForConditionalGeneration",
        model_type="glm4v_moe",
        model="model.language_model.",
        foreign=("model.visual.",),
    ),
    fields=_glm4v_moe,
    defaults=FAMILY.defaults
    | {
        "attention_bias": True,
        "max_position_embeddings": 65536,
        "num_nextn_predict_layers": 0,
        "vocab_size": 151424,
    },
)
