"""Grouped GEMMs of the experts with weight-only quantization: int4, fp4, int8 or fp8.

Scales apply to groups of inputs. Activations are not quantized: weights are widened to the dtype of
the activations in registers.

Sizes: T tokens, K experts per token, N = T * K (token, k) pairs or received rows, e local experts,
D model width, I expert width, G groups of inputs.
"""

import math
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
from moeserve.kernels.fp8 import E4M3

GROUPS = (16, 32, 64, 128)  # group sizes of 4-bit weights
# Inputs of one tensor-core instruction. With 8-bit weights, the number of inputs and the group size
# are multiples of it.
MIN_K = 16


@dataclass(frozen=True, slots=True)
class Narrow:
    """Quantized weights: w[s, n, k] = (value - zeros[s, k // group, n]) * scales[s, k // group, n].

    4-bit values are packed in pairs. In every 2 * half inputs, byte j holds input j in its low bits
    and input half + j in its high bits. So the low bits of `half` bytes are one tile of weights,
    and the high bits are another.
    """

    group: int  # inputs that share a scale
    values: Tensor  # int8 or e4m3 [e, outputs, inputs], or packed 4 bits, uint8 [.., inputs / 2]
    scales: Tensor  # any float dtype [e, G, outputs]
    # Whole numbers, shape and dtype of `scales`. None means 8 for int4, 0 otherwise. None is
    # required for 8-bit values and for e2m1.
    zeros: Tensor | None = None
    floats: bool = False  # 4-bit values are e2m1 instead of integers

    @property
    def kind(self) -> str:
        """The format: int4, fp4, int8 or fp8."""
        return {torch.uint8: "fp4" if self.floats else "int4", torch.int8: "int8", E4M3: "fp8"}[
            self.values.dtype
        ]

    @property
    def in_pairs(self) -> bool:
        """Whether a byte holds two values."""
        return self.values.dtype == torch.uint8

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape without packing: [e, outputs, inputs]."""
        experts, outputs, num_bytes = self.values.shape
        return experts, outputs, num_bytes * (2 if self.in_pairs else 1)

    @property
    def half(self) -> int:
        """The depth of one `tl.dot`: inputs that lie in one group.

        Example: fp8, 2,048 inputs, groups of 128 -> 128
        """
        if self.in_pairs:
            return half_of(self.group)
        return math.gcd(self.values.shape[-1], self.group, tiles.STEP_BYTES)


def half_of(group: int) -> int:
    """Return the depth of one `tl.dot` with 4-bit weights. 32 -> 32; 128 -> 64"""
    assert group in GROUPS, group
    return min(group, 64)


def pack_int4(
    values: Tensor, scales: Tensor, zeros: Tensor | None, group: int, floats: bool = False
) -> Narrow:
    """Pack 4-bit values into `Narrow`.

    values: uint8 from 0 to 15 [e, outputs, inputs]. inputs must be a multiple of 2 * half.
    scales, zeros: [e, outputs, G].
    """
    half = half_of(group)
    assert values.shape[-1] % (2 * half) == 0, (values.shape, group)
    low, high = values.unflatten(-1, (-1, 2, half)).unbind(-2)
    return Narrow(
        group=group,
        values=(low | (high << 4)).flatten(-2).contiguous(),
        scales=scales.transpose(-1, -2).contiguous(),
        zeros=None if zeros is None else zeros.transpose(-1, -2).contiguous(),
        floats=floats,
    )


@triton.jit
def _centred(values, zeros, like):
    """Return values - zeros in the dtype of `like`, exactly.

    For 16-bit floats, the value is written into the low mantissa bits of 128 (bfloat16) or 1,024
    (float16), which gives 128 + value or 1,024 + value without a conversion.
    """
    if like.dtype == tl.bfloat16:
        result = (values.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (zeros + 128.0).to(
            tl.bfloat16
        )[:, None]
    elif like.dtype == tl.float16:
        result = (values.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (zeros + 1024.0).to(
            tl.float16
        )[:, None]
    else:
        result = values.to(tl.float32) - zeros[:, None]
    return result


@triton.jit
def _of_e2m1(values, like):
    """Return e2m1 values in the dtype of `like`, exactly.

    0 and 0.5 are special cases. For all others, the exponent and mantissa bits are shifted into
    place and added to the bits of 0.5.
    """
    if like.dtype == tl.bfloat16:
        bits = values.to(tl.int16)
        sign = (values.to(tl.int16) & 8) << 12
        sizes = tl.where((bits & 7) < 2, (bits & 7) * 0x3F00, ((bits & 7) << 6) + 0x3F00)
    elif like.dtype == tl.float16:
        bits = values.to(tl.int16)
        sign = (values.to(tl.int16) & 8) << 12
        sizes = tl.where((bits & 7) < 2, (bits & 7) * 0x3800, ((bits & 7) << 9) + 0x3800)
    else:
        bits = values.to(tl.int32)
        sign = (values.to(tl.int32) & 8) << 28
        sizes = tl.where((bits & 7) < 2, (bits & 7) * 0x3F000000, ((bits & 7) << 22) + 0x3F000000)
    return (sizes | sign).to(like.dtype, bitcast=True)


@triton.jit
def _widened(values, zeros, like, FLOATS: tl.constexpr):
    """Return 4-bit values in the dtype of `like`."""
    return _of_e2m1(values, like) if FLOATS else _centred(values, zeros, like)


@triton.jit
def _group(scale_ptr, zero_ptr, places, mask):
    """Load (scales, zeros) of one group of inputs."""
    scales = tl.load(scale_ptr + places, mask=mask, other=0.0).to(tl.float32)
    zeros = tl.full(scales.shape, 8.0, tl.float32)
    if zero_ptr is not None:
        zeros = tl.load(zero_ptr + places, mask=mask, other=0.0).to(tl.float32)
    return scales, zeros


@triton.jit
def _groups(scale_ptr, zero_ptr, places, step, mask, SHARED: tl.constexpr):
    """Load (scales, zeros) of the low and of the high inputs. SHARED: both are in one group."""
    scales, zeros = _group(scale_ptr, zero_ptr, places, mask)
    high_scales = scales
    high_zeros = zeros
    if not SHARED:
        high_scales, high_zeros = _group(scale_ptr, zero_ptr, places + step, mask)
    return scales, zeros, high_scales, high_zeros


@triton.jit
def _step(
    total, values, x_low, x_high, scales, zeros, high_scales, high_zeros, SHARED: tl.constexpr,
    PAIRS: tl.constexpr,
    FLOATS: tl.constexpr,
):  # fmt: skip
    """Return total + (value - zero) * scale * x.

    PAIRS: sum over the low and the high inputs; otherwise over the low inputs only.
    """
    if PAIRS:
        part = tl.dot(_widened(values & 15, zeros, x_low, FLOATS), x_low, input_precision="ieee")
        if not SHARED:
            total += part * scales[:, None]
            part = tl.zeros_like(part)
        high = _widened(values >> 4, high_zeros, x_high, FLOATS)
        part = tl.dot(high, x_high, part, input_precision="ieee")
        total += part * high_scales[:, None]
    else:
        total += tl.dot(values.to(x_low.dtype), x_low, input_precision="ieee") * scales[:, None]
    return total


@triton.jit(do_not_specialize=["num_tiles"])
def weight_only_kernel(
    x_ptr, w, scale_ptr, zero_ptr, bias_ptr, out_ptr, order_ptr, ends_ptr, expert_ptr, row_ptr,
    num_tiles,
    x_stride, out_stride, width, inner, top_k,
    ACT: tl.constexpr, PAIRS: tl.constexpr, FLOATS: tl.constexpr, TMA: tl.constexpr,
    GROUP: tl.constexpr,
    INPUTS: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_N outputs of a tile of rows, like `grouped_kernel`.

    INPUTS: group size of the weights. PAIRS: a byte holds two weights. FLOATS: they are e2m1.
    """
    UP: tl.constexpr = ACT is not None
    tile, block = tiles.tile_of(tl.program_id(0), num_tiles, tl.cdiv(width, BLOCK_N), GROUP)
    expert = tl.load(expert_ptr + tile)
    if expert < 0:
        return
    sources, targets, live = tiles.rows_of(
        tile, expert, row_ptr, ends_ptr, order_ptr, top_k, UP, BLOCK_M
    )
    outputs = 2 * width if UP else width
    x_ptrs = x_ptr + sources.to(tl.int64)[:, None] * x_stride + tl.arange(0, HALF)[None, :]
    base = expert * outputs
    first = block * BLOCK_N
    last = width - 1
    columns = first + tl.arange(0, BLOCK_N)
    mask = columns < width
    scale_ptr += expert.to(tl.int64) * tl.cdiv(inner, INPUTS) * outputs
    if zero_ptr is not None:
        zero_ptr += expert.to(tl.int64) * tl.cdiv(inner, INPUTS) * outputs
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    total_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    PER_VALUE: tl.constexpr = 2 if PAIRS else 1
    SHARED: tl.constexpr = INPUTS >= PER_VALUE * HALF
    for k in range(0, inner, PER_VALUE * HALF):
        # Load all scales first, so that they arrive while the tensor cores work.
        places = k // INPUTS * outputs + columns
        scales, zeros, high_scales, high_zeros = _groups(
            scale_ptr, zero_ptr, places, outputs, mask, SHARED
        )
        if UP:
            up_scales, up_zeros, up_high_scales, up_high_zeros = _groups(
                scale_ptr, zero_ptr, places + width, outputs, mask, SHARED
            )
        low = tl.trans(tiles.load_rows(x_ptrs, live, k, inner, HALF, True))
        high = low
        if PAIRS:
            high = tl.trans(tiles.load_rows(x_ptrs, live, k + HALF, inner, HALF, True))
        column = k // PER_VALUE
        stride = inner // PER_VALUE
        values = tiles.load_weights(w, base, first, last, column, stride, BLOCK_N, HALF, True, TMA)
        total = _step(
            total, values, low, high, scales, zeros, high_scales, high_zeros, SHARED, PAIRS, FLOATS
        )
        if UP:
            values = tiles.load_weights(
                w, base + width, first, last, column, stride, BLOCK_N, HALF, True, TMA
            )
            total_up = _step(
                total_up,
                values,
                low,
                high,
                up_scales,
                up_zeros,
                up_high_scales,
                up_high_zeros,
                SHARED,
                PAIRS,
                FLOATS,
            )
    total = tiles.add_bias(total, bias_ptr, base, columns, width)
    if UP:
        total = gated(total, tiles.add_bias(total_up, bias_ptr, base + width, columns, width), ACT)
    out_ptrs = out_ptr + targets.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(
        out_ptrs, tl.trans(total.to(out_ptr.dtype.element_ty)), mask=live[:, None] & mask[None, :]
    )


