"""Qwen3.8-Flash-Next (Qwen4-Exp): the layers of Qwen3.5-MoE with three additions.

- Several residual streams with gated residuals replace every norm of the residual stream.
- Attention reads the best groups of four tokens (QSA).
- Some layers begin with n-gram embeddings (PLE), whose tables stay in the checkpoint's files.

Norm weights are stored minus 1. Only the text model is supported, for which the three axes of the
rotary embedding are the same.
"""

import functools
import math
from dataclasses import fields, replace
from typing import Any, Literal

from moeserve.blocks.attention import Attention
from moeserve.blocks.gated_residual import AllStreams, GatedResidual
from moeserve.blocks.group_indexer import GroupIndexedAttention, GroupIndexer
from moeserve.blocks.ngram_embedding import NgramEmbedding
from moeserve.blocks.weights import QWEN_MTP, Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.qwen2 import experts
from moeserve.models.qwen3_next import by_layer_type, gated_attention, gated_delta
from moeserve.models.spec import LayerSpec, NormSpec
from moeserve.ops.rules import TILE

_MAX_STREAMS = 64
_MAX_NGRAM = 8
_MAX_NGRAM_HEADS = 64  # for each length of n-grams
_MAX_ROWS = 2**34  # of all n-gram tables
_MAX_SEED = 2**63 - 1


def _spec_fields(config: Fields) -> family.SpecFields:
    delta_net = gated_delta(
        config, inputs_by_head=False, gates_by_head=False, output_gate=_output_gate(config)
    )
    types = ("full_attention", "indexed_attention")
    mixers = by_layer_type(config, _attention(config), delta_net, types)
    block = experts(config, renormalize=config.boolean("norm_topk_prob"))
    streams = config.integer("hc_count", 2, _MAX_STREAMS)
    residual = GatedResidual(
        name="attn_hyper_connection.",
        streams=streams,
        low_rank=config.integer("hc_lowrank", 1, family.MAX_WIDTH),
    )
    layers = family.layers(
        config,
        mixers,
        block,
        pre_norm=False,
        attn_connection=residual,
        mlp_connection=replace(residual, name="mlp_hyper_connection."),
    )
    embeddings = ngram_embeddings(config, streams)
    has_mtp = family.mtp_layers(config, key="mtp_num_hidden_layers")
    return {
        "layers": _with_embeddings(layers, embeddings),
        "norm": NormSpec(shift=family.norm_shift(config)),
        "num_streams": streams,
        "collapse": replace(residual, name="hyper_connection_mixer.", injects=False),
        "has_final_norm": False,
        "mtp": replace(layers[0], mixer=_attention(config)) if has_mtp else None,
        "num_earlier_ids": config.integer("ngram_size", 2, _MAX_NGRAM) - 1 if embeddings else 0,
    }


def _output_gate(config: Fields) -> Literal["silu", "sigmoid"]:
    """Read the activation of the output gates of gated delta nets."""
    if config.raw("output_gate_type") is None:
        return "silu"
    kind = config.choice("output_gate_type", ("silu", "swish", "sigmoid"))
    return "sigmoid" if kind == "sigmoid" else "silu"


def _attention(config: Fields) -> GroupIndexedAttention:
    plain = gated_attention(config)
    config.integer("indexer_kv_heads", 1, 1)
    group = config.integer("indexer_compress_ratio", 1, TILE)
    if TILE % group:
        raise config.error("indexer_compress_ratio", f"it must divide {TILE}")
    budget = config.integer("indexer_budget", group, family.MAX_POSITION)
    if budget % group:
        raise config.error("indexer_budget", f"indexer_compress_ratio ({group}) must divide it")
    dim = config.integer("indexer_head_dim", 2, family.MAX_HEADS)
    if dim % group:
        raise config.error("indexer_head_dim", f"indexer_compress_ratio ({group}) must divide it")
    assert plain.rope is not None
    if (rotated := plain.rope.size or plain.head_dim) > dim:
        raise config.error("indexer_head_dim", f"it must be at least {rotated}, as heads rotate")
    indexer = GroupIndexer(
        num_heads=config.integer("indexer_n_heads", 1, family.MAX_HEADS),
        dim=dim,
        num_groups=budget // group,
        group=group,
    )
    options = {field.name: getattr(plain, field.name) for field in fields(Attention)}
    return GroupIndexedAttention(**options, indexer=indexer)


def _with_embeddings(
    layers: tuple[LayerSpec, ...], embeddings: dict[int, NgramEmbedding]
) -> tuple[LayerSpec, ...]:
    """Insert n-gram embeddings before the layers that they belong to, by index."""
    if not embeddings:
        return layers
    result = []
    for i, layer in enumerate(layers):
        if i in embeddings:
            result.append(
                LayerSpec(
                    mixer=embeddings[i],
                    feed_forward=None,
                    pre_norm=False,
                    attn_connection=AllStreams(),
                    stored_as=(i, i),
                )
            )
        result.append(replace(layer, stored_as=(i, i)))
    return tuple(result)


