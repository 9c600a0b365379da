"""A.X-K1: DeepSeek-V3 with a norm of what the experts give.

Source: huggingface.co/skt/A.X-K1.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.blocks.feed_forward import MoE
from moeserve.blocks.weights import Names
from moeserve.loader.files import Fields
from moeserve.models import family


def _fields(config: Fields) -> family.SpecFields:
    experts = family.moe(config, router=family.deepseek_router(config), shared=family.shared_experts(config))
    blocks = family.listed_moe(config, experts, family.dense(config), None)
    layers = family.layers(config, family.latent_attention(config), blocks)
    return {"layers": tuple(replace(layer, mlp_post_norm=isinstance(layer.feed_forward, MoE)) for layer in layers)}


FAMILY = family.Family(
    "AXK1ForCausalLM",
    "axk1",
    _fields,
    family.sizes(163840, 7168, 18432, 61, 64, 64, 32768, experts=192, top_k=8, expert_size=2048)
    | family.LATENT
    | {"eos_token_id": 163691, "n_group": 8, "routed_scaling_factor": 2.5, "topk_group": 4},
    Names(spelled={"mlp_post_norm.weight": ("post_mlp_layernorm.weight",)}),
)
