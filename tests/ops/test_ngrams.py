"""Rows of n-grams against plain loops over whole sequences."""

from __future__ import annotations

import pytest
import torch

from moeserve.ops.ngrams import NgramHash

END = 9
MULTIPLIERS = (2**44 + 1, 3 * 2**43 + 7, 2**42 + 5, 11)
SIZES = (101, 103, 107, 109, 113, 127)
OFFSETS = (0, 101, 204, 311, 420, 533)


def naive(tokens: list[int], position: int, longest: int) -> list[int]:
    """Return the rows of the n-grams that end at a position."""
    window = [tokens[position]]
    for earlier in range(position - 1, position - longest, -1):
        is_cut = earlier < 0 or END in tokens[earlier:position]
        window.append(END if is_cut else tokens[earlier])
    rows = []
    heads = len(SIZES) // (longest - 1)
    for head, (size, offset) in enumerate(zip(SIZES, OFFSETS, strict=True)):
        mixed = 0
        for token, multiplier in zip(window[: 2 + head // heads], MULTIPLIERS, strict=False):
            mixed ^= token * multiplier
        rows.append(mixed % size + offset)
    return rows


@pytest.mark.parametrize("longest", [2, 3, 4])
def test_rows_are_those_of_plain_loops(longest: int) -> None:
    """N-grams end at the end of a text, and at the beginning of the request."""
    generator = torch.Generator().manual_seed(longest)
    tokens = torch.randint(5, 12, (60,), generator=generator).tolist()
    assert END in tokens[1:-1]
    earlier = [
        [tokens[p - i] if p >= i else -1 for i in range(1, longest)] for p in range(len(tokens))
    ]
    constants = (torch.tensor(x) for x in (MULTIPLIERS[:longest], SIZES, OFFSETS))
    rows = NgramHash(*constants, END)(torch.tensor(tokens), torch.tensor(earlier))
    assert rows.dtype == torch.int64
    assert rows.tolist() == [naive(tokens, p, longest) for p in range(len(tokens))]


def test_no_tokens_have_no_rows() -> None:
    constants = (torch.tensor(x) for x in (MULTIPLIERS[:3], SIZES, OFFSETS))
    none = torch.zeros(0, dtype=torch.int64)
    assert NgramHash(*constants, END)(none, none.view(0, 2)).shape == (0, len(SIZES))
