"""Checkpoints with quantized weights in all published layouts, each beside its fp32 meaning.

The meaning is the same checkpoint with dequantized weights.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from moeserve.ops.quantized import Quantized

LINEAR = (
    "_proj.weight",
    ".w1.weight",
    ".w2.weight",
    ".w3.weight",
    "put_linear.weight",
    "experts.w13_weight",
    "experts.w2_weight",
)


@dataclass(frozen=True)
class Form:
    """A format of quantized weights and its layout in a checkpoint."""

    kind: str  # int4, int8, fp8, fp4
    rows: int = 1  # outputs that share a scale; 0: all
    group: int = 0  # inputs that share a scale; 0: all
    zeros: bool = False  # whether there are zero points
    packed: bool = False  # in int32 words, as compressed-tensors packs them
    method: str = "compressed-tensors"

    @property
    def bits(self) -> int:
        return 4 if self.kind in ("int4", "fp4") else 8

    @property
    def config(self) -> dict[str, Any]:
        match self.method:
            case "fp8":
                block = {"weight_block_size": [self.rows, self.group]} if self.group else {}
                return {
                    "quant_method": "fp8",
                    "fmt": "e4m3",
                    "activation_scheme": "dynamic",
                    **block,
                }
            case "mxfp8":
                return {
                    "quant_method": "mxfp8",
                    "weight_block_size": [self.rows, self.group],
                    "scale_fmt": "ue8m0",
                }
            case "mxfp4":
                return {
                    "quant_method": "mxfp4",
                    "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
                }
            case "modelopt":
                algo = "NVFP4" if self.kind == "fp4" else "MXFP8" if self.group else "FP8"
                return {
                    "quant_method": "modelopt",
                    "quant_algo": algo,
                    "kv_cache_quant_algo": "FP8",
                    "ignore": ["lm_head"],
                }
            case "awq":
                return {
                    "quant_method": "awq",
                    "bits": 4,
                    "group_size": self.group,
                    "version": "gemm",
                    "zero_point": True,
                }
            case "gptq" | "gptq_v2":
                return {
                    "quant_method": "gptq",
                    "bits": self.bits,
                    "group_size": self.group,
                    "desc_act": False,
                    "sym": not self.zeros,
                    "checkpoint_format": self.method,
                    "dynamic": {"-:.*gate$": {}},
                }
        return self.compressed

    @property
    def compressed(self) -> dict[str, Any]:
        strategy = (
            "tensor"
            if not self.rows
            else "block"
            if self.rows > 1
            else "group"
            if self.group
            else "channel"
        )
        nvfp4 = self.kind == "fp4" and self.group == 16
        weights = {
            "num_bits": self.bits,
            "type": "float" if self.kind in ("fp8", "fp4") else "int",
            "symmetric": not self.zeros,
            "strategy": "tensor_group" if nvfp4 else strategy,
            "dynamic": False,
            "actorder": None,
            "group_size": self.group if strategy == "group" else None,
            "block_structure": [self.rows, self.group] if strategy == "block" else None,
        }
        layout = (
            "pack-quantized"
            if self.packed
            else "float-quantized"
            if self.kind == "fp8"
            else "int-quantized"
        )
        layout = f"{'nvfp4' if nvfp4 else 'mxfp4'}-pack-quantized" if self.kind == "fp4" else layout
        return {
            "quant_method": "compressed-tensors",
            "format": layout,
            "ignore": ["lm_head", "re:.*mlp.gate$"],
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "sparsity_config": {},
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}
            },
        }


FORMS = {
    "int8": Form("int8"),
    "int8 per tensor": Form("int8", rows=0),
    "int8 in words": Form("int8", packed=True),
    "int8 in groups": Form("int8", group=32, packed=True),
    "int4": Form("int4", group=32, packed=True),
    "int4 with zero points": Form("int4", group=32, zeros=True, packed=True),
    "int4 per channel": Form("int4", packed=True),
    "fp8": Form("fp8"),
    "fp8 per tensor": Form("fp8", rows=0, method="fp8"),
    "fp8 in blocks": Form("fp8", rows=128, group=128, method="fp8"),
    "fp8 in small blocks": Form("fp8", rows=24, group=16),
    "fp8 of ModelOpt": Form("fp8", rows=0, method="modelopt"),
    "fp8 in groups, mxfp8": Form("fp8", group=32, method="modelopt"),
    "fp8 in groups, mxfp8 of its own": Form("fp8", group=32, method="mxfp8"),
    "fp4, mxfp4": Form("fp4", group=32, method="mxfp4"),
    "fp4, mxfp4 of compressed-tensors": Form("fp4", group=32, packed=True),
    "fp4, nvfp4 of compressed-tensors": Form("fp4", group=16, packed=True),
    "fp4, nvfp4 of ModelOpt": Form("fp4", group=16, method="modelopt"),
    "int4, awq": Form("int4", group=32, zeros=True, method="awq"),
    "int4, gptq": Form("int4", group=32, zeros=True, method="gptq"),
    "int4, gptq_v2 and symmetric": Form("int4", group=32, method="gptq_v2"),
    "int8, gptq": Form("int8", group=32, method="gptq"),
}
E2M1 = torch.tensor([s * m for s in (1, -1) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])


def scales_of(peak_RC: Tensor, form: Form) -> tuple[Tensor, dict[str, Tensor]]:
    """Return fp32 scales for blocks with the given largest magnitudes, and the scales as stored.

    The stored ones are keyed by the ending of the tensor's name.
    """
    levels = {"int8": 127, "int4": 7, "fp8": 448, "fp4": 6}[form.kind]
    if form.kind == "fp4" and form.group == 16:
        outer = peak_RC.max() / (448 * 6)
        stored = (peak_RC / levels / outer).clamp(2**-9).to(torch.float8_e4m3fn)
        if form.method == "modelopt":
            return stored.float() * outer, {
                "_scale": stored,
                "_scale_2": outer,
                "_input": torch.tensor(0.5),
            }
        inverse = (1 / outer).view(1)
        return stored.float() / inverse, {"_scale": stored, "_global_scale": inverse}
    if form.group == 32 and form.kind in ("fp4", "fp8"):
        exponents = (peak_RC / levels).clamp(2**-100).log2().ceil()
        return exponents.exp2(), {"_scale": (exponents + 127).to(torch.uint8)}
    scales = (peak_RC / levels).bfloat16()
    return scales.float(), {
        "_scale_inv" if form.method == "fp8" and form.group else "_scale": scales
    }


def rounded(w_NK: Tensor, form: Form) -> tuple[Tensor, Tensor | None, Tensor, dict[str, Tensor]]:
    """Return values [N, K], zero points [R, C], the dequantized values, and stored scales."""
    outputs, inputs = w_NK.shape
    rows = form.rows or outputs
    group = form.group or inputs
    padded = (
        pad(w_NK, (0, -inputs % group, 0, -outputs % rows))
        .unflatten(0, (-1, rows))
        .unflatten(2, (-1, group))
    )
    low = padded.amin((1, 3))
    high = padded.amax((1, 3))
    peak = (high - low) * 7 / 15 if form.zeros else torch.maximum(high, -low)
    scales, stored = scales_of(peak, form)
    least = 1 if form.method == "gptq" else 0
    zeros = (-low / scales).round().clamp(least, 15) if form.zeros else None

    def spread(blocks: Tensor) -> Tensor:
        return blocks.repeat_interleave(rows, 0)[:outputs].repeat_interleave(group, 1)[:, :inputs]

    scaled = w_NK / spread(scales)
    if form.kind == "fp8":
        values = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
        return values, None, values.float() * spread(scales), stored
    if form.kind == "fp4":
        values = (scaled[..., None] - E2M1).abs().argmin(-1)
        values[0, 0] = 8  # the code of -0
        return values, None, E2M1[values] * spread(scales), stored
    shift = spread(zeros) if zeros is not None else torch.zeros(())
    levels = 2 ** (form.bits - 1) - 1
    bounds = (0, 15) if form.zeros else (-levels - 1, levels)
    values = (scaled.round() + shift).clamp(*bounds)
    return values, zeros, (values - shift) * spread(scales), stored


def words(values_NK: Tensor, bits: int) -> Tensor:
    """Pack unsigned numbers into int32 words of 32 / bits each, the first one lowest."""
    each = 32 // bits
    numbers = pad(values_NK, (0, -values_NK.shape[1] % each)).long()
    total = sum(numbers[:, i::each] << (bits * i) for i in range(each))
    assert isinstance(total, Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def by_turns(numbers_MN: Tensor) -> Tensor:
    """Return the columns in the order in which AWQ packs them, lowest bits first."""
    return torch.cat(
        [
            numbers_MN[:, i : i + 8][:, [0, 2, 4, 6, 1, 3, 5, 7]]
            for i in range(0, numbers_MN.shape[1], 8)
        ],
        1,
    )


def stored(name: str, w_NK: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors that store one weight, and its dequantized values."""
    if w_NK.ndim == 3:
        each, meant = zip(*(stored(name, w, form) for w in w_NK), strict=True)
        return {key: torch.stack([one[key] for one in each]) for key in each[0]}, torch.stack(meant)
    values, zeros, meaning, scales = rounded(w_NK, form)
    module = name.removesuffix("weight")
    unsigned = (
        values if zeros is not None or form.kind == "fp4" else values.float() + 2 ** (form.bits - 1)
    )
    if form.method in ("awq", "gptq", "gptq_v2"):
        points_CN = (
            zeros.t()
            if zeros is not None
            else torch.full_like(scales["_scale"].t(), 2.0 ** (form.bits - 1))
        )
        parts = {module + "scales": scales["_scale"].t().contiguous().float()}
        if form.method == "awq":
            found = {
                "qweight": words(by_turns(unsigned.t()), 4),
                "qzeros": words(by_turns(points_CN), 4),
            }
        else:
            found = {
                "qweight": words(unsigned, form.bits).t().contiguous(),
                "qzeros": words(points_CN - int(form.method == "gptq"), form.bits),
                "g_idx": torch.arange(w_NK.shape[1], dtype=torch.int32) // form.group,
            }
        return parts | {module + key: part.contiguous() for key, part in found.items()}, meaning
    if form.method == "mxfp4":
        pairs = (unsigned[:, 0::2] | unsigned[:, 1::2] << 4).to(torch.uint8)
        return {
            name + "_blocks": pairs.unflatten(1, (-1, 16)),
            name + "_scales": scales["_scale"],
        }, meaning
    parts = {name + end: part for end, part in scales.items() if end != "_input"}
    if "_input" in scales:
        parts[module + "input_scale"] = scales["_input"]
    if form.kind == "fp4":
        parts[name + "_packed" * form.packed] = (unsigned[:, 0::2] | unsigned[:, 1::2] << 4).to(
            torch.uint8
        )
    elif form.packed:
        parts[name + "_packed"] = words(unsigned, form.bits)
        parts[name + "_shape"] = torch.tensor(w_NK.shape)
        if zeros is not None:
            parts[name + "_zero_point"] = words(zeros.t(), 4).t().contiguous()
    else:
        parts[name] = values if form.kind == "fp8" else values.to(torch.int8)
    return parts, meaning


