"""KV groups: the layers that share one block table, and pure functions over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with equal caching rules. window: tokens that a position sees, itself included, for kind "window"."""

    kind: Literal["full", "window"]
    block_size: int
    layers: tuple[int, ...]
    window: int | None = None


def groups_of(windows: tuple[int | None, ...], block_size: int) -> tuple[KVGroup, ...]:
    """Returns one group per distinct window, in order of first appearance. windows[i] is layer i's, None for full.

    (None, 64, None, 64) -> full group with layers (0, 2), window group with layers (1, 3)
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    return tuple(
        KVGroup("full" if w is None else "window", block_size, tuple(layers), w) for w, layers in by_window.items()
    )


def blocks_needed(group: KVGroup, num_tokens: int, chunk: int) -> int:
    """Returns the most blocks that a request of num_tokens holds at once if it computes at most `chunk` per step.

    window 4, block_size 2, 100 tokens one at a time: 4 tokens lie in at most 3 blocks -> 3
    """
    whole = -(-num_tokens // group.block_size)
    if group.window is None:
        return whole
    span = group.window - 1 + chunk
    return min(whole, -(-(span - 1) // group.block_size) + 1)


def first_live_token(group: KVGroup, position: int) -> int:
    """Returns the oldest position that is read to compute `position` or any later one."""
    if group.window is None:
        return 0
    return max(0, position - group.window + 1)


def longest_hit(group: KVGroup, is_cached: Callable[[int], bool], limit: int) -> int:
    """Returns the largest n <= limit such that the request can continue at block n with cached blocks alone.

    is_cached(i): whether block i of the request's prefix is cached. A full group needs blocks 0..n-1; a window group
    needs only those that the first token of block n reads, so the search goes from right to left.
    """
    if group.window is None:
        return next((i for i in range(limit) if not is_cached(i)), limit)
    n = limit
    while n > 0:
        first = first_live_token(group, n * group.block_size) // group.block_size
        missing = next((i for i in range(n - 1, first - 1, -1) if not is_cached(i)), None)
        if missing is None:
            return n
        n = missing  # any hit that needs block `missing` fails as well
    return 0
