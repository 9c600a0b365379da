"""How long the KV entries of a layer are needed. No numpy here: specs are made of it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KVRule:
    """How long the KV entries of a layer are needed.

    window: tokens that a query sees, itself included. chunk: a query sees the tokens of its own
    chunk of so many (Llama-4). tile: a recurrence reads the tile of so many tokens that its token
    is in, or, for the first token of a tile, the one before. At most one of them; without any a
    query sees all earlier tokens.
    """

    window: int | None = None
    chunk: int | None = None
    tile: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether entries are needed as long as their request lives."""
        return self.window is None and self.chunk is None and self.tile is None

    def length(self, position: Any) -> Any:
        """Return how many entries there are once all positions before `position` (one, or an array
        of them) are computed. A rule of a subclass may count otherwise, but never fewer entries
        for a later position.
        """
        return position

    @property
    def counts_positions(self) -> bool:
        """Whether each position has an entry."""
        return type(self).length is KVRule.length

    def first_live(self, position: Any) -> Any:
        """Returns the oldest position that is read to compute `position` (one or an array of them)
        or any later one.
        """
        if self.tile is not None:
            before = position - 1
            return before * (before > 0) // self.tile * self.tile
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        if self.window is None:
            return position * 0
        first = position - (self.window - 1)
        return first * (first > 0)


FULL = KVRule()
