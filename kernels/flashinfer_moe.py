"""FlashInfer's fused experts (github.com/flashinfer-ai/flashinfer) in place of products and sum of
ours: a package of its own, imported where it is asked about, whose bits are not those of the
kernels here.

T tokens, K experts per token, e local experts, D model width, I expert width, F = 2 I.
"""

import importlib
import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moeserve.kernels import grouped_gemm
from moeserve.kernels.configs import Config, facts_of, known
from moeserve.kernels.grouped_fp8 import Scaled

FUNCTION = "cutlass_fused_moe"
OPTIONS = {"output", "use_deepseek_fp8_block_scale", "use_fused_finalize"}  # that a call here has
HOPPER = (9, 0)
ALIGNED = 8  # elements of 16 bits that fill the 16 bytes which widths must be multiples of
NOT_MEASURED = "flashinfer was not measured to be faster on this card; `moeserve tune` finds out"
WINS: Config = {
    "flashinfer": 1
}  # in tables, beside the parameters of grouped_gemm.py, for which it lost
CONFIG: Config = {**WINS, "block_m": 128}  # with which it always runs


def _function() -> Any:
    return getattr(importlib.import_module("flashinfer.fused_moe"), FUNCTION)


@cache
def obstacle(device: torch.device, blocks: bool) -> str | None:
    """Return the reason why FlashInfer cannot run on a device, or None.

    blocks: whether the weights are in e4m3 blocks.
    """
    try:
        missing = OPTIONS - inspect.signature(_function()).parameters.keys()
    except Exception as error:  # it looks for CUDA at once
        return f"flashinfer cannot be imported: {type(error).__name__}: {error}"
    if missing:
        return f"{FUNCTION} of this flashinfer takes no {', '.join(sorted(missing))}; 0.7.2 does"
    card = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if card < HOPPER or (blocks and card != HOPPER):
        return (
            f"flashinfer serves here on Hopper{'' if blocks else ' or newer'}, and not on {device}"
        )
    return None


def is_faster(device: torch.device, experts: int, width: int, dim: int, dtype: torch.dtype) -> bool:
    """Return whether `moeserve tune` found it so for any number of rows."""
    shape = grouped_gemm.shape_of(experts, width, dim, dtype)
    return any(
        config.get("flashinfer") for config in known("grouped_gemm", facts_of(device).name, shape)
    )


def swapped(w13: Any) -> Any:
    """Return up rows, then gate rows, as it has them, of gate rows, then up rows [e, F, ...]."""
    if isinstance(w13, Scaled):
        return Scaled(
            swapped(w13.values.view(torch.uint8)).view(w13.values.dtype), swapped(w13.scales)
        )
    return w13.roll(w13.shape[1] // 2, 1)


def fused_moe(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, w31: Any, w2: Any, out: Tensor | None = None
) -> Tensor:
    """Return the weighted sums [T, D] of what the experts make of each row, by SwiGLU; ids outside
    0..e-1 go nowhere.

    It sums by a kernel of its own, in fp32 in the order of choices: the fused sum adds in 16 bits
    in any order. It does not look at strides.
    """
    out = torch.empty_like(x_TD) if out is None else out
    blocks = isinstance(w2, Scaled)
    first, second, scales = (
        (w31.values, w2.values, [w31.scales, w2.scales]) if blocks else (w31, w2, [])
    )
    assert out.is_contiguous(), out.stride()
    if len(x_TD):
        _function()(
            x_TD.contiguous(), ids_TK.contiguous(), weights_TK.contiguous(), first, second,
            x_TD.dtype, scales,
            output=out, use_deepseek_fp8_block_scale=blocks, use_fused_finalize=False,
        )  # fmt: skip
    return out


def of_sorted(x_PD: Tensor, ends_e: Tensor, w31: Any, w2: Any, out_PD: Tensor) -> None:
    """Write the expert outputs of sorted rows. ends_e: int32, the end of each expert's rows."""
    rows_P = torch.arange(len(x_PD), dtype=torch.int32, device=x_PD.device)
    ids_P1 = torch.searchsorted(ends_e, rows_P, right=True, out_int32=True)[:, None]
    fused_moe(x_PD, ids_P1, torch.ones_like(ids_P1, dtype=torch.float32), w31, w2, out_PD)
