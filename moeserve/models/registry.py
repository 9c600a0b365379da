"""All model families, by architecture."""

from __future__ import annotations

from moeserve.models import granite_moe, llama, mixtral, olmoe, qwen2_moe, qwen3, qwen3_moe
from moeserve.models.family import Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.architecture: module.FAMILY
    for module in (granite_moe, llama, mixtral, olmoe, qwen2_moe, qwen3, qwen3_moe)
}