@lru_cache(4096)
def launch_narrow_of(
    num_rows: int,
    num_experts: int,
    width: int,
    dim: int,
    kind: str,
    group: int,
    dtype: torch.dtype,
    device: str,
) -> Config:
    """Return launch parameters like `grouped_gemm.launch_of`, for activations of `dtype`.

    A weight is widened once per tile of rows, so large tiles are faster when there are many rows.
    """
    rows = num_rows / num_experts
    # Large tiles of fp32 do not fit into shared memory.
    big = rows > 256 and dtype != torch.float32
    default = {
        **tiles.tile_rows(rows),
        "up_block_n": 64,
        "up_warps": 8 if big else 4,
        "up_stages": 4,
        "down_block_n": 128 if big else 64,
        "down_warps": 8 if big else 4,
        "down_stages": 3 if big else 4,
    }
    if big:
        default["block_m"] = 128
    shape = shape_of(num_experts, width, dim, kind, group, dtype)
    return tuned_config("grouped_weight_only", device, shape, num_rows, default)


def shape_of(
    num_experts: int, width: int, dim: int, kind: str, group: int, dtype: torch.dtype
) -> str:
    """Return the shape's key in the config tables."""
    return f"E{num_experts} I{width} D{dim} {kind} G{group} {str(dtype).removeprefix('torch.')}"


