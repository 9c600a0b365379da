"""Sarvam-30B: GLM-4.5's blocks, with a rotary embedding of whole heads and Ling's names of tensors.

Sarvam-105B: DeepSeek-V3's blocks. transformers computes both with the classes of GLM-4.5 and
DeepSeek-V3, and names these in the checkpoints that it saves. Layers for multi-token prediction,
which published checkpoints lack, are not loaded.

Source: huggingface.co/sarvamai/sarvam-30b, huggingface.co/sarvamai/sarvam-105b.
"""

from dataclasses import replace

from moeserve.loader.fields import Fields
from moeserve.models import deepseek_v3, family, glm4_moe
from moeserve.models.bailing_moe import LING_2

_ALIASES = {
    "num_mtp_layers": "num_nextn_predict_layers",
    "num_shared_experts": "n_shared_experts",
    "use_qkv_bias": "attention_bias",
}


def _only_known(config: Fields) -> None:
    config.only(
        moe_router_enable_expert_bias=True,
        moe_router_enable_routed_scaling=True,
        moe_router_enable_shared_expert=True,
        moe_shared_expert_intermediate_size=config.raw("moe_intermediate_size"),
        router_dtype="fp32",
        score_function="sigmoid",
        use_bias=False,
    )


def _sarvam_moe(config: Fields) -> family.SpecFields:
    _only_known(config)
    return glm4_moe.FAMILY.fields(config) | {"mtp": None}


def _sarvam_mla(config: Fields) -> family.SpecFields:
    _only_known(config)
    values = dict(config.values)
    scaling = config.section("rope_scaling")
    for key in ("type", "rope_type"):
        if scaling.get(key) == "deepseek_yarn":  # YaRN, as in DeepSeek-V3
            values["rope_scaling"] = scaling = scaling | {key: "yarn"}
    return deepseek_v3.FAMILY.fields(replace(config, values=values)) | {"mtp": None}


MOE = family.Family(
    architecture="SarvamMoEForCausalLM",
    model_type="sarvam_moe",
    saved_as="Glm4MoeForCausalLM",
    fields=_sarvam_moe,
    defaults=family.sizes(
        vocab=262144,
        hidden=4096,
        intermediate=8192,
        layers=19,
        heads=64,
        kv_heads=4,
        positions=131072,
        experts=128,
        top_k=6,
        expert_size=1024,
    )
    | {
        "eos_token_id": 1,
        "head_dim": 64,
        "partial_rotary_factor": 1.0,
        "rope_theta": 8_000_000.0,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    },
    names=LING_2.names,
    aliases=_ALIASES,
)
MLA = family.Family(
    architecture="SarvamMLAForCausalLM",
    model_type="sarvam_mla",
    saved_as="DeepseekV3ForCausalLM",
    fields=_sarvam_mla,
    defaults=family.sizes(
        vocab=262144,
        hidden=4096,
        intermediate=16384,
        layers=32,
        heads=64,
        kv_heads=None,
        positions=4096,
        experts=128,
        top_k=8,
        expert_size=2048,
    )
    | family.LATENT_DEFAULTS
    | {"eos_token_id": 1, "q_lora_rank": None, "routed_scaling_factor": 2.5},
    aliases=_ALIASES,
)
