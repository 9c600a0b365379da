"""The rule of a layer that says how long its KV entries are needed: its attention pattern.

Model specs contain these rules, so this module does not import numpy.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KVRule:
    """How long the KV entries of a layer are needed.

    At most one field is set. If none is set, a query reads all earlier tokens (full attention).
    """

    # Tokens that a query reads, its own token included (sliding window).
    window: int | None = None
    # Tokens per chunk. A query reads the tokens of its own chunk (Llama 4).
    chunk: int | None = None
    # Tokens per tile of a recurrent layer. A token reads the state of its own tile or, if it is the
    # first of its tile, that of the tile before.
    tile: int | None = None
    # Tokens per block of a model that decodes blocks (docs/diffusion.md). A query reads all earlier
    # tokens and all tokens of its own block.
    diffusion_block: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether entries are needed until their request ends."""
        return self.window is None and self.chunk is None and self.tile is None

    def length(self, position: Any) -> Any:
        """Return how many entries exist once all positions before `position` are computed.

        position: a number or an array. A subclass may count differently, but the number of entries
        must not decrease with the position.
        """
        return position

    @property
    def counts_positions(self) -> bool:
        """Whether there is one entry per position."""
        return type(self).length is KVRule.length

    def first_live(self, position: Any) -> Any:
        """Return the oldest position that is read to compute `position` or any later one.

        position: a number or an array.
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
