"""Kimi-Linear: Kimi delta attention; every fourth layer has latent attention without position
encoding.

Source: arXiv 2510.26692.
"""

from moeserve.blocks.kda import KimiDelta
from moeserve.blocks.latent_attention import LatentAttention
from moeserve.blocks.weights import Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.mixtral import EXPERTS

FULL = "full_attention"
LINEAR = "linear_attention"
CONV = "linear_conv_kernel_dim"


def _mixers(config: Fields) -> list[LatentAttention | KimiDelta]:
    """Return the mixer of each layer.

    They are listed in `layer_types`, or else in two lists of layers, which are numbered from 1.
    """
    flat_keys = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": CONV,
    }
    defaults = {"full_attn_layers": None, "kda_layers": None} | {
        key: config.raw(name) for key, name in flat_keys.items()
    }
    linear_config = Fields(
        config.path, config.section("linear_attn_config"), defaults, prefix="linear_attn_config."
    )
    delta = KimiDelta(
        num_heads=linear_config.integer("num_heads", 1, family.MAX_HEADS),
        head_dim=linear_config.integer("head_dim", 1, family.MAX_HEADS),
        conv=linear_config.integer("short_conv_kernel_size", 2, family.MAX_CONV),
        decay_tensor=family.decay_tensor(config),
    )
    full = family.latent_attention(config, rotates=False)
    count = family.num_layers(config)
    default = [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]
    if (
        linear_config.raw("full_attn_layers") is not None
        and linear_config.raw("kda_layers") is not None
    ):
        listed = {
            key: linear_config.integers(key, 1, count) for key in ("full_attn_layers", "kda_layers")
        }
        if sorted([*listed["full_attn_layers"], *listed["kda_layers"]]) != list(
            range(1, count + 1)
        ):
            raise linear_config.error(
                "kda_layers", f"it and full_attn_layers must list each of layers 1 to {count} once"
            )
        default = [FULL if i + 1 in listed["full_attn_layers"] else LINEAR for i in range(count)]
    kinds = family.layer_types(config, known=(FULL, LINEAR), default=default)
    return [full if kind == FULL else delta for kind in kinds]


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(mla_use_nope=True, moe_layer_freq=1, moe_router_activation_func="sigmoid")
    shared = family.shared_experts(config, name="block_sparse_moe.shared_experts")
    experts = family.moe(config, router=family.deepseek_router(config), shared=shared)
    return {
        "layers": family.layers(
            config, _mixers(config), family.listed_moe(config, experts, family.dense(config))
        )
    }


FAMILY = family.Family(
    architecture="KimiLinearForCausalLM",
    model_type="kimi_linear",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=163840,
        hidden=2304,
        intermediate=9216,
        layers=27,
        heads=32,
        kv_heads=32,
        positions=1048576,
        experts=256,
        top_k=8,
        expert_size=1024,
    )
    | family.LATENT_DEFAULTS
    | {
        "eos_token_id": 163586,
        "linear_attn_config": None,
        CONV: 4,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.446,
    },
    names=Names(
        experts=EXPERTS,
        spelled={
            "mlp.gate.weight": ("block_sparse_moe.gate.weight",),
            "mlp.gate.e_score_correction_bias": ("block_sparse_moe.gate.e_score_correction_bias",),
            # Dense layers, as published and as transformers writes them
            **{
                f"mlp.{name}.weight": (f"mlp.{name}.weight", f"block_sparse_moe.{name}.weight")
                for name in ("gate_proj", "up_proj", "down_proj")
            },
        },
    ),
    aliases={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
)
