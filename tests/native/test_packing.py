"""The bytes of packed weights and their checksum, which files of packed weights rely on
(loader/packed_cache.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.ops.native import native
from moeserve.ops.native_layer import LAYOUT, allocate_new, pack, packing_of
from moeserve.ops.quantized import Quantized

module: Any = native()
pytestmark = pytest.mark.skipif(
    module is None or not module.supported_isas(), reason="needs the native kernels"
)


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    yield
    module.set_threads([-1])


def checksum(data: Tensor) -> int:
    return int(module.checksum(data.data_ptr(), len(data)))


def reference_checksum(data: bytes, part: int = 2 << 20) -> int:
    """Compute the checksum of csrc/core/checksum.cpp in Python integers."""
    odd = 0x9E3779B97F4A7C15
    most = (1 << 64) - 1

    def mix(total: int, word: int) -> int:
        total ^= word
        return (total << 29 | total >> 35) * odd & most

    def of(data: bytes) -> int:
        lanes = [odd * (i + 1) & most for i in range(8)]
        padded = data + bytes(-len(data) % 64)
        for i in range(0, len(padded), 8):
            lanes[i // 8 % 8] = mix(lanes[i // 8 % 8], int.from_bytes(padded[i : i + 8], "little"))
        total = mix(odd, len(data))
        for lane in lanes:
            total = mix(total, lane)
        return total

    parts = [of(data[i : i + part]) for i in range(0, len(data), part)]
    return of(b"".join(one.to_bytes(8, "little") for one in parts))


@pytest.mark.parametrize(
    "size", [0, 1, 7, 8, 63, 64, 65, 1000, (2 << 20) - 1, 2 << 20, (2 << 20) + 1, 5 << 20]
)
def test_the_checksum_is_its_definition_on_any_threads(size: int) -> None:
    data = torch.randint(
        0, 256, (size + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)
    )[3:]
    found = set()
    for threads in (1, 2, 5):
        module.set_threads([-1] * threads)
        found.add(checksum(data))
    assert found == {reference_checksum(data.numpy().tobytes())}


def test_no_bit_changes_without_the_checksum() -> None:
    module.set_threads([-1])
    data = torch.randint(
        0, 256, (200,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    seen = {checksum(data)}
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(checksum(data))
        for other in range(
            bit % 64 + 64, 8 * len(data), 64
        ):  # the same bit of another word, where sums may cancel
            data[other // 8] ^= 1 << other % 8
            seen.add(checksum(data))
            data[other // 8] ^= 1 << other % 8
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) > 8 * len(data) + 1
    zeros = {checksum(torch.zeros(size, dtype=torch.uint8)) for size in range(300)}
    assert len(zeros) == 300


def test_another_layout_needs_another_number() -> None:
    """If this fails and packed bytes are meant to be others now, LAYOUT must be, too: see
    ops/native_layer.py.
    """
    w_NK = (torch.arange(19 * 40).view(19, 40) % 251).to(torch.uint8)
    scales = torch.arange(19.0).unsqueeze(1)
    weights = [w_NK.float(), w_NK.bfloat16(), w_NK.half()]
    weights += [Quantized(kind, 0, torch.bfloat16, w_NK, scales) for kind in ("int8", "fp8")]
    weights += [
        Quantized("int4", 32, torch.bfloat16, w_NK % 16, scales.repeat(1, 2), zeros)
        for zeros in (None, scales.repeat(1, 2))
    ]
    weights += [Quantized("fp4", 32, torch.bfloat16, w_NK % 16, scales.repeat(1, 2))]
    weights += [
        Quantized(kind, 32, torch.bfloat16, w_NK, scales.repeat(1, 2)) for kind in ("int8", "fp8")
    ]
    rounded: dict[str, Any] = {"activations": "int8"}
    weights += [
        Quantized("int4", 32, torch.bfloat16, w_NK % 16, scales.repeat(1, 2), **rounded),
        Quantized("int8", 16, torch.bfloat16, w_NK, scales.repeat(1, 3), **rounded),
        Quantized("int8", 32, torch.bfloat16, w_NK % 2, scales.repeat(1, 2), bits=2, **rounded),
    ]
    sums = []
    for weight in weights:
        packing = packing_of(weight)
        memory, _ = allocate_new(packing.bytes)
        pack(packing, weight, memory.data_ptr(), packing.block_bytes, all_threads=False)
        sums.append(checksum(memory))
    assert (LAYOUT, [hex(one) for one in sums]) == (
        2,
        [
            "0x91ef194d212d1563",
            "0x3df84d60e223bafb",
            "0xcac3ed5a8880f866",
            "0x56b70e6b80bf2c6f",
            "0x56b70e6b80bf2c6f",
            "0xdf75a6725ed0b241",
            "0x4622d4f5ba3012ee",
            "0xdf75a6725ed0b241",
            "0xafe7ca98d2fa2944",
            "0xafe7ca98d2fa2944",
            "0x4b2229d8ce8d2dbb",
            "0x1f5db388e0e3059b",
            "0x91cce10eb43a37eb",
        ],
    )
