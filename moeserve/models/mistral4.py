"""Mistral 4 (Mistral-Large-3, Mistral-Small-4): latent attention with a scale of queries that grows
with the position, a softmax router, and a shared expert.

Three formats are supported: transformers' (FAMILY), a multimodal model whose text model is Mistral
4 (MULTIMODAL: Mistral-Small-4), and Mistral's own params.json (LARGE_3).

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


def _spec_fields(config: Fields) -> family.SpecFields:
    router = replace(family.deepseek_router(config), score="softmax", bias=False, fp32=False)
    experts = family.moe(config, router=router, shared=family.shared_experts(config))
    blocks = family.first_dense(config, experts, family.dense(config))
    mixer = family.latent_attention(config)
    rope = rope_fields(config)
    if rope.values.get("llama_4_scaling_beta"):
        query_scale = QueryScale(
            slope=rope.number("llama_4_scaling_beta", 0, family.MAX_MULTIPLIER),
            every=rope.integer("original_max_position_embeddings", 1, family.MAX_POSITION),
        )
        mixer = replace(mixer, query_scale=query_scale)
    return {"layers": family.layers(config, mixer, blocks)}


def _text_fields(config: Fields) -> family.SpecFields:
    """Read the text model, which must be Mistral 4: Mistral 3 has the same multimodal class."""
    config.choice("model_type", ("mistral4",))
    return _spec_fields(config)


FAMILY = family.Family(
    architecture="Mistral4ForCausalLM",
    model_type="mistral4",
    fields=_spec_fields,
    defaults=family.sizes(
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
    | family.LATENT_DEFAULTS
    | {
        "eos_token_id": 2,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "rope_parameters": _ROPE,
    },
    names=Names(experts=(FUSED, PER_EXPERT)),
)
MULTIMODAL = replace(
    FAMILY.inside(
        architecture="Mistral3ForConditionalGeneration",
        model_type="mistral3",
        model="language_model.model.",
        head="language_model.lm_head.weight",
        foreign=("vision_tower.", "multi_modal_projector."),
    ),
    fields=_text_fields,
    # A text model without a model type is Mistral 3, which `_text_fields` rejects.
    defaults=FAMILY.defaults | {"model_type": "mistral"},
)

# A layer's tensors: name in transformers -> name in Mistral's own checkpoints.
MISTRAL_NAMES = {
    "input_layernorm": "attention_norm",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.gate": "gate",
    "mlp.shared_experts.gate_proj": "shared_experts.w1",
    "mlp.shared_experts.down_proj": "shared_experts.w2",
    "mlp.shared_experts.up_proj": "shared_experts.w3",
}
LARGE_3 = replace(
    FAMILY,
    architecture="MistralLarge3ForCausalLM",  # set by hf_config.py; params.json has none
    names=Names(
        model="",
        head="output.weight",
        embed="tok_embeddings.weight",
        experts=(per_expert("experts", gate="w1", up="w3", down="w2"),),
        spelled={
            f"{name}.weight": (f"{mistral_name}.weight",)
            for name, mistral_name in MISTRAL_NAMES.items()
        },
        foreign=(
            "vision_encoder.",
            "vision_language_adapter.",
            "patch_merger.",
            "pre_mm_projector_norm.",
        ),
    ),
)
