"""Qwen3.8-Flash-Next."""

from collections.abc import Mapping
from typing import Any

from moeserve.errors import CheckpointError
from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import GGUFArchitecture, Shape, Variants
from moeserve.loader.gguf_architectures.qwen_next import OPTIONS, hybrid_config
from moeserve.loader.gguf_layers import FULL, depthwise, layer_values

_RATIOS = "attention.compress_ratios"  # tokens of an index group; 0 for layers without an indexer
_LAYERS = "ple.layers"  # the layers with n-gram embeddings, counted from 0
_TABLE = "per_layer_token_embd.weight"
_MAX_SIZE = 2**20
# GGUF key -> config.json key, of the constants of the hash, which transformers stores as tensors
_CONSTANTS = {
    "ple.layer_multipliers": "ple_layer_multipliers",
    "ple.head_vocab_sizes": "ple_head_vocab_sizes",
    "ple.head_offsets": "ple_head_offsets",
}


def _config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    config = hybrid_config(metadata, tensors)
    ratios = layer_values(metadata, _RATIOS)
    full = [kind == FULL for kind in config["layer_types"]]
    different = {ratio for ratio, is_full in zip(ratios, full, strict=True) if is_full}
    if len(different) != 1 or [bool(ratio) for ratio in ratios] != full:
        raise metadata.error(
            _RATIOS, "it must be the same number for all layers with full attention, 0 for others"
        )
    return config | {
        "indexer_compress_ratio": different.pop(),
        "linear_value_heads_tiled": True,
        "output_gate_type": "sigmoid",  # llama.cpp has no key for it
        **_embeddings(metadata, tensors),
    }


def _embeddings(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the keys of n-gram embeddings."""
    layers = metadata.values.get(_LAYERS) or []
    if not layers:
        return {}
    if len(layers) > 1:
        raise metadata.error(_LAYERS, "one layer is supported, because the file has one table")
    if _TABLE not in tensors:
        raise CheckpointError(f"{metadata.path}: tensor {_TABLE!r} is missing; download it again")
    rows, width = tensors[_TABLE]
    num_heads = metadata.integer("ple.heads_per_ngram", 1, _MAX_SIZE)
    num_heads *= metadata.integer("ple.ngram_size", 2, _MAX_SIZE) - 1
    return {
        "ple_layer_ids": [layers[0] + 1],
        "ple_embed_dim": width * num_heads,
        "ple_table_rows": rows,
        **{name: metadata.raw(key) for key, name in _CONSTANTS.items()},
    }


def _connection(begin: str, module: str) -> dict[str, str]:
    """Return the names of a gated residual's tensors. begin: of the GGUF names."""
    return {
        f"{begin}_norm": f"{module}.hc_norm",
        f"{begin}_down": f"{module}.input_mix_weight_down",
        f"{begin}_up": f"{module}.input_mix_weight_up",
        f"{begin}_inject": f"{module}.block_inject_weight",
    }


ARCHITECTURES: dict[str, Variants] = {
    "qwen4exp": {
        "": GGUFArchitecture(
            "Qwen4ExpForCausalLM",
            config=_config,
            keys={
                **OPTIONS["keys"],
                "attention.indexer.head_count": "indexer_n_heads",
                "attention.indexer.key_length": "indexer_head_dim",
                "attention.indexer.top_k": "indexer_budget",
                "hyper_connection.count": "hc_count",
                "hyper_connection.low_rank": "hc_lowrank",
                "ple.conv_kernel": "ple_conv_kernel_size",
                "ple.eos_token_id": "ple_eos_token_id",
                "ple.heads_per_ngram": "heads_per_ngram",
                "ple.ngram_size": "ngram_size",
            },
            defaults={"norm_topk_prob": True, "indexer_kv_heads": 1},
            required=(*OPTIONS["required"], _RATIOS, "attention.indexer.top_k"),
            shared=OPTIONS["shared"],
            other_keys=(
                *OPTIONS["other_keys"],
                *_CONSTANTS,
                _RATIOS,
                _LAYERS,
                "embedding_length_per_layer_input",
                "ple.image_token_id",
            ),
            names={
                **OPTIONS["names"],
                **_connection("hc_attn", "attn_hyper_connection"),
                **_connection("hc_ffn", "mlp_hyper_connection"),
                "indexer.k_norm": "self_attn.indexer.k_layernorm",
                "indexer.k_proj": "self_attn.indexer.index_k_proj",
                "indexer.q_norm": "self_attn.indexer.q_layernorm",
                "indexer.q_proj": "self_attn.indexer.index_q_proj",
                "ple_conv1d": "ple.conv1d",
                "ple_key": "ple.key_proj",
                "ple_norm_conv": "ple.norm_conv",
                "ple_norm_key": "ple.norm_key",
                "ple_norm_query": "ple.norm_query",
                "ple_value": "ple.value_proj",
            },
            global_names=_connection("output_hc", "model.hyper_connection_mixer"),
            exact_names=OPTIONS["exact_names"],
            shapes={"ssm_conv1d": depthwise, "ple_conv1d": depthwise},
        )
    }
}
