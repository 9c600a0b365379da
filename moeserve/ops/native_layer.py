"""The native (C++) matrix products, paged attention, and fused blocks of a decoder layer.

Results are batch-invariant. An output of a product is one chain of fp32 fused multiply-adds over
the inputs in ascending order (csrc/kernels/product.hpp), so its bits depend on its row and its
column's weights only: not on other rows or columns, threads, or the vector width of the processor.
Attention has one function for prefill and decode, whose bits depend on query and context only
(csrc/kernels/attention.hpp). `AttentionBlock`, `GatedMLPBlock` and `ExpertsBlock` fuse several
calls into one (csrc/bindings/layer.cpp) with the same bits, because the interpreter takes longer
than small kernels.

Shapes: T tokens, D model width, H heads and G KV heads of this rank, d width of a head, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.errors import IncompressibleWeights
from moeserve.ops.elementwise import HeadRule
from moeserve.ops.inputs import (
    GroupInputs,
    HeadShape,
    LayerCache,
    RopeCacheInputs,
    RowContext,
    StepInputs,
    entry_width,
)
from moeserve.ops.native import native
from moeserve.ops.native_rows import (
    KV_TYPES,
    TYPES,
    address,
    check_per_expert,
    native_activation,
    native_rule,
)
from moeserve.ops.quantized import E2M1_INTEGERS, Quantized, Weight
from moeserve.ops.rules import SWIGLU, Activation, RouterRule

BLOCK = 16  # columns of a packed block
HUGE = 2 << 20  # bytes of a huge page
# The version of the packed layout. Change the version with the layout, so that cached files in an
# older layout are not used (loader/packed_cache.py).
LAYOUT = 2
BYTES_IN_12_BITS = 1.53  # bytes per compressed weight, with tables and room for escapes
HEAD_DIMS = range(8, 577, 8)  # widths of heads that the attention kernels support
# Allocates memory for packed weights: number of bytes -> (uint8 memory aligned to 64 bytes, whether
# it has the packed weights already).
Allocate = Callable[[int], tuple[Tensor, bool]]
# Writes a layer's packed experts [e, bytes of one], in memory from an `Allocate`, to disk. Returns
# the handle by which kernels find them.
WriteExperts = Callable[[Tensor], Any]
_native: Any = native()
_empty = torch.empty


def allocate_new(num_bytes: int) -> tuple[Tensor, bool]:
    """Allocate new memory, on huge pages if it is large enough (an `Allocate`)."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes >= HUGE:
        _native.advise_huge_pages(memory.data_ptr(), num_bytes)
    return memory, False


def packing_of(weight: Weight, columns: int | None = None, lossless: bool = False) -> Any:
    """Return the packed format of a weight [..., N, K], or of `columns` outputs of it.

    lossless: compress bf16 weights to 12 bits.
    """
    num_outputs = columns or weight.shape[-2]
    num_inputs = weight.shape[-1]
    if isinstance(weight, Quantized):
        kind = "int8" if weight.kind == "codes" else weight.kind
        bits = 0
        codes = weight.codes
        factor = weight.super_factor
        if weight.activations == "int8":
            bits = weight.bits or (8 if weight.kind == "int8" else 4)
            if weight.kind == "fp4":
                codes = E2M1_INTEGERS
                factor = 0.5
        return _native.Packing(
            getattr(_native.Type, kind), num_inputs, num_outputs, weight.group,
            weight.zeros is not None, bits, TYPES[weight.scale_dtype], weight.mins is not None,
            weight.supers is not None, codes, factor,
        )  # fmt: skip
    is_compressed = lossless and weight.dtype is torch.bfloat16 and num_inputs % 8 == 0
    native_type = _native.Type.bf12 if is_compressed else TYPES[weight.dtype]
    return _native.Packing(native_type, num_inputs, num_outputs)


