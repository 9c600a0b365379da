"""Masks of grammars on logits; moeserve/runner/sampling/reference.py specifies them.

C masked rows, V vocabulary, W words of 32 tokens.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # tokens of one program


@triton.jit(do_not_specialize=["stride"])
def bitmask_kernel(x_ptr, rows_ptr, bits_ptr, stride, width, words, BLOCK: tl.constexpr):
    """One program: BLOCK tokens of one row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits_ptr + row * words + token // 32, mask=token < width, other=-1)
    is_banned = ((word >> (token % 32)) & 1) == 0
    at = x_ptr + tl.load(rows_ptr + row) * stride + token
    tl.store(at, tl.full((BLOCK,), float("-inf"), x_ptr.dtype.element_ty), mask=is_banned)


def apply_bitmask(x_rV: Tensor, rows_C: Tensor, bits_CW: Tensor) -> None:
    """Sets the tokens whose bit is 0 to -inf in the given rows (int64), in place."""
    (count, words), width = bits_CW.shape, x_rV.shape[1]
    assert words * 32 >= width, (words, width)
    assert x_rV.stride(1) == 1, x_rV.stride()
    assert bits_CW.is_contiguous(), bits_CW.stride()
    grid = count, triton.cdiv(width, BLOCK)
    bitmask_kernel[grid](x_rV, rows_C, bits_CW, x_rV.stride(0), width, words, BLOCK=BLOCK, num_warps=4)
