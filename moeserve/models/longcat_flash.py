"""LongCat-Flash: each layer has two blocks of latent attention, each with a dense MLP. Experts read
the first MLP's input, and their output is added after the second MLP. Some experts, which return
their input, have no weights.

Source: arXiv 2509.01322, huggingface.co/meituan-longcat/LongCat-Flash-Chat.
"""

from dataclasses import replace

from moeserve.blocks.feed_forward import Dense, MoE
from moeserve.blocks.shortcut import Shortcut
from moeserve.blocks.weights import FUSED, PER_EXPERT, Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.spec import LayerSpec
from moeserve.ops.rules import RouterRule


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(
        router_bias=False,
        norm_topk_prob=False,
        zero_expert_type="identity",
        attention_method="MLA",
    )
    rope_dim = config.raw("qk_rope_head_dim")
    if config.raw("head_dim") != rope_dim:  # transformers' width of the rotary embedding
        raise config.error("head_dim", f"it must be qk_rope_head_dim ({rope_dim})")
    count = config.integer("num_layers", 1, family.MAX_LAYERS)
    mlp = family.dense(config)
    identities = config.optional_integer("zero_expert_num", 0, family.MAX_EXPERTS) or 0
    experts = family.moe(
        config,
        router=RouterRule(
            bias=True,
            scale=config.number("routed_scaling_factor", 0, family.MAX_MULTIPLIER),
            fp32=True,
        ),
        identities=identities,
        num_unused=identities,  # transformers writes tensors for them
        apart=replace(mlp, name="mlps.0"),
    )
    halves = (_half(config, 0, experts), _half(config, 1, replace(mlp, name="mlps.1")))
    layers = [replace(half, stored_as=(i, i)) for i in range(count) for half in halves]
    # After the last layer, the norm is that of the model.
    return {
        "layers": tuple(layers),
        "collapse": Shortcut(norm="norm.weight"),
        "has_final_norm": False,
    }


def _half(config: Fields, number: int, block: Dense | MoE) -> LayerSpec:
    """Read one of the two halves of a layer. number: 0 or 1. block: its feed-forward block."""
    width = config.integer("hidden_size", 1, family.MAX_WIDTH)
    mixer = family.latent_attention(config, module=f"self_attn.{number}.")
    if config.boolean("mla_scale_q_lora") and mixer.q_rank is not None:
        mixer = replace(mixer, q_factor=(width / mixer.q_rank) ** 0.5)
    if config.boolean("mla_scale_kv_lora"):
        mixer = replace(mixer, kv_factor=(width / mixer.rank) ** 0.5)
    return LayerSpec(
        mixer=mixer,
        feed_forward=block,
        pre_norm=False,
        attn_connection=Shortcut(norm=f"input_layernorm.{number}.weight"),
        mlp_connection=Shortcut(
            norm=f"post_attention_layernorm.{number}.weight",
            sets_aside=number == 0,
            adds_aside=number == 1,
        ),
    )


FAMILY = family.Family(
    architecture="LongcatFlashForCausalLM",
    model_type="longcat_flash",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=131072,
        hidden=6144,
        intermediate=12288,
        layers=28,
        heads=64,
        kv_heads=None,
        positions=131072,
        experts=512,
        top_k=12,
        expert_size=2048,
    )
    | family.LATENT_DEFAULTS
    | {
        "eos_token_id": 2,
        "head_dim": 64,
        "mla_scale_kv_lora": True,
        "mla_scale_q_lora": True,
        "num_layers": 28,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000_000.0,
        "routed_scaling_factor": 6.0,
        "zero_expert_num": 256,
    },
    names=Names(
        experts=(PER_EXPERT, FUSED),
        spelled={
            "mlp.gate.weight": ("mlp.router.classifier.weight",),
            "mlp.gate.e_score_correction_bias": ("mlp.router.e_score_correction_bias",),
        },
        foreign=("model.mtp.",),
    ),
    aliases={
        "expert_ffn_hidden_size": "moe_intermediate_size",
        "ffn_hidden_size": "intermediate_size",
        "moe_topk": "num_experts_per_tok",
    },
)