def pack(
    packing: Any, weight_NK: Weight, target: int, block_stride: int, all_threads: bool
) -> None:
    """Pack a matrix to the address `target`.

    block_stride: bytes between the starts of two blocks. all_threads: use the thread pool.

    Raises IncompressibleWeights for weights that cannot be compressed to 12 bits.
    """
    values: Tensor
    group_parts: tuple[Tensor | None, ...]  # scales, zeros, mins, d, dmin
    if isinstance(weight_NK, Quantized):
        # `contiguous` makes new objects, which takes as long as packing a small matrix.
        is_contiguous = all(part.is_contiguous() for part in weight_NK.parts)
        w = weight_NK if is_contiguous else weight_NK.contiguous()
        values = w.values
        group_parts = (w.scales, w.zeros, w.mins, *(w.supers or (None, None)))
    else:
        values = weight_NK if weight_NK.stride(1) == 1 else weight_NK.contiguous()
        group_parts = (None,) * 5
    if not _native.pack(
        packing,
        values.data_ptr(),
        values.stride(0),
        *(address(part) for part in group_parts),
        target,
        block_stride,
        all_threads,
    ):
        raise IncompressibleWeights(
            f"weights {list(weight_NK.shape)} cannot be compressed to 12 bits: in a block of 16 "
            "outputs, more than one weight in a thousand has an upper byte that is not among the "
            "16 most frequent ones; use lossless_compression=off"
        )


class NativeLinear:
    """y = x W^T + b, for x [M, K] of the weight's dtype, with any stride between rows.

    Keeps only the packed weight. lossless: compress bf16 weights to 12 bits. For example x [[1,
    2]], weight [[3, 4]], bias [5] -> [[16]].
    """

    __slots__ = (
        "_bias",
        "_bias_address",
        "_columns",
        "_depth",
        "_dtype",
        "_packing",
        "_type",
        "matrix",
        "packed",
    )

    def __init__(
        self,
        weight_NK: Weight,
        bias_N: Tensor | None = None,
        allocate: Allocate = allocate_new,
        lossless: bool = False,
    ) -> None:
        self._dtype = weight_NK.dtype
        self._type = TYPES[weight_NK.dtype]
        self._columns, self._depth = weight_NK.shape
        self._packing = packing_of(weight_NK, lossless=lossless)
        self.packed, is_packed = allocate(self._packing.bytes)
        if not is_packed:
            pack(
                self._packing,
                weight_NK,
                target=self.packed.data_ptr(),
                block_stride=self._packing.block_bytes,
                all_threads=True,
            )
        self._bias: Tensor | None = None
        if bias_N is not None:
            self._bias = torch.nn.functional.pad(bias_N.float(), (0, -self._columns % BLOCK))
        self._bias_address = address(self._bias)
        # A reference to this object's memory, for fused blocks.
        self.matrix = _native.Matrix(self._packing, self.packed.data_ptr(), self._bias_address)

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        """The tensors that hold the weight and the bias."""
        return self.packed, self._bias

    def __call__(self, x_MK: Tensor, context: RowContext | None = None) -> Tensor:
        """Return x W^T + bias [M, N] in the dtype of x [M, K]."""
        assert x_MK.dtype == self._dtype
        assert x_MK.shape[1] == self._depth
        if x_MK.stride(1) != 1:
            x_MK = x_MK.contiguous()
        y_MN = x_MK.new_empty(x_MK.shape[0], self._columns)
        _native.linear(
            self._type, self._packing, self.packed.data_ptr(), self._bias_address, x_MK.data_ptr(),
            x_MK.stride(0),
            x_MK.shape[0], y_MN.data_ptr(),
        )  # fmt: skip
        return y_MN


