"""Mistral Large 4: latent attention with index heads, and a softmax router. Some layers have no
position encoding. Layers share latents of earlier layers and selections of tokens.

Source: huggingface.co/mistralai/Mistral-Large-4-1T-A52B.
"""

from dataclasses import replace

from moeserve.blocks.shared_latent_attention import SharedLatentAttention
from moeserve.blocks.weights import FUSED, PER_EXPERT, Names, per_expert
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.deepseek_v32 import indexer_types
from moeserve.models.mistral4 import MISTRAL_NAMES
from moeserve.models.rope_config import read_rope, rope_fields, temperature
from moeserve.ops.rules import RouterRule


def _spec_fields(config: Fields) -> family.SpecFields:
    count = family.num_layers(config)
    family.layer_types(config, known=("indexed_attention",), default=["indexed_attention"] * count)
    rotates = _rotates(config, count)
    sources = _latent_sources(config, rotates)
    kinds = indexer_types(config)
    mixer = _attention(config)
    mixers = [
        replace(
            mixer,
            rotates=rotates[i],
            owns_latents=sources[i] == i,
            shares_latents=i in sources[i + 1 :],
            selects=kinds[i] == "full",
        )
        for i in range(count)
    ]
    router = RouterRule(
        score="softmax",
        groups=config.integer("n_group", 1, family.MAX_EXPERTS),
        kept_groups=config.integer("topk_group", 1, family.MAX_EXPERTS),
        renormalize=True,
        epsilon=1e-20,
        scale=config.number("routed_scaling_factor", 0, family.MAX_MULTIPLIER),
        fp32=True,
    )
    experts = family.moe(config, router=router, shared=family.shared_experts(config))
    blocks = family.listed_moe(config, experts, family.dense(config))
    return {
        "layers": family.layers(config, mixers, blocks),
        "logits_cap": config.number("final_logit_softcapping", 0, 1e6),
    }


def _attention(config: Fields) -> SharedLatentAttention:
    """Read the attention of a layer that rotates, owns its latents and selects tokens."""
    nope_dim = config.integer("qk_nope_head_dim", 2, family.MAX_HEADS)
    rotated = config.integer("qk_rope_head_dim", 2, family.MAX_HEADS)
    if rotated % 2:
        raise config.error("qk_rope_head_dim", "it must be even for the rotary embedding")
    scaling = rope_fields(config)
    mscale = 1.0
    if scaling.raw("rope_type") != "default" and scaling.raw("mscale_all_dim"):
        mscale = temperature(
            scaling.number("factor", 1.0, 1e6), scaling.number("mscale_all_dim", 0, 100.0)
        )
    return SharedLatentAttention(
        num_heads=config.integer("num_attention_heads", 1, family.MAX_HEADS),
        key_dim=nope_dim + rotated,
        rotated=rotated,
        v_dim=config.integer("v_head_dim", 1, family.MAX_HEADS),
        rank=config.integer("kv_lora_rank", 1, family.MAX_WIDTH),
        rope=read_rope(config, rotated, partial=None, interleaved=True),
        bias=config.boolean("attention_bias"),
        scale=(nope_dim + rotated) ** -0.5 * mscale**2,
        index_heads=config.integer("index_n_heads", 1, family.MAX_HEADS),
        index_dim=config.integer("index_head_dim", rotated, family.MAX_HEADS),
        top_k=config.integer("index_topk", 1, family.MAX_POSITION),
    )


def _rotates(config: Fields, count: int) -> list[bool]:
    """Read which layers have a rotary embedding; by default, every fourth has none."""
    flags = config.integers("no_rope_layers", 0, 1)
    if not flags:
        interval = config.integer("no_rope_layer_interval", 1, family.MAX_LAYERS)
        return [(i + 1) % interval != 0 for i in range(count)]
    if len(flags) < count:
        raise config.error("no_rope_layers", f"it must list 0 or 1 for each of {count} layers")
    return [flag == 1 for flag in flags[:count]]


def _latent_sources(config: Fields, rotates: list[bool]) -> tuple[int, ...]:
    """Read the layer whose latents each layer attends to: itself, or an earlier one."""
    key = "kv_source_layers"
    count = len(rotates)
    sources = config.integers(key, 0, count - 1) or tuple(range(count))
    if len(sources) != count:
        raise config.error(key, f"it must list a layer for each of {count} layers")
    nearest: dict[bool, int] = {}
    for i, source in enumerate(sources):
        if source == i:
            if i in sources[i + 1 :]:
                nearest[rotates[i]] = i
        elif nearest.get(rotates[i]) != source:
            raise config.error(
                key,
                f"layer {i} must use the latents of the nearest earlier layer that shares latents "
                f"and that has a rotary embedding if layer {i} has one",
            )
    return sources


_OTHER_NAMES = {
    "self_attn.q_proj.weight": "attention.wq.weight",
    "self_attn.softmax_scaling.scale": "attention.ssmax_scaling.s",
    "self_attn.softmax_scaling.bias": "attention.ssmax_scaling.b",
    "self_attn.indexer.softmax_scaling.scale": "attention.indexer.ssmax_scaling.s",
    "self_attn.indexer.softmax_scaling.bias": "attention.indexer.ssmax_scaling.b",
    **{
        f"self_attn.indexer.{name}": f"attention.indexer.{name}"
        for name in (
            "k_norm.bias",
            "k_norm.weight",
            "q_input_norm.bias",
            "q_input_norm.weight",
            "weights_proj.weight",
            "wk.weight",
            "wq_b.weight",
        )
    },
    "rotary_emb.alpha": "lerope.alpha",
}
FAMILY = family.Family(
    architecture="MistralLarge4ForConditionalGeneration",
    model_type="mistral_large4",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=204800,
        hidden=6144,
        intermediate=24576,
        layers=72,
        heads=64,
        kv_heads=64,
        positions=1048576,
        experts=128,
        top_k=4,
        expert_size=6144,
    )
    | {
        "eos_token_id": 2,
        "final_logit_softcapping": 30.0,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_skip_topk_offset": 2,
        "index_topk": 2048,
        "index_topk_freq": 1,
        "index_topk_pattern": None,
        "indexer_types": None,
        "kv_lora_rank": 512,
        "kv_source_layers": None,
        "no_rope_layer_interval": 4,
        "no_rope_layers": None,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 2048.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.0,
        },
        "v_head_dim": 128,
    },
    names=Names(
        model="",
        head="output.weight",
        embed="tok_embeddings.weight",
        experts=(per_expert("experts", gate="w1", up="w3", down="w2"), FUSED, PER_EXPERT),
        spelled={
            **{
                f"{name}.weight": (f"{published}.weight",)
                for name, published in MISTRAL_NAMES.items()
            },
            **{name: (published,) for name, published in _OTHER_NAMES.items()},
        },
        foreign=(
            "mtp_dspark.",
            "patch_merger.",
            "pre_mm_projector_norm.",
            "vision_encoder.",
            "vision_language_adapter.",
        ),
    ),
    text="text_config",
)
