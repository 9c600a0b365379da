"""Grouped GEMMs of the experts, over rows sorted by expert.

`gate_up` computes the gate and up projections with their activation, `down` the down projection.

Sizes: T tokens, K experts per token, N = T * K (token, k) pairs or received rows, e local experts,
D model width, I expert width, F = 2 I, Z tiles of rows.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.kernels import tiles
from moeserve.kernels.activation import SWIGLU_ACT, Act, gated
from moeserve.kernels.align import Alignment
from moeserve.kernels.configs import Config, tuned_config


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_kernel(
    x_ptr, w, bias_ptr, out_ptr, order_ptr, ends_ptr, expert_ptr, row_ptr, num_tiles, x_stride,
    out_stride, width,
    inner, top_k, ACT: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_N outputs of a tile of rows.

    ACT: the activation of gate and up; None for down. If `order_ptr` is given, gate and up gather
    their input rows by it, and down scatters its output rows by it.
    """
    UP: tl.constexpr = ACT is not None
    tile, block = tiles.tile_of(tl.program_id(0), num_tiles, tl.cdiv(width, BLOCK_N), GROUP)
    expert = tl.load(expert_ptr + tile)
    if expert < 0:
        return
    sources, targets, live = tiles.rows_of(
        tile, expert, row_ptr, ends_ptr, order_ptr, top_k, UP, BLOCK_M
    )
    x_ptrs = x_ptr + sources.to(tl.int64)[:, None] * x_stride + tl.arange(0, BLOCK_K)[None, :]
    base = expert * width
    first = block * BLOCK_N
    last = width - 1
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if UP:
        base *= 2
        total_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, inner, BLOCK_K):
            x = tl.trans(tiles.load_rows(x_ptrs, live, k, inner, BLOCK_K, EVEN))
            gate = tiles.load_weights(w, base, first, last, k, inner, BLOCK_N, BLOCK_K, EVEN, TMA)
            up = tiles.load_weights(
                w, base + width, first, last, k, inner, BLOCK_N, BLOCK_K, EVEN, TMA
            )
            total = tl.dot(gate, x, total, input_precision="ieee")
            total_up = tl.dot(up, x, total_up, input_precision="ieee")
    else:
        for k in range(0, inner, BLOCK_K):
            x = tl.trans(tiles.load_rows(x_ptrs, live, k, inner, BLOCK_K, EVEN))
            down = tiles.load_weights(w, base, first, last, k, inner, BLOCK_N, BLOCK_K, EVEN, TMA)
            total = tl.dot(down, x, total, input_precision="ieee")
    columns = first + tl.arange(0, BLOCK_N)
    total = tiles.add_bias(total, bias_ptr, base, columns, width)
    if UP:
        total = gated(total, tiles.add_bias(total_up, bias_ptr, base + width, columns, width), ACT)
    out_ptrs = out_ptr + targets.to(tl.int64)[:, None] * out_stride + columns[None, :]
    y = tl.trans(total.to(out_ptr.dtype.element_ty))
    tl.store(out_ptrs, y, mask=live[:, None] & (columns < width)[None, :])


@lru_cache(4096)
def launch_of(
    num_rows: int, num_experts: int, width: int, dim: int, dtype: torch.dtype, device: str
) -> Config:
    """Return the launch parameters of both products for `num_rows` rows.

    block_m: rows of a tile, also the argument of `align`.
    tma: whether weights are loaded by Hopper's copy engine.
    group: tiles that share a block of weights, see `tiles.tile_of`.
    up_block_n, down_block_n: outputs of a program.
    up_warps, down_warps; up_stages, down_stages: warps, and pipeline stages of the loop over K.

    width is I, dim is D. Example with 8 experts: 8 rows -> block_m 16; 8,192 rows -> block_m 128.
    """
    rows = num_rows / num_experts
    block_m = next((size for size, most in ((16, 8), (32, 24), (64, 96)) if rows <= most), 128)
    big = block_m == 128
    default = {
        "block_m": block_m,
        "tma": 1,
        "group": 8 if big else 1,
        "up_block_n": 128 if big else 64,
        "up_warps": 8 if big else 4,
        "up_stages": 4,
        "down_block_n": 128,
        "down_warps": 8 if big else 4,
        "down_stages": 3 if big else 4,
    }
    return tuned_config(
        "grouped_gemm", device, shape_of(num_experts, width, dim, dtype), num_rows, default
    )


