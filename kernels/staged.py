"""Many small writes to one array on the device: packed on the host, one copy, one launch.

N values, W pieces: values that lie side by side, at most PIECE of them.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

PIECE = 1024


@triton.jit(do_not_specialize=["pieces"])
def write_kernel(arena_ptr, words_ptr, pieces, PIECE: tl.constexpr):
    """One program: one piece. words: the pieces' places, their starts among the values (and the end), the values."""
    piece = tl.program_id(0)
    place = tl.load(words_ptr + piece).to(tl.int64)
    start = tl.load(words_ptr + pieces + piece)
    end = tl.load(words_ptr + pieces + piece + 1)
    index = tl.arange(0, PIECE)
    inside = index < end - start
    values_ptr = words_ptr + 2 * pieces.to(tl.int64) + 1
    tl.store(arena_ptr + place + index, tl.load(values_ptr + start + index, mask=inside, other=0), mask=inside)


def pack(offsets_N: NDArray[np.int64], values_N: NDArray[np.int32]) -> tuple[NDArray[np.int32], int]:
    """Writes as words for `write`, and the number of their pieces. No offset may be there twice.

    offsets [5, 6, 9], values [1, 2, 3] -> [5, 9, 0, 2, 3, 1, 2, 3] and 2: two values from 5 on, one at 9
    """
    assert len(offsets_N) == len(values_N), (len(offsets_N), len(values_N))
    num_values = len(offsets_N)
    run_starts = np.concatenate(([0] if num_values else [], np.flatnonzero(np.diff(offsets_N) != 1) + 1)).astype(
        np.int64
    )
    pieces_of_run = -(-np.diff(run_starts, append=num_values) // PIECE)
    piece_of_run = np.arange(pieces_of_run.sum()) - np.repeat(pieces_of_run.cumsum() - pieces_of_run, pieces_of_run)
    starts_W = np.repeat(run_starts, pieces_of_run) + piece_of_run * PIECE
    words = np.concatenate((offsets_N[starts_W], starts_W, [num_values], values_N)).astype(np.int32)
    return words, len(starts_W)


def write(arena: Tensor, words: Tensor, pieces: int) -> None:
    """Puts what `pack` packed into the arena; both int32 on the device.

    arena of zeros [0, 0, 0, 0], words [1, 3, 0, 2, 3, 7, 8, 9], 2 pieces -> [0, 7, 8, 9]
    """
    assert arena.is_contiguous(), arena.stride()
    assert len(words) > 2 * pieces, (len(words), pieces)
    if pieces:
        write_kernel[(pieces,)](arena, words, pieces, PIECE=PIECE, num_warps=4)
