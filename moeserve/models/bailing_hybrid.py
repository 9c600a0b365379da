"""Ling 3.0: Kimi delta attention with bounded decays; the last layer of each group of layers has
latent attention whose results are multiplied by a gate per head. Ling 2.0's router.

Source: huggingface.co/inclusionAI/Ling-3.0-Flash.
"""

from dataclasses import replace

from moeserve.blocks.kda import KimiDelta
from moeserve.blocks.latent_attention import LatentAttention
from moeserve.blocks.weights import MTPNames, Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.bailing_moe import LING_2, LING_2_5

FULL = "full_attention"
LINEAR = "linear_attention"


def _delta(config: Fields) -> KimiDelta:
    config.only(no_kda_lora=True)
    heads = "linear_num_heads" if "linear_num_heads" in config.values else "num_attention_heads"
    width = "linear_head_dim" if "linear_head_dim" in config.values else "head_dim"
    bounded = config.boolean("kda_safe_gate")
    return KimiDelta(
        num_heads=config.integer(heads, 1, family.MAX_HEADS),
        head_dim=config.integer(width, 1, family.MAX_HEADS),
        conv=config.integer("short_conv_kernel_size", 2, family.MAX_CONV),
        decay_tensor=family.decay_tensor(config),
        low_rank=False,
        lower_bound=config.number("kda_lower_bound", -family.MAX_DECAY, 0) if bounded else None,
        flat_decay=True,
    )


def _latent(config: Fields) -> LatentAttention:
    config.only(
        attention_bias=False,
        gated_attention_proj_granularity_type="head_wise",
        rope_interleave=True,
        use_mla_nope=False,
    )
    return family.latent_attention(config, gate="head")


def _layer_types(config: Fields) -> list[str]:
    group = config.integer("layer_group_size", 1, family.MAX_LAYERS)
    count = family.num_layers(config)
    if count % group and config.raw("layer_types") is None:
        raise config.error(
            "layer_group_size",
            f"it must divide num_hidden_layers ({count}), or layer_types must list the layers",
        )
    default = [LINEAR if (i + 1) % group else FULL for i in range(count)]
    return family.layer_types(config, known=(FULL, LINEAR), default=default)


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(
        moe_router_enable_expert_bias=True,
        moe_shared_expert_intermediate_size=config.raw("moe_intermediate_size"),
        multi_gate=False,
        router_type="topN",
        score_function="sigmoid",
        use_bias=False,
        use_qkv_bias=False,
    )
    for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        limits = config.values.get(key) or ()
        if not isinstance(limits, list | tuple) or any(limits):
            raise config.error(key, "limits of activations are not supported for this family")
    full = _latent(config)
    delta = _delta(config)
    mixers = [full if kind == FULL else delta for kind in _layer_types(config)]
    shared = family.shared_experts(config, key="num_shared_experts")
    experts = family.moe(config, router=family.deepseek_router(config), shared=shared)
    blocks = family.listed_moe(config, experts, family.dense(config))
    layers = family.layers(config, mixers, blocks)
    return family.with_mtp(config, layers, mixer=full, feed_forward=experts)


FAMILY = family.Family(
    architecture="BailingHybridForCausalLM",
    model_type="bailing_hybrid",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=157184,
        hidden=2560,
        intermediate=6144,
        layers=42,
        heads=32,
        kv_heads=32,
        positions=262144,
        experts=512,
        top_k=8,
        expert_size=768,
    )
    | family.LATENT_DEFAULTS
    | {
        "eos_token_id": 156895,
        "first_k_dense_replace": 2,
        "head_dim": 128,
        "kda_lower_bound": -5.0,
        "kda_safe_gate": True,
        "layer_group_size": 6,
        "n_group": 8,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": None,
        "rope_theta": 6_000_000.0,
        "routed_scaling_factor": 2.5,
        "short_conv_kernel_size": 4,
        "topk_group": 4,
    },
    names=Names(
        embed=LING_2.names.embed,
        spelled={
            **{
                name: spellings
                for name, spellings in LING_2_5.names.spelled.items()
                if "query_key_value" not in spellings[0]
            },
            **{
                f"self_attn.{name}": (f"attention.{name}",)
                for name in (
                    *(f"{x}_proj.weight" for x in "qkvbfg"),
                    *(f"{x}_conv1d.weight" for x in "qkv"),
                    "A_log",
                    "dt_bias",
                    "o_norm.weight",
                )
            },
            "self_attn.o_proj.weight": ("attention.dense.weight", "attention.o_proj.weight"),
            "self_attn.gate_proj.weight": ("attention.g_proj.weight", "self_attn.g_proj.weight"),
        },
        mtp=MTPNames(norm="final_layernorm"),
    ),
    aliases={
        "linear_conv_kernel_dim": "short_conv_kernel_size",
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
    },
)
V3 = replace(FAMILY, architecture="BailingMoeV3ForCausalLM")
