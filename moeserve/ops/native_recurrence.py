"""Native (C++) functions with the signatures of ops/recurrence.py and ops/selective_scan.py.

They are in csrc/kernels/causal_conv.hpp, recurrence.hpp and selective_scan.hpp. CPU tensors only.
Bits differ from the reference where it rounds products before it adds them, and where it adds in
another order.
"""

from typing import Any

import torch
from torch import Tensor

from moeserve.ops.inputs import GroupInputs, StepInputs
from moeserve.ops.native import native
from moeserve.ops.native_rows import TYPES, address
from moeserve.ops.recurrence import Caches
from moeserve.ops.rules import TILE

_native: Any = native()
_empty = torch.empty


class NativeTilePlan:
    """The tiles of one step. pieces: the native plan."""

    def __init__(self, pieces: Any, block_size: int) -> None:
        self.pieces = pieces
        self.block_size = block_size
        self.num_tokens = int(pieces.num_tokens)


def plan_tiles(group: GroupInputs, step: StepInputs) -> NativeTilePlan:
    """Divide the tokens of a step into tiles; see ops/recurrence.py."""
    blocks_RN = group.blocks_RN
    size = group.block_size
    assert size % TILE == 0, size
    assert blocks_RN.dtype == torch.int64, blocks_RN.dtype
    assert blocks_RN.is_contiguous(), blocks_RN.stride()
    pieces = _native.TilePlan(
        blocks_RN.data_ptr(), blocks_RN.shape[1], size, step.starts_R, step.offsets_R1
    )
    return NativeTilePlan(pieces, size)


def check_cache(cache: Tensor, *shape: int) -> None:
    """Assert that a cache is fp32 [blocks, *shape] and contiguous."""
    assert cache.dtype == torch.float32, cache.dtype
    assert cache.shape[1:] == shape, (cache.shape, shape)
    assert cache.is_contiguous(), cache.stride()


def causal_conv(
    x_TC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    silu: bool,
    caches: Caches,
    plan: NativeTilePlan,
) -> Tensor:
    """Return the convolution [T, C] in fp32; see ops/recurrence.py. x may have any row stride."""
    num_rows, channels = x_TC.shape
    inputs = weight_CK.shape[1]
    assert 2 <= inputs <= TILE + 1, inputs
    assert x_TC.stride(1) == 1 or channels == 1, x_TC.stride()
    assert plan.num_tokens <= num_rows, (plan.num_tokens, num_rows)
    assert weight_CK.dtype == torch.float32, weight_CK.dtype
    assert weight_CK.shape[0] == channels, (weight_CK.shape, channels)
    assert weight_CK.is_contiguous(), weight_CK.stride()
    if bias_C is not None:
        assert (bias_C.dtype, bias_C.shape) == (torch.float32, (channels,)), (
            bias_C.dtype,
            bias_C.shape,
        )
        assert bias_C.is_contiguous(), bias_C.stride()
    rows, borders = caches
    check_cache(rows, plan.block_size, 1, channels)
    check_cache(borders, plan.block_size // TILE, inputs - 1, channels)
    out_TC = _empty((num_rows, channels))
    plan.pieces.causal_conv(
        TYPES[x_TC.dtype], num_rows, channels, inputs, x_TC.data_ptr(), x_TC.stride(0),
        weight_CK.data_ptr(),
        address(bias_C), silu, rows.data_ptr(), borders.data_ptr(), out_TC.data_ptr(),
    )  # fmt: skip
    return out_TC


def _by_token(x: Tensor) -> tuple[Tensor, int]:
    """Return the tensor, contiguous within each token, and its stride between tokens."""
    assert x.dtype == torch.float32, x.dtype
    if x.shape[0] and not x[0].is_contiguous():
        x = x.contiguous()
    return x, x.stride(0)


def recurrence(
    q_TGd: Tensor,
    k_TGd: Tensor,
    v_THv: Tensor,
    log_decay_THD: Tensor,
    beta_TH: Tensor | None,
    caches: Caches,
    plan: NativeTilePlan,
) -> Tensor:
    """Return o [T, H, v] of the recurrence; see ops/recurrence.py."""
    num_rows, groups, d = q_TGd.shape
    _, heads, v = v_THv.shape
    decays = log_decay_THD.shape[2]
    assert k_TGd.shape == q_TGd.shape, (k_TGd.shape, q_TGd.shape)
    assert v_THv.shape[0] == num_rows >= plan.num_tokens, (v_THv.shape, num_rows, plan.num_tokens)
    assert heads % groups == 0, (heads, groups)
    assert log_decay_THD.shape[:2] == (num_rows, heads), (log_decay_THD.shape, v_THv.shape)
    assert decays in (1, d), (decays, d)
    assert beta_TH is None or beta_TH.shape == (num_rows, heads), (beta_TH.shape, v_THv.shape)
    states, keys, updates, sums = caches
    check_cache(states, plan.block_size // TILE, heads, d * v)
    check_cache(keys, plan.block_size, groups, d)
    check_cache(updates, plan.block_size, heads, v)
    check_cache(sums, plan.block_size, heads, decays)
    q_TGd, q_stride = _by_token(q_TGd)
    k_TGd, k_stride = _by_token(k_TGd)
    v_THv, v_stride = _by_token(v_THv)
    log_decay_THD, decay_stride = _by_token(log_decay_THD)
    beta_TH, beta_stride = (None, 0) if beta_TH is None else _by_token(beta_TH)
    out_THv = _empty((num_rows, heads, v))
    plan.pieces.recurrence(
        num_rows, groups, heads, d, v, decays, q_TGd.data_ptr(), q_stride, k_TGd.data_ptr(),
        k_stride,
        v_THv.data_ptr(), v_stride, log_decay_THD.data_ptr(), decay_stride, address(beta_TH),
        beta_stride,
        states.data_ptr(), keys.data_ptr(), updates.data_ptr(), sums.data_ptr(), out_THv.data_ptr(),
    )  # fmt: skip
    return out_THv


def selective_scan(
    x_TC: Tensor,
    dt_TC: Tensor,
    a_NC: Tensor,
    b_TN: Tensor,
    c_TN: Tensor,
    skip_C: Tensor,
    caches: Caches,
    plan: NativeTilePlan,
) -> Tensor:
    """Return y [T, C] of the scan; see ops/selective_scan.py."""
    num_rows, channels = x_TC.shape
    state = len(a_NC)
    assert plan.num_tokens <= num_rows, (plan.num_tokens, num_rows)
    shapes = (
        (num_rows, channels),
        (num_rows, channels),
        (state, channels),
        (num_rows, state),
        (num_rows, state),
        (channels,),
    )
    inputs = [x.contiguous() for x in (x_TC, dt_TC, a_NC, b_TN, c_TN, skip_C)]
    for x, shape in zip(inputs, shapes, strict=True):
        assert (x.dtype, x.shape) == (torch.float32, shape), (x.dtype, x.shape, shape)
    states, xs, dts, bs = caches
    check_cache(states, plan.block_size // TILE, state, channels)
    check_cache(xs, plan.block_size, 1, channels)
    check_cache(dts, plan.block_size, 1, channels)
    check_cache(bs, plan.block_size, 1, state)
    out_TC = _empty((num_rows, channels))
    addresses = (x.data_ptr() for x in (*inputs, *caches, out_TC))
    plan.pieces.selective_scan(num_rows, channels, state, *addresses)
    return out_TC
