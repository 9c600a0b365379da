"""Matrix products in C++ (csrc/kernels/product.hpp), alone or with the rest of a decoder layer's half in one call.

An output is one fp32 chain of fused multiply-adds over the inputs in ascending order, so its bits depend only on its
row and its column's weights: not on other rows, columns, threads, or the processor's vector width. `AttentionBlock` and
`ExpertsBlock` (csrc/bindings/layer.cpp) have the bits of separate calls. Small calls take less time than the
interpreter between them, whose own code has left the caches while weights streamed through.

T tokens, D model width, H heads and G KV heads of this rank, d head width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.errors import ConfigError
from moeserve.ops.inputs import entry_width
from moeserve.ops.native import native
from moeserve.ops.native_attention import NativeAttentionMetadata
from moeserve.ops.native_rows import KV_TYPES
from moeserve.ops.qk_norm_rope_cache import HeadRule
from moeserve.ops.quantised import Quantised, Weight

BLOCK = 16  # columns of a packed block
HUGE = 2 << 20
LAYOUT = 1  # of packed bytes: a new number for any other, so that none are taken for these (loader/packed_cache.py)
# Memory for so many packed bytes, aligned to 64, and whether they are there already.
Room = Callable[[int], tuple[Tensor, bool]]
_native: Any = native()
_empty = torch.empty


def native_type(dtype: torch.dtype) -> Any:
    """Returns the extension's name of an element type. Raises ConfigError if products do not take it."""
    module: Any = native()
    if module is None or not module.serving_isa():
        raise ConfigError("native products need the compiled extension and a CPU with AVX2, FMA and F16C")
    types = {
        torch.float32: module.Type.float32,
        torch.bfloat16: module.Type.bfloat16,
        torch.float16: module.Type.float16,
    }
    if dtype not in types:
        raise ConfigError(f"native products take float32, bfloat16 or float16, not {dtype}")
    return types[dtype]


