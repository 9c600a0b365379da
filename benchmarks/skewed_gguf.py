"""Writes a GGUF file in Q4_0 with random weights and Zipf-distributed routing.

benchmarks.expert_memory uses it. The shape is MiniMax-M2's, whose routers have a bias for each
expert: if tokens' scores are normal and independent, the expert of rank r is chosen with a
probability proportional to r ** -s. Every expert has different bytes. Embeddings are large, because
otherwise the layers' outputs would dominate and all tokens would choose alike.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from moeserve.loader.model_dir import resolve_model_dir
from moeserve.text.tokenizer import Tokenizer
from tests.gguf_files import add_tokenizer

TOP_K = 8
Q4_0 = gguf.GGMLQuantizationType.Q4_0
BLOCK, BLOCK_BYTES = gguf.GGML_QUANT_SIZES[Q4_0]
HIDDEN = 2048
EXPERT = 768
HEADS = 16
KV_HEADS = 4
HEAD = 128
UINTS = {
    "context_length": 4096,
    "embedding_length": HIDDEN,
    "feed_forward_length": EXPERT,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "rope.dimension_count": HEAD // 2,
    "expert_feed_forward_length": EXPERT,
    "expert_used_count": TOP_K,
    "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID.value,
}


def expert_bytes(layers: int, experts: int) -> int:
    """Return the size of all experts."""
    return layers * experts * 3 * HIDDEN * EXPERT // BLOCK * BLOCK_BYTES


def write(path: Path, layers: int, experts: int, zipf: float, *, alike: bool = False) -> None:
    """Write the model with the demo's tokenizer.

    alike: layers have the same matrices, so that one layer fits into memory at a time.
    """
    folder = resolve_model_dir("demo")
    vocab_size = len(json.loads(Tokenizer.load(folder).backend.to_str())["model"]["vocab"])
    writer = gguf.GGUFWriter(path, "minimax-m2")
    for key, value in (UINTS | {"block_count": layers, "expert_count": experts}).items():
        writer.add_uint32(f"minimax-m2.{key}", value)
    writer.add_float32("minimax-m2.rope.freq_base", 1e4)
    writer.add_float32("minimax-m2.attention.layer_norm_rms_epsilon", 1e-6)
    add_tokenizer(writer, folder)
    rng = np.random.default_rng(0)
    written: dict[tuple[float, ...], NDArray[np.uint8]] = {}

    def matrix(name: str, *shape: int, scale: float = 0.005) -> None:
        """Add a matrix of random integers from -7 to 7, times the scale.

        -8 is left out because the mean would not be 0, and all outputs would be alike.
        """
        key = (*shape, scale)
        if key not in written:
            nibbles = rng.integers(
                1, 16, (2, *shape[:-1], shape[-1] // BLOCK, BLOCK_BYTES), dtype=np.uint8
            )
            blocks = nibbles[0] | nibbles[1] << 4
            blocks[..., :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
            written[key] = blocks.reshape(*shape[:-1], -1)
        writer.add_tensor(name, written[key], raw_dtype=Q4_0)
        if not alike:
            written.clear()

    def plain(name: str, values: NDArray[Any]) -> None:
        writer.add_tensor(name, values.astype(np.float32))

    matrix("token_embd.weight", vocab_size, HIDDEN, scale=1)
    matrix("output.weight", vocab_size, HIDDEN)
    plain("output_norm.weight", np.ones(HIDDEN))
    for layer in range(layers):
        name = f"blk.{layer}.{{}}.weight".format
        for part, width in (
            ("attn", HIDDEN),
            ("attn_q", HEADS * HEAD),
            ("attn_k", KV_HEADS * HEAD),
            ("ffn", HIDDEN),
        ):
            plain(name(f"{part}_norm"), np.ones(width))
        matrix(name("attn_q"), HEADS * HEAD, HIDDEN)
        for part in ("attn_k", "attn_v"):
            matrix(name(part), KV_HEADS * HEAD, HIDDEN)
        matrix(name("attn_output"), HIDDEN, HEADS * HEAD)
        plain(name("ffn_gate_inp"), rng.standard_normal((experts, HIDDEN)) / HIDDEN**0.5)
        order = list(range(experts))
        Random(layer).shuffle(order)
        plain(f"blk.{layer}.exp_probs_b.bias", biases(experts, zipf)[order])
        for part in ("gate", "up"):
            matrix(name(f"ffn_{part}_exps"), experts, EXPERT, HIDDEN)
        matrix(name("ffn_down_exps"), experts, HIDDEN, EXPERT)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()


def law(experts: int, zipf: float) -> NDArray[np.float64]:
    """Return the probability that an expert is among a token's, by rank.

    It is Zipf's law with probabilities limited to 1.
    """
    weights = np.arange(1, experts + 1) ** -zipf
    low = 0.0
    high = float(experts) ** (zipf + 1)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if np.minimum(1, middle * weights).sum() < TOP_K else (low, middle)
        )
    return np.asarray(np.minimum(1, high * weights), np.float64)


def biases(experts: int, zipf: float) -> NDArray[np.float32]:
    """Return the biases that make choices follow the law, for sigmoids of normal scores.

    They are found by iteration.
    """
    scores = 1 / (1 + np.exp(-np.random.default_rng(0).standard_normal((4000, experts))))
    wanted = law(experts, zipf)
    found = np.zeros(experts)
    for step in range(200):
        chosen = np.argpartition(-(scores + found), TOP_K, axis=1)[:, :TOP_K]
        share = np.bincount(chosen.ravel(), minlength=experts) / len(scores)
        found += 0.1 * 0.99**step * np.log((wanted + 1e-3) / (share + 1e-3))
    return np.asarray(found - found.max(), np.float32)
