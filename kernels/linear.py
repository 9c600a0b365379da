"""Batch-invariant dense GEMMs: a row's bits do not depend on the number of rows.

M rows, N outputs, K inputs. T tokens, H heads with one weight matrix each.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.kernels.configs import Config, facts_of, tuned_config
from moeserve.kernels.tiles import block_k, load_rows, load_weights, tile_of, weights_argument


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr, w, bias_ptr, out_ptr, num_rows, x_stride, out_stride, x_head_stride, out_head_stride,
    width, inner,
    EVEN: tl.constexpr, TMA: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_N outputs of BLOCK_M rows of one head.

    The weights of the heads are contiguous.
    """
    head = tl.program_id(1)
    x_ptr += head.to(tl.int64) * x_head_stride
    out_ptr += head.to(tl.int64) * out_head_stride
    tile, block = tile_of(
        tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.cdiv(width, BLOCK_N), GROUP
    )
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    live = rows < num_rows
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, inner, BLOCK_K):
        x = tl.trans(load_rows(x_ptrs, live, k, inner, BLOCK_K, EVEN))
        weights = load_weights(
            w, head * width, block * BLOCK_N, width - 1, k, inner, BLOCK_N, BLOCK_K, EVEN, TMA
        )
        total = tl.dot(weights, x, total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)[
            :, None
        ]
    y = tl.trans(total.to(out_ptr.dtype.element_ty))
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(out_ptrs, y, mask=live[:, None] & (columns < width)[None, :])


@lru_cache(4096)
def launch_of(num_rows: int, width: int, inner: int, dtype: torch.dtype, device: str) -> Config:
    """Return the launch parameters, which do not affect the result. width: N, inner: K.

    1 row -> tiles of 16 rows and 64 outputs, so that even a small matrix has enough programs to
    fill the device.
    """
    block_m = next((rows for rows in (16, 32, 64) if num_rows <= rows), 128)
    if block_m < 128:
        block_n = 64
    elif num_rows <= 512 or width <= 128:
        block_n = 128
    else:
        block_n = 256
    default = {
        "block_m": block_m,
        "block_n": block_n,
        "warps": 4 if block_n == 64 else 8,
        "tma": 1,
        "group": 8,
        "stages": 6 if block_n == 64 else 4,
    }
    return tuned_config("linear", device, shape_of(width, inner, dtype), num_rows, default)


def shape_of(width: int, inner: int, dtype: torch.dtype) -> str:
    """Return the shape's key in the config tables."""
    return f"N{width} K{inner} {str(dtype).removeprefix('torch.')}"


def linear(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None = None,
    out_MN: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Return x w^T + bias.

    Sums over K are fp32, in one order for any number of rows. The bias is added last, then the
    result is rounded once.

    config: launch parameters, by default those of `launch_of`.

    x [[1, 2]], w [[3, 4], [5, 6]], bias [0, 1] -> [[11, 18]]
    """
    out = x_MK.new_empty((x_MK.shape[0], w_NK.shape[0])) if out_MN is None else out_MN
    _multiply(x_MK, w_NK, bias_N, out, heads=1, x_head_stride=0, out_head_stride=0, config=config)
    return out


def heads_linear(
    x_THK: Tensor, w_HNK: Tensor, out: Tensor | None = None, config: Config | None = None
) -> Tensor:
    """Return y[t, h] = w[h] x[t, h], with sums like `linear`.

    Tokens and heads of x and of the result may have any strides.

    x [[[1, 2], [1, 2]]], w [[[3, 4]], [[5, 6]]] -> [[[11], [17]]]
    """
    tokens, heads, _ = x_THK.shape
    if out is None:
        out = x_THK.new_empty((tokens, heads, w_HNK.shape[1]))
    assert heads == w_HNK.shape[0] == out.shape[1], (x_THK.shape, w_HNK.shape, out.shape)
    _multiply(
        x_THK[:, 0],
        w_HNK.flatten(0, 1),
        None,
        out[:, 0],
        heads=heads,
        x_head_stride=x_THK.stride(1),
        out_head_stride=out.stride(1),
        config=config,
    )
    return out


def _multiply(
    x_MK: Tensor,
    w_PK: Tensor,
    bias_N: Tensor | None,
    out_MN: Tensor,
    *,
    heads: int,
    x_head_stride: int,
    out_head_stride: int,
    config: Config | None,
) -> None:
    """Write the products of all heads.

    x_MK, out_MN: the rows of the first head. Those of the next head begin `x_head_stride` and
        `out_head_stride` elements later.
    w_PK: the weights of all heads.
    """
    rows, inner = x_MK.shape
    width = w_PK.shape[0] // heads
    assert inner == w_PK.shape[1], (x_MK.shape, w_PK.shape)
    assert out_MN.shape == (rows, width), (out_MN.shape, rows, width)
    assert x_MK.dtype == w_PK.dtype, (x_MK.dtype, w_PK.dtype)
    assert x_MK.stride(1) == out_MN.stride(1) == 1, (x_MK.stride(), out_MN.stride())
    config = config or launch_of(rows, width, inner, w_PK.dtype, facts_of(x_MK.device).name)
    block_m = config["block_m"]
    block_n = config["block_n"]
    depth = block_k(inner, w_PK.dtype)
    weights, tma = weights_argument(w_PK, block_n, depth, bool(config["tma"]))
    if rows:
        linear_kernel[(triton.cdiv(rows, block_m) * triton.cdiv(width, block_n), heads)](
            x_MK, weights, bias_N, out_MN, rows, x_MK.stride(0), out_MN.stride(0), x_head_stride,
            out_head_stride, width, inner,
            EVEN=inner % depth == 0, TMA=tma, GROUP=config["group"], BLOCK_M=block_m,
            BLOCK_N=block_n, BLOCK_K=depth,
            num_warps=config["warps"], num_stages=config["stages"],
        )  # fmt: skip
