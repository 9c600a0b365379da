"""What Triton's interpreter does otherwise than devices do, put right where a test asks for bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

CUT: Any = interpreter._convert_float


def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
    """For `interpreter._convert_float`: NumPy cuts off what bfloat16 has no room for; devices round."""
    if source == tl.float32 and target == tl.bfloat16:
        return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return CUT(data, source, target, mode)


def ordered_dot(self: Any, a: Any, b: Any, sums: Any, *options: Any) -> Any:
    """For `InterpreterBuilder.create_dot`: it multiplies tiles by BLAS, where the order of a sum depends on the tile's
    shape; on tensor cores it does not. Here it is the order of the inputs."""
    total = sums.data.copy()
    for k in range(a.data.shape[1]):
        total += a.data[:, k : k + 1].astype(total.dtype) * b.data[k : k + 1].astype(total.dtype)
    return interpreter.TensorHandle(total, sums.dtype.scalar)
