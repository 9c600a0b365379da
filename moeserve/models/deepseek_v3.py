"""DeepSeek-V3 (V3, V3.1, R1, Kimi-K2, Moonlight): latent attention, first layers dense, a shared expert, and a sigmoid
router with a bias per expert for the choice.

Source: arXiv 2412.19437, 2507.20534.
"""

from __future__ import annotations

from moeserve.blocks.feed_forward import MoE
from moeserve.loader.files import Fields
from moeserve.models import family


def experts_of(config: Fields) -> MoE:
    """Reads the experts, which V3.2 and GLM-5 share."""
    config.only(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    return family.moe(config, router=family.deepseek_router(config), shared=family.shared_experts(config))


def _fields(config: Fields) -> family.SpecFields:
    blocks = family.first_dense(config, experts_of(config), family.dense(config))
    return family.with_mtp(config, family.layers(config, family.latent_attention(config), blocks))


FAMILY = family.Family(
    "DeepseekV3ForCausalLM",
    ("deepseek_v3", "kimi_k2"),
    _fields,
    family.sizes(129280, 7168, 18432, 61, 128, 128, 4096, experts=256, top_k=8, expert_size=2048)
    | family.LATENT
    | {
        "eos_token_id": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "num_nextn_predict_layers": 1,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
)
KIMI_K25 = FAMILY.inside(
    "KimiK25ForConditionalGeneration",
    "kimi_k25",
    model="language_model.model.",
    head="language_model.lm_head.weight",
    foreign=("vision_tower.", "mm_projector."),
)
FAMILIES = (FAMILY, KIMI_K25)
