"""ggml's types: every weight has the bits that the package which llama.cpp maintains gives it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.loader.gguf_quants import dense, fill, read_blocks
from moeserve.loader.load_plan import Index
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored_format import GGML_FORMATS
from moeserve.ops.quantised import Quantised, dequantised
from tests.gguf_files import KINDS, random_blocks

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
SCALES = np.array([0, 0x8000, 1, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00], np.uint16)  # 0, -0, subnormal, least, most


def rows_of(kind: str, raw: np.ndarray) -> tuple[TensorInfo, Callable[[TensorInfo, Index], Tensor]]:
    elements, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    shape = (*raw.shape[:-1], raw.shape[-1] // num_bytes * elements)

    def read(tensor: TensorInfo, take: Index) -> Tensor:
        assert (tensor.dtype, tensor.shape) == ("U8", raw.shape)
        return torch.from_numpy(raw)[take].clone()

    return TensorInfo("w", Path("w.gguf"), kind, shape, 0, raw.nbytes), read


def hostile(kind: str) -> np.ndarray:
    """All bits at random, and scales at the ends of fp16 and of e8m0."""
    num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    raw = np.random.default_rng(0).integers(0, 256, (64, 8, num_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = np.arange(64 * 8).reshape(64, 8) % 255
    for i, at in enumerate(HALVES.get(kind, (0,))):
        raw[..., at : at + 2] = np.roll(SCALES, i).view(np.uint8).reshape(8, 2)
    return raw.reshape(64, -1)


def test_every_type_is_here() -> None:
    assert set(KINDS) == set(GGML_FORMATS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("take", [(), (slice(3, 40, 2),), (5,)])
def test_weights_have_the_same_bits(kind: str, take: Index) -> None:
    raw = hostile(kind)
    tensor, read = rows_of(kind, raw)
    got = dense(read_blocks(tensor, take, read))
    with np.errstate(over="ignore"):  # the largest powers of two
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])[take]
    assert np.array_equal(got.numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not GGML_FORMATS[kind].widened])
@pytest.mark.parametrize("common", [False, True])
def test_a_parameter_means_the_same(kind: str, common: bool) -> None:
    """In its own kind, and in the int8 that types have in common. Zeros may lose their sign."""
    raw, form = random_blocks(kind, (2, 16, 512), 3), GGML_FORMATS[kind]
    tensor, read = rows_of(kind, raw)
    own = ("int8", 16) if common else (form.kind, form.group)
    into = Quantised.empty(*own, False, torch.float32, (2, 16, 512))
    fill(read_blocks(tensor, (), read), into)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(dequantised(into).numpy(), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_scales_that_are_no_numbers_are_refused(kind: str, bits: int) -> None:
    for at in HALVES.get(kind, (0,)) or (0,):
        raw = random_blocks(kind, (4, 256), 1)
        raw[2, at : at + 2] = [255, 255] if kind == "MXFP4" else np.array([bits], np.uint16).view(np.uint8)
        tensor, read = rows_of(kind, raw)
        with pytest.raises(CheckpointError, match=r"tensor 'w' in w.gguf has a scale that is NaN or infinite"):
            read_blocks(tensor, (), read)
