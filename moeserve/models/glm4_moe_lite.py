"""GLM-4.7-Flash: DeepSeek-V3's blocks in a small model.

Source: github.com/zai-org/GLM-4.5.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import family
from moeserve.models.spec import layer_specs


def _fields(config: Fields) -> family.SpecFields:
    experts = family.moe(config, router=family.deepseek_router(config), shared=family.shared_experts(config))
    blocks = family.listed_moe(config, experts, family.dense(config))
    return {
        "layers": layer_specs([family.latent_attention(config)] * len(blocks), blocks),
        "num_mtp_layers": family.mtp_layers(config),
    }


FAMILY = family.Family(
    "Glm4MoeLiteForCausalLM",
    "glm4_moe_lite",
    _fields,
    family.sizes(154880, 2048, 10240, 47, 20, 20, 202752)
    | family.LATENT
    | {
        "eos_token_id": 1,
        "mlp_layer_types": None,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "v_head_dim": 256,
    },
)
