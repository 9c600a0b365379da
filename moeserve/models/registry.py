"""Which family serves an architecture."""

from __future__ import annotations

from moeserve.errors import CheckpointError
from moeserve.loader.spec import ModelSpec
from moeserve.models import granite_moe, llama, mixtral, olmoe, qwen2_moe, qwen3, qwen3_moe
from moeserve.models.family import Family

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        granite_moe.FAMILY,
        llama.FAMILY,
        mixtral.FAMILY,
        olmoe.FAMILY,
        qwen2_moe.FAMILY,
        qwen3.FAMILY,
        qwen3_moe.FAMILY,
    )
}


def family(spec: ModelSpec) -> Family:
    """The family of `spec.architecture`. Raises CheckpointError with the known ones."""
    try:
        return FAMILIES[spec.architecture]
    except KeyError:
        raise CheckpointError(
            f"architecture {spec.architecture} is not one that moeserve knows; known: {', '.join(sorted(FAMILIES))}"
        ) from None
