"""Adapter of DeepGEMM (github.com/deepseek-ai/DeepGEMM), which can replace grouped_fp8.py.

DeepGEMM is an optional package, imported on first use. Its results differ in some bits from those
of the kernels here.

Rows sorted by expert are moved to its contiguous layout, where each tile of 128 rows belongs to one
expert. Rows in slots stay where they are, because its masked layout has slots, too.

Sizes: N rows or (token, k) pairs sorted by expert, M rows of the contiguous layout, e local
experts, C rows allocated for each, D model width, I expert width, F = 2 I.
"""

import importlib
import math
from functools import cache

import torch
from torch import Tensor

from moeserve.kernels import grouped_fp8
from moeserve.kernels.activation import SWIGLU_ACT, Act
from moeserve.kernels.align import Alignment
from moeserve.kernels.configs import Config, facts_of, known_configs
from moeserve.kernels.fp8 import E4M3, quantize
from moeserve.kernels.grouped_fp8 import Scaled

TILE = 128
HOPPER = (9, 0)  # compute capability; on others, scales have another format
PRODUCT = "m_grouped_fp8_gemm_nt_contiguous"
MASKED = "m_grouped_fp8_gemm_nt_masked"
NOT_MEASURED = (
    "deep_gemm was not measured to be faster on this card; `moeserve tune --weights fp8` finds out"
)
# Config tables have this entry, beside the parameters of grouped_fp8.py, if DeepGEMM was faster.
FASTER: Config = {"deep_gemm": 1}
CONFIG: Config = {**FASTER, "block_m": TILE}  # launch parameters that select DeepGEMM


@cache
def unsupported_reason(device: torch.device) -> str | None:
    """Return why DeepGEMM cannot be used on a device, None if it can."""
    try:
        package = importlib.import_module("deep_gemm")
    except Exception as error:  # the import itself looks for CUDA and compiles
        return f"deep_gemm cannot be imported: {type(error).__name__}: {error}"
    version = getattr(package, "__version__", "of unknown version")
    for name in (PRODUCT, MASKED):
        if not hasattr(package, name):
            return f"deep_gemm {version} has no {name}; a newer one has"
    rows = getattr(package, "get_mk_alignment_for_contiguous_layout", lambda: TILE)()
    if TILE % rows:
        return f"deep_gemm {version} needs tiles of {rows} rows, but here they have {TILE}"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        return f"deep_gemm is supported on Hopper only, not on {device}"
    return None


def with_deep_gemm(config: Config, rows: float = 1) -> Config:
    """Return the launch parameters, with those of DeepGEMM if it was measured to be faster.

    rows: rows per expert if the load is even.
    """
    if not config.get("deep_gemm"):
        return config
    return {**config, **CONFIG, "expected_m": max(1, math.ceil(rows))}


def is_faster(device: torch.device, experts: int, width: int, dim: int) -> bool:
    """Return whether `moeserve tune` measured DeepGEMM to be faster for any number of rows."""
    shape = grouped_fp8.shape_of(experts, width, dim)
    return any(
        config.get("deep_gemm")
        for config in known_configs("grouped_fp8", facts_of(device).name, shape)
    )


def _places(alignment: Alignment) -> tuple[Tensor, Tensor]:
    """Return the sorted row of each row of the contiguous layout, and whether there is one.

    Where there is none, the row is 0.
    """
    assert alignment.block_m == TILE, alignment.block_m
    rows_ZB = alignment.row_Z[:, None].long() + torch.arange(TILE, device=alignment.row_Z.device)
    exists_ZB = (alignment.expert_Z >= 0)[:, None] & (
        rows_ZB < alignment.ends_e[alignment.expert_Z.clamp(min=0)][:, None]
    )
    return torch.where(exists_ZB, rows_ZB, 0).flatten(), exists_ZB.flatten()


def _in_slots(alignment: Alignment) -> bool:
    """Return whether rows are in slots of whole tiles.

    With other slots, the masked GEMM would overwrite the next expert's rows.
    """
    return alignment.room > 0 and alignment.room % TILE == 0


def _product(
    x: Scaled, w: Scaled, alignment: Alignment, config: Config, out: Tensor | None = None
) -> Tensor:
    """Return x w^T in bf16: [M, outputs], or [e * C, outputs] in slots, in `out` if it is bf16.

    Results without a row are undefined.
    """
    if out is None or out.dtype != torch.bfloat16:
        out = w.scales.new_empty((len(x.values), w.shape[1]), dtype=torch.bfloat16)
    package = importlib.import_module("deep_gemm")
    weights = (w.values, w.scales)
    if _in_slots(alignment):
        values, scales, out_eCN = (
            part.view(len(w.values), alignment.room, -1) for part in (x.values, x.scales, out)
        )
        getattr(package, MASKED)(
            (values.contiguous(), scales),
            weights,
            out_eCN,
            alignment.counts_e,
            config["expected_m"],
        )
    else:
        getattr(package, PRODUCT)(
            (x.values, x.scales), weights, out, alignment.expert_Z.repeat_interleave(TILE)
        )
    return out


def gate_up(
    x: Scaled,
    w13: Scaled,
    alignment: Alignment,
    config: Config,
    top_k: int = 1,
    act: Act = SWIGLU_ACT,
    bias_eF: Tensor | None = None,
) -> Scaled:
    """Compute `grouped_fp8.gate_up_fp8`, by DeepGEMM if `config` selects it.

    DeepGEMM's results are [M, I], in its contiguous layout, or in slots.
    """
    if not config.get("deep_gemm"):
        return grouped_fp8.gate_up_fp8(x, w13, alignment, config, top_k, act, bias_eF)
    assert bias_eF is None, "DeepGEMM adds no biases"
    if _in_slots(alignment):
        return Scaled(*quantize(_product(x, w13, alignment, config), alignment, act))
    rows_M, exists_M = _places(alignment)
    if alignment.order_N is not None:
        rows_M = torch.where(exists_M, alignment.order_N[rows_M] // top_k, 0)
    scales = x.scales.reshape(len(x.values), -1)[rows_M]
    placed = Scaled(x.values.view(torch.uint8)[rows_M].view(E4M3), scales)
    return Scaled(*quantize(_product(placed, w13, alignment, config), act=act))


def down(
    h: Scaled,
    w2: Scaled,
    alignment: Alignment,
    config: Config,
    out: Tensor,
    bias_eD: Tensor | None = None,
) -> Tensor:
    """Compute `grouped_fp8.down_fp8` with the result of `gate_up`."""
    if not config.get("deep_gemm"):
        return grouped_fp8.down_fp8(h, w2, alignment, config, out, bias_eD)
    assert bias_eD is None, "DeepGEMM adds no biases"
    if _in_slots(alignment):
        result = _product(h, w2, alignment, config, out)
        return out if result is out else out.copy_(result)
    rows_M, exists_M = _places(alignment)
    if alignment.order_N is not None:
        rows_M = alignment.order_N[rows_M].long()
    rows_M = torch.where(exists_M, rows_M, len(out))
    place_N = rows_M.new_zeros(len(out) + 1).scatter_(
        0, rows_M, torch.arange(len(rows_M), device=rows_M.device)
    )
    return out.copy_(_product(h, w2, alignment, config)[place_N[:-1]])
