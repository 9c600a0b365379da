"""The functions of ops/recurrence.py in native code (csrc/kernels/causal_conv.hpp and recurrence.hpp), with the same
signatures and meanings, and whole blocks with one decay per head in one call; CPU tensors only.

They differ from the reference where it rounds products before it adds them, and where it adds in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import Tensor

from moeserve.ops import recurrence as recurrence_ops
from moeserve.ops.inputs import GroupInputs, StepInputs
from moeserve.ops.native import native
from moeserve.ops.native_layer import NativeLinear
from moeserve.ops.native_rows import TYPES, address
from moeserve.ops.recurrence import Caches, Tile
from moeserve.ops.rules import TILE

_native: Any = native()
_empty = torch.empty


class NativeTilePlan:
    """The tiles of one step. pieces: the native plan."""

    def __init__(self, pieces: Any, group: GroupInputs, step: StepInputs) -> None:
        self.pieces, self.block_size, self.num_tokens = pieces, group.block_size, int(pieces.num_tokens)
        self._step = group, step

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles as ops/recurrence.py has them, for functions without native code."""
        return recurrence_ops.plan_tiles(*self._step).tiles


def plan_tiles(group: GroupInputs, step: StepInputs) -> NativeTilePlan:
    """Cuts the step's tokens at the borders of tiles; see ops/recurrence.py."""
    blocks_RN, size = group.blocks_RN, group.block_size
    assert size % TILE == 0, size
    assert blocks_RN.dtype == torch.int64, blocks_RN.dtype
    assert blocks_RN.is_contiguous(), blocks_RN.stride()
    pieces = _native.TilePlan(blocks_RN.data_ptr(), blocks_RN.shape[1], size, step.starts_R, step.offsets_R1)
    return NativeTilePlan(pieces, group, step)


def _check_cache(cache: Tensor, *shape: int) -> None:
    """Asserts that a cache is fp32 [blocks, *shape]."""
    assert cache.dtype == torch.float32, cache.dtype
    assert cache.shape[1:] == shape, (cache.shape, shape)
    assert cache.is_contiguous(), cache.stride()


