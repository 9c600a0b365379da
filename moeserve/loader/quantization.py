"""Reads the formats of a checkpoint's quantized weights from its quantization_config.

The config is in config.json, or in ModelOpt's hf_quant_config.json. Supported values of
quant_method: compressed-tensors, fp8, fbgemm_fp8, mxfp8, mxfp4, modelopt, awq, gptq, and those of
plugins.

Not read:
- Which layers are quantized (`ignore`, `modules_to_not_convert`, ...): the names and dtypes of the
  tensors show it (loader/stored.py).
- Scales for an fp8 KV cache: keys and values are not rounded to fp8.

Does not import torch.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moeserve.errors import CheckpointError
from moeserve.loader.documents import read_optional_json
from moeserve.loader.fields import Fields
from moeserve.loader.stored_format import GGML_FORMATS, StoredFormat
from moeserve.plugins import Registry

_KEYS = ("quantization_config", "compression_config")
_MLX_KEY = "quantization"  # MLX writes it beside, or in place of, quantization_config
_OTHER_PROGRAMS = {"exl2": "ExLlamaV2", "exl3": "ExLlamaV3 (EXL3)", "mlx": "MLX"}
_MODELOPT_FILE = "hf_quant_config.json"
_FORMATS = (  # of compressed-tensors
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
_WEIGHTS_DEFAULTS = {  # of the `weights` section of a compressed-tensors group
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": None,
    "group_size": None,
    "block_structure": None,
    "dynamic": False,
    "actorder": None,
}
_STRATEGIES = {  # (bits, type) -> supported strategies of compressed-tensors
    (4, "int"): ("tensor", "channel", "group"),
    (8, "int"): ("tensor", "channel", "group"),
    (8, "float"): ("tensor", "channel", "group", "block"),
    (4, "float"): ("group", "tensor_group"),
}
_FP4_GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}  # format -> group size
_MODELOPT_SCALES = {  # quant_algo -> outputs and inputs that share a scale; 0: all
    "FP8": (0, 0),
    "FP8_PER_CHANNEL_PER_TOKEN": (1, 0),
    "FP8_PB_WO": (128, 128),
    "MXFP8": (1, 32),
    "NVFP4": (1, 16),
    "W4A16_NVFP4": (1, 16),
}
_MAX_SIZE = 2**20
_USE_16_BITS = "use the float16 or bfloat16 checkpoint"
_USE_ANOTHER = "experts in this format are not supported; use the checkpoint of the model's authors"


def read_stored_formats(config: Fields) -> tuple[StoredFormat, ...]:
    """Return the formats of a model's quantized weights, () for an unquantized model.

    Raises CheckpointError for an unsupported format.
    """
    inner = config.values.get("text_config")
    sources = [config]
    if isinstance(inner, dict):
        sources.append(Fields(config.path, inner, {}, "text_config."))
    for source, key in itertools.product(sources, (*_KEYS, _MLX_KEY)):
        _refuse_other_programs(config, source.values.get(key))
    for source, key in itertools.product(sources, _KEYS):
        if source.values.get(key) not in (None, {}):
            section = _section(source, key, {"quant_method": "compressed-tensors"}, source.prefix)
            if source.values.get("expert_dtype") is not None:  # DeepSeek-V4
                outer = {"expert_dtype": source.values["expert_dtype"]}
                section = replace(section, values={**outer, **section.values})
            method = section.choice("quant_method", tuple(WEIGHT_FORMATS))
            return tuple(WEIGHT_FORMATS[method](_with_defaults(section)))
    folder = config.path.parent
    if values := read_optional_json(folder, _MODELOPT_FILE):
        document = Fields(folder / _MODELOPT_FILE, values, {})
        return tuple(read_modelopt(_section(document, "quantization", {})))
    return ()


def _refuse_other_programs(config: Fields, section: Any) -> None:
    """Raise CheckpointError for the weights of programs that have a format of their own."""
    if not isinstance(section, dict):
        return
    method = section.get("quant_method")
    program = ""
    if method not in tuple(WEIGHT_FORMATS):  # a plugin may read them
        program = _OTHER_PROGRAMS.get(str(method).lower(), "")
    if method is None and {"group_size", "bits"} <= section.keys():
        program = "MLX"
    if program:
        raise CheckpointError(
            f"{config.path}: the weights are in the format of {program}, which only {program} "
            "reads; pass the original model, or a repository of it in GGUF, FP8, NVFP4, AWQ or GPTQ"
        )


def _section(config: Fields, key: str, defaults: dict[str, Any], prefix: str = "") -> Fields:
    return Fields(config.path, config.section(key), defaults, f"{prefix}{key}.")


def _with_defaults(config: Fields, **defaults: Any) -> Fields:
    return replace(config, defaults=defaults)


def read_fp8(config: Fields) -> list[StoredFormat]:
    """Read DeepSeek's format: e4m3 with a scale per block, or per tensor without a block size.

    The experts of DeepSeek-V4 may be e2m1 with a scale per 32 inputs.
    """
    config = _with_defaults(
        config, fmt="e4m3", weight_block_size=None, expert_dtype="fp8", moe_quant_algo=None
    )
    config.unsupported("moe_quant_algo", _USE_ANOTHER)
    config.choice("fmt", ("e4m3",))
    rows = 0
    group = 0
    if config.raw("weight_block_size") is not None:
        rows, group = _block_size(config, "weight_block_size")
    stored = StoredFormat(kind="fp8", rows=rows, group=group, activations=True)
    if config.choice("expert_dtype", ("fp8", "fp4")) == "fp8":
        return [stored]
    return [stored, StoredFormat(kind="fp4", layout="nibbles", group=32)]


def _block_size(config: Fields, key: str) -> tuple[int, int]:
    block = config.integers(key, 1, _MAX_SIZE)
    if len(block) != 2 or block[1] % 8:
        raise config.error(
            key,
            "it must be two sizes, [outputs, inputs], the second a multiple of 8, like [128, 128]",
        )
    return block[0], block[1]


def read_modelopt(config: Fields) -> list[StoredFormat]:
    """Read ModelOpt's formats: one for all layers, or one per layer (MIXED_PRECISION).

    In the second case each tensor's dtype decides which of the formats it has.
    """
    config = _with_defaults(
        config, quantized_layers=None, group_size=None, kv_cache_quant_algo=None
    )
    if config.raw("quant_algo") != "MIXED_PRECISION":
        return [] if config.raw("quant_algo") is None else [_modelopt_format(config)]
    layers = config.section("quantized_layers")
    key = "quantized_layers"
    if not layers or not all(isinstance(layer, dict) for layer in layers.values()):
        raise config.error(key, 'it must map names of layers to {"quant_algo": ...}')
    formats = [
        _modelopt_format(
            Fields(config.path, layer, {"group_size": None}, f"{config.prefix}{key}.{name}.")
        )
        for name, layer in layers.items()
    ]
    return list(dict.fromkeys(formats))


def _modelopt_format(config: Fields) -> StoredFormat:
    algo = config.choice("quant_algo", tuple(_MODELOPT_SCALES))
    rows, group = _MODELOPT_SCALES[algo]
    if "FP4" in algo and config.raw("group_size") not in (None, group):
        raise config.error("group_size", f"supported: {group}")
    if "FP4" in algo:
        return StoredFormat(kind="fp4", layout="nibbles", group=group, activations=algo == "NVFP4")
    return StoredFormat(kind="fp8", rows=rows, group=group, activations=algo != "FP8_PB_WO")


def read_awq(config: Fields) -> list[StoredFormat]:
    """Read AWQ's format (version gemm): int4 in groups, with zero points."""
    config = _with_defaults(config, bits=4, group_size=128, version="gemm", zero_point=True)
    if config.integer("bits", 1, 8) != 4:
        raise config.error("bits", f"supported: 4; {_USE_16_BITS}")
    if str(config.raw("version")).lower() != "gemm":
        raise config.error("version", f"supported: gemm; {_USE_16_BITS}")
    if not config.boolean("zero_point"):
        raise config.error("zero_point", f"supported: true; {_USE_16_BITS}")
    return [StoredFormat(kind="int4", layout="awq", group=_group_size(config), zeros=True)]


