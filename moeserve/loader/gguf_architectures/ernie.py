"""ERNIE-4.5."""

from collections.abc import Mapping
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import SHARED_SIZE, GGUFArchitecture, Shape, Variants


def _config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    metadata.only(expert_weights_norm=True, expert_weights_scale=1.0, expert_group_count=1)
    return {"use_bias": "blk.0.attn_q.bias" in tensors}


ARCHITECTURES: dict[str, Variants] = {
    "ernie4_5-moe": {
        "": GGUFArchitecture(
            "Ernie4_5_MoeForCausalLM",
            keys={
                "expert_shared_count": "moe_num_shared_experts",
                "interleave_moe_layer_step": "moe_layer_interval",
                "leading_dense_block_count": "moe_layer_start_index",
            },
            defaults={"moe_num_shared_experts": 0, "moe_layer_start_index": 0},
            required=("interleave_moe_layer_step",),
            config=_config,
            other_keys=(SHARED_SIZE,),  # not the size: converters divide unrelated numbers
            shapes={"exp_probs_b": lambda shape: shape[-1:]},
        )
    },
}