def causal_conv(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, silu: bool, caches: Caches, plan: NativeTilePlan
) -> Tensor:
    """Returns the convolution [T, C] in fp32; see ops/recurrence.py. Rows of x may be strided."""
    (num_rows, channels), inputs = x_TC.shape, weight_CK.shape[1]
    assert 2 <= inputs <= TILE + 1, inputs
    assert x_TC.stride(1) == 1 or channels == 1, x_TC.stride()
    assert plan.num_tokens <= num_rows, (plan.num_tokens, num_rows)
    assert weight_CK.dtype == torch.float32, weight_CK.dtype
    assert weight_CK.shape[0] == channels, (weight_CK.shape, channels)
    assert weight_CK.is_contiguous(), weight_CK.stride()
    if bias_C is not None:
        assert (bias_C.dtype, bias_C.shape) == (torch.float32, (channels,)), (bias_C.dtype, bias_C.shape)
        assert bias_C.is_contiguous(), bias_C.stride()
    rows, borders = caches
    _check_cache(rows, plan.block_size, 1, channels)
    _check_cache(borders, plan.block_size // TILE, inputs - 1, channels)
    out_TC = _empty((num_rows, channels))
    plan.pieces.causal_conv(
        TYPES[x_TC.dtype], num_rows, channels, inputs, x_TC.data_ptr(), x_TC.stride(0), weight_CK.data_ptr(),
        address(bias_C), silu, rows.data_ptr(), borders.data_ptr(), out_TC.data_ptr(),
    )  # fmt: skip
    return out_TC


def _by_token(x: Tensor) -> tuple[Tensor, int]:
    """Returns a tensor in which what belongs to a token lies side by side, and elements from one token to the next."""
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
    """Returns o [T, H, v] of the recurrence; see ops/recurrence.py."""
    (num_rows, groups, d), (_, heads, v), decays = q_TGd.shape, v_THv.shape, log_decay_THD.shape[2]
    assert k_TGd.shape == q_TGd.shape, (k_TGd.shape, q_TGd.shape)
    assert v_THv.shape[0] == num_rows >= plan.num_tokens, (v_THv.shape, num_rows, plan.num_tokens)
    assert heads % groups == 0, (heads, groups)
    assert log_decay_THD.shape[:2] == (num_rows, heads), (log_decay_THD.shape, v_THv.shape)
    assert decays in (1, d), (decays, d)
    assert beta_TH is None or beta_TH.shape == (num_rows, heads), (beta_TH.shape, v_THv.shape)
    states, keys, updates, sums = caches
    _check_cache(states, plan.block_size // TILE, heads, d * v)
    _check_cache(keys, plan.block_size, groups, d)
    _check_cache(updates, plan.block_size, heads, v)
    _check_cache(sums, plan.block_size, heads, decays)
    (q_TGd, q_stride), (k_TGd, k_stride), (v_THv, v_stride) = _by_token(q_TGd), _by_token(k_TGd), _by_token(v_THv)
    log_decay_THD, decay_stride = _by_token(log_decay_THD)
    beta_TH, beta_stride = (None, 0) if beta_TH is None else _by_token(beta_TH)
    out_THv = _empty((num_rows, heads, v))
    plan.pieces.recurrence(
        num_rows, groups, heads, d, v, decays, q_TGd.data_ptr(), q_stride, k_TGd.data_ptr(), k_stride,
        v_THv.data_ptr(), v_stride, log_decay_THD.data_ptr(), decay_stride, address(beta_TH), beta_stride,
        states.data_ptr(), keys.data_ptr(), updates.data_ptr(), sums.data_ptr(), out_THv.data_ptr(),
    )  # fmt: skip
    return out_THv


@dataclass(frozen=True, slots=True)
class RecurrentRule:
    """The numbers and fp32 parameters of a gated delta net or of Mamba-2 (see blocks/gated_delta_layer.py and
    blocks/mamba2_layer.py), G groups and H heads of this rank.

    unit: weights of the norms that give queries and keys length 1, and their epsilon; of the gated delta net alone.
    skip_H1, time_limit: of Mamba-2 alone. norm: of each head [v], or of each group [H * v / G].
    """

    groups: int
    heads: int
    conv_CK: Tensor
    conv_bias_C: Tensor | None
    decay_H: Tensor
    dt_bias_H: Tensor
    norm: Tensor
    norm_width: int
    eps: float
    unit: tuple[Tensor, Tensor, float] | None = None
    skip_H1: Tensor | None = None
    time_limit: tuple[float, float] = (0.0, inf)


class RecurrentBlock:
    """The products before a recurrence, its convolution, gates and norm and, if given, the output product in one call
    (csrc/bindings/recurrent_block.cpp): x [T, D] -> [T, D], or [T, H * v] without the output product.

    gates: the product to beta and decays of a gated delta net; None: Mamba-2.
    """

    __slots__ = ("_block", "_columns", "_dtype", "_keep", "_sizes")

    def __init__(
        self,
        inputs: NativeLinear,
        gates: NativeLinear | None,
        out: NativeLinear | None,
        rule: RecurrentRule,
        dim: int,
        v_dim: int,
        dtype: torch.dtype,
    ) -> None:
        self._keep = inputs, gates, out, rule  # whose memory the block reads
        (channels, num_inputs), (unit_q, unit_k, unit_eps) = rule.conv_CK.shape, rule.unit or (None, None, 0.0)
        assert channels == 2 * rule.groups * dim + rule.heads * v_dim, (rule.conv_CK.shape, dim, v_dim)
        for part in (
            rule.conv_CK,
            rule.conv_bias_C,
            rule.decay_H,
            rule.dt_bias_H,
            unit_q,
            unit_k,
            rule.skip_H1,
            rule.norm,
        ):
            assert part is None or (part.dtype, part.is_contiguous()) == (torch.float32, True), (part.dtype, part.shape)
        self._dtype, self._sizes = dtype, (channels, num_inputs, rule.groups, rule.heads, dim, v_dim)
        self._columns = rule.heads * v_dim if out is None else out.matrix.columns
        self._block = _native.RecurrentBlock(
            type=TYPES[dtype], inputs=inputs.matrix, gates=gates and gates.matrix, out=out and out.matrix,
            groups=rule.groups, heads=rule.heads, d=dim, v=v_dim, num_inputs=num_inputs, conv=address(rule.conv_CK),
            conv_bias=address(rule.conv_bias_C), decay=address(rule.decay_H), dt_bias=address(rule.dt_bias_H),
            least=rule.time_limit[0], most=rule.time_limit[1], unit_q=address(unit_q), unit_k=address(unit_k),
            unit_eps=unit_eps, skip=address(rule.skip_H1), norm=address(rule.norm), norm_width=rule.norm_width,
            eps=rule.eps,
        )  # fmt: skip

    def __call__(self, x_TD: Tensor, cache: Caches, plan: NativeTilePlan) -> Tensor:
        """Returns the block's output; writes what the tokens leave behind to `cache`: of the convolution, then of the
        recurrence."""
        assert x_TD.dtype is self._dtype, (x_TD.dtype, self._dtype)
        assert x_TD.stride(1) == 1, x_TD.stride()
        channels, num_inputs, groups, heads, dim, v_dim = self._sizes
        size = plan.block_size
        shapes = (
            (size, 1, channels), (size // TILE, num_inputs - 1, channels), (size // TILE, heads, dim * v_dim),
            (size, groups, dim), (size, heads, v_dim), (size, heads, 1),
        )  # fmt: skip
        for part, shape in zip(cache, shapes, strict=True):
            _check_cache(part, *shape)
        y = _empty((len(x_TD), self._columns), dtype=self._dtype)
        self._block.run(
            plan.pieces, x_TD.data_ptr(), x_TD.stride(0), len(x_TD), *(part.data_ptr() for part in cache), y.data_ptr()
        )
        return y
