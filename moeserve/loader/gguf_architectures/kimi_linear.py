"""Kimi-Linear."""

from collections.abc import Mapping
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import SIGMOID, GGUFArchitecture, Shape, Variants
from moeserve.loader.gguf_layers import recurrent_layers


def _config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    heads = metadata.raw("attention.head_count")
    return {
        "decays_exponentiated": True,
        "layer_types": recurrent_layers(metadata)["layer_types"],
        "linear_num_heads": heads,
        "num_key_value_heads": heads,
    }


def _conv_shape(shape: Shape) -> Shape:
    """[1, channels, 1, inputs], or without the first dimension -> [channels, 1, inputs]."""
    return shape[1:] if len(shape) == 4 else shape


def _decay_shape(shape: Shape) -> Shape:
    """[1, 1, heads, 1], or [heads, 1] -> [1, 1, heads, 1]."""
    return (1,) * (4 - len(shape)) + shape


ARCHITECTURES: dict[str, Variants] = {
    "kimi-linear": {
        "": GGUFArchitecture(
            "KimiLinearForCausalLM",
            keys={"kda.head_dim": "linear_head_dim", "ssm.conv_kernel": "linear_conv_kernel_dim"},
            defaults={"norm_topk_prob": True},
            required=("attention.head_count_kv", "kda.head_dim", "ssm.conv_kernel"),
            gating=SIGMOID,
            shared="block_sparse_moe.shared_experts",
            config=_config,
            per_layer=("attention.head_count_kv",),
            names={
                **{f"ssm_conv1d_{x}": f"self_attn.{x}_conv1d" for x in "qkv"},
                **{f"ssm_{x}": f"self_attn.{x}_proj" for x in ("f_a", "f_b", "g_a", "g_b")},
                "ssm_beta": "self_attn.b_proj",
                "ssm_norm": "self_attn.o_norm",
            },
            exact_names={"ssm_a": "self_attn.A", "ssm_dt.bias": "self_attn.dt_bias"},
            shapes={
                **{f"ssm_conv1d_{x}": _conv_shape for x in "qkv"},
                "ssm_a": _decay_shape,
            },
        )
    },
}
