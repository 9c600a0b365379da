"""Qwen3.5-MoE, the text part: Qwen3-Next's layers, with a tensor per part of the gated delta nets' inputs.

Vision is not loaded. The three axes of its rotary embedding are one for text.
"""

from __future__ import annotations

from moeserve.blocks.weights import QWEN_MTP, Names
from moeserve.loader.files import Fields
from moeserve.models import family
from moeserve.models.qwen2_moe import experts
from moeserve.models.qwen3_next import SIZES, full_attention, mixers
from moeserve.models.spec import LayerSpec, NormSpec


def _fields(config: Fields) -> family.SpecFields:
    layers = mixers(config, by_head=False)
    block = experts(config, renormalize=True)
    has_mtp = family.mtp_layers(config, "mtp_num_hidden_layers")
    return {
        "layers": family.layers(config, layers, block),
        "norm": NormSpec(shift=1.0),
        "mtp": LayerSpec(mixer=full_attention(config), feed_forward=block) if has_mtp else None,
    }


FAMILY = family.Family(
    "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe",
    _fields,
    family.sizes(248320, 2048, 512, 40, 16, 2, 32768, experts=256, top_k=8, expert_size=512)
    | SIZES
    | {"mtp_num_hidden_layers": 0},
    Names("model.language_model.", foreign=("model.visual.", "mtp."), mtp=QWEN_MTP),
    text="text_config",
)
