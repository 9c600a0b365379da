"""GLM-5: DeepSeek-V3.2's blocks; some layers may attend to the tokens that the layer before chose.

Sources: arXiv 2602.15763; of the sharing, 2603.12201.
"""

from __future__ import annotations

from moeserve.loader.files import Fields
from moeserve.models import deepseek_v32, family

_KINDS = {"F": "full", "S": "shared"}


def _indexer_types(config: Fields) -> list[str]:
    """Reads which layers choose themselves: a list, a pattern ("FSSF"), or every `index_topk_freq`-th layer from
    `index_skip_topk_offset` - 1 on and all before."""
    count = family.num_layers(config)
    key = "index_topk_pattern" if config.raw("indexer_types") is None else "indexer_types"
    kinds = config.raw(key)
    if kinds is None:
        every = max(config.integer("index_topk_freq", 0, family.MAX_LAYERS), 1)
        first = config.integer("index_skip_topk_offset", 0, family.MAX_LAYERS) - 1
        return ["full" if max(i - first, 0) % every == 0 else "shared" for i in range(count)]
    if isinstance(kinds, str) and key == "index_topk_pattern":
        kinds = [_KINDS.get(kind) for kind in kinds]
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in _KINDS.values() for kind in kinds):
        raise config.error(key, f"it must name full or shared for each of {count} layers")
    if kinds[0] != "full":
        raise config.error(key, "the first layer has no choice to share; it must be full")
    return kinds


def _fields(config: Fields) -> family.SpecFields:
    kinds = _indexer_types(config)
    mixers = [deepseek_v32.indexed_attention(config, interleaved=True, shared=kind == "shared") for kind in kinds]
    return deepseek_v32.indexed_layers(config, mixers)


FAMILY = family.Family(
    "GlmMoeDsaForCausalLM",
    "glm_moe_dsa",
    _fields,
    deepseek_v32.DEFAULTS
    | family.sizes(154880, 6144, 12288, 78, 64, 64, 202752, experts=256, top_k=8, expert_size=2048)
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
