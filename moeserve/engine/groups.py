"""KV groups as data: the layers that share one block table, and three pure functions that serve every kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with equal caching rules. `window` (tokens, itself included) belongs to kind `window`."""

    kind: Literal["full", "window"]
    block_size: int
    layers: tuple[int, ...]
    window: int | None = None


def groups_of(windows: tuple[int | None, ...], block_size: int) -> tuple[KVGroup, ...]:
    """One group per distinct window, in order of first appearance. windows[i] is layer i's, None for full.

    (None, 64, None, 64) -> full group with layers (0, 2), window group with layers (1, 3)
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    return tuple(
        KVGroup("full" if w is None else "window", block_size, tuple(layers), w)
        for w, layers in by_window.items()
    )
