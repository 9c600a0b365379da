"""Grouped GEMMs of the experts in FP8 (e4m3), with block scales as in DeepSeek-V3.

Weights have one scale per 128 x 128 block, activations one scale per 128 elements of a row.

Sizes: T tokens, K experts per token, N = T * K (token, k) pairs or received rows, e local experts,
D model width, I expert width, F = 2 I, G blocks of 128 inputs, R blocks of 128 outputs.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.kernels import tiles
from moeserve.kernels.activation import SWIGLU_ACT, Act, gated
from moeserve.kernels.align import Alignment
from moeserve.kernels.configs import Config, tuned_config
from moeserve.kernels.fp8 import BLOCK, E4M3, round_blocks


@dataclass(frozen=True, slots=True)
class Scaled:
    """An e4m3 tensor with its block scales: activations or weights."""

    values: Tensor  # activations: e4m3 [M, K]; weights: e4m3 [e, N, K]
    # Activations: fp32 [M, G], or [e, C, G] in slots, with any strides. Weights: fp32 [e, R, G].
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the values."""
        return self.values.shape


@triton.jit
def _step(total, w, x, w_scale, x_scales):
    """Add the scaled product of one step to the total, in fp32.

    Tensor cores accumulate e4m3 products with few bits, so no sum on them is longer than a step.
    """
    return total + tl.dot(w, x) * (w_scale * x_scales)[None, :]


