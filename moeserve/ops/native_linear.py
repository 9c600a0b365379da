"""Matrix products in C++ (csrc/kernels/product.hpp), with the interface of ops/linear.py.

An output is one fp32 chain of fused multiply-adds over the inputs in ascending order, so its bits depend only on its
row and its column's weights: not on other rows, columns, threads, or the processor's vector width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moeserve.errors import ConfigError
from moeserve.ops.native import native
from moeserve.ops.quantised import Quantised, Weight

BLOCK = 16  # columns of a packed block
HUGE = 2 << 20
LAYOUT = 1  # of packed bytes: a new number for any other, so that none are taken for these (loader/packed_cache.py)
# Memory for so many packed bytes, aligned to 64, and whether they are there already.
Room = Callable[[int], tuple[Tensor, bool]]


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
