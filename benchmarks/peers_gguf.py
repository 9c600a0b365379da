"""Writes half of Qwen3-30B-A3B as GGUF with random weights, in llama.cpp's mixtures of types.

    python -m benchmarks.peers_gguf FILE --mixture IQ2_XXS

benchmarks.peers compares engines on such files. The 24 layers have 15 billion weights; --layers 16
makes three engines fit into less memory. A mixture chooses a type for each tensor as llama.cpp's
quantizer does; UD is like Unsloth's dynamic files of 3 bits. The script prints the bytes per
weight, which benchmarks.peers takes as --weight-bytes.

The weights of each row have a mean near zero. Otherwise all tokens would choose the same experts,
and a batch would read few. For the same reason embeddings are larger than the layers' outputs.
Every expert has different bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.common import parser
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.text.tokenizer import Tokenizer
from tests.gguf_files import add_tokenizer, put_scales

ARCH = "qwen3moe"


@dataclass(frozen=True, slots=True)
class Size:
    """The widths of Qwen3-30B-A3B, and half of its layers."""

    layers: int = 24
    hidden: int = 2048
    experts: int = 128
    expert: int = 768
    heads: int = 32
    kv_heads: int = 4
    head: int = 128

    def keys(self) -> dict[str, Any]:
        """Return the metadata of the architecture."""
        return {
            "block_count": self.layers,
            "context_length": 32768,
            "embedding_length": self.hidden,
            "feed_forward_length": 8 * self.expert,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head,
            "attention.value_length": self.head,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e6,
            "expert_count": self.experts,
            "expert_used_count": min(8, self.experts),
            "expert_feed_forward_length": self.expert,
        }

    def shapes(self, vocab_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by its name."""
        of_layer = {
            "attn_norm": (self.hidden,),
            "attn_q": (self.heads * self.head, self.hidden),
            "attn_k": (self.kv_heads * self.head, self.hidden),
            "attn_v": (self.kv_heads * self.head, self.hidden),
            "attn_output": (self.hidden, self.heads * self.head),
            "attn_q_norm": (self.head,),
            "attn_k_norm": (self.head,),
            "ffn_norm": (self.hidden,),
            "ffn_gate_inp": (self.experts, self.hidden),
            "ffn_gate_exps": (self.experts, self.expert, self.hidden),
            "ffn_up_exps": (self.experts, self.expert, self.hidden),
            "ffn_down_exps": (self.experts, self.hidden, self.expert),
        }
        found: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (vocab_size, self.hidden),
            "output_norm.weight": (self.hidden,),
            "output.weight": (vocab_size, self.hidden),
        }
        for layer in range(self.layers):
            found |= {f"blk.{layer}.{part}.weight": shape for part, shape in of_layer.items()}
        return found


DEVIATION = 0.02  # of weights, near 1 / sqrt(hidden)
Part = str  # a tensor's name without its layer
Mixture = Callable[[Part, int, int], str]  # part, layer, number of layers -> type


