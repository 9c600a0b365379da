"""Checks of arguments, and results that are poison until they arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

topk_idx_t = torch.int64
FP8 = torch.float8_e4m3fn
POISON_INT = -7777


def trap(holds: bool, why: str) -> None:
    """Fail where the real package aborts, hangs or corrupts memory."""
    if not holds:
        raise AssertionError(why)


def check_ids(topk_idx: Tensor, num_experts: int) -> None:
    trap(topk_idx.dtype == topk_idx_t, f"topk_idx must be int64, not {topk_idx.dtype}")
    trap(topk_idx.dim() == 2 and topk_idx.is_contiguous(), "topk_idx must be [T, K] and contiguous")
    ok = (topk_idx >= -1) & (topk_idx < num_experts)
    trap(
        bool(ok.all()),
        f"topk_idx holds ids that are not among the {num_experts} experts of all ranks",
    )


def check_weights(topk_weights: Tensor, topk_idx: Tensor) -> None:
    trap(topk_weights.dtype == torch.float32, "topk_weights must be float32")
    trap(
        topk_weights.is_contiguous() and topk_weights.shape == topk_idx.shape,
        "topk_weights must be as topk_idx",
    )


def check_rows(x: Any, row_alignment: int = 512) -> tuple[Tensor, Tensor | None]:
    """Return (rows, scales) of bf16 rows, or of a tuple of fp8 and fp32."""
    data, scales = x if isinstance(x, tuple) else (x, None)
    trap(data.dim() == 2 and data.is_contiguous(), "x must be [T, H] and contiguous")
    trap(
        data.shape[1] * data.element_size() % row_alignment == 0,
        f"rows must be multiples of {row_alignment} bytes",
    )
    if scales is None:
        trap(data.dtype == torch.bfloat16, f"x must be bfloat16, not {data.dtype}")
    else:
        trap(
            data.dtype == FP8 and scales.dtype == torch.float32, "fp8 rows come with float32 scales"
        )
        trap(scales.shape == (data.shape[0], data.shape[1] // 128), "scales must be [T, H / 128]")
    return data, scales


def poisoned(truth: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Return a poisoned result, and a function that fills in its true values."""
    shown = torch.empty_like(truth)
    if truth.dtype == FP8:
        shown.view(torch.uint8).fill_(0x7F)
    elif truth.dtype.is_floating_point:
        shown.fill_(torch.nan)
    else:
        shown.fill_(POISON_INT)

    def arrive() -> None:
        if truth.dtype == FP8:
            shown.view(torch.uint8).copy_(truth.view(torch.uint8))
        else:
            shown.copy_(truth)

    return shown, arrive


def padded(rows: Tensor, count: int) -> Tensor:
    """Return `rows` followed by poison, `count` rows in all."""
    shown, _ = poisoned(rows.new_empty((count, *rows.shape[1:])))
    view, source = (
        (shown.view(torch.uint8), rows.view(torch.uint8)) if rows.dtype == FP8 else (shown, rows)
    )
    view[: len(rows)] = source
    return shown


def local_of(ids: Tensor, rank: int, slots: int) -> Tensor:
    """Return ids relative to those of `rank`; -1 for experts of other ranks."""
    local = ids - rank * slots
    return torch.where((local >= 0) & (local < slots) & (ids >= 0), local, -1)


def cat(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors, fp8 included."""
    if parts[0].dtype == FP8:
        return torch.cat([part.view(torch.uint8) for part in parts]).view(FP8)
    return torch.cat(parts)


def take(rows: Tensor, index: Tensor) -> Tensor:
    return rows.view(torch.uint8)[index].view(FP8) if rows.dtype == FP8 else rows[index]
