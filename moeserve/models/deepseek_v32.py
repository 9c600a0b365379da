"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention; an indexer selects the tokens for each query.
GLM-5: the same blocks; a layer may reuse the selection of the layer before.

Source: arXiv 2512.02556, 2602.15763. Reuse of selections: 2603.12201.
"""

from collections.abc import Sequence

from moeserve.blocks.indexer import Indexer
from moeserve.blocks.latent_attention import LatentAttention
from moeserve.loader.fields import Fields
from moeserve.models import deepseek_v3, family

_TYPE_OF_LETTER = {"F": "full", "S": "shared"}


def _attention(
    config: Fields, *, interleaved: bool = False, shared: bool = False
) -> LatentAttention:
    """Read latent attention with an indexer. interleaved, shared: see `Indexer`."""
    config.only(indexer_rope_interleave=interleaved)
    for key in ("q_lora_rank", "rope_interleave"):
        if not config.raw(key):
            raise config.error(key, "an indexer is not supported without it")
    rope_dim = config.integer("qk_rope_head_dim", 2, family.MAX_HEADS)
    indexer = Indexer(
        num_heads=config.integer("index_n_heads", 1, family.MAX_HEADS),
        dim=config.integer("index_head_dim", rope_dim, family.MAX_HEADS),
        top_k=config.integer("index_topk", 1, family.MAX_POSITION),
        interleaved=interleaved,
        shared=shared,
    )
    return family.latent_attention(config, indexer=indexer)


def _with_layers(config: Fields, mixers: Sequence[LatentAttention]) -> family.SpecFields:
    """Return the fields for layers with these mixers."""
    blocks = family.listed_moe(config, deepseek_v3.experts_of(config), family.dense(config))
    # The MTP layer has the first mixer, because that never reuses another layer's selection.
    return family.with_mtp(config, family.layers(config, mixers, blocks), mixer=mixers[0])


def _v32(config: Fields) -> family.SpecFields:
    return _with_layers(config, [_attention(config)] * family.num_layers(config))


def indexer_types(config: Fields, first: int = 0) -> list[str]:
    """Read which layers have an indexer ("full"), and which reuse another's selection ("shared").

    config.json has a list, a pattern ("FSSF"), or a frequency: then all layers up to
    `index_skip_topk_offset` - 1, and every `index_topk_freq`-th layer after it, have an indexer.

    first: the first layer that may have one.
    """
    count = family.num_layers(config)
    key = "index_topk_pattern" if config.raw("indexer_types") is None else "indexer_types"
    kinds = config.raw(key)
    if kinds is None:
        frequency = max(config.integer("index_topk_freq", 0, family.MAX_LAYERS), 1)
        last_of_first = config.integer("index_skip_topk_offset", 0, family.MAX_LAYERS) - 1
        kinds = [
            "full" if max(i - last_of_first, 0) % frequency == 0 else "shared" for i in range(count)
        ]
    if isinstance(kinds, str) and key == "index_topk_pattern":
        kinds = [_TYPE_OF_LETTER.get(kind) for kind in kinds]
    if (
        not isinstance(kinds, list)
        or len(kinds) != count
        or any(kind not in _TYPE_OF_LETTER.values() for kind in kinds)
    ):
        raise config.error(key, f"it must list full or shared for each of {count} layers")
    if kinds[first] != "full":
        raise config.error(
            key,
            f"the first layer must be full (layer {first}): there is no selection to share yet",
        )
    return kinds


def _glm_5(config: Fields) -> family.SpecFields:
    kinds = indexer_types(config)
    mixers = [_attention(config, interleaved=True, shared=kind == "shared") for kind in kinds]
    return _with_layers(config, mixers)


_DEFAULTS = deepseek_v3.FAMILY.defaults | {
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "max_position_embeddings": 163840,
}
V32 = family.Family(
    architecture="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    fields=_v32,
    defaults=_DEFAULTS,
)
GLM_5 = family.Family(
    architecture="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    fields=_glm_5,
    defaults=_DEFAULTS
    | family.sizes(
        vocab=154880,
        hidden=6144,
        intermediate=12288,
        layers=78,
        heads=64,
        kv_heads=64,
        positions=202752,
        experts=256,
        top_k=8,
        expert_size=2048,
    )
    | {
        "index_n_heads": 32,
        "index_skip_topk_offset": 2,
        "index_topk_freq": 1,
        "index_topk_pattern": None,
        "indexer_types": None,
        "n_group": 1,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "topk_group": 1,
        "v_head_dim": 256,
    },
)