def more_bits(layer: int, layers: int) -> bool:
    """Return whether llama.cpp gives a layer more bits: the first and last eighth, and a third."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def q4_0(part: Part, layer: int, layers: int) -> str:
    return "Q6_K" if part == "output" else "Q4_0"


def q4_k_m(part: Part, layer: int, layers: int) -> str:
    is_larger = part in ("attn_v", "ffn_down_exps") and more_bits(layer, layers)
    return "Q6_K" if is_larger or part == "output" else "Q4_K"


def q3_k_m(part: Part, layer: int, layers: int) -> str:
    if part == "attn_v":
        return "Q5_K" if layer < 2 else "Q4_K"
    if part == "ffn_down_exps":
        return "Q5_K" if layer < layers // 16 else "Q4_K"
    return {"attn_output": "Q4_K", "output": "Q6_K"}.get(part, "Q3_K")


def q2_k(part: Part, layer: int, layers: int) -> str:
    larger = {"attn_v": "Q4_K", "attn_output": "Q3_K", "ffn_down_exps": "Q3_K", "output": "Q6_K"}
    return larger.get(part, "Q2_K")


def iq3_s(part: Part, layer: int, layers: int) -> str:
    return {"attn_v": "Q4_K", "output": "Q6_K"}.get(part, "IQ3_S")


def iq3_xxs(part: Part, layer: int, layers: int) -> str:
    others = {
        "attn_q": "IQ2_S",
        "attn_k": "IQ2_S",
        "attn_v": "Q4_K",
        "attn_output": "IQ3_S",
        "token_embd": "IQ3_S",
        "output": "Q5_K",
    }
    return others.get(part, "IQ3_XXS")


def iq2_xxs(part: Part, layer: int, layers: int) -> str:
    if part == "ffn_down_exps" and layer < layers // 8:
        return "Q2_K"
    return {"attn_v": "Q4_K", "token_embd": "Q2_K", "output": "Q5_K"}.get(part, "IQ2_XXS")


def ud(part: Part, layer: int, layers: int) -> str:
    """Gate and up have about 3 bits, down has more, attention 5 to 8."""
    if part == "ffn_down_exps":
        return "IQ4_XS" if more_bits(layer, layers) else "IQ3_S"
    if part.endswith("_exps"):
        return "IQ3_S" if layer < layers // 8 else "IQ3_XXS"
    others = {"attn_v": "Q8_0", "attn_output": "Q5_K", "token_embd": "Q5_K"}
    return others.get(part, "Q6_K")


MIXTURES: dict[str, Mixture] = {
    "Q4_0": q4_0,
    "Q4_K_M": q4_k_m,
    "Q3_K_M": q3_k_m,
    "Q2_K": q2_k,
    "IQ3_S": iq3_s,
    "IQ3_XXS": iq3_xxs,
    "IQ2_XXS": iq2_xxs,
    "UD": ud,
}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("file", type=Path, metavar="FILE")
    flags.add_argument("--mixture", choices=MIXTURES, required=True)
    flags.add_argument("--layers", type=int, default=24, help="[24]")
    args = flags.parse_args()
    num_bytes, weights = write(args.file, MIXTURES[args.mixture], Size(layers=args.layers))
    print(f"{args.file.name}: {num_bytes / 1e9:.2f} GB, --weight-bytes {num_bytes / weights:.4f}")


def write(path: Path, mixture: Mixture, size: Size) -> tuple[int, int]:
    """Write the model with the demo's tokenizer. Return the bytes and the number of weights."""
    writer = gguf.GGUFWriter(path, ARCH)
    for key, value in size.keys().items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{ARCH}.{key}", value)
    folder = resolve_model_dir("demo")
    vocab_size = len(json.loads(Tokenizer.load(folder).backend.to_str())["model"]["vocab"])
    add_tokenizer(writer, folder)
    tensors = []
    for name, shape in size.shapes(vocab_size).items():
        kind = type_of(name, len(shape), mixture, size.layers)
        elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = shape[-1] // elements * block_bytes
        stored = (*shape[:-1], row_bytes)
        num_bytes = int(np.prod(stored))
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), num_bytes, raw_dtype=kind)
        tensors.append((name, shape, kind, num_bytes))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for name, shape, kind, _ in tensors:
        writer.write_tensor_data(values(rng, name, shape, kind))
    writer.close()
    weights = sum(int(np.prod(shape)) for _, shape, _, _ in tensors)
    return sum(num_bytes for *_, num_bytes in tensors), weights


def type_of(name: str, dimensions: int, mixture: Mixture, layers: int) -> gguf.GGMLQuantizationType:
    words = name.split(".")
    part = words[-2]
    if dimensions == 1 or part == "ffn_gate_inp":
        return gguf.GGMLQuantizationType.F32
    layer = int(words[1]) if words[0] == "blk" else 0
    return gguf.GGMLQuantizationType[mixture(part, layer, layers)]


def values(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType
) -> np.ndarray:
    """Return a tensor's bytes."""
    if len(shape) == 1:
        return np.ones(shape, np.float32).view(np.uint8)
    if kind == gguf.GGMLQuantizationType.F32:
        routers = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        return routers.view(np.uint8)
    deviation = 1.0 if name == "token_embd.weight" else DEVIATION
    return random_blocks(rng, kind, shape, deviation)


def random_blocks(
    rng: np.random.Generator,
    kind: gguf.GGMLQuantizationType,
    shape: tuple[int, ...],
    deviation: float,
) -> np.ndarray:
    """Return blocks of random bits whose weights have a mean near zero and this deviation."""
    elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_blocks = int(np.prod(shape)) // elements
    raw = np.frombuffer(rng.bytes(num_blocks * block_bytes), np.uint8).copy()
    raw = raw.reshape(num_blocks, block_bytes)
    center(kind.name, raw)
    sample = raw[:256].copy()
    put_scales(kind.name, sample, with_mins(kind.name, 1.0, len(sample)))
    unit = deviation / float(gguf.quants.dequantize(sample, kind).std())
    put_scales(kind.name, raw, with_mins(kind.name, unit, num_blocks))
    return raw.reshape(*shape[:-1], -1)


def center(kind: str, raw: np.ndarray) -> None:
    """Change blocks in place so that weights have no mean.

    Types with mins get mins that are proportional to the scales.
    """
    if kind == "Q4_0":  # 0 in place of -8
        for nibble, zero in ((0x0F, 0x08), (0xF0, 0x80)):
            raw[:, 2:] |= ((raw[:, 2:] & nibble) == 0) * np.uint8(zero)
    if kind == "Q2_K":
        raw[:, :16] = (raw[:, :16] & 15) * np.uint8(17)
    if kind in ("Q4_K", "Q5_K"):
        raw[:, 8:12] = raw[:, 4:8]
        raw[:, 12:16] = (raw[:, 12:16] & 15) * np.uint8(17)


def with_mins(kind: str, unit: float, num_blocks: int) -> np.ndarray:
    """Return the fp16 scales of blocks, [blocks, 1 or 2], in the order of `put_scales`."""
    mean = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}.get(kind)
    row = [unit] if mean is None else [unit, mean * unit]
    return np.tile(np.array(row, np.float16), (num_blocks, 1))


if __name__ == "__main__":
    main()
