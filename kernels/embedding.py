"""Rows of the embedding table.

T tokens, V vocabulary, D width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements of one program


@triton.jit
def embedding_kernel(ids_ptr, table_ptr, out_ptr, table_stride, width, scale, BLOCK: tl.constexpr):
    """One program: BLOCK elements of one row."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    row = tl.load(ids_ptr + token).to(tl.int64)
    x = tl.load(table_ptr + row * table_stride + columns, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out_ptr + token * width + columns, x.to(out_ptr.dtype.element_ty), mask=inside)


def embedding(ids_T: Tensor, table_VD: Tensor, scale: float = 1.0) -> Tensor:
    """table[ids] * scale, rounded once; every id must be one of the table's rows.

    table [[1, 2], [3, 4]], ids [1, 0], scale 2 -> [[6, 8], [2, 4]]
    """
    tokens, width = ids_T.shape[0], table_VD.shape[1]
    assert table_VD.stride(1) == 1, table_VD.stride()
    assert ids_T.is_contiguous(), ids_T.stride()
    out_TD = table_VD.new_empty((tokens, width))
    if tokens:
        grid = (tokens, triton.cdiv(width, BLOCK))
        embedding_kernel[grid](
            ids_T, table_VD, out_TD, table_VD.stride(0), width, float(scale), BLOCK=BLOCK, num_warps=4
        )
    return out_TD