def read_gptq(config: Fields) -> list[StoredFormat]:
    """Read GPTQ's formats: int4 or symmetric int8, without reordered inputs."""
    defaults = {
        "sym": True,
        "desc_act": False,
        "static_groups": False,
        "checkpoint_format": "gptq",
        "dynamic": None,
    }
    config = _with_defaults(config, group_size=128, **defaults)
    bits = config.integer("bits", 1, 8)
    group = _group_size(config)
    if bits not in (4, 8):
        raise config.error("bits", f"supported: 4, 8; {_USE_16_BITS}")
    if config.boolean("desc_act") and group and not config.boolean("static_groups"):
        raise config.error(
            "desc_act", f"groups of reordered inputs are not supported; {_USE_16_BITS}"
        )
    # A pattern that begins with "-:" excludes modules from quantization, which tensors show anyway.
    if any(not str(pattern).startswith("-:") for pattern in config.section("dynamic")):
        raise config.error("dynamic", f"settings per module are not supported; {_USE_16_BITS}")
    layout: Any = config.choice("checkpoint_format", ("gptq", "gptq_v2"))
    zeros = not config.boolean("sym")
    if zeros and bits == 8:
        raise config.error("sym", f"zero points are supported for 4 bits only; {_USE_16_BITS}")
    return [
        StoredFormat(kind="int4" if bits == 4 else "int8", layout=layout, group=group, zeros=zeros)
    ]