def dequantized(weight: Quantized) -> Tensor:
    """Return the values in fp32, computed element by element."""
    values = weight.values.view(torch.float8_e4m3fn) if weight.kind == "fp8" else weight.values
    values = E2M1[values.long()] if weight.kind == "fp4" else values
    inputs = values.shape[-1]
    group = weight.group or inputs

    def spread(parts: Tensor) -> Tensor:
        return parts.repeat_interleave(group, -1)[..., :inputs]

    zeros = spread(weight.zeros) if weight.zeros is not None else 8 if weight.kind == "int4" else 0
    return (values.float() - zeros) * spread(weight.scales)


def write_quantized(
    source: Path, folder: Path, form: Form, plain: str = "layers.1.self_attn"
) -> tuple[Path, Path]:
    """Write the quantized checkpoint and its fp32 meaning; return both folders.

    Layers whose name contains `plain` keep their weights.
    """
    tensors = load_file(source / "model.safetensors")
    quantized = dict[str, Tensor]()
    meaning = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if not name.endswith(LINEAR) or plain in name:
            quantized[name] = meaning[name] = tensor
            continue
        parts, meaning[name] = stored(name, tensor.float(), form)
        quantized |= parts
    config = json.loads((source / "config.json").read_text())
    paths = (folder / "quantized", folder / "meaning")
    extras = ({"quantization_config": form.config}, {})
    for path, content, extra in zip(paths, (quantized, meaning), extras, strict=True):
        shutil.copytree(source, path)
        save_file(content, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config | extra))
    return paths
