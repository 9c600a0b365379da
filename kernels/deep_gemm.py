"""DeepGEMM's products of e4m3 blocks (github.com/deepseek-ai/DeepGEMM) in place of those of
grouped_fp8.py: a package of its own, imported where it is asked about, whose bits are not those of
the kernels here.

N rows or (token, k) pairs sorted by expert; M places for them, in tiles of 128 of one expert, as
its contiguous layout has them; rows in slots stay where they are, as its masked layout has them. e
local experts, C rows that each has room for, D model width, I expert width, F = 2 I.
"""

import importlib
import math
from functools import cache

import torch
from torch import Tensor

from moeserve.kernels import grouped_fp8
from moeserve.kernels.activation import SWIGLU_ACT, Act
from moeserve.kernels.align import Alignment
from moeserve.kernels.configs import Config, facts_of, known
from moeserve.kernels.fp8 import E4M3, quantise
from moeserve.kernels.grouped_fp8 import Scaled

TILE = 128
HOPPER = (9, 0)  # on others its scales have another form
PRODUCT = "m_grouped_fp8_gemm_nt_contiguous"
MASKED = "m_grouped_fp8_gemm_nt_masked"
NOT_MEASURED = (
    "deep_gemm was not measured to be faster on this card; `moeserve tune --weights fp8` finds out"
)
WINS: Config = {
    "deep_gemm": 1
}  # in tables, beside the parameters of grouped_fp8.py, for which it lost
CONFIG: Config = {**WINS, "block_m": TILE}  # with which the products here are DeepGEMM's


@cache
def obstacle(device: torch.device) -> str | None:
    """Return why it cannot serve on a device; None if it can."""
    try:
        package = importlib.import_module("deep_gemm")
    except Exception as error:  # it looks for CUDA and compiles at once
        return f"deep_gemm cannot be imported: {type(error).__name__}: {error}"
    found = getattr(package, "__version__", "of unknown version")
    for name in (PRODUCT, MASKED):
        if not hasattr(package, name):
            return f"deep_gemm {found} has no {name}; a newer one has"
    rows = getattr(package, "get_mk_alignment_for_contiguous_layout", lambda: TILE)()
    if TILE % rows:
        return f"deep_gemm {found} wants tiles of {rows} rows, here they have {TILE}"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        return f"deep_gemm serves here on Hopper alone, and not on {device}"
    return None


def chosen(config: Config, rows: float = 1) -> Config:
    """Return the parameters of a launch, DeepGEMM's own among them where it was measured to be
    faster. rows: of an expert, with an even load."""
    return (
        {**config, **CONFIG, "expected_m": max(1, math.ceil(rows))}
        if config.get("deep_gemm")
        else config
    )


def is_faster(device: torch.device, experts: int, width: int, dim: int) -> bool:
    """Return whether `moeserve tune` found it so for any number of rows."""
    shape = grouped_fp8.shape_of(experts, width, dim)
    return any(
        config.get("deep_gemm") for config in known("grouped_fp8", facts_of(device).name, shape)
    )


def _places(to: Alignment) -> tuple[Tensor, Tensor]:
    """Return the sorted row at each place, 0 where none is, and whether there is one."""
    assert to.block_m == TILE, to.block_m
    rows_ZB = to.row_Z[:, None].long() + torch.arange(TILE, device=to.row_Z.device)
    there_ZB = (to.expert_Z >= 0)[:, None] & (
        rows_ZB < to.ends_e[to.expert_Z.clamp(min=0)][:, None]
    )
    return torch.where(there_ZB, rows_ZB, 0).flatten(), there_ZB.flatten()


def _in_slots(to: Alignment) -> bool:
    """Whether rows lie in slots of whole tiles: the masked product would write others over the next
    expert's rows.
    """
    return to.room > 0 and to.room % TILE == 0


def _product(
    x: Scaled, w: Scaled, to: Alignment, config: Config, out: Tensor | None = None
) -> Tensor:
    """Return bf16 [M, outputs], for slots [e * C, outputs], maybe in `out`; what belongs to no row
    is undefined.
    """
    if out is None or out.dtype != torch.bfloat16:
        out = w.scales.new_empty((len(x.values), w.shape[1]), dtype=torch.bfloat16)
    package = importlib.import_module("deep_gemm")
    weights = (w.values, w.scales)
    if _in_slots(to):
        values, scales, out_eCN = (
            part.view(len(w.values), to.room, -1) for part in (x.values, x.scales, out)
        )
        counts = to.counts_e, config["expected_m"]
        getattr(package, MASKED)((values.contiguous(), scales), weights, out_eCN, *counts)
    else:
        getattr(package, PRODUCT)(
            (x.values, x.scales), weights, out, to.expert_Z.repeat_interleave(TILE)
        )
    return out


def gate_up(
    x: Scaled, w13: Scaled, to: Alignment, config: Config, top_k: int = 1, act: Act = SWIGLU_ACT,
    bias_eF: Tensor | None = None,
) -> Scaled:  # fmt: skip
    """Does `grouped_fp8.gate_up_fp8`; by DeepGEMM, if the parameters say so: then results are [M,
    I], in its places.
    """
    if not config.get("deep_gemm"):
        return grouped_fp8.gate_up_fp8(x, w13, to, config, top_k, act, bias_eF)
    assert bias_eF is None, "DeepGEMM adds no biases"
    if _in_slots(to):
        return Scaled(*quantise(_product(x, w13, to, config), to, act))
    rows_M, there_M = _places(to)
    if to.order_N is not None:
        rows_M = torch.where(there_M, to.order_N[rows_M] // top_k, 0)
    scales = x.scales.reshape(len(x.values), -1)[rows_M]
    placed = Scaled(x.values.view(torch.uint8)[rows_M].view(E4M3), scales)
    return Scaled(*quantise(_product(placed, w13, to, config), act=act))


def down(
    h: Scaled, w2: Scaled, to: Alignment, config: Config, out: Tensor, bias_eD: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Does `grouped_fp8.down_fp8` with what `gate_up` returned."""
    if not config.get("deep_gemm"):
        return grouped_fp8.down_fp8(h, w2, to, config, out, bias_eD)
    assert bias_eD is None, "DeepGEMM adds no biases"
    if _in_slots(to):
        found = _product(h, w2, to, config, out)
        return out if found is out else out.copy_(found)
    rows_M, there_M = _places(to)
    if to.order_N is not None:
        rows_M = to.order_N[rows_M].long()
    rows_M = torch.where(there_M, rows_M, len(out))
    place_N = rows_M.new_zeros(len(out) + 1).scatter_(
        0, rows_M, torch.arange(len(rows_M), device=rows_M.device)
    )
    return out.copy_(_product(h, w2, to, config)[place_N[:-1]])