@triton.jit(do_not_specialize=["num_tiles"])
def fp8_kernel(
    x_ptr, x_scale_ptr, w, w_scale_ptr, bias_ptr, out_ptr, out_scale_ptr, order_ptr, ends_ptr,
    expert_ptr, row_ptr,
    num_tiles, x_stride, out_stride, width, inner, top_k,
    ACT: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_N outputs of a tile of rows, like `grouped_kernel`.

    With an ACT, it rounds them to one block of e4m3 and stores its scale too.
    """
    UP: tl.constexpr = ACT is not None
    tile, block = tiles.tile_of(tl.program_id(0), num_tiles, tl.cdiv(width, BLOCK_N), GROUP)
    expert = tl.load(expert_ptr + tile)
    if expert < 0:
        return
    sources, targets, live = tiles.rows_of(
        tile, expert, row_ptr, ends_ptr, order_ptr, top_k, UP, BLOCK_M
    )
    groups = tl.cdiv(inner, BLOCK)
    num_matrices = 2 if UP else 1
    x_ptrs = x_ptr + sources.to(tl.int64)[:, None] * x_stride + tl.arange(0, BLOCK)[None, :]
    x_scale_ptrs = x_scale_ptr + sources.to(tl.int64) * groups
    base = expert * (num_matrices * width)
    first = block * BLOCK_N
    last = width - 1
    w_scale_ptr += (base + first) // BLOCK * groups
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    total_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for group in range(groups):
        k = group * BLOCK
        # Load all scales first, so that they arrive while the tensor cores work.
        x_scales = tl.load(x_scale_ptrs + group, mask=live, other=0.0)
        scale = tl.load(w_scale_ptr + group)
        if UP:
            up_scale = tl.load(w_scale_ptr + width // BLOCK * groups + group)
        x = tl.trans(tiles.load_rows(x_ptrs, live, k, inner, BLOCK, EVEN))
        tile_w = tiles.load_weights(w, base, first, last, k, inner, BLOCK_N, BLOCK, EVEN, TMA)
        total = _step(total, tile_w, x, scale, x_scales)
        if UP:
            tile_w = tiles.load_weights(
                w, base + width, first, last, k, inner, BLOCK_N, BLOCK, EVEN, TMA
            )
            total_up = _step(total_up, tile_w, x, up_scale, x_scales)
    columns = first + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + targets.to(tl.int64)[:, None] * out_stride + columns[None, :]
    mask = live[:, None] & (columns < width)[None, :]
    total = tiles.add_bias(total, bias_ptr, base, columns, width)
    if UP:
        total_up = tiles.add_bias(total_up, bias_ptr, base + width, columns, width)
        values, scales = round_blocks(gated(total, total_up, ACT), 0)
        tl.store(out_ptrs, tl.trans(values), mask=mask)
        tl.store(out_scale_ptr + targets.to(tl.int64) * (width // BLOCK) + block, scales, mask=live)
    else:
        tl.store(out_ptrs, tl.trans(total.to(out_ptr.dtype.element_ty)), mask=mask)


@lru_cache(4096)
def launch_fp8_of(num_rows: int, num_experts: int, width: int, dim: int, device: str) -> Config:
    """Return launch parameters like `grouped_gemm.launch_of`.

    A program of gate and up computes a whole block of 128 outputs, for at most 64 rows.
    """
    rows = tiles.tile_rows(num_rows / num_experts)
    large = rows["block_m"] == 64
    default = {
        **rows,
        "up_block_n": BLOCK,
        "up_warps": 8 if large else 4,
        "up_stages": 4 if large else 3,
    }
    default |= {"down_block_n": 128, "down_warps": 4, "down_stages": 4}
    return tuned_config("grouped_fp8", device, shape_of(num_experts, width, dim), num_rows, default)


def shape_of(num_experts: int, width: int, dim: int) -> str:
    """Return the shape's key in the config tables."""
    return f"E{num_experts} I{width} D{dim}"


def _launch(
    x: Scaled, w: Scaled, bias: Tensor | None, out: Tensor, out_scales: Tensor | None,
    alignment: Alignment, top_k: int,
    act: Act | None, config: Config,
) -> None:  # fmt: skip
    is_up = act is not None
    tiles.check_bias(bias, w)
    _, outputs, inner = w.values.shape
    name = "up" if is_up else "down"
    width = outputs // 2 if is_up else outputs
    block_n = config[f"{name}_block_n"]
    assert x.values.dtype == w.values.dtype == E4M3, (x.values.dtype, w.values.dtype)
    assert x.values.stride(1) == out.stride(1) == 1, (x.values.stride(), out.stride())
    assert x.values.shape[1] == inner, (x.values.shape, inner)
    assert width % BLOCK == 0, width
    assert BLOCK % block_n == 0, block_n
    assert not is_up or block_n == BLOCK, block_n
    groups = triton.cdiv(inner, BLOCK)
    # DeepEP stores the scales column by column, so this may copy.
    x_scales = x.scales.reshape(len(x.values), groups).contiguous()
    for scales, shape in (
        (x_scales, (len(x.values), groups)),
        (w.scales, (len(alignment.ends_e), outputs // BLOCK, groups)),
    ):
        assert scales.shape == shape, (scales.shape, shape)
        assert scales.is_contiguous(), scales.stride()
    weights, tma = tiles.weights_argument(w.values, block_n, BLOCK, bool(config["tma"]))
    num_tiles = len(alignment.expert_Z)
    if not num_tiles:
        return
    fp8_kernel[(num_tiles * triton.cdiv(width, block_n),)](
        x.values, x_scales, weights, w.scales, bias, out, out_scales, alignment.order_N,
        alignment.ends_e, alignment.expert_Z, alignment.row_Z,
        num_tiles, x.values.stride(0), out.stride(0), width, inner, top_k, ACT=act,
        EVEN=inner % BLOCK == 0, TMA=tma,
        GROUP=config["group"], BLOCK_M=alignment.block_m, BLOCK_N=block_n, BLOCK=BLOCK,
        num_warps=config[f"{name}_warps"], num_stages=config[f"{name}_stages"],
    )  # fmt: skip


def gate_up_fp8(
    x: Scaled,
    w13: Scaled,
    alignment: Alignment,
    config: Config,
    top_k: int = 1,
    act: Act = SWIGLU_ACT,
    bias_eF: Tensor | None = None,
) -> Scaled:
    """Compute `grouped_gemm.gate_up` with e4m3 inputs and outputs.

    Each sum of 128 products is computed on tensor cores, then scaled and added in fp32, in order.
    The outputs of each row are rounded in blocks of 128, like in `fp8.quantize`. I must be a
    multiple of 128.

    Example: one row of 128 inputs with value 1 and scale 1, gate and up weights with value 1 and
    scale 1/128. Gate and up are 1, so all 128 results are silu(1) = 0.7311: values 448, scale
    0.7311 / 448.
    """
    width = w13.values.shape[1] // 2
    rows = len(x.values) if alignment.order_N is None else len(alignment.order_N)
    values = x.values.new_empty((rows, width))
    scales = x.scales.new_empty((rows, width // BLOCK))
    _launch(x, w13, bias_eF, values, scales, alignment, top_k, act, config)
    return Scaled(values, scales)


def down_fp8(
    h: Scaled,
    w2: Scaled,
    alignment: Alignment,
    config: Config,
    out: Tensor,
    bias_eD: Tensor | None = None,
) -> Tensor:
    """Compute `grouped_gemm.down` with e4m3 inputs.

    Write the result of each sorted row to the row of its pair in out [N, D], in the dtype of out.

    Example: one row of 128 inputs with value 2 and scale 1/2, weights with value 1 and scale 1/128
    -> 128 results of 1.
    """
    _launch(h, w2, bias_eD, out, None, alignment, 1, None, config)
    return out