def _group_size(config: Fields) -> int:
    """Read the number of inputs that share a scale; 0 for all of them (-1 in the file)."""
    size = config.integer("group_size", -1, _MAX_SIZE)
    if size != -1 and (size < 8 or size % 8):
        raise config.error("group_size", "it must be a multiple of 8, or -1 for all inputs")
    return max(0, size)


def read_compressed(config: Fields) -> list[StoredFormat]:
    """Read the formats of llm-compressor: one per config group, one in all if they are equal."""
    config = _with_defaults(config, config_groups=None, format=None)
    for key in ("moe_sparsity_config", "transform_config"):
        if config.values.get(key):
            raise config.error(key, f"this is not supported; {_USE_16_BITS}")
    sparsity = config.values.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise config.error("sparsity_config", f"sparse weights are not supported; {_USE_16_BITS}")
    groups = config.section("config_groups")
    if not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise config.error(
            "config_groups", 'it must have a group: {"group_0": {"weights": ..., "targets": ...}}'
        )
    is_mixed = config.raw("format") == "mixed-precision"  # then every group has its own format
    default_format = "" if is_mixed else config.choice("format", _FORMATS)
    formats = [
        _group_format(
            Fields(
                config.path,
                group,
                {"weights": None, "format": default_format},
                f"{config.prefix}config_groups.{name}.",
            )
        )
        for name, group in groups.items()
    ]
    without_targets = {replace(form, targets=()) for form in formats}
    return list(without_targets) if len(without_targets) == 1 else formats


def _group_format(config: Fields) -> StoredFormat:
    if config.values.get("format") is None:
        config = replace(config, values={**config.values, "format": config.defaults["format"]})
    layout = config.choice("format", _FORMATS)
    if not config.section("weights"):
        raise config.error(
            "weights", f"groups that quantize activations alone are not supported; {_USE_16_BITS}"
        )
    weights = _section(config, "weights", _WEIGHTS_DEFAULTS, config.prefix)
    activations = bool(
        config.values.get("input_activations") or config.values.get("output_activations")
    )
    targets = config.values.get("targets") or ()
    if not isinstance(targets, list | tuple) or not all(
        isinstance(target, str) for target in targets
    ):
        config = _with_defaults(config, targets=None)
        raise config.error("targets", "it must be a list of names of modules")
    if layout in _FP4_GROUPS:
        form = _fp4_format(weights, layout)
    else:
        form = _fp8_or_int_format(weights, layout)
    return replace(form, activations=activations, targets=tuple(targets))


def _fp4_format(weights: Fields, layout: str) -> StoredFormat:
    size = _FP4_GROUPS[layout]
    for key, value in (("num_bits", 4), ("type", "float"), ("group_size", size)):
        if weights.raw(key) != value:
            raise weights.error(key, f"supported: {value} with the format {layout}")
    weights.choice("strategy", _STRATEGIES[4, "float"])
    return StoredFormat(kind="fp4", layout="nibbles", group=size)