def _launch(
    x: Tensor,
    w: Narrow,
    bias: Tensor | None,
    out: Tensor,
    alignment: Alignment,
    top_k: int,
    act: Act | None,
    config: Config,
) -> None:
    experts, outputs, inner = w.shape
    pairs = w.in_pairs
    half = w.half
    name = "down" if act is None else "up"
    tiles.check_bias(bias, w)
    width = outputs // 2 if name == "up" else outputs
    block_n = config[f"{name}_block_n"]
    assert x.stride(1) == out.stride(1) == 1, (x.stride(), out.stride())
    assert x.shape[1] == inner, (x.shape, inner)
    assert half >= MIN_K, (inner, w.group)
    assert inner % (2 * half if pairs else half) == 0, (inner, w.group)
    for part in (w.scales, w.zeros):
        assert part is None or part.shape == (experts, triton.cdiv(inner, w.group), outputs), (
            part.shape
        )
        assert part is None or part.is_contiguous(), part.stride()
    weights, tma = tiles.weights_argument(w.values, block_n, half, bool(config["tma"]))
    num_tiles = len(alignment.expert_Z)
    if not num_tiles:
        return
    weight_only_kernel[(num_tiles * triton.cdiv(width, block_n),)](
        x, weights, w.scales, w.zeros, bias, out, alignment.order_N, alignment.ends_e,
        alignment.expert_Z, alignment.row_Z, num_tiles, x.stride(0),
        out.stride(0), width, inner, top_k, ACT=act, PAIRS=pairs, FLOATS=w.floats, TMA=tma,
        GROUP=config["group"],
        INPUTS=w.group, HALF=half, BLOCK_M=alignment.block_m, BLOCK_N=block_n,
        num_warps=config[f"{name}_warps"], num_stages=config[f"{name}_stages"],
    )  # fmt: skip


