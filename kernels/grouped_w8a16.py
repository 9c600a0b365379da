"""The experts' two products with weights in 8 bits, int8 or e4m3, that become rows' own type in registers.

T tokens, K experts per token, N = T * K (token, k) pairs or received rows, e local slots, D model width, I expert
width, G groups of inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.kernels.align import Alignment
from moeserve.kernels.configs import Config
from moeserve.kernels.fp8 import E4M3
from moeserve.kernels.tiles import STEP_BYTES, load_rows, load_weights, rows_of, tile_of, weights_argument

FAMILY = "grouped_w8a16"  # of tables of configurations
LEAST = 16  # inputs of one instruction: both all inputs and those of a group are multiples


@dataclass(frozen=True, slots=True)
class Bytes:
    """w[s, n, k] = values[s, n, k] * scales[s, k // group, n]; group 0: one scale per output,.

    values: int8 or e4m3 [e, outputs, inputs]. scales: fp32 [e, G, outputs]; the last group may be smaller.
    """

    group: int
    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def depth(self) -> int:
        """Inputs of one step over K, all in one group. 2,048 inputs, group 0 -> 128; 96 inputs, group 48 -> 16"""
        common = math.gcd(self.values.shape[-1], self.group, STEP_BYTES)
        assert common >= LEAST, (self.values.shape, self.group)
        return common


def widen_bytes(w: Bytes) -> Tensor:
    """What the bytes stand for, in fp64, for references. [e, outputs, inputs]"""
    inputs = w.values.shape[-1]
    scales = w.scales.double().transpose(-1, -2).repeat_interleave(w.group or inputs, -1)
    return w.values.double() * scales[..., :inputs]


@triton.jit
def _scales(ptrs, mask, INPUTS: tl.constexpr):
    """A group's scales; ones where they come at the end."""
    scales = tl.full(mask.shape, 1.0, tl.float32)
    if INPUTS:
        scales = tl.load(ptrs, mask=mask, other=0.0)
    return scales


@triton.jit
def _step(total, w, x, scales, INPUTS: tl.constexpr):
    """total + w * scale * x; e4m3 and int8 are whole in either 16-bit type."""
    if INPUTS:
        total += tl.dot(w.to(x.dtype), x, input_precision="ieee") * scales[:, None]
    else:
        total = tl.dot(w.to(x.dtype), x, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_tiles"])
def w8a16_kernel(
    x_ptr, w, scale_ptr, out_ptr, order_ptr, ends_ptr, slot_ptr, row_ptr, num_tiles,
    x_stride, out_stride, width, inner, top_k,
    SWIGLU: tl.constexpr, TMA: tl.constexpr, GROUP: tl.constexpr, INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of a tile of rows, as `grouped_kernel`. INPUTS: of a group of weights, 0: all."""
    tile, block = tile_of(tl.program_id(0), num_tiles, tl.cdiv(width, BLOCK_N), GROUP)
    slot = tl.load(slot_ptr + tile)
    if slot < 0:
        return
    sources, targets, live = rows_of(tile, slot, row_ptr, ends_ptr, order_ptr, top_k, SWIGLU, BLOCK_M)
    outputs = 2 * width if SWIGLU else width
    groups = tl.cdiv(inner, INPUTS) if INPUTS else 1
    x_ptrs = x_ptr + sources[:, None] * x_stride + tl.arange(0, BLOCK_K)[None, :]
    base, first, last = slot * outputs, block * BLOCK_N, width - 1
    columns = first + tl.arange(0, BLOCK_N)
    mask = columns < width
    scale_ptrs = scale_ptr + slot.to(tl.int64) * groups * outputs + columns
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    total_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, inner, BLOCK_K):
        # All scales first: they arrive while the tensor cores work.
        places = scale_ptrs + (k // INPUTS * outputs if INPUTS else 0)
        scales = _scales(places, mask, INPUTS)
        if SWIGLU:
            up_scales = _scales(places + width, mask, INPUTS)
        x = tl.trans(load_rows(x_ptrs, live, k, inner, BLOCK_K, True))
        values = load_weights(w, base, first, last, k, inner, BLOCK_N, BLOCK_K, True, TMA)
        total = _step(total, values, x, scales, INPUTS)
        if SWIGLU:
            values = load_weights(w, base + width, first, last, k, inner, BLOCK_N, BLOCK_K, True, TMA)
            total_up = _step(total_up, values, x, up_scales, INPUTS)
    if not INPUTS:
        total *= tl.load(scale_ptrs, mask=mask, other=0.0)[:, None]
    if SWIGLU:
        if not INPUTS:
            total_up *= tl.load(scale_ptrs + width, mask=mask, other=0.0)[:, None]
        total = total * tl.sigmoid(total) * total_up
    out_ptrs = out_ptr + targets[:, None] * out_stride + columns[None, :]
    tl.store(out_ptrs, tl.trans(total.to(out_ptr.dtype.element_ty)), mask=live[:, None] & mask[None, :])


def _launch(x: Tensor, w: Bytes, out: Tensor, to: Alignment, top_k: int, name: str, config: Config) -> None:
    slots, outputs, inner = w.values.shape
    width, block_n, depth = outputs // 2 if name == "up" else outputs, config[f"{name}_block_n"], w.depth
    assert w.values.dtype in (torch.int8, E4M3), w.values.dtype
    assert x.stride(1) == out.stride(1) == 1, (x.stride(), out.stride())
    assert x.shape[1] == inner, (x.shape, inner)
    assert w.scales.shape == (slots, triton.cdiv(inner, w.group or inner), outputs), (w.scales.shape, w.values.shape)
    assert w.scales.is_contiguous(), w.scales.stride()
    weights, tma = weights_argument(w.values, block_n, depth, bool(config["tma"]))
    num_tiles = len(to.slot_Z)
    if not num_tiles:
        return
    w8a16_kernel[(num_tiles * triton.cdiv(width, block_n),)](
        x, weights, w.scales, out, to.order_N, to.ends_e, to.slot_Z, to.row_Z, num_tiles, x.stride(0), out.stride(0),
        width, inner, top_k, SWIGLU=name == "up", TMA=tma, GROUP=config["group"], INPUTS=w.group, BLOCK_M=to.block_m,
        BLOCK_N=block_n, BLOCK_K=depth, num_warps=config[f"{name}_warps"], num_stages=config[f"{name}_stages"],
    )  # fmt: skip


def gate_up_w8a16(x: Tensor, w13: Bytes, to: Alignment, config: Config, top_k: int = 1) -> Tensor:
    """As `grouped_gemm.gate_up`. Weights enter the tensor cores without their scales; each group's sum is scaled in
    fp32, or the whole sum at the end.

    16 inputs of 1, gate and up weights of value 1 with scales 1/16, group 0 -> silu(1) * 1 = 0.7311
    """
    rows = x.shape[0] if to.order_N is None else len(to.order_N)
    out = x.new_empty((rows, w13.values.shape[1] // 2))
    _launch(x, w13, out, to, top_k, "up", config)
    return out


def down_w8a16(h_NI: Tensor, w2: Bytes, to: Alignment, config: Config, out: Tensor) -> Tensor:
    """As `grouped_gemm.down`, in out's type. 16 inputs of 2, weights of value -1 with scales 1/16 -> -2"""
    _launch(h_NI, w2, out, to, 1, "down", config)
    return out