def new_room(num_bytes: int) -> tuple[Tensor, bool]:
    """A `Room` of new memory, on large pages where there are enough bytes for them."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes >= HUGE:
        module: Any = native()
        module.advise_huge_pages(memory.data_ptr(), num_bytes)
    return memory, False


def packing_of(weight: Weight, columns: int | None = None) -> Any:
    """Returns how a weight [..., N, K], or `columns` rows of it, is packed."""
    module: Any = native()
    rows, depth = columns or weight.shape[-2], weight.shape[-1]
    if isinstance(weight, Quantised):
        return module.Packing(getattr(module.Type, weight.kind), depth, rows, weight.group, weight.zeros is not None)
    return module.Packing(native_type(weight.dtype), depth, rows)


def pack(packing: Any, weight_NK: Weight, to: int, step: int, all_threads: bool) -> None:
    """Packs a matrix to the address `to`, each block `step` bytes behind the one before. all_threads: on the pool."""
    module: Any = native()
    weight_NK = weight_NK.contiguous() if isinstance(weight_NK, Quantised) or weight_NK.stride(1) != 1 else weight_NK
    parts = weight_NK.parts if isinstance(weight_NK, Quantised) else (weight_NK,)
    values, scales, zeros = (*(part.data_ptr() for part in parts), 0, 0)[:3]
    module.pack(packing, values, parts[0].stride(0), scales, zeros, to, step, all_threads)


class NativeLinear:
    """y = x W^T + b for x [M, K] of the weight's dtype; rows of x may be strided. The weight is packed, and not kept.

    x [[1, 2]], weight [[3, 4]], bias [5] -> [[16]]
    """

    __slots__ = ("_bias", "_columns", "_depth", "_dtype", "_module", "_packing", "_type", "matrix", "packed")

    def __init__(self, weight_NK: Weight, bias_N: Tensor | None = None, room: Room = new_room) -> None:
        module: Any = native()
        self._module = module
        self._dtype, self._type = weight_NK.dtype, native_type(weight_NK.dtype)
        self._columns, self._depth = weight_NK.shape
        self._packing = packing_of(weight_NK)
        self.packed, is_there = room(self._packing.bytes)
        if not is_there:
            pack(self._packing, weight_NK, self.packed.data_ptr(), self._packing.block_bytes, all_threads=True)
        self._bias = None if bias_N is None else torch.nn.functional.pad(bias_N.float(), (0, -self._columns % BLOCK))
        # For calls that do more than one product; the memory stays this object's.
        self.matrix = module.Matrix(
            self._packing, self.packed.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()
        )

    def __call__(self, x_MK: Tensor) -> Tensor:
        """Returns x W^T + bias [M, N] in the dtype of x [M, K]."""
        assert x_MK.dtype == self._dtype
        assert x_MK.shape[1] == self._depth
        if x_MK.stride(1) != 1:
            x_MK = x_MK.contiguous()
        y_MN = x_MK.new_empty(x_MK.shape[0], self._columns)
        self._module.linear(
            self._type, self._packing, self.packed.data_ptr(), 0 if self._bias is None else self._bias.data_ptr(),
            x_MK.data_ptr(), x_MK.stride(0), x_MK.shape[0], y_MN.data_ptr(),
        )  # fmt: skip
        return y_MN


class AttentionBlock:
    """The QKV product, `qk_norm_rope_cache`, attention and, if given, the output product in one call.

    x [T, D] -> [T, D], or [T, H * d] without the output product.
    """

    __slots__ = ("_block", "_columns", "_dtype", "_keep", "_shape")

    def __init__(
        self, qkv: NativeLinear, out: NativeLinear | None, rule: HeadRule, dim: int, dtype: torch.dtype
    ) -> None:
        self._keep = qkv, out, rule  # whose memory the block reads
        self._dtype = dtype
        self._shape = rule.num_heads, rule.num_kv_heads, dim
        self._columns = rule.num_heads * dim if out is None else out.matrix.columns
        self._block = _native.AttentionBlock(
            native_type(dtype), qkv.matrix, None if out is None else out.matrix, rule.num_heads, rule.num_kv_heads, dim,
            0 if rule.norms is None else rule.norms.data_ptr(), rule.eps, rule.clip, rule.scale,
        )  # fmt: skip

    def __call__(
        self,
        x_TD: Tensor,
        cos_T1d: Tensor,
        sin_T1d: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping_T: Tensor,
        plan: NativeAttentionMetadata,
    ) -> Tensor:
        """Takes what `qk_norm_rope_cache` and `attention` take, all contiguous; both caches of x's dtype or int8."""
        assert x_TD.dtype is self._dtype, (x_TD.dtype, self._dtype)
        assert k_cache.dtype in (self._dtype, torch.int8), (k_cache.dtype, self._dtype)
        assert k_cache.shape[3] == entry_width(self._shape[2], k_cache.dtype), k_cache.shape
        assert plan.shape == (*self._shape, k_cache.shape[1]), (plan.shape, self._shape, k_cache.shape)
        rows = x_TD.shape[0]
        y = _empty((rows, self._columns), dtype=self._dtype)
        self._block.run(
            plan.pieces, x_TD.data_ptr(), x_TD.stride(0), rows, cos_T1d.data_ptr(), sin_T1d.data_ptr(),
            slot_mapping_T.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), KV_TYPES[k_cache.dtype], y.data_ptr(),
        )  # fmt: skip
        return y


class ExpertsBlock:
    """Router, experts and weighted sum of tokens that stay on their rank, in one call: x [T, D] -> [T, D]."""

    __slots__ = ("_block", "_keep", "_num_experts")

    def __init__(self, router: NativeLinear, top_k: int, score: str, renormalize: bool, dtype: torch.dtype) -> None:
        self._keep = router
        self._num_experts = router.matrix.columns
        self._block = _native.ExpertsBlock(
            native_type(dtype), router.matrix, top_k, score == "softmax_selected", renormalize
        )

    def __call__(self, x_TD: Tensor, packed: Any, num_tokens: int | Tensor) -> tuple[Tensor, NDArray[np.int64]]:
        """Returns the sums [T, D] and the rows of each expert. Rows from num_tokens on are padding and become zero.

        packed: what `NativeExperts.pack` made; expert e is local expert e.
        """
        assert isinstance(num_tokens, int), num_tokens
        assert x_TD.dtype is packed.dtype, (x_TD.dtype, packed.dtype)
        assert x_TD.is_contiguous(), x_TD.stride()
        experts = packed.bytes_eB
        out_TD = _empty(x_TD.shape, dtype=x_TD.dtype)
        counts_E = np.empty(self._num_experts, np.int64)
        self._block.run(
            packed.gate_up, packed.down, experts.data_ptr(), experts.shape[1], counts_E, x_TD.data_ptr(), num_tokens,
            out_TD.data_ptr(),
        )  # fmt: skip
        if num_tokens < len(out_TD):
            out_TD[num_tokens:] = 0
        return out_TD, counts_E