def gate_up_narrow(
    x: Tensor,
    w13: Narrow,
    alignment: Alignment,
    config: Config,
    top_k: int = 1,
    act: Act = SWIGLU_ACT,
    bias_eF: Tensor | None = None,
) -> Tensor:
    """Compute `grouped_gemm.gate_up` with quantized weights.

    The tensor cores multiply unscaled weights; the sum of each group is scaled in fp32.

    Example: 64 inputs of 1, int4 gate and up weights with value 9 and scale 1/64, groups of 32 ->
    silu(1) * 1 = 0.7311
    """
    rows = x.shape[0] if alignment.order_N is None else len(alignment.order_N)
    out = x.new_empty((rows, w13.shape[1] // 2))
    _launch(x, w13, bias_eF, out, alignment, top_k, act, config)
    return out


def down_narrow(
    h_NI: Tensor,
    w2: Narrow,
    alignment: Alignment,
    config: Config,
    out: Tensor | None = None,
    bias_eD: Tensor | None = None,
) -> Tensor:
    """Compute `grouped_gemm.down` with quantized weights; the result has the dtype of `out`.

    Example: 64 inputs of 2, int4 weights with value 7 and scale 1/64 -> -2
    """
    if out is None:
        out = h_NI.new_empty((h_NI.shape[0], w2.shape[1]))
    _launch(h_NI, w2, bias_eD, out, alignment, 1, None, config)
    return out
