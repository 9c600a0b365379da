"""The attention heads that a tensor-parallel rank computes. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.comm.world import World
from moeserve.errors import ConfigError
from moeserve.loader.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Heads:
    """The rank's query heads [first, first + count) and the KV heads that they read."""

    first: int
    count: int
    first_kv: int
    count_kv: int


def possible_tp(spec: ModelSpec) -> list[int]:
    """Returns the numbers of ranks that an engine may have.

    Each rank gets equally many query heads, and whole KV heads or a part of one's queries.
    12 query heads on 4 KV heads -> [1, 2, 4, 12]
    """
    heads, kv = spec.num_heads, spec.num_kv_heads
    return [tp for tp in range(1, heads + 1) if heads % tp == 0 and (kv % tp == 0 or tp % kv == 0)]


def local_heads(spec: ModelSpec, world: World) -> Heads:
    """Returns this rank's heads; a KV head that several ranks need is computed and cached by each of them.

    8 query heads on 2 KV heads, rank 3 of 4 -> queries 6 and 7, KV head 1. Raises ConfigError with the possible tp.
    """
    tp, rank = world.tp_size, world.tp_rank
    possible = possible_tp(spec)
    if tp not in possible:
        raise ConfigError(
            f"tp={tp} cannot share out {spec.num_heads} query heads on {spec.num_kv_heads} KV heads evenly; "
            f"choose tp from {', '.join(map(str, possible))}"
        )
    queries = spec.num_heads // tp
    return Heads(rank * queries, queries, rank * spec.num_kv_heads // tp, local_kv_heads(spec, tp))


def local_kv_heads(spec: ModelSpec, tp_size: int) -> int:
    """The number of KV heads in each rank's cache."""
    return max(1, spec.num_kv_heads // tp_size)
