"""Quantised weights of a checkpoint: their format in config.json, and the tensors of each weight. No torch here.

Known: compressed-tensors (its formats pack-, int-, float- and naive-quantized) and fp8, as in DeepSeek-V3 and
Qwen3-FP8. Which layers are quantised is not read: `ignore` and `targets` are for the writer, and each tensor's own
dtype tells the reader.

N outputs, K inputs, R x C scales. A weight `x.weight` lies in the file as

    x.weight, or x.weight_packed    int8 or e4m3 [N, K], or words of 32 bits [N, K / 8 or 4], first inputs lowest
    x.weight_scale (_inv)           [R, C]; R is 1, N or a block's share of N, C likewise of K
    x.weight_zero_point             words of eight outputs [N / 8, C], if int4 is not symmetric

Two more tensors are not needed: x.weight_shape, which config.json implies, and x.input_scale, for quantised
activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeserve.errors import CheckpointError
from moeserve.loader.files import Fields
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.spec import StoredFormat

_KEYS = ("quantization_config", "compression_config")
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_WEIGHTS = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": None, "group_size": None, "block_structure": None,
    "dynamic": False, "actorder": None,
}  # fmt: skip
_STRATEGIES = {
    (4, "int"): ("tensor", "channel", "group"),
    (8, "int"): ("tensor", "channel"),
    (8, "float"): ("tensor", "channel", "group", "block"),
}
_MAX_SIZE = 2**20
_SCALE_DTYPES = ("F32", "BF16", "F16")
_SCALES = ("_scale_inv", "_scale")
_WHOLE = "use the float16 or bfloat16 checkpoint"


def read_stored_format(config: Fields) -> StoredFormat | None:
    """Returns the format of quantised weights, None without any. Raises CheckpointError if not supported."""
    for key in _KEYS:
        if config.values.get(key) is not None:
            asked = _section(config, key, {"quant_method": "compressed-tensors"})
            if asked.choice("quant_method", ("compressed-tensors", "fp8")) == "fp8":
                return _fp8(_section(config, key, {"fmt": "e4m3", "weight_block_size": None}))
            return _compressed(_section(config, key, {"config_groups": None, "format": None}))
    return None


def _section(config: Fields, key: str, defaults: dict[str, Any], prefix: str = "") -> Fields:
    return Fields(config.path, config.section(key), defaults, f"{prefix}{key}.")


def _fp8(config: Fields) -> StoredFormat:
    config.choice("fmt", ("e4m3",))
    rows, group = _block(config, "weight_block_size") if config.raw("weight_block_size") is not None else (0, 0)
    return StoredFormat(kind="fp8", rows=rows, group=group, activations=True)


def _block(config: Fields, key: str) -> tuple[int, int]:
    block = config.integers(key, 1, _MAX_SIZE)
    if len(block) != 2 or block[1] % 8:
        raise config.error(key, "it must be two sizes, outputs and inputs, the second a multiple of 8, as [128, 128]")
    return block[0], block[1]


def _compressed(config: Fields) -> StoredFormat:
    layout = config.choice("format", _FORMATS)
    for key in ("kv_cache_scheme", "moe_sparsity_config", "transform_config"):
        if config.values.get(key):
            raise config.error(key, f"this is not supported; {_WHOLE}")
    sparsity = config.values.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise config.error("sparsity_config", f"sparse weights are not supported; {_WHOLE}")
    groups = config.section("config_groups")
    found = {
        _group(Fields(config.path, group, {"weights": None}, f"quantization_config.config_groups.{name}."), layout)
        for name, group in groups.items()
        if isinstance(group, dict)
    }
    if len(found) != 1 or not all(isinstance(group, dict) for group in groups.values()):
        raise config.error("config_groups", f"it must have one group, or several that say the same; {_WHOLE}")
    return found.pop()


def _group(config: Fields, layout: str) -> StoredFormat:
    if config.values.get("format") not in (None, layout):
        raise config.error("format", f"supported: {layout}, as for all groups")
    if not config.section("weights"):
        raise config.error("weights", f"groups of activations alone are not supported; {_WHOLE}")
    weights = _section(config, "weights", _WEIGHTS, "quantization_config.config_groups.")
    packed = layout == "pack-quantized"
    allowed = {"pack-quantized": ("int",), "int-quantized": ("int",), "float-quantized": ("float",)}
    kind = weights.choice("type", allowed.get(layout, ("int", "float")))
    bits = weights.integer("num_bits", 4, 8)
    if bits != 8 and not (bits == 4 and packed):
        raise weights.error("num_bits", f"supported: 8, and 4 where the format is pack-quantized; {_WHOLE}")
    for key, values in (("dynamic", (False,)), ("actorder", (None, False, "weight", "static"))):
        if weights.raw(key) not in values:
            raise weights.error(key, f"this is not supported; {_WHOLE}")
    zeros = not weights.boolean("symmetric")
    if zeros and bits == 8:
        raise weights.error("symmetric", f"zero points are supported for 4 bits only; {_WHOLE}")
    rows, group = _scales(weights, _STRATEGIES[bits, kind])
    activations = bool(config.values.get("input_activations") or config.values.get("output_activations"))
    name = "fp8" if kind == "float" else f"int{bits}"
    return StoredFormat(kind=name, packed=packed, rows=rows, group=group, zeros=zeros, activations=activations)  # type: ignore[arg-type]


def _scales(weights: Fields, supported: tuple[str, ...]) -> tuple[int, int]:
    """Returns the numbers of outputs and inputs that share a scale; 0: all."""
    size = weights.raw("group_size")
    if weights.raw("strategy") is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
        if strategy not in supported:
            raise weights.error("group_size", f"supported strategies: {', '.join(supported)}; {_WHOLE}")
    else:
        strategy = weights.choice("strategy", supported)
    if strategy == "block":
        return _block(weights, "block_structure")
    if strategy == "group" and weights.integer("group_size", 8, _MAX_SIZE) % 8:
        raise weights.error("group_size", "it must be a multiple of 8")
    return (0 if strategy == "tensor" else 1), size if strategy == "group" else 0


@dataclass(frozen=True, slots=True)
class Stored:
    """One quantised weight in the files. others: tensors that belong to it and are not needed."""

    form: StoredFormat
    values: TensorInfo
    scales: TensorInfo
    zeros: TensorInfo | None
    others: tuple[TensorInfo, ...]

    @property
    def parts(self) -> list[TensorInfo]:
        """All tensors of the weight, the values first."""
        return [part for part in (self.values, self.scales, self.zeros, *self.others) if part is not None]

    def mismatch(self, shape: tuple[int, ...]) -> str:
        """Returns what is wrong with the headers for a weight of `shape`; empty if nothing is."""
        rows, depth = shape[-2:]
        per_word = (8 if self.form.kind == "int4" else 4) if self.form.packed else 1
        scale_rows, scale_columns = self.form.scale_shape(shape)
        zeros = (*shape[:-2], -(-rows // 8), scale_columns)
        scales = [*shape[:-2], scale_rows, scale_columns]
        if self.values.shape != (found := (*shape[:-1], -(-depth // per_word))):
            return f"{self.values} has shape {list(self.values.shape)}, config.json implies {list(found)}"
        if _wide(self.scales.shape) != _wide(scales) or self.scales.dtype not in _SCALE_DTYPES:
            what = f"{self.scales.dtype} {list(self.scales.shape)}"
            return f"{self.scales} is {what}; supported: {scales} scales in {', '.join(_SCALE_DTYPES)}"
        if self.form.zeros and (self.zeros is None or (self.zeros.dtype, self.zeros.shape) != ("I32", zeros)):
            return f"{self.values} needs zero points, I32 {list(zeros)}, beside it"
        return ""


def find_stored(tensors: Mapping[str, TensorInfo], form: StoredFormat) -> dict[str, Stored]:
    """Returns the quantised weights among `tensors`, by the names that they would have unquantised.

    Raises CheckpointError where one has no scales, or is present unquantised as well.
    """
    found = {}
    for name, tensor in tensors.items():
        if tensor.dtype != form.values_dtype or (form.packed and not name.endswith("_packed")):
            continue
        if name.endswith(("_zero_point", "_shape")):
            continue
        base = name.removesuffix("_packed") if form.packed else name
        if form.packed and base in tensors:
            raise CheckpointError(f"{tensor} is there as {base!r}, too; only one of them can be meant")
        scales = next((tensors[base + end] for end in _SCALES if base + end in tensors), None)
        if scales is None:
            raise CheckpointError(f"{tensor} is {tensor.dtype}, and there is no {base}_scale; download it again")
        module = base.removesuffix("weight")
        others = (base + "_shape", module + "input_scale", module + "input_zero_point")
        zeros = tensors.get(base + "_zero_point") if form.zeros else None
        found[base] = Stored(form, tensor, scales, zeros, tuple(tensors[n] for n in others if n in tensors))
    return found


def _wide(shape: Sequence[int]) -> list[int]:
    """Drops dimensions of size 1, which writers leave out or add."""
    return [size for size in shape if size != 1]
