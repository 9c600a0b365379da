"""Adapter of FlashInfer's fused MoE (github.com/flashinfer-ai/flashinfer).

It can replace the grouped GEMMs and the combine of this package. FlashInfer is an optional package,
imported on first use. Its results differ in some bits from those of the kernels here.

T tokens, K experts per token, e local experts, D model width, I expert width, F = 2 I.
"""

import importlib
import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moeserve.kernels import grouped_gemm
from moeserve.kernels.configs import Config, facts_of, known_configs
from moeserve.kernels.grouped_fp8 import Scaled

FUNCTION = "cutlass_fused_moe"
OPTIONS = {"output", "use_deepseek_fp8_block_scale", "use_fused_finalize"}  # required arguments
HOPPER = (9, 0)  # compute capability
ALIGNED = 8  # widths must be multiples of 8 elements of 16 bits (16 bytes)
NOT_MEASURED = "flashinfer was not measured to be faster on this card; `moeserve tune` finds out"
# Config tables have this entry, beside the parameters of grouped_gemm.py, if FlashInfer was faster.
FASTER: Config = {"flashinfer": 1}
CONFIG: Config = {**FASTER, "block_m": 128}  # launch parameters that select FlashInfer


def _function() -> Any:
    return getattr(importlib.import_module("flashinfer.fused_moe"), FUNCTION)


@cache
def unsupported_reason(device: torch.device, blocks: bool) -> str | None:
    """Return why FlashInfer cannot be used on a device, None if it can.

    blocks: whether the weights are e4m3 with block scales.
    """
    try:
        missing = OPTIONS - inspect.signature(_function()).parameters.keys()
    except Exception as error:  # the import itself looks for CUDA
        return f"flashinfer cannot be imported: {type(error).__name__}: {error}"
    if missing:
        return f"{FUNCTION} of this flashinfer takes no {', '.join(sorted(missing))}; 0.7.2 does"
    card = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if card < HOPPER or (blocks and card != HOPPER):
        return f"flashinfer is supported on Hopper{'' if blocks else ' or newer'}, not on {device}"
    return None


def is_faster(device: torch.device, experts: int, width: int, dim: int, dtype: torch.dtype) -> bool:
    """Return whether `moeserve tune` measured FlashInfer to be faster for any number of rows."""
    shape = grouped_gemm.shape_of(experts, width, dim, dtype)
    return any(
        config.get("flashinfer")
        for config in known_configs("grouped_gemm", facts_of(device).name, shape)
    )


def swapped(w13: Any) -> Any:
    """Swap gate and up weights [e, F, ...], because FlashInfer expects the up weights first."""
    if isinstance(w13, Scaled):
        return Scaled(
            swapped(w13.values.view(torch.uint8)).view(w13.values.dtype), swapped(w13.scales)
        )
    return w13.roll(w13.shape[1] // 2, 1)


def fused_moe(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, w31: Any, w2: Any, out: Tensor | None = None
) -> Tensor:
    """Return the weighted sums [T, D] of the experts' outputs, with SwiGLU.

    Ids outside 0..e-1 add nothing. The sum is computed by FlashInfer's separate kernel, in fp32 and
    in routing order, because its fused sum adds 16-bit numbers in any order. FlashInfer ignores
    strides, so inputs are made contiguous.
    """
    out = torch.empty_like(x_TD) if out is None else out
    has_block_scales = isinstance(w2, Scaled)
    if has_block_scales:
        w31_values = w31.values
        w2_values = w2.values
        scales = [w31.scales, w2.scales]
    else:
        w31_values = w31
        w2_values = w2
        scales = []
    assert out.is_contiguous(), out.stride()
    if len(x_TD):
        _function()(
            x_TD.contiguous(), ids_TK.contiguous(), weights_TK.contiguous(), w31_values, w2_values,
            x_TD.dtype, scales,
            output=out, use_deepseek_fp8_block_scale=has_block_scales, use_fused_finalize=False,
        )  # fmt: skip
    return out


def of_sorted(x_PD: Tensor, ends_e: Tensor, w31: Any, w2: Any, out_PD: Tensor) -> None:
    """Write the expert outputs of sorted rows. ends_e: int32, the end of each expert's rows."""
    rows_P = torch.arange(len(x_PD), dtype=torch.int32, device=x_PD.device)
    ids_P1 = torch.searchsorted(ends_e, rows_P, right=True, out_int32=True)[:, None]
    fused_moe(x_PD, ids_P1, torch.ones_like(ids_P1, dtype=torch.float32), w31, w2, out_PD)
