"""The grouped Triton kernels for each weight format, and the layouts of their weights.

Shapes: e local experts, N outputs, K inputs, I inner width of an expert, D model width. Every
tensor of a layout, including scales, has the expert as its first dimension, so one expert can be
copied tensor by tensor in any format.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from moeserve.errors import ConfigError
from moeserve.kernels import deep_gemm, grouped_fp8, grouped_gemm
from moeserve.kernels.align import Alignment
from moeserve.kernels.configs import Config, facts_of
from moeserve.kernels.fp8 import BLOCK, E4M3, quantize
from moeserve.kernels.grouped_fp8 import Scaled
from moeserve.kernels.grouped_weight_only import (
    GROUPS,
    MIN_K,
    Narrow,
    down_narrow,
    gate_up_narrow,
    half_of,
    launch_narrow_of,
    pack_int4,
)
from moeserve.ops.quantized import Quantized, Weight

E4M3_GPUS = (8, 9)  # the lowest compute capability whose compiler supports e4m3


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels for one weight format."""

    lay: Callable[[Any], Any]  # weights [e, N, K] -> the kernels' layout
    launch: Callable[[int, Any, Tensor], Config]  # (number of rows, w2, x) -> launch parameters
    gate_up: Callable[..., Any]  # see kernels/grouped_gemm.py
    down: Callable[..., Tensor]  # see kernels/grouped_gemm.py
    # (x, alignment of rows) -> the input of gate_up, for example quantized activations
    rows: Callable[[Tensor, Alignment], Any] = lambda x, alignment: x
    # flashinfer_moe.py is used if the launch parameters say so; w13 then has its layout
    flashinfer: bool = False


def kernels_for(w13_eFD: Weight, w2_eDI: Weight) -> Kernels:
    """Return the kernels for such experts.

    Raises ConfigError if only one of the weights is quantized.
    """
    if isinstance(w13_eFD, Quantized) != isinstance(w2_eDI, Quantized):
        up, down = (getattr(weight, "kind", weight.dtype) for weight in (w13_eFD, w2_eDI))
        raise ConfigError(
            f"some experts have gate and up in {up}, but down in {down}: Triton's kernels need "
            "both quantized or none; use another checkpoint, or --device cpu with kernels: native"
        )
    if isinstance(w2_eDI, Tensor):
        return PLAIN
    e4m3_activations = multiplies_e4m3(w2_eDI.kind, w2_eDI.rows, w2_eDI.group, *w2_eDI.shape[-2:])
    return W8A8 if e4m3_activations else WEIGHT_ONLY


def multiplies_e4m3(kind: str, rows: int, group: int, *sizes: int) -> bool:
    """Return whether activations become e4m3 for such weights.

    That kernel needs scales of whole blocks of 128 x 128 weights. For example blocks of DeepSeek
    with I 768 and D 2048 -> True; a scale per output, or I 96 -> False.
    """
    return kind == "fp8" and not any(size % BLOCK for size in (rows, group, *sizes))


def obstacle(device: torch.device, kind: str, group: int, inputs: int) -> str:
    """Return why no kernel supports weights with `inputs` inputs; empty if one does.

    group: inputs per scale; 0: all.
    """
    if kind in ("int4", "fp4"):
        if _group_of_pairs(group or inputs, inputs):
            return ""
        return f"{kind} products take groups of {GROUPS[0]}s and inputs of {2 * GROUPS[0]}s"
    if (
        kind == "fp8"
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) < E4M3_GPUS
    ):
        return "e4m3 needs a GPU of compute capability 8.9 or more"
    if group % MIN_K or inputs % MIN_K:
        return f"{kind} products take groups and inputs of {MIN_K}s"
    return ""


def parts_of(weights: Any) -> list[Tensor]:
    """Return the tensors of packed weights."""
    if isinstance(weights, Tensor):
        return [weights]
    return [getattr(weights, name) for name in _names(weights)]


