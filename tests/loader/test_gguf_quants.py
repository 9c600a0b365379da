"""ggml's types: every weight has the bits that the package which llama.cpp maintains gives it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.config import Activations
from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import Checkpoint
from moeserve.loader.gguf_quants import dense, fill, read_blocks
from moeserve.loader.load_plan import Index, Param, Piece
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored import StoredWeight
from moeserve.loader.stored_format import GGML_FORMATS, common_format
from moeserve.loader.weights import empty_weight
from moeserve.ops.native import native
from moeserve.ops.native_layer import NativeLinear
from moeserve.ops.quantized import Quantized, dequantized
from tests.gguf_files import KINDS, random_blocks

HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}
SCALES = np.array(
    [0, 0x8000, 1, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00], np.uint16
)  # 0, -0, subnormal, least, most


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


def parameter(
    kind: str, activations: Activations, *others: str, raw: np.ndarray | None = None
) -> tuple[Any, Tensor]:
    """Return a filled parameter and gguf's dequantized values.

    The parameter has tensors of other types too.
    """
    raw = random_blocks(kind, (48, 512), 3) if raw is None else raw
    tensor, read = rows_of(kind, raw)
    stored = {name: StoredWeight(GGML_FORMATS[name], tensor, tensor) for name in (kind, *others)}
    pieces = [Piece(name, tensor.shape, "qkv") for name in stored]
    checkpoint = Checkpoint(Path("w.gguf"), {}, stored, activations)
    into = empty_weight(
        checkpoint, Param("qkv", tensor.shape), pieces, torch.float32, torch.device("cpu")
    )
    if isinstance(into, Quantized):
        fill(read_blocks(tensor, (), read), into)
    return into, torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("others", [(), ("Q6_K",), ("Q4_K", "Q8_0"), ("Q4_1", "IQ4_NL")])
def test_a_parameter_means_the_same(kind: str, others: tuple[str, ...]) -> None:
    """In its own kind, and in the int8 that types have in common. Zeros may lose their sign."""
    into, expected = parameter(kind, "auto", *others)
    assert into.activations == "int8"
    assert torch.equal(dequantized(into), expected)
    floats, _ = parameter(kind, "float", *others)
    if any(GGML_FORMATS[name].mins for name in (kind, *others)):
        assert isinstance(floats, Tensor), "widened"
    else:
        assert (floats.activations, floats.scale_dtype, floats.bits) == ("float", torch.float32, 0)
        assert torch.equal(dequantized(floats), expected)


@pytest.mark.skipif(native() is None, reason="needs the native kernels")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("others", [(), ("Q4_K", "Q6_K")])
def test_a_product_is_that_of_the_meaning_with_rounded_rows(
    kind: str, others: tuple[str, ...]
) -> None:
    """Weights have the bits of the format.

    A row is rounded per 32 inputs, to whole multiples of 1/127 of the largest.
    """
    into, w_NK = parameter(kind, "auto", *others)
    linear = NativeLinear(into)
    x_MK = torch.randn(5, 512, generator=torch.Generator().manual_seed(1))
    form = common_format([GGML_FORMATS[name] for name in {kind, *others}], is_linear=True)
    assert form is not None
    assert linear.packed.nbytes == into.values.numel() * form.bytes_per_weight
    blocks = x_MK.view(5, -1, 32)
    sizes = blocks.abs().amax(-1, keepdim=True)
    rows_MK = ((blocks * (127 / sizes)).round().double() * (sizes / 127)).view(5, 512)
    expected = rows_MK @ w_NK.double().T
    most = rows_MK.abs() @ w_NK.double().abs().T
    assert ((linear(x_MK) - expected).abs() <= 3e-6 * most).all()


@pytest.mark.skipif(native() is None, reason="needs the native kernels")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "MXFP4"])
def test_scales_at_the_ends_of_fp16_are_packed_as_they_are(kind: str) -> None:
    """One input at a time: a product is then the weight."""
    into, w_NK = parameter(kind, "auto", raw=hostile(kind))
    linear = NativeLinear(into)
    mins_NK = 0 if into.mins is None else into.mins.repeat_interleave(into.group, 1).abs()
    bound_NK = 1e-6 * (w_NK.abs() + 2 * mins_NK)
    eye = torch.eye(w_NK.shape[1]) * 127
    for k in range(0, len(eye), 11):
        y_N = linear(eye[k : k + 1])[0] / 127
        assert ((y_N - w_NK[:, k]).abs() <= bound_NK[:, k]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_scales_that_are_no_numbers_are_refused(kind: str, bits: int) -> None:
    for at in HALVES.get(kind, (0,)) or (0,):
        raw = random_blocks(kind, (4, 256), 1)
        raw[2, at : at + 2] = (
            [255, 255] if kind == "MXFP4" else np.array([bits], np.uint16).view(np.uint8)
        )
        tensor, read = rows_of(kind, raw)
        with pytest.raises(
            CheckpointError, match=r"tensor 'w' in w.gguf has a scale that is NaN or infinite"
        ):
            read_blocks(tensor, (), read)