class NativeHeads:
    """`HeadsLinear` (ops/latent.py): the product of each head with its own packed weight.

    x [[[1, 2]]], weight [[[3, 4]]] -> [[[11]]]
    """

    __slots__ = ("_dtype", "_packed", "_packing", "_shape", "_type", "matrices")

    def __init__(self, weight_HNK: Weight, allocate: Allocate = allocate_new) -> None:
        self._dtype = weight_HNK.dtype
        self._type = TYPES[weight_HNK.dtype]
        self._shape = tuple(weight_HNK.shape)
        self._packing = packing_of(weight_HNK)
        self._packed, is_packed = allocate(self._shape[0] * self._packing.bytes)
        if not is_packed:
            for head in range(self._shape[0]):
                pack(
                    self._packing,
                    weight_HNK[head],
                    target=self._packed.data_ptr() + head * self._packing.bytes,
                    block_stride=self._packing.block_bytes,
                    all_threads=True,
                )
        # A reference to this object's memory, for fused blocks.
        self.matrices = _native.HeadMatrices(self._packing, self._packed.data_ptr(), self._shape[0])

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensor that holds the weights."""
        return (self._packed,)

    @property
    def width(self) -> int:
        """The outputs of a head, N."""
        return self._shape[1]

    def __call__(self, x_THK: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the products [T, H, N], written to `out` if given.

        The last dimension of x and `out` must be contiguous.
        """
        heads, width, depth = self._shape
        out_THN = _empty((x_THK.shape[0], heads, width), dtype=self._dtype) if out is None else out
        assert x_THK.dtype is out_THN.dtype is self._dtype, (
            x_THK.dtype,
            out_THN.dtype,
            self._dtype,
        )
        assert x_THK.shape == (len(out_THN), heads, depth), (x_THK.shape, self._shape)
        assert out_THN.shape == (len(x_THK), heads, width), (out_THN.shape, self._shape)
        assert x_THK.stride(2) == out_THN.stride(2) == 1, (x_THK.stride(), out_THN.stride())
        _native.head_products(
            self._type, self._packing, self._packed.data_ptr(), heads, x_THK.data_ptr(),
            x_THK.stride(0),
            x_THK.stride(1), len(x_THK), out_THN.data_ptr(), out_THN.stride(0), out_THN.stride(1),
        )  # fmt: skip
        return out_THN


@dataclass(frozen=True, slots=True)
class NativeAttentionMetadata:
    """The attention metadata of one step."""

    num_tokens: int
    pieces: Any  # _native.AttentionPlan, which points into `blocks_RN`
    blocks_RN: Tensor
    shape: HeadShape
    block_size: int


def plan_attention(
    group: GroupInputs, step: StepInputs, shape: HeadShape
) -> NativeAttentionMetadata:
    """Divide attention into pieces for threads; see `PlanAttention`."""
    blocks_RN = group.blocks_RN
    size = group.block_size
    assert blocks_RN.dtype == torch.int64, blocks_RN.dtype
    assert blocks_RN.is_contiguous(), blocks_RN.stride()
    pieces = _native.AttentionPlan(
        blocks_RN.data_ptr(), blocks_RN.shape[1], size, group.window, group.chunk, step.starts_R,
        step.offsets_R1,
        shape.num_heads, shape.num_kv_heads, shape.dim, shape.v_dim,
    )  # fmt: skip
    return NativeAttentionMetadata(pieces.num_tokens, pieces, blocks_RN, shape, size)