def with_parts(weights: Any, parts: Sequence[Tensor]) -> Any:
    """Return the packed weights with other tensors, in the order of `parts_of`."""
    if isinstance(weights, Tensor):
        return parts[0]
    return replace(weights, **dict(zip(_names(weights), parts, strict=True)))


def _names(weights: Any) -> list[str]:
    return [
        field.name for field in fields(weights) if isinstance(getattr(weights, field.name), Tensor)
    ]


def _group_of_pairs(group: int, inputs: int) -> int:
    """Return the group size that 4-bit kernels use for weights in groups of `group`; 0: none.

    It divides `group`, and inputs must be a multiple of the kernels' step for it. For example
    groups of 128 with 192 inputs -> 32, because kernels with groups of 128 take 128 inputs at once.
    """
    return next((g for g in GROUPS[::-1] if group % g == 0 and inputs % (2 * half_of(g)) == 0), 0)


def _regrouped(scales_eNG: Tensor, group: int, step: int, inputs: int) -> Tensor:
    """Repeat the scales of groups, to one scale per `step` inputs."""
    return scales_eNG.repeat_interleave(group // step, -1)[..., : inputs // step]


def _lay_narrow(w: Quantized) -> Narrow:
    inputs = w.shape[-1]
    if w.kind in ("int4", "fp4"):
        group = _group_of_pairs(w.group, inputs)
        zeros = None if w.zeros is None else _regrouped(w.zeros, w.group, group, inputs)
        return pack_int4(
            w.values,
            _regrouped(w.scales, w.group, group, inputs),
            zeros,
            group,
            floats=w.kind == "fp4",
        )
    values = w.values.view(E4M3) if w.kind == "fp8" else w.values
    scales = w.scales.transpose(-1, -2).contiguous()
    return Narrow(w.group or inputs, values.contiguous(), scales)


def _lay_e4m3(w: Quantized) -> Scaled:
    inputs = w.shape[-1]
    scales = _regrouped(w.scales[..., ::BLOCK, :], w.group or inputs, BLOCK, inputs)
    return Scaled(w.values.view(E4M3).contiguous(), scales.contiguous())


def _sizes(w2: Any) -> tuple[int, int, int]:
    """Return e, I and D, the order of sizes in launch parameters."""
    experts, dim, width = w2.shape
    return experts, width, dim


PLAIN = Kernels(
    lay=Tensor.contiguous,
    launch=lambda n, w2, x: grouped_gemm.launch_of(
        n, *_sizes(w2), x.dtype, facts_of(x.device).name
    ),
    gate_up=grouped_gemm.gate_up,
    down=grouped_gemm.down,
)
W8A8 = Kernels(
    lay=_lay_e4m3,
    rows=lambda x, alignment: (
        x
        if isinstance(x, Scaled)
        else Scaled(*quantize(x, alignment if alignment.order_N is None else None))
    ),
    launch=lambda n, w2, x: grouped_fp8.launch_fp8_of(n, *_sizes(w2), facts_of(x.device).name),
    gate_up=grouped_fp8.gate_up_fp8,
    down=grouped_fp8.down_fp8,
)
W8A8_OR_DEEP_GEMM = replace(
    W8A8,
    launch=lambda n, w2, x: deep_gemm.with_deep_gemm(W8A8.launch(n, w2, x), n / len(w2.values)),
    gate_up=deep_gemm.gate_up,
    down=deep_gemm.down,
)
DEEP_GEMM = replace(
    W8A8_OR_DEEP_GEMM,
    launch=lambda n, w2, x: deep_gemm.with_deep_gemm(deep_gemm.CONFIG, n / len(w2.values)),
)
WEIGHT_ONLY = Kernels(
    lay=_lay_narrow,
    launch=lambda n, w2, x: launch_narrow_of(
        n, *_sizes(w2), w2.kind, w2.group, x.dtype, facts_of(x.device).name
    ),
    gate_up=gate_up_narrow,
    down=down_narrow,
)
