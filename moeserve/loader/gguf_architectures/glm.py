"""GLM-4.5 to 4.7, and GLM-5."""

from collections.abc import Mapping
from typing import Any

from moeserve.loader.fields import Fields
from moeserve.loader.gguf_architecture import SIGMOID, GGUFArchitecture, Shape, Variants
from moeserve.loader.gguf_architectures.deepseek import INDEXER_KEYS, INDEXER_NAMES

_TYPES = "attention.indexer.types"  # whether a layer has an indexer, or reuses another's selection
_GLM_5_2_CONTEXT = 2**20  # context length from which a file without types is GLM-5.2


def _indexer_types(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the keys that tell which layers have an indexer."""
    types = metadata.values.get(_TYPES)
    if types is None:
        context = metadata.integer("context_length", 1, 2**31)
        reused = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
        return reused if context >= _GLM_5_2_CONTEXT else {"index_topk_freq": 1}
    if not isinstance(types, list):  # all layers are alike
        if types not in (0, 1):
            raise metadata.error(_TYPES, "it must be true or false, or a list of them")
        return {"index_topk_freq": 1} if types else {"indexer_types": ["shared"]}
    if any(kind not in (0, 1) for kind in types):
        raise metadata.error(_TYPES, "it must be a list of true and false")
    return {"indexer_types": ["full" if kind else "shared" for kind in types]}


ARCHITECTURES: dict[str, Variants] = {
    "glm-dsa": {
        "": GGUFArchitecture(
            "GlmMoeDsaForCausalLM",
            keys=INDEXER_KEYS,
            required=("attention.q_lora_rank", *INDEXER_KEYS),
            gating=SIGMOID,
            config=_indexer_types,
            other_keys=(_TYPES,),
            names=INDEXER_NAMES,
        )
    },
    "glm4moe": {  # also Solar Open and the text model of GLM-4.5V, which compute the same
        "": GGUFArchitecture(
            "Glm4MoeForCausalLM",
            defaults={"partial_rotary_factor": 1.0},
            gating=SIGMOID,
            # Axes of the rotary embedding of GLM-4.5V, which are the same for text
            other_keys=("rope.dimension_sections",),
        )
    },
}
