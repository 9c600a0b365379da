"""Mistral 4 (Mistral-Large-3, Mistral-Small-4): latent attention whose queries grow with the
position, a softmax router, a shared expert. Mistral-Small-4 is the text part of a multimodal
checkpoint.

Source: huggingface.co/mistralai/Mistral-Small-4-119B-2603.
"""

from dataclasses import replace

from moeserve.blocks.mixer import QueryScale
from moeserve.blocks.weights import FUSED, PER_EXPERT, Names, per_expert
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.rope_config import rope_fields

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _fields(config: Fields) -> family.SpecFields:
    router = replace(family.deepseek_router(config), score="softmax", bias=False, fp32=False)
    experts = family.moe(config, router=router, shared=family.shared_experts(config))
    blocks = family.first_dense(config, experts, family.dense(config))
    mixer = family.latent_attention(config)
    rope = rope_fields(config)
    if rope.values.get("llama_4_scaling_beta"):
        beta = rope.number("llama_4_scaling_beta", 0, family.MAX_MULTIPLIER)
        length = rope.integer("original_max_position_embeddings", 1, family.MAX_POSITION)
        mixer = replace(mixer, query_scale=QueryScale(beta, length))
    return {"layers": family.layers(config, mixer, blocks)}


def _text_fields(config: Fields) -> family.SpecFields:
    """Read the text part, which must be Mistral 4: others have the same outer class."""
    config.choice("model_type", ("mistral4",))
    return _fields(config)


FAMILY = family.Family(
    "Mistral4ForCausalLM",
    "mistral4",
    _fields,
    family.sizes(
        vocab=131072,
        hidden=4096,
        intermediate=12288,
        layers=36,
        heads=32,
        kv_heads=32,
        positions=1048576,
        experts=128,
        top_k=4,
        expert_size=2048,
    )
    | family.LATENT
    | {
        "eos_token_id": 2,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "rope_parameters": _ROPE,
    },
    Names(experts=(FUSED, PER_EXPERT)),
)
MULTIMODAL = replace(
    FAMILY.inside(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        model="language_model.model.",
        head="language_model.lm_head.weight",
        foreign=("vision_tower.", "multi_modal_projector."),
    ),
    fields=_text_fields,
    # A text part without a model type is Mistral 3, which `_text_fields` refuses.
    defaults=FAMILY.defaults | {"model_type": "mistral"},
)
_BLOCKS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "gate",
    **{
        f"self_attn.{ours}": f"attention.{theirs}"
        for ours, theirs in {
            "q_a_proj": "wq_a",
            "q_a_layernorm": "q_a_norm",
            "q_b_proj": "wq_b",
            "kv_a_proj_with_mqa": "wkv_a_with_mqa",
            "kv_a_layernorm": "kv_a_norm",
            "kv_b_proj": "wkv_b",
            "o_proj": "wo",
        }.items()
    },
    **{
        f"{ours}.{part}_proj": f"{theirs}.{number}"
        for ours, theirs in (("mlp", "feed_forward"), ("mlp.shared_experts", "shared_experts"))
        for part, number in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
    },
}
LARGE_3 = replace(
    FAMILY,
    architecture="MistralLarge3ForCausalLM",  # hf_config.py gives params.json this name
    names=Names(
        "",
        "output.weight",
        embed="tok_embeddings.weight",
        experts=(per_expert("experts", "w1", "w3", "w2"),),
        spelled={f"{ours}.weight": (f"{theirs}.weight",) for ours, theirs in _BLOCKS.items()},
        foreign=(
            "vision_encoder.",
            "vision_language_adapter.",
            "patch_merger.",
            "pre_mm_projector_norm.",
        ),
    ),
)
