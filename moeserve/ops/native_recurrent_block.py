"""The native (C++) fused layer of a gated delta net or of Mamba-2.

Shapes: T tokens, D model width, G groups and H heads of this rank, v width of a head's values.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from moeserve.ops.native import native
from moeserve.ops.native_layer import NativeLinear
from moeserve.ops.native_recurrence import NativeTilePlan, check_cache
from moeserve.ops.native_rows import TYPES, address
from moeserve.ops.recurrence import Caches
from moeserve.ops.rules import TILE

_native: Any = native()


@dataclass(frozen=True, slots=True)
class RecurrentRule:
    """The sizes and fp32 parameters of a gated delta net or of Mamba-2.

    See blocks/gated_delta_layer.py and blocks/mamba2_layer.py.
    """

    groups: int  # G
    heads: int  # H
    conv_CK: Tensor
    conv_bias_C: Tensor | None
    decay_H: Tensor
    dt_bias_H: Tensor
    norm: Tensor  # weights of a norm per head [v], or (Mamba-2) of a norm per group [H * v]
    eps: float
    # Gated delta net: weights of the L2 norms of queries and of keys, and their epsilon
    unit: tuple[Tensor, Tensor, float] | None = None
    places: Tensor | None = None  # int64 [H]: the place of each head's results; None: in order
    # Mamba-2:
    skip_H1: Tensor | None = None
    time_limit: tuple[float, float] = (0.0, inf)


class RecurrentBlock:
    """A fused recurrent layer (csrc/bindings/recurrent_block.cpp).

    It computes the input products, convolution, recurrence, gates, norm and, if given, the output
    product: x [T, D] -> [T, D], or [T, H * v] without the output product.

    gates: the product to beta and decays of a gated delta net; None for Mamba-2.
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
        self._keep = inputs, gates, out, rule  # the block reads their memory
        channels, num_inputs = rule.conv_CK.shape
        unit_q, unit_k, unit_eps = rule.unit or (None, None, 0.0)
        assert channels == 2 * rule.groups * dim + rule.heads * v_dim, (
            rule.conv_CK.shape,
            dim,
            v_dim,
        )
        assert 2 <= num_inputs <= TILE + 1, num_inputs
        columns = channels + rule.heads * v_dim + (rule.heads if gates is None else 0)
        assert inputs.matrix.columns == columns, (inputs.matrix.columns, columns)
        assert gates is None or gates.matrix.columns == 2 * rule.heads, (gates, rule.heads)
        assert out is None or out.matrix.depth == rule.heads * v_dim, (out, rule.heads, v_dim)
        params = (
            rule.conv_CK,
            rule.conv_bias_C,
            rule.decay_H,
            rule.dt_bias_H,
            unit_q,
            unit_k,
            rule.skip_H1,
            rule.norm,
        )
        for part in params:
            assert part is None or (part.dtype, part.is_contiguous()) == (torch.float32, True), (
                part.dtype,
                part.shape,
            )
        places = rule.places
        assert places is None or (places.dtype, places.shape) == (torch.int64, (rule.heads,)), (
            places
        )
        self._dtype = dtype
        self._sizes = (channels, num_inputs, rule.groups, rule.heads, dim, v_dim)
        self._columns = rule.heads * v_dim if out is None else out.matrix.columns
        self._block = _native.RecurrentBlock(
            type=TYPES[dtype], inputs=inputs.matrix, gates=gates and gates.matrix,
            out=out and out.matrix,
            groups=rule.groups, heads=rule.heads, d=dim, v=v_dim, num_inputs=num_inputs,
            conv=address(rule.conv_CK),
            conv_bias=address(rule.conv_bias_C), decay=address(rule.decay_H),
            dt_bias=address(rule.dt_bias_H),
            least=rule.time_limit[0], most=rule.time_limit[1], unit_q=address(unit_q),
            unit_k=address(unit_k),
            unit_eps=unit_eps, skip=address(rule.skip_H1), norm=address(rule.norm), eps=rule.eps,
            norm_width=v_dim if rule.unit else rule.heads * v_dim // rule.groups,
            places=address(rule.places),
        )  # fmt: skip

    def __call__(self, x_TD: Tensor, cache: Caches, plan: NativeTilePlan) -> Tensor:
        """Return the block's output. Writes the tokens' inputs and states to `cache`.

        cache: of the convolution, then of the recurrence.
        """
        assert x_TD.dtype is self._dtype, (x_TD.dtype, self._dtype)
        assert x_TD.stride(1) == 1, x_TD.stride()
        assert x_TD.shape[1] == self._keep[0].matrix.depth, (x_TD.shape, self._keep[0].matrix.depth)
        assert plan.num_tokens <= len(x_TD), (plan.num_tokens, x_TD.shape)
        channels, num_inputs, groups, heads, dim, v_dim = self._sizes
        size = plan.block_size
        shapes = (
            (size, 1, channels), (size // TILE, num_inputs - 1, channels),
            (size // TILE, heads, dim * v_dim),
            (size, groups, dim), (size, heads, v_dim), (size, heads, 1),
        )  # fmt: skip
        for part, shape in zip(cache, shapes, strict=True):
            check_cache(part, *shape)
        y = torch.empty((len(x_TD), self._columns), dtype=self._dtype)
        self._block.run(
            plan.pieces,
            x_TD.data_ptr(),
            x_TD.stride(0),
            len(x_TD),
            *(part.data_ptr() for part in cache),
            y.data_ptr(),
        )
        return y
