"""Limits the tokens of one round, so that no rank receives more rows than it has planned memory for.

In the worst case every token of every rank has all its experts on one rank. The planned rows depend only on what all
ranks of all epochs share; the tokens of a round also depend on the size of the group.
"""

from __future__ import annotations

ROUND_BYTES = 128 << 20  # for the rows that one dispatch may bring to a rank
ON_GPUS = 4  # times as many: each round reads all experts' weights, and there is more memory
USUAL_RANKS = 8  # planned for where rows are so small that ROUND_BYTES would be far too many


def most_rows(max_tokens: int, top_k: int, row_bytes: int, device: str = "cpu") -> int:
    """Returns the rows that one dispatch may bring to a rank. max_tokens: of one rank's step. row_bytes: unencoded."""
    budget = ROUND_BYTES if device == "cpu" else ON_GPUS * ROUND_BYTES
    return max(top_k, min(budget // row_bytes, USUAL_RANKS * max_tokens * top_k))


def round_tokens(max_tokens: int, top_k: int, row_bytes: int, num_ranks: int, device: str = "cpu") -> int:
    """Returns the tokens, at least 1, that each of num_ranks ranks may dispatch at once."""
    return max(1, min(max_tokens, most_rows(max_tokens, top_k, row_bytes, device) // (num_ranks * top_k)))