def ngram_embeddings(config: Fields, streams: int) -> dict[int, NgramEmbedding]:
    """Return the n-gram embeddings by the index of their layer; config.json counts from 1."""
    ids = sorted(set(config.integers("ple_layer_ids", 1, family.num_layers(config))))
    if not ids:
        return {}
    hidden_size = config.integer("hidden_size", 1, family.MAX_WIDTH)
    embed_dim = config.optional_integer("ple_embed_dim", 1, family.MAX_WIDTH) or hidden_size
    size = config.integer("ngram_size", 2, _MAX_NGRAM)
    heads = (size - 1) * config.integer("heads_per_ngram", 1, _MAX_NGRAM_HEADS)
    if embed_dim % heads:
        raise config.error(
            "heads_per_ngram", f"{heads} heads must divide ple_embed_dim ({embed_dim})"
        )
    kernel = config.integer("ple_conv_kernel_size", 2, TILE)
    if (kernel - 1) * size > TILE:
        raise config.error(
            "ple_conv_kernel_size", f"its {kernel - 1} earlier tokens, {size} apart, exceed {TILE}"
        )
    shared: dict[str, Any] = {
        "streams": streams,
        "channels": streams * hidden_size,
        "embed_dim": embed_dim,
        "kernel": kernel,
        "dilation": size,
        "end_id": _end_id(config),
        "shards": config.integer("split_ngram_parts", 1, 2**20),
    }
    return {
        layer - 1: NgramEmbedding(**shared, **_hash_constants(config, index, len(ids), size, heads))
        for index, layer in enumerate(ids)
    }


def _end_id(config: Fields) -> int:
    """Read the id that ends n-grams: the first of `eos_token_id`."""
    # "ple_eos_token_id" comes from GGUF files, like the constants below.
    ids = config.values.get("ple_eos_token_id", config.raw("eos_token_id"))
    first = ids[0] if isinstance(ids, list) and ids else ids
    if type(first) is not int:
        raise config.error("eos_token_id", "n-gram embeddings (ple_layer_ids) need it")
    return first


def _hash_constants(
    config: Fields, index: int, count: int, size: int, heads: int
) -> dict[str, Any]:
    """Return the constants of the hash of one of `count` n-gram embeddings, and the table's rows.

    Each head has as many rows as a prime number of its own.
    """
    if "ple_table_rows" in config.values:
        return {
            "multipliers": _checked(config, "ple_layer_multipliers", size),
            "sizes": _checked(config, "ple_head_vocab_sizes", heads),
            "offsets": _checked(config, "ple_head_offsets", heads),
            "rows": config.integer("ple_table_rows", 1, _MAX_ROWS),
        }
    least = config.integer("ngram_vocab_size_base", 1, _MAX_ROWS // (count * heads))
    divisor = config.integer("make_ngram_vocab_size_divisible_by", 1, _MAX_ROWS)
    sizes = _primes_from(least, count * heads)[index * heads : (index + 1) * heads]
    total = sum(sizes)
    return {
        "multipliers": _multipliers(
            vocab_size=config.integer("vocab_size", 1, 2**31),
            count=size,
            seed=config.integer("seed", 0, _MAX_SEED) + 10_007 * index,
        ),
        "sizes": sizes,
        "offsets": tuple(sum(sizes[:head]) for head in range(heads)),
        "rows": -(-total // divisor) * divisor,
    }


def _checked(config: Fields, key: str, count: int) -> tuple[int, ...]:
    """Read `count` integers."""
    numbers = config.integers(key, 0, _MAX_SEED)
    if len(numbers) != count:
        raise config.error(key, f"it must have {count} numbers")
    return numbers


def _multipliers(*, vocab_size: int, count: int, seed: int) -> tuple[int, ...]:
    """Return odd numbers whose products with token ids are below 2 ** 63.

    They are results of SplitMix64 (Steele et al. 2014).
    """
    gamma = 0x9E3779B97F4A7C15
    bound = max(1, (2**63 - 1) // vocab_size // 2)
    return tuple(2 * (_mix((seed + gamma * (i + 2)) % 2**64) % bound) + 1 for i in range(count))


def _mix(value: int) -> int:
    """Return the last step of SplitMix64."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


@functools.cache
def _primes_from(least: int, count: int) -> tuple[int, ...]:
    """Return the first `count` prime numbers from `least` on."""
    primes = list[int]()
    number = max(2, least)
    while len(primes) < count:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            primes.append(number)
        number += 1
    return tuple(primes)


FAMILY = family.Family(
    architecture="Qwen4ExpForConditionalGeneration",
    model_type="qwen4_exp",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=248320,
        hidden=2048,
        intermediate=5632,
        layers=40,
        heads=16,
        kv_heads=2,
        positions=32768,
        experts=512,
        top_k=10,
        expert_size=512,
    )
    | {
        "full_attention_interval": 4,
        "hc_count": 4,
        "hc_lowrank": 320,
        "head_dim": 256,
        "heads_per_ngram": 8,
        "indexer_budget": None,
        "indexer_compress_ratio": None,
        "indexer_head_dim": None,
        "indexer_kv_heads": None,
        "indexer_n_heads": None,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mtp_num_hidden_layers": 0,
        "make_ngram_vocab_size_divisible_by": 128,
        "ngram_size": 3,
        "ngram_vocab_size_base": 20_000_000,
        "output_gate_type": None,
        "partial_rotary_factor": 1.0,
        "ple_conv_kernel_size": 4,
        "ple_embed_dim": None,
        "ple_layer_ids": None,
        "seed": 1234,
        "shared_expert_intermediate_size": 512,
        "split_ngram_parts": 512,
    },
    names=Names(
        model="model.language_model.",
        foreign=("model.visual.", "mtp."),
        mtp=QWEN_MTP,
        # The last gated residual has no block, so its weights for the block's output are unused.
        ignored=("rotary_emb.inv_freq", "hyper_connection_mixer.block_inject_weight.weight"),
    ),
    text="text_config",
)
TEXT = replace(
    FAMILY,
    architecture="Qwen4ExpForCausalLM",
    model_type="qwen4_exp_text",
    names=replace(FAMILY.names, model="model.", foreign=("mtp.",)),
    text="",
)
