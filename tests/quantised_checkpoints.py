"""Checkpoints with quantised weights, laid out as by compressed-tensors and DeepSeek, each beside one that says in fp32
what the quantised weights mean."""

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

from moeserve.ops.quantised import Quantised

LINEAR = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight", "put_linear.weight")


@dataclass(frozen=True)
class Form:
    """rows, group: outputs and inputs that share a scale, 0 for all."""

    kind: str  # int4, int8, fp8
    rows: int = 1
    group: int = 0
    zeros: bool = False
    packed: bool = False
    method: str = "compressed-tensors"

    @property
    def config(self) -> dict[str, Any]:
        if self.method == "fp8":
            block = {"weight_block_size": [self.rows, self.group]} if self.group else {}
            return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **block}
        strategy = "tensor" if not self.rows else "block" if self.rows > 1 else "group" if self.group else "channel"
        weights = {
            "num_bits": 4 if self.kind == "int4" else 8, "type": "float" if self.kind == "fp8" else "int",
            "symmetric": not self.zeros, "strategy": strategy, "dynamic": False, "actorder": None,
            "group_size": self.group if strategy == "group" else None,
            "block_structure": [self.rows, self.group] if strategy == "block" else None,
        }  # fmt: skip
        layout = "pack-quantized" if self.packed else "float-quantized" if self.kind == "fp8" else "int-quantized"
        return {
            "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head", "re:.*mlp.gate$"],
            "quantization_status": "compressed", "kv_cache_scheme": None, "sparsity_config": {},
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        }  # fmt: skip


FORMS = {
    "int8": Form("int8"),
    "int8 per tensor": Form("int8", rows=0),
    "int8 in words": Form("int8", packed=True),
    "int4": Form("int4", group=32, packed=True),
    "int4 with zero points": Form("int4", group=32, zeros=True, packed=True),
    "int4 per channel": Form("int4", packed=True),
    "fp8": Form("fp8"),
    "fp8 per tensor": Form("fp8", rows=0, method="fp8"),
    "fp8 in blocks": Form("fp8", rows=128, group=128, method="fp8"),
    "fp8 in small blocks": Form("fp8", rows=24, group=16),
}


def rounded(w_NK: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Values [N, K], scales [R, C], zero points [R, C], and what they mean."""
    outputs, inputs = w_NK.shape
    rows, group = form.rows or outputs, form.group or inputs
    padded = pad(w_NK, (0, -inputs % group, 0, -outputs % rows)).unflatten(0, (-1, rows)).unflatten(2, (-1, group))
    low, high = padded.amin((1, 3)), padded.amax((1, 3))
    peak = torch.maximum(high, -low)
    levels = {"int8": 127, "int4": 7, "fp8": 448}[form.kind]
    scales = ((high - low) / 15 if form.zeros else peak / levels).bfloat16().float()
    zeros = (-low / scales).round().clamp(0, 15) if form.zeros else None

    def spread(blocks: Tensor) -> Tensor:
        return blocks.repeat_interleave(rows, 0)[:outputs].repeat_interleave(group, 1)[:, :inputs]

    scaled = w_NK / spread(scales)
    if form.kind == "fp8":
        values = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
        return values, scales, None, values.float() * spread(scales)
    shift = spread(zeros) if zeros is not None else torch.zeros(())
    least, most = (0, 15) if form.zeros else (-levels - 1, levels)
    values = (scaled.round() + shift).clamp(least, most)
    return values, scales, zeros, (values - shift) * spread(scales)


def words(values_NK: Tensor, bits: int) -> Tensor:
    """int32 words of 32 / bits numbers from 0, the first lowest."""
    each = 32 // bits
    numbers = pad(values_NK, (0, -values_NK.shape[1] % each)).long()
    total = sum(numbers[:, i::each] << (bits * i) for i in range(each))
    assert isinstance(total, Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def stored(name: str, w_NK: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of one weight, and what they mean."""
    if w_NK.ndim == 3:
        each, meant = zip(*(stored(name, w, form) for w in w_NK), strict=True)
        return {key: torch.stack([one[key] for one in each]) for key in each[0]}, torch.stack(meant)
    values, scales, zeros, meaning = rounded(w_NK, form)
    parts = {name + ("_scale_inv" if form.method == "fp8" and form.group else "_scale"): scales.bfloat16()}
    if form.packed:
        bits = 4 if form.kind == "int4" else 8
        parts[name + "_packed"] = words(values if form.zeros else values + 2 ** (bits - 1), bits)
        parts[name + "_shape"] = torch.tensor(w_NK.shape)
        if zeros is not None:
            parts[name + "_zero_point"] = words(zeros.t(), 4).t().contiguous()
    else:
        parts[name] = values if form.kind == "fp8" else values.to(torch.int8)
    return parts, meaning


def dequantised(weight: Quantised) -> Tensor:
    """What it means, in fp32, number by number."""
    values = weight.values.view(torch.float8_e4m3fn) if weight.kind == "fp8" else weight.values
    inputs = values.shape[-1]
    group = weight.group or inputs

    def spread(parts: Tensor) -> Tensor:
        return parts.repeat_interleave(group, -1)[..., :inputs]

    zeros = spread(weight.zeros) if weight.zeros is not None else 8 if weight.kind == "int4" else 0
    return (values.float() - zeros) * spread(weight.scales)


def write_quantised(source: Path, folder: Path, form: Form, plain: str = "layers.1.self_attn") -> tuple[Path, Path]:
    """The quantised checkpoint and its meaning in fp32. plain: layers that keep their weights."""
    tensors = load_file(source / "model.safetensors")
    quantised, meaning = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if not name.endswith(LINEAR) or plain in name:
            quantised[name] = meaning[name] = tensor
            continue
        parts, meaning[name] = stored(name, tensor.float(), form)
        quantised |= parts
    config = json.loads((source / "config.json").read_text())
    paths, extras = (folder / "quantised", folder / "meaning"), ({"quantization_config": form.config}, {})
    for path, content, extra in zip(paths, (quantised, meaning), extras, strict=True):
        shutil.copytree(source, path)
        save_file(content, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config | extra))
    return paths
