"""Shared parts of the GEMM kernels: the order of tiles, the depth of a step over K, and loads.

The kernels compute y^T = w x^T. The outputs are the M dimension of the tensor cores, which is at
least 64 on Hopper, and the activation rows are the N dimension, which may be as small as 16. So the
same instructions (wgmma on Hopper) serve one row and thousands, and every sum over K has the same
order. A row's bits do not depend on the number of rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Bytes of a weight row per step over K: a cache line, and the width of the shared-memory swizzle.
STEP_BYTES = 128


@triton.jit
def tile_of(program, num_tiles, num_blocks, GROUP: tl.constexpr):
    """Return (tile of rows, block of outputs) of a program.

    Programs take GROUP tiles at a time: all of them in one block of outputs, then in the next. So
    the weights and rows of programs that run at the same time fit into the L2 cache.

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
    """Return (input rows, output rows, row mask) of a tile of rows sorted by expert.

    If there is an order, the first product (UP) gathers its input rows by it, and the second one
    scatters its output rows by it. Indices are 32 bits, because they occupy registers that the sums
    need until the end.
    """
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
    """Load [rows, BLOCK_K] from column k; rows that are not live and missing columns become zero.

    EVEN: all columns exist.
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
    """Load [BLOCK_N, BLOCK_K] weights from row `base + row` and column k.

    Rows after `base + last` are replaced by arbitrary other rows.

    w: a tensor descriptor if TMA, otherwise a pointer.
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
    """Add the fp32 bias, which begins at `base`, to total [BLOCK_N, rows], if there is a bias."""
    if bias_ptr is not None:
        total += tl.load(bias_ptr + base + columns, mask=columns < width, other=0.0)[:, None]
    return total


def tile_rows(rows: float) -> dict[str, int]:
    """Return the launch parameters that depend on the mean number of rows per expert.

    They are for quantized weights, where a tile has at most 64 rows.

    8 -> block_m 16; 1000 -> block_m 64
    """
    return {
        "block_m": next((size for size, most in ((16, 8), (32, 24)) if rows <= most), 64),
        "tma": 1,
        "group": 8 if rows > 64 else 1,
    }


def check_bias(bias: Tensor | None, w: Any) -> None:
    """Assert that a bias is None or fp32 [e, outputs], for weights [e, outputs, inputs]."""
    if bias is not None:
        assert (bias.dtype, bias.shape) == (torch.float32, w.shape[:2]), (
            bias.dtype,
            bias.shape,
            w.shape,
        )
        assert bias.is_contiguous(), bias.stride()


def block_k(inner: int, dtype: torch.dtype) -> int:
    """Return the depth of one step over K.

    It depends on the weights alone, so that sums have the same order for any number of rows.

    2048, bf16 -> 64
    """
    return max(16, min(STEP_BYTES // dtype.itemsize, int(triton.next_power_of_2(inner))))


def weights_argument(
    w: Tensor, rows: int, columns: int, use_tma: bool
) -> tuple[Tensor | TensorDescriptor, bool]:
    """Return the kernel argument for weights [..., K], and whether it is a tensor descriptor.

    A descriptor lets Hopper's copy engine (TMA) load tiles.

    use_tma: return a descriptor if alignment allows.
    """
    assert w.is_contiguous(), w.stride()
    if not use_tma or w.data_ptr() % 16 or w.shape[-1] * w.element_size() % 16:
        return w, False
    return TensorDescriptor.from_tensor(w.view(-1, w.shape[-1]), [rows, columns]), True
