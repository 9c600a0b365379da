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
from moeserve.loader.gguf_file import TYPES
from moeserve.loader.gguf_native import decodes, fits
from moeserve.loader.gguf_quants import decode, decode_into, dense, fill, read_blocks, read_raw
from moeserve.loader.load_plan import Index, Param, Piece
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored import StoredWeight
from moeserve.loader.stored_format import GGML_FORMATS, common_format
from moeserve.loader.weights import empty_weight
from moeserve.ops.native import native
from moeserve.ops.native_layer import NativeLinear
from moeserve.ops.quantized import Quantized, dequantized
from tests.gguf_files import KINDS, put_scales, random_blocks

TWO_SCALES = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
NO_HALVES = ("MXFP4", "NVFP4")  # their scales are bytes
UNKNOWN_TO_GGUF = ("Q1_0", "Q2_0")  # to the package
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
    scales = np.stack((SCALES, np.roll(SCALES, 1)), -1)[:, : 2 if kind in TWO_SCALES else 1]
    put_scales(kind, raw, np.broadcast_to(scales.view(np.float16), (64, *scales.shape)))
    return raw.reshape(64, -1)


def test_every_type_is_here() -> None:
    assert {*KINDS, *UNKNOWN_TO_GGUF} == set(GGML_FORMATS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("take", [(), (slice(3, 40, 2),), (5,)])
def test_weights_have_the_same_bits(kind: str, take: Index) -> None:
    raw = hostile(kind)
    tensor, read = rows_of(kind, raw)
    got = dense(read_blocks(tensor, take, read))
    with np.errstate(over="ignore"):  # the largest powers of two
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])[take]
    # Zeros may have another sign.
    bits = (got.numpy() + 0.0).view(np.int32)
    assert np.array_equal(bits, (expected + np.float32(0)).view(np.int32))