def shape_of(num_experts: int, width: int, dim: int, dtype: torch.dtype) -> str:
    """Return the shape's key in the config tables."""
    return f"E{num_experts} I{width} D{dim} {str(dtype).removeprefix('torch.')}"


def _launch(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    alignment: Alignment,
    top_k: int,
    act: Act | None,
    config: Config,
) -> None:
    if act is None:
        name = "down"
        width = w.shape[1]
    else:
        name = "up"
        width = w.shape[1] // 2
    tiles.check_bias(bias, w)
    assert x.dtype == w.dtype == out.dtype, (x.dtype, w.dtype, out.dtype)
    assert x.stride(1) == out.stride(1) == 1, (x.stride(), out.stride())
    assert len(w) == len(alignment.ends_e), (w.shape, len(alignment.ends_e))
    assert x.shape[1] == w.shape[2], (x.shape, w.shape)
    block_n = config[f"{name}_block_n"]
    depth = tiles.block_k(w.shape[2], w.dtype)
    weights, tma = tiles.weights_argument(w, block_n, depth, bool(config["tma"]))
    num_tiles = len(alignment.expert_Z)
    if not num_tiles:
        return
    grouped_kernel[(num_tiles * triton.cdiv(width, block_n),)](
        x, weights, bias, out, alignment.order_N, alignment.ends_e, alignment.expert_Z,
        alignment.row_Z, num_tiles, x.stride(0), out.stride(0),
        width, w.shape[2], top_k, ACT=act, EVEN=w.shape[2] % depth == 0, TMA=tma,
        GROUP=config["group"],
        BLOCK_M=alignment.block_m, BLOCK_N=block_n, BLOCK_K=depth,
        num_warps=config[f"{name}_warps"], num_stages=config[f"{name}_stages"],
    )  # fmt: skip


def gate_up(
    x: Tensor,
    w13_eFD: Tensor,
    alignment: Alignment,
    config: Config,
    top_k: int = 1,
    act: Act = SWIGLU_ACT,
    bias_eF: Tensor | None = None,
) -> Tensor:
    """Return act(w1 x + b1) * (w3 x + b3) [N, I] for each sorted row, with its expert's weights.

    Rows after the last expert's end are undefined. Sums over D are fp32, in one order for any
    number of rows, and rounded once.

    x: the tokens' activations [T, D], where pair p reads row p // top_k. If `alignment` has no
        order: sorted rows.
    w13_eFD: the gate weights come first.
    config: from `launch_of`.
    bias_eF: fp32.

    Example: x [[1]], w13 [[[2], [3]]] -> [[silu(2) * 3]] = [[5.2848]]
    """
    rows = x.shape[0] if alignment.order_N is None else len(alignment.order_N)
    out = x.new_empty((rows, w13_eFD.shape[1] // 2))
    _launch(x, w13_eFD, bias_eF, out, alignment, top_k, act, config)
    return out


def down(
    h_NI: Tensor,
    w2_eDI: Tensor,
    alignment: Alignment,
    config: Config,
    out: Tensor | None = None,
    bias_eD: Tensor | None = None,
) -> Tensor:
    """Return w2 h + b2 [N, D] for each sorted row, with its expert's weights.

    The result of a sorted row is written to the row of its pair, or to the same row if `alignment`
    has no order. Rows of pairs without an expert are not written. Sums and rounding are as in
    `gate_up`.

    Example: h [[4], [5]] of pairs [1, 0] with expert 0, w2 [[[1], [2]]] -> [[5, 10], [4, 8]]
    """
    if out is None:
        out = h_NI.new_empty((h_NI.shape[0], w2_eDI.shape[1]))
    _launch(h_NI, w2_eDI, bias_eD, out, alignment, 1, None, config)
    return out
