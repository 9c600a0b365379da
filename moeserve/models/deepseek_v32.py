"""DeepSeek-V3.2: DeepSeek-V3 whose queries attend to the tokens that an index selector chooses.

Source: arXiv 2512.02556.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.blocks.indexer import Indexer
from moeserve.blocks.latent_attention import LatentAttention
from moeserve.loader.files import Fields
from moeserve.models import deepseek_v3, family


def indexed_attention(config: Fields, *, interleaved: bool = False, shared: bool = False) -> LatentAttention:
    """Reads latent attention with an indexer. interleaved, shared: see `Indexer`."""
    config.only(indexer_rope_interleave=interleaved)
    for key in ("q_lora_rank", "rope_interleave"):
        if not config.raw(key):
            raise config.error(key, "an index selector is not computed without it")
    rotated = config.integer("qk_rope_head_dim", 2, family.MAX_HEADS)
    indexer = Indexer(
        num_heads=config.integer("index_n_heads", 1, family.MAX_HEADS),
        dim=config.integer("index_head_dim", rotated, family.MAX_HEADS),
        top_k=config.integer("index_topk", 1, family.MAX_POSITION),
        interleaved=interleaved,
        shared=shared,
    )
    return family.latent_attention(config, indexer=indexer)


def indexed_layers(config: Fields, mixers: Sequence[LatentAttention]) -> family.SpecFields:
    """Reads what the layers with these mixers have beside them, and those for multi-token prediction."""
    blocks = family.listed_moe(config, deepseek_v3.experts_of(config), family.dense(config))
    return family.with_mtp(config, family.layers(config, mixers, blocks), mixer=mixers[0])  # which chooses itself


def _fields(config: Fields) -> family.SpecFields:
    return indexed_layers(config, [indexed_attention(config)] * family.num_layers(config))


DEFAULTS = deepseek_v3.FAMILY.defaults | {
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "max_position_embeddings": 163840,
}
FAMILY = family.Family("DeepseekV32ForCausalLM", "deepseek_v32", _fields, DEFAULTS)
