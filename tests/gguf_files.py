"""Write small checkpoints as GGUF files, as llama.cpp's converters do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from moeserve.text.tokenizer import Tokenizer
from tests.gguf_families import latent, recurrent, standard, windows
from tests.gguf_families.group import Tensors

GROUPS = (latent.GROUP, recurrent.GROUP, standard.GROUP, windows.GROUP)
FAMILIES = {  # family of tests/families.py -> architecture in GGUF
    family: arch for group in GROUPS for family, arch in group.architectures.items()
}
OPTIONS = {family: options for group in GROUPS for family, options in group.options.items()}
Choose = Callable[[str, tuple[int, ...]], gguf.GGMLQuantizationType]
KINDS = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "NVFP4",
    "Q2_K",
    "Q3_K",
    "TQ1_0",
    "TQ2_0",
    "IQ3_XXS",
    "IQ3_S",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ1_S",
    "IQ1_M",
)
_SCALES = {  # offsets of fp16 scales in a block; other types have one at 0
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "NVFP4": (),
}
F32 = gguf.GGMLQuantizationType.F32


def as_f32(name: str, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType:
    return F32


def matrices(*kinds: str) -> Choose:
    """Return a function that chooses one of these types for each matrix.

    Routers, and matrices whose rows are no whole number of blocks, stay in F32.
    """
    quantized = [gguf.GGMLQuantizationType[kind] for kind in kinds]

    def choose(name: str, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType:
        kind = quantized[sum(name.encode()) % len(quantized)]
        whole = shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        return kind if len(shape) > 1 and "ffn_gate_inp" not in name and whole else F32

    return choose


def random_blocks(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return rows of a type with random bits, and scales for weights around 0.1."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, num_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = rng.integers(120, 125, raw.shape[:-1])
    if kind == "NVFP4":
        raw[..., :4] = rng.integers(1, 40, (*raw.shape[:-1], 4))
    small = {
        "Q2_K": 5e-3,
        "Q3_K": 2e-3,
        "Q4_K": 6e-4,
        "Q5_K": 3e-4,
        "Q6_K": 1e-4,
        "Q8_0": 2e-3,
        "IQ4_NL": 2e-3,
        "IQ4_XS": 1e-4,
        "IQ3_XXS": 1e-3,
        "IQ3_S": 1e-3,
        "IQ2_XXS": 2e-3,
        "IQ2_XS": 2e-3,
        "IQ2_S": 2e-3,
    }.get(kind, 0.02)
    num_scales = len(_SCALES.get(kind, (0,)))
    scales = rng.uniform(small / 2, small, (*raw.shape[:-1], num_scales)).astype(np.float16)
    put_scales(kind, raw, scales)
    return raw.reshape(*shape[:-1], -1)


def put_scales(kind: str, raw: np.ndarray, scales: np.ndarray) -> None:
    """Write fp16 scales [..., number of scales] into blocks [..., bytes]."""
    if kind == "IQ1_M":  # in the upper nibbles of four words
        words = raw[..., 48:56].copy().view(np.uint16)
        nibbles = (scales[..., :1].view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16)) & 15
        raw[..., 48:56] = ((words & 0x0FFF) | (nibbles << 12)).astype(np.uint16).view(np.uint8)
        return
    for i, at in enumerate(_SCALES.get(kind, (0,))):
        raw[..., at : at + 2] = scales[..., i : i + 1].copy().view(np.uint8)


def write_gguf(
    name: str,
    checkpoint: Path,
    path: Path,
    choose: Choose = as_f32,
    *,
    tokenizer: Path | None = None,
    split: int = 0,
    meaning: bool = False,
    outer_scales: bool = False,
    fused: bool = False,
    change: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    **metadata: Any,
) -> Path:
    """Write a family's checkpoint as GGUF; return the (first) file.

    choose gives the type of each tensor; quantized ones get random blocks. metadata replaces the
    keys that a converter writes; None omits a key. split is the number of tensors per file. With
    `meaning`, quantized tensors are written dequantized, in fp32. outer_scales: quantized tensors
    have scales beside them, one or one for each expert. fused: gates and ups of experts are one
    tensor. change: changes the tensors before they are written.
    """
    arch = FAMILIES[name]
    group = next(group for group in GROUPS if name in group.architectures)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= config.get("text_config", {})
    tensors = change(group.tensors(name, config, load_file(checkpoint / "model.safetensors")))
    if fused:
        tensors = _fused(tensors)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    for key, value in (group.metadata(name, config) | metadata).items():
        add(writer, f"{arch}.{key}", value)
    if tokenizer:
        add_tokenizer(writer, tokenizer)
    for theirs, tensor in tensors.items():
        data = tensor.float().contiguous().numpy()
        kind = choose(theirs, tuple(tensor.shape))
        if kind in (F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16):
            writer.add_tensor(
                theirs, data if kind == F32 else gguf.quants.quantize(data, kind), raw_dtype=kind
            )
            continue
        data = random_blocks(kind.name, tuple(tensor.shape), sum(theirs.encode()))
        outer = np.ones(1, np.float32)
        if outer_scales:
            outer = np.linspace(0.7, 1.3, len(tensor) if tensor.dim() == 3 else 1, dtype=np.float32)
        if meaning:
            factors = outer.reshape(-1, *[1] * (tensor.dim() - 1))
            writer.add_tensor(theirs, gguf.quants.dequantize(data, kind) * factors)
            continue
        writer.add_tensor(theirs, data, raw_dtype=kind)
        if outer_scales:
            writer.add_tensor(theirs.replace(".weight", ".scale"), outer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()
    return path if not split else min(path.parent.glob(f"{path.stem}-*"))


def _fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with ffn_gate_up_exps: gates, then ups."""
    found = {}
    for name, tensor in tensors.items():
        if "ffn_up_exps" in name and (gate := name.replace("_up_", "_gate_")) in tensors:
            found[name.replace("_up_", "_gate_up_")] = torch.cat((tensors[gate], tensor), 1)
        elif "ffn_gate_exps" not in name:
            found[name] = tensor
    return found


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Add a byte-level BPE tokenizer."""
    spec = json.loads(Tokenizer.load(folder).backend.to_str())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    special = {token["content"] for token in spec["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocab)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in vocab]
    )  # fmt: skip
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    )
    writer.add_eos_token_id(vocab.index(config["eos_token"]))
    template = folder / "chat_template.jinja"
    writer.add_chat_template(
        template.read_text() if template.is_file() else config["chat_template"]
    )


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, np.ndarray):
        kinds = gguf.GGUFValueType
        kind = kinds[value.dtype.name.upper()]
        writer.add_key_value(key, value.tolist(), kinds.ARRAY, sub_type=kind)
    elif value is not None:
        writer.add_array(key, value)
