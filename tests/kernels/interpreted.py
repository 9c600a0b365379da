"""Make Triton's interpreter compute as a GPU does, and faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@contextmanager
def rounding_to_nearest() -> Iterator[None]:
    """Fix the conversion of fp32 to e4m3, where the interpreter loses carries: 127.9 becomes 64."""
    convert = InterpreterBuilder.create_fp_to_fp

    def rounding(self: InterpreterBuilder, source: Any, to: Any, mode: Any) -> Any:
        if source.dtype.scalar != tl.float32 or to.scalar != tl.float8e4nv:
            return convert(self, source, to, mode)
        data = (
            torch.from_numpy(source.data.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        )
        return TensorHandle(data, to.scalar)

    with patch.object(InterpreterBuilder, "create_fp_to_fp", rounding):
        yield


@contextmanager
def ordered_dots() -> Iterator[None]:
    """Sum products in the order of the inputs.

    The interpreter multiplies tiles by BLAS, where the order depends on the tile's shape; on tensor
    cores it does not.
    """

    def dot(self: Any, a: Any, b: Any, sums: Any, *options: Any) -> Any:
        if a.dtype.scalar == tl.float8e4nv:
            a, b = (TensorHandle(e4m3_values(x.data), tl.float32) for x in (a, b))
        total = sums.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k : k + 1].astype(total.dtype) * b.data[k : k + 1].astype(
                total.dtype
            )
        return TensorHandle(total, sums.dtype.scalar)

    with patch.object(InterpreterBuilder, "create_dot", dot):
        yield


def e4m3_values(data: Any) -> Any:
    """Return the values of e4m3 bytes."""
    return torch.from_numpy(data.copy()).view(torch.float8_e4m3fn).float().numpy()


CUT: Any = interpreter._convert_float


def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
    """Replace `interpreter._convert_float`, which truncates bf16 where devices round."""
    if source == tl.float32 and target == tl.bfloat16:
        return (
            torch.from_numpy(np.ascontiguousarray(data))
            .bfloat16()
            .view(torch.int16)
            .numpy()
            .view(np.uint16)
        )
    return CUT(data, source, target, mode)


def interpret_quickly() -> None:
    """Make the interpreter twice as fast.

    At each call of a device function it searches all of `triton.language` for names to patch, which
    is half of a test's time. Now it reuses what the first search found, once per launch. It also
    computes each integer sum in 64 bits, another quarter, and ignores the result without `debug`;
    that is switched off.
    """
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    builder: Any = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    look_through = interpreter._patch_lang
    found = []

    def patch_lang(fn: Any) -> Any:
        if not found:
            scope = look_through(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            found.extend((owner, name, vars(owner)[name]) for owner, name, _ in scope._changes)
            return scope
        scope = interpreter._LangPatchScope()
        for change in found:
            scope.set_attr(*change)
        return scope

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = patch_lang
    interpreter.InterpretedFunction.__call__ = call