def attention(
    q_THd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: NativeAttentionMetadata,
    *,
    sinks_H: Tensor | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    """Return attention over the paged cache, [T', H * v] in q's dtype; see ops/attention.py.

    All sums are fp32. q_THd: already scaled; contiguous per token, with any stride between tokens.
    v_cache: contiguous, or a view of the first elements of k_cache's entries (not with int8).
    """
    num_rows, num_heads, d = q_THd.shape
    v = plan.shape.v_dim
    assert HeadShape(num_heads, k_cache.shape[2], d, v) == plan.shape, (
        q_THd.shape,
        k_cache.shape,
        plan.shape,
    )
    assert k_cache.shape[1] == plan.block_size, (k_cache.shape, plan.block_size)
    assert q_THd.stride()[1:] == (d, 1), q_THd.stride()
    assert k_cache.dtype == v_cache.dtype, (k_cache.dtype, v_cache.dtype)
    assert k_cache.is_contiguous(), k_cache.stride()
    assert k_cache.shape[3] == entry_width(d, k_cache.dtype), (k_cache.shape, plan.shape)
    assert v_cache.shape == (*k_cache.shape[:3], entry_width(v, k_cache.dtype)), (
        v_cache.shape,
        plan.shape,
    )
    is_view = v_cache.data_ptr() == k_cache.data_ptr() and v_cache.stride() == k_cache.stride()
    assert v_cache.is_contiguous() or (is_view and k_cache.dtype != torch.int8), v_cache.stride()
    k_bytes = k_cache.shape[3] * k_cache.itemsize
    v_bytes = k_bytes if is_view else v_cache.shape[3] * v_cache.itemsize
    if sinks_H is not None:
        assert sinks_H.dtype == torch.float32, sinks_H.dtype
        assert sinks_H.is_contiguous(), sinks_H.stride()
        assert sinks_H.shape == (num_heads,), sinks_H.shape
    out = torch.empty((num_rows, num_heads * v), dtype=q_THd.dtype)
    plan.pieces.run(
        q_THd.data_ptr(), q_THd.stride(0), TYPES[q_THd.dtype], k_cache.data_ptr(), k_bytes,
        v_cache.data_ptr(), v_bytes,
        KV_TYPES[k_cache.dtype], out.data_ptr(), num_rows, soft_cap, address(sinks_H),
    )  # fmt: skip
    return out


class AttentionBlock:
    """A fused attention layer: qkv, `qk_norm_rope_cache`, attention and, if given, the output.

    x [T, D] -> [T, D], or [T, H * v] without the output product.
    """

    __slots__ = ("_columns", "_dtype", "_keep", "_kv_types", "_shape", "native")

    def __init__(
        self,
        qkv: NativeLinear,
        out: NativeLinear | None,
        rule: HeadRule,
        dim: int,
        dtype: torch.dtype,
        sinks_H: Tensor | None = None,
        soft_cap: float = 0.0,
    ) -> None:
        self._keep = qkv, out, rule, sinks_H  # the block reads their memory
        self._dtype = dtype
        shape = HeadShape(rule.num_heads, rule.num_kv_heads, dim, rule.v_dim or dim)
        self._shape = shape
        # (dtype of the KV cache, widths of its key and value entries) -> native type. Other caches
        # do not fit, so the lookup fails.
        self._kv_types = {
            (kv_dtype, entry_width(dim, kv_dtype), entry_width(shape.v_dim, kv_dtype)): KV_TYPES[
                kv_dtype
            ]
            for kv_dtype in (dtype, torch.int8)
        }
        self._columns = rule.num_heads * shape.v_dim if out is None else out.matrix.columns
        self.native = _native.AttentionBlock(
            TYPES[dtype], qkv.matrix, None if out is None else out.matrix, rule.num_heads,
            rule.num_kv_heads, dim,
            shape.v_dim, address(rule.norms), rule.norm_last, rule.norm_values, rule.eps,
            rule.clip, rule.scale,
            address(sinks_H), soft_cap,
        )  # fmt: skip

    def __call__(
        self,
        x_TD: Tensor,
        rope_cache: RopeCacheInputs,
        cache: LayerCache,
        plan: NativeAttentionMetadata,
    ) -> Tensor:
        """Run the block. For the arguments see `qk_norm_rope_cache` and `attention`.

        All must be contiguous. Both caches have x's dtype or int8.
        """
        cos_T1d, sin_T1d, slot_mapping_T = rope_cache
        k_cache, v_cache = cache
        assert x_TD.dtype is self._dtype, (x_TD.dtype, self._dtype)
        _, block_size, _, width = k_cache.shape
        assert (plan.shape, plan.block_size) == (self._shape, block_size), (
            plan.shape,
            self._shape,
            k_cache.shape,
        )
        rows = x_TD.shape[0]
        y = _empty((rows, self._columns), dtype=self._dtype)
        self.native.run(
            plan.pieces, x_TD.data_ptr(), x_TD.stride(0), rows, cos_T1d.data_ptr(),
            sin_T1d.data_ptr(),
            slot_mapping_T.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
            self._kv_types[k_cache.dtype, width, v_cache.shape[3]], y.data_ptr(),
        )  # fmt: skip
        return y


class GatedMLPBlock:
    """A fused MLP: x [T, D] -> [T, N], with any stride between rows of x."""

    __slots__ = ("_columns", "_depth", "_dtype", "_keep", "native")

    def __init__(
        self, gate_up: NativeLinear, down: NativeLinear, activation: Activation, dtype: torch.dtype
    ) -> None:
        columns = gate_up.matrix.columns
        inner = down.matrix.depth
        assert columns == activation.parts * inner, (columns, inner, activation)
        self._keep = gate_up, down  # the call reads their memory
        self.native = native_activation(activation)
        self._dtype = dtype
        self._depth = gate_up.matrix.depth
        self._columns = down.matrix.columns

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return down(act(gate(x)) * up(x)), or down(act(up(x)))."""
        assert x_TD.dtype is self._dtype, (x_TD.dtype, self._dtype)
        assert x_TD.shape[1] == self._depth, (x_TD.shape, self._depth)
        assert x_TD.stride(1) == 1, x_TD.stride()
        gate_up, down = self._keep
        y = _empty((x_TD.shape[0], self._columns), dtype=self._dtype)
        _native.gated_mlp(
            TYPES[self._dtype], gate_up.matrix, down.matrix, self.native, x_TD.data_ptr(),
            x_TD.stride(0),
            x_TD.shape[0], y.data_ptr(),
        )  # fmt: skip
        return y


class ExpertsBlock:
    """A fused MoE layer for tokens that stay on their rank: x [T, D] -> [T, D].

    Computes router, experts and weighted sum.
    """

    __slots__ = ("_block", "_keep", "_num_experts")

    def __init__(
        self,
        router: NativeLinear,
        top_k: int,
        rule: RouterRule,
        dtype: torch.dtype,
        activation: Activation = SWIGLU,
        bias_E: Tensor | None = None,
        expert_scale_E: Tensor | None = None,
    ) -> None:
        self._keep = router, bias_E, expert_scale_E  # the block reads their memory
        self._num_experts = router.matrix.columns
        check_per_expert(bias_E, self._num_experts)
        check_per_expert(expert_scale_E, self._num_experts)
        self._block = _native.ExpertsBlock(
            TYPES[dtype], router.matrix, TYPES[torch.float32 if rule.fp32 else dtype], top_k,
            native_rule(rule),
            rule.on_input, address(bias_E), address(expert_scale_E), native_activation(activation),
        )  # fmt: skip

    def predict_experts_of(self, block: ExpertsBlock) -> None:
        """Predict the experts of `block`, that of the next layer, and prefetch them from disk."""
        self._block.expect(block._block)

    def __call__(
        self, x_TD: Tensor, packed: Any, num_tokens: int | Tensor
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Return the results [T, D] and the number of tokens of each expert.

        Rows from num_tokens on are padding, and get zeros. packed: from `NativeExperts.pack`;
        expert e is local expert e.
        """
        assert isinstance(num_tokens, int), num_tokens
        assert x_TD.dtype is packed.dtype, (x_TD.dtype, packed.dtype)
        assert x_TD.is_contiguous(), x_TD.stride()
        experts = packed.bytes_eB
        out_TD = _empty(x_TD.shape, dtype=x_TD.dtype)
        counts_E = np.empty(self._num_experts, np.int64)
        self._block.run(
            packed.gate_up, packed.down, experts.data_ptr(), experts.shape[1], packed.has_biases,
            counts_E, x_TD.data_ptr(),
            num_tokens, out_TD.data_ptr(), packed.cached,
        )  # fmt: skip
        if num_tokens < len(out_TD):
            out_TD[num_tokens:] = 0
        return out_TD, counts_E