def _fp8_or_int_format(weights: Fields, layout: str) -> StoredFormat:
    is_packed = layout == "pack-quantized"
    types = {"pack-quantized": ("int",), "int-quantized": ("int",), "float-quantized": ("float",)}
    number_type = weights.choice("type", types.get(layout, ("int", "float")))
    bits = weights.integer("num_bits", 4, 8)
    if bits != 8 and not (bits == 4 and is_packed):
        raise weights.error(
            "num_bits", f"supported: 8, and 4 with the format pack-quantized; {_USE_16_BITS}"
        )
    for key, values in (("dynamic", (False,)), ("actorder", (None, False, "weight", "static"))):
        if weights.raw(key) not in values:
            raise weights.error(key, f"this is not supported; {_USE_16_BITS}")
    zeros = not weights.boolean("symmetric")
    if zeros and bits == 8:
        raise weights.error(
            "symmetric", f"zero points are supported for 4 bits only; {_USE_16_BITS}"
        )
    rows, group = _outputs_and_inputs_per_scale(weights, _STRATEGIES[bits, number_type])
    weight_kind: Any = "fp8" if number_type == "float" else f"int{bits}"
    return StoredFormat(
        kind=weight_kind,
        layout="words" if is_packed else "plain",
        rows=rows,
        group=group,
        zeros=zeros,
    )


def _outputs_and_inputs_per_scale(weights: Fields, supported: tuple[str, ...]) -> tuple[int, int]:
    """Read the numbers of outputs and of inputs that share a scale; 0 stands for all."""
    size = weights.raw("group_size")
    if weights.raw("strategy") is not None:
        strategy = weights.choice("strategy", supported)
    elif size is None:
        strategy = "tensor"
    else:
        strategy = "channel" if size == -1 else "group"
    if strategy == "block":
        return _block_size(weights, "block_structure")
    if strategy == "group" and weights.integer("group_size", 8, _MAX_SIZE) % 8:
        raise weights.error("group_size", "it must be a multiple of 8")
    rows = 0 if strategy == "tensor" else 1
    inputs = size if strategy == "group" else 0
    return rows, inputs


def read_fbgemm_fp8(config: Fields) -> list[StoredFormat]:
    """Return fbgemm's only format: e4m3 with a scale per output."""
    return [StoredFormat(kind="fp8", activations=True)]


def read_mxfp8(config: Fields) -> list[StoredFormat]:
    """Read the format of Inkling 2 and MiniMax-M3: e4m3 with a scale per 32 inputs."""
    rows, group = _MODELOPT_SCALES["MXFP8"]
    config = _with_defaults(config, weight_block_size=[rows, group])
    if config.raw("weight_block_size") not in (None, [rows, group]):
        raise config.error("weight_block_size", f"supported: [{rows}, {group}]")
    return [StoredFormat(kind="fp8", rows=rows, group=group, activations=True)]


def read_mxfp4(config: Fields) -> list[StoredFormat]:
    """Return the only format of gpt-oss: e2m1 in groups of 32."""
    return [StoredFormat(kind="fp4", layout="blocks", group=32)]


def read_gguf(config: Fields) -> list[StoredFormat]:
    """Return the formats of the ggml types in a GGUF file (loader/gguf_config.py lists them)."""
    return [GGML_FORMATS[name] for name in config.raw("types")]


FormatReader = Callable[[Fields], list[StoredFormat]]
# quant_method -> function that reads its quantization_config
WEIGHT_FORMATS: Registry[FormatReader] = Registry(
    "moeserve.weight_formats",
    {
        method: f"moeserve.loader.quantization:{reader}"
        for method, reader in {
            "compressed-tensors": "read_compressed",
            "fp8": "read_fp8",
            "awq": "read_awq",
            "gptq": "read_gptq",
            "modelopt": "read_modelopt",
            "modelopt_fp4": "read_modelopt",
            "modelopt_mixed": "read_modelopt",
            "fbgemm_fp8": "read_fbgemm_fp8",
            "mxfp4": "read_mxfp4",
            "mxfp8": "read_mxfp8",
            "gguf": "read_gguf",
        }.items()
    },
)