REFERENCE_ONLY = ("NVFP4", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0")  # types without a native decoder
NATIVE = [kind for kind in GGML_FORMATS if kind not in REFERENCE_ONLY]


def same_bits(ours: Tensor | None, reference: Tensor | None) -> bool:
    if ours is None or reference is None:
        return ours is reference
    return (
        ours.dtype == reference.dtype
        and ours.shape == reference.shape
        and np.array_equal(
            ours.contiguous().view(torch.uint8), reference.contiguous().view(torch.uint8)
        )
    )


@pytest.mark.skipif(native() is None, reason="needs the native extension")
def test_the_types_that_files_have_most_are_decoded_natively() -> None:
    assert [kind for kind in GGML_FORMATS if decodes(kind)] == NATIVE


@pytest.mark.skipif(native() is None, reason="needs the native extension")
@pytest.mark.parametrize("kind", NATIVE)
@pytest.mark.parametrize("take", [(), (slice(3, 40, 2),), (5,), (slice(0, 0),)])
def test_native_blocks_have_the_bits_of_the_reference(kind: str, take: Index) -> None:
    """Signs of zeros, too."""
    tensor, read = rows_of(kind, hostile(kind))
    raw = read_raw(tensor, take, read)
    ours = decode(tensor, raw)
    reference = decode(tensor, raw, use_native=False)
    assert same_bits(ours.values, reference.values)
    assert same_bits(ours.scales, reference.scales)
    assert same_bits(ours.mins, reference.mins)
    assert all(map(same_bits, ours.supers, reference.supers))
    assert (len(ours.supers), ours.codes) == (len(reference.supers), reference.codes)


@pytest.mark.skipif(native() is None, reason="needs the native extension")
@pytest.mark.parametrize("kind", GGML_FORMATS)
@pytest.mark.parametrize("activations", ["auto", "float"])
@pytest.mark.parametrize("others", [(), ("Q6_K",), ("Q4_1", "IQ4_NL")])
@pytest.mark.parametrize(
    ("index", "take"),
    [
        ((1,), ()),  # an expert
        ((2, slice(7, 38)), (slice(9, 40),)),  # some rows of an expert
        ((slice(0, 1), 5), (slice(5, 6),)),  # one row
    ],
)
def test_parameters_have_the_bits_of_the_reference(
    kind: str, activations: Activations, others: tuple[str, ...], index: Index, take: Index
) -> None:
    """Parts of a parameter of three experts, and not a byte beside the part."""
    type_bytes = {tensor_type.name: tensor_type for tensor_type in TYPES.values()}[kind]
    num_bytes = 512 // type_bytes.block_size * type_bytes.block_bytes
    bits = np.random.default_rng(3).integers(0, 60, (64, num_bytes), dtype=np.uint8)
    tensor = TensorInfo("w", Path("w.gguf"), kind, (64, 512), 0, bits.nbytes)
    raw = read_raw(tensor, take, lambda _, rows: torch.from_numpy(bits)[rows].contiguous())
    stored = {name: StoredWeight(GGML_FORMATS[name], tensor, tensor) for name in (kind, *others)}
    pieces = [Piece(name, (3, 64, 512), "w13") for name in stored]
    checkpoint = Checkpoint(Path("w.gguf"), {}, stored, activations)
    ours, reference = (
        empty_weight(
            checkpoint, Param("w13", (3, 64, 512)), pieces, torch.float32, torch.device("cpu")
        )
        for _ in range(2)
    )
    if isinstance(ours, Tensor):
        pytest.skip("widened, as no kernel keeps it quantized")
    assert isinstance(reference, Quantized)
    for part in (*ours.parts, *reference.parts):
        part.fill_(7)
    if not others:
        assert fits(kind, ours[1]) is (ours.kind == GGML_FORMATS[kind].kind)
    decode_into(tensor, raw, ours[index])
    fill(decode(tensor, raw, use_native=False), reference[index])
    assert all(map(same_bits, ours.parts, reference.parts))


@pytest.mark.parametrize(
    ("kind", "width", "numbers"), [("Q1_0", 1, [-1, 1]), ("Q2_0", 2, [-1, 0, 1, 2])]
)
def test_types_of_one_and_two_bits(kind: str, width: int, numbers: list[int]) -> None:
    """These have a scale, and numbers in the order of the weights, the lowest bits first."""
    elements = 128 // width
    raw = np.random.default_rng(0).integers(0, 256, (6, 4, 18), dtype=np.uint8)
    raw[..., :2] = np.array([0.5, -0.25, 65504, 2**-24], np.float16).view(np.uint8).reshape(4, 2)
    shape = (6, 4 * elements)
    tensor = TensorInfo("w", Path("w.gguf"), kind, shape, 0, raw.nbytes)
    got = dense(read_blocks(tensor, (), lambda *_: torch.from_numpy(raw.reshape(6, -1))))
    for row in range(6):
        for k in range(0, shape[1], 7):
            block = raw[row, k // elements]
            place = k % elements * width
            number = block[2 + place // 8] >> place % 8 & (2**width - 1)
            scale = float(block[:2].view(np.float16)[0])
            assert got[row, k].item() == numbers[number] * scale


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
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NO_HALVES])
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


@pytest.mark.skipif(native() is None, reason="needs the native kernels")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_outputs", [4, 16, 21, 48])
def test_outputs_do_not_depend_on_the_outputs_beside_them(kind: str, num_outputs: int) -> None:
    """Four outputs are packed at a time, and those left over one by one."""
    into, _ = parameter(kind, "auto")
    x_MK = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    together = NativeLinear(into[:num_outputs])(x_MK)
    alone = [NativeLinear(into[n : n + 1])(x_MK) for n in range(num_outputs)]
    assert torch.equal(together, torch.cat(alone, 1))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "NVFP4"])
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_scales_that_are_no_numbers_are_refused(kind: str, bits: int) -> None:
    for wrong in range(2 if kind in TWO_SCALES else 1):
        raw = random_blocks(kind, (4, 256), 1)
        block = raw[2].reshape(1, -1)[
            :, : gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
        ]
        if kind == "MXFP4":
            block[0, 0] = 255
        else:
            scales = np.full((1, 2), 1, np.float16)
            scales[:, wrong] = np.array([bits], np.uint16).view(np.float16)
            put_scales(kind, block, scales)
        tensor, read = rows_of(kind, raw)
        with pytest.raises(
            CheckpointError, match=r"tensor 'w' in w.gguf has a scale that is NaN or infinite"
        ):
            read_blocks(tensor, (), read)
