"""The owner's sum: what the experts made of a token's row, weighted and added in the order of the token's choices.

T tokens, K experts per token, D width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def combine_kernel(y_ptr, weights_ptr, ids_ptr, out_ptr, out_stride, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK outputs of a token. Products and partial sums are each rounded to fp32.

    Four outputs of a thread leave the compiler registers to load all K rows before it adds the first.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        pair = token * K + k
        is_there = tl.load(ids_ptr + pair) >= 0
        readable = columns < tl.where(is_there, width, 0)
        y = tl.load(y_ptr + pair * width + columns, mask=readable, other=0.0).to(tl.float32)
        term = y * tl.where(is_there, tl.load(weights_ptr + pair), 0.0)
        total = term if k == 0 else total + term  # 0 + -0 would lose the sign
    tl.store(out_ptr + token * out_stride + columns, total.to(out_ptr.dtype.element_ty), mask=columns < width)


def combine(y_TKD: Tensor, weights_TK: Tensor, ids_TK: Tensor, out_TD: Tensor | None = None) -> Tensor:
    """The sum over k = 0..K-1, in this order, of weights[t, k] * y[t, k], in fp32; one rounding at the end.

    Where an id is -1, y is not read, the weight may be anything, and zero is added. Multiplication and addition round
    one after the other, never fused, as in the native sum of the CPU's ranks: the bits are the same.
    y [[[1, 2], [3, 4]]], weights [[0.5, 2]], ids [[7, 0]] -> [[6.5, 9]]; ids [[7, -1]] -> [[0.5, 1]]
    """
    tokens, top_k, width = y_TKD.shape
    assert y_TKD.is_contiguous(), y_TKD.stride()
    assert weights_TK.shape == ids_TK.shape == (tokens, top_k), (weights_TK.shape, ids_TK.shape)
    assert weights_TK.is_contiguous(), weights_TK.stride()
    assert ids_TK.is_contiguous(), ids_TK.stride()
    assert weights_TK.dtype == torch.float32, weights_TK.dtype
    out = y_TKD.new_empty((tokens, width)) if out_TD is None else out_TD
    assert out.stride(1) == 1, out.stride()
    block = 512 if tokens >= 64 else 256  # few tokens share the device by columns
    if tokens:
        combine_kernel[(tokens, triton.cdiv(width, block))](
            y_TKD, weights_TK, ids_TK, out, out.stride(0), width,
            K=top_k, BLOCK=block, num_warps=block // 128, enable_fp_fusion=False,
        )  # fmt: skip
    return out
