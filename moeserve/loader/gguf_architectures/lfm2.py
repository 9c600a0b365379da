"""LFM2-MoE."""

from collections.abc import Mapping
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import SIGMOID, GGUFArchitecture, Shape, Variants
from moeserve.loader.gguf_layers import FULL, depthwise, recurrent_layers

_LENGTH = "shortconv.l_cache"  # inputs of a convolution


def _config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    layers = recurrent_layers(metadata)
    return layers | {
        "layer_types": [kind if kind == FULL else "conv" for kind in layers["layer_types"]],
        "use_expert_bias": any(".exp_probs_b" in name for name in tensors),
    }


ARCHITECTURES: dict[str, Variants] = {
    "lfm2moe": {
        "": GGUFArchitecture(
            "Lfm2MoeForCausalLM",
            keys={_LENGTH: "conv_L_cache", "leading_dense_block_count": "num_dense_layers"},
            defaults={"norm_topk_prob": True, "num_dense_layers": 0},
            required=("attention.head_count_kv", "rope.freq_base", _LENGTH),
            gating=SIGMOID,
            config=_config,
            per_layer=("attention.head_count_kv",),
            names={
                "shortconv.conv": "conv.conv",
                "shortconv.in_proj": "conv.in_proj",
                "shortconv.out_proj": "conv.out_proj",
            },
            global_names={
                "output_norm": "model.embedding_norm",
                "token_embd_norm": "model.embedding_norm",
            },
            shapes={"shortconv.conv": depthwise},
        )
    },
}
