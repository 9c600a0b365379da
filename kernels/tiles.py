"""Shared parts of the matrix products: the order of tiles, the depth of a step over K, and loads of
rows and weights.

Products compute y^T = w x^T: the weights' rows are the tensor cores' M, at least 64 of them, and
the tokens' rows their N, as few as 16. So the same instructions (on Hopper: wgmma) serve one row
and thousands, every sum over K has the same order, and a row's bits do not depend on how many there
are.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# of a row of weights in one step over K: a line of the cache, and of shared memory's swizzle
STEP_BYTES = 128


@triton.jit
def tile_of(program, num_tiles, num_blocks, GROUP: tl.constexpr):
    """(tile of rows, block of outputs) of a program: of GROUP tiles at a time, all in one block,
    then in the next. So weights and rows that run at the same time are few enough for the L2 cache.

    4 tiles, 2 blocks, GROUP 2: (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)
    """
    first = program // (GROUP * num_blocks) * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    place = program % (GROUP * num_blocks)
    return first + place % size, place // size


@triton.jit
def rows_of(
    tile, expert, row_ptr, ends_ptr, order_ptr, top_k, UP: tl.constexpr, BLOCK_M: tl.constexpr
):
    """(rows of x, rows of the result, which of both there are) of a tile of the experts' sorted
    rows. With an order, the first product (UP) fetches its rows through it, the second puts them
    back. 32 bits each: until the end they take registers from the sums."""
    rows = tl.load(row_ptr + tile) + tl.arange(0, BLOCK_M)
    live = rows < tl.load(ends_ptr + expert)
    sources = rows
    targets = rows
    if order_ptr is not None:
        pairs = tl.load(order_ptr + rows, mask=live, other=0)
        if UP:
            sources = pairs // top_k
        else:
            targets = pairs
    return sources, targets, live


@triton.jit
def load_rows(ptrs, live, k, inner, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """[rows, BLOCK_K] from column k on, zeros where a row is not live or beyond the last column;
    those are not read.
    """
    mask = live[:, None] if EVEN else live[:, None] & (k + tl.arange(0, BLOCK_K) < inner)[None, :]
    return tl.load(ptrs + k, mask=mask, other=0.0)


@triton.jit
def load_weights(
    w,
    base,
    row,
    last,
    k,
    inner,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
):
    """[BLOCK_N, BLOCK_K] weights from row `base + row` and column k on; instead of rows after base
    + last, any others.

    w: a descriptor if TMA, else a pointer.
    """
    if TMA:
        tile = w.load([base + row, k])
    else:
        rows = (base + tl.minimum(row + tl.arange(0, BLOCK_N), last)).to(tl.int64)
        columns = k + tl.arange(0, BLOCK_K)
        ptrs = w + rows[:, None] * inner + columns[None, :]
        tile = tl.load(ptrs) if EVEN else tl.load(ptrs, mask=columns[None, :] < inner, other=0.0)
    return tile


@triton.jit
def add_bias(total, bias_ptr, base, columns, width):
    """total [BLOCK_N, rows] + the bias of its outputs, fp32 from base on; no pointer: total."""
    if bias_ptr is not None:
        total += tl.load(bias_ptr + base + columns, mask=columns < width, other=0.0)[:, None]
    return total


def tile_rows(rows: float) -> dict[str, int]:
    """Launch parameters that depend on the mean number of rows of an expert, at most 64 in a tile
    of quantised weights.

    8 -> block_m 16; 1000 -> block_m 64
    """
    return {
        "block_m": 16 if rows <= 8 else 32 if rows <= 24 else 64,
        "tma": 1,
        "group": 8 if rows > 64 else 1,
    }


def check_bias(bias: Tensor | None, w: Any) -> None:
    """Asserts that a bias is fp32 [e, outputs], for weights [e, outputs, inputs]; or None."""
    if bias is not None:
        assert (bias.dtype, bias.shape) == (torch.float32, w.shape[:2]), (
            bias.dtype,
            bias.shape,
            w.shape,
        )
        assert bias.is_contiguous(), bias.stride()


def block_k(inner: int, dtype: torch.dtype) -> int:
    """Columns of one step over K: a function of the weights alone, so that sums have one order.
    2048, bf16 -> 64
    """
    return max(16, min(STEP_BYTES // dtype.itemsize, int(triton.next_power_of_2(inner))))


def weights_argument(
    w: Tensor, rows: int, columns: int, wanted: bool
) -> tuple[Tensor | TensorDescriptor, bool]:
    """Return the kernel's argument for weights [..., K], and whether it is a descriptor (for
    Hopper's copy engine).
    """
    assert w.is_contiguous(), w.stride()
    if not wanted or w.data_ptr() % 16 or w.shape[-1] * w.element_size() % 16:
        return w, False
    return TensorDescriptor.from_tensor(w.view(-1, w.shape[-1]), [rows, columns]), True
