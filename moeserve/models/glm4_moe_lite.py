"""GLM-4.7-Flash: DeepSeek-V3's blocks in a small model.

Source: github.com/zai-org/GLM-4.5.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family


def _fields(config: Fields) -> family.SpecFields:
    experts = family.moe(config, router=family.deepseek_router(config), shared=family.shared_experts(config))
    blocks = family.listed_moe(config, experts, family.dense(config))
    return family.with_mtp(config, family.layers(config, family.latent_attention(config), blocks))


FAMILY = family.Family(
    "Glm4MoeLiteForCausalLM",
    "glm4_moe_lite",
    _fields,
    family.sizes(154880, 2048, 10240, 47, 20, 20, 202752, experts=64, top_k=4, expert_size=1536)
    | family.LATENT
    | {
        "eos_token_id": 1,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
        "v_head_dim": 256,
    },
)
