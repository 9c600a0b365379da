"""Safetensors headers are checked before use: damaged or random bytes raise CheckpointError."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.load_plan import LoadPlan, Param, Piece
from moeserve.loader.safetensors_file import read_header
from tests.loader.eager import load


def test_header_agrees_with_the_reference_reader(small_file: Path) -> None:
    header = read_header(small_file)
    with safe_open(small_file, "pt") as reference:
        assert set(header) == set(reference.keys())
        for name, tensor in header.items():
            assert list(tensor.shape) == reference.get_slice(name).get_shape()
            assert tensor.dtype == reference.get_slice(name).get_dtype()
            raw = small_file.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes]
            assert (
                raw
                == reference.get_tensor(name)
                .contiguous()
                .view(-1)
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )


def file_of(tmp_path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(
    dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


LIES: dict[str, Any] = {
    "offset past the end": {"w": entry(shape=[4], offsets=[0, 16])},
    "offset far past the end": {"w": entry(shape=[2**40], offsets=[0, 2**42])},
    "offset beyond 64 bits": {"w": entry(offsets=[0, 2**70])},
    "negative offset": {"w": entry(offsets=[-8, 0])},
    "end before begin": {"w": entry(offsets=[8, 0])},
    "float offset": {"w": entry(offsets=[0, 8.5])},
    "three offsets": {"w": entry(offsets=[0, 4, 8])},
    "entry in serde's other form": {"w": ["F32", [2], [0, 8]]},
    "gap at the start": {"w": entry(shape=[1], offsets=[4, 8])},
    "gap at the end": {"w": entry(shape=[1], offsets=[0, 4])},
    "overlap": {"v": entry(), "w": entry(shape=[1], offsets=[4, 8])},
    "same bytes twice": {"v": entry(), "w": entry()},
    "shape too large": {"w": entry(shape=[3])},
    "shape overflows": {"w": entry(shape=[2**62, 2**62, 4])},
    "negative shape": {"w": entry(shape=[-2])},
    "two negative sizes": {"w": entry(shape=[-1, -2])},
    "too many dimensions": {"w": entry(shape=[1] * 1000)},
    "shape of floats": {"w": entry(shape=[2.5])},
    "shape is text": {"w": entry(shape="2")},
    "unknown dtype": {"w": entry(dtype="F24")},
    "dtype is a number": {"w": entry(dtype=32)},
    "missing key": {"w": {"dtype": "F32", "shape": [2]}},
    "entry is a list": {"w": [1, 2]},
    "metadata is not text": {"__metadata__": {"a": 1}, "w": entry()},
    "header is a list": [1, 2],
    "header is cut": b'{"w": {"dtype"',
    "header is not UTF-8": b'{"\xff\xfe": 1}',
    "deep header": b'{"w":' + b"[" * 100_000,
    "digits without end": b'{"w":{"dtype":"F32","shape":['
    + b"9" * 100_000
    + b'],"data_offsets":[0,8]}}',
    "same name twice": (
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_lying_header_is_refused_with_file_and_remedy(lie: str, tmp_path: Path) -> None:
    path = file_of(tmp_path, LIES[lie], bytes(8))
    began = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert time.process_time() - began < 10
    assert str(caught.value).startswith(f"{path} is damaged or incomplete: ")
    assert str(caught.value).endswith("; download it again")


@pytest.mark.parametrize("length", [0, 1, 500, 10**9, 2**63, 2**64 - 1])
def test_header_longer_than_the_file_is_refused(length: int, tmp_path: Path) -> None:
    path = file_of(tmp_path, {"w": entry()}, bytes(8), length=length)
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        read_header(path)


def test_header_of_a_gigabyte_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = file_of(tmp_path, b"{}", length=10**9)
    with path.open("r+b") as file:
        file.truncate(2 * 10**9)  # sparse
    began = time.process_time()
    with pytest.raises(CheckpointError, match="header too large"):
        read_header(path)
    assert time.process_time() - began < 10


@pytest.mark.parametrize("num_bytes", [0, 5, 8])
def test_tiny_file_is_refused(num_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(num_bytes))
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        read_header(path)


def test_every_cut_of_a_file_is_refused(small_file: Path) -> None:
    whole = small_file.read_bytes()
    for num_bytes in [*range(0, 900, 13), *range(900, len(whole), 97), len(whole) - 1]:
        small_file.write_bytes(whole[:num_bytes])
        with pytest.raises(CheckpointError):
            read_header(small_file)


def test_bytes_after_the_last_tensor_are_refused(small_file: Path) -> None:
    with small_file.open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="file not fully covered"):
        read_header(small_file)


def test_empty_file_of_no_tensors_and_scalars_are_valid(tmp_path: Path) -> None:
    assert read_header(file_of(tmp_path, {"__metadata__": {"data_offsets": "any text"}})) == {}
    scalar = read_header(file_of(tmp_path, {"w": entry(shape=[], offsets=[0, 4])}, bytes(4)))
    assert scalar["w"].shape == ()


def plan_of(tensors: dict[str, torch.Tensor]) -> LoadPlan:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return LoadPlan(
        tuple(Param(name, shape) for name, shape in shapes.items()),
        tuple(Piece(name, shape, name) for name, shape in shapes.items()),
    )


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_random_damage_is_refused_or_loads_the_bytes_that_are_there(
    data: st.DataObject, small_file: Path, tensors: dict[str, torch.Tensor]
) -> None:
    """A flipped bit in a weight cannot be seen; in a header it must never become another error or
    another shape.
    """
    raw = bytearray(original := small_file.read_bytes())
    try:
        where = st.one_of(st.integers(0, 600), st.integers(0, len(raw) - 1))
        for _ in range(data.draw(st.integers(0, 3))):
            raw[data.draw(where)] ^= 1 << data.draw(st.integers(0, 7))
        if data.draw(st.booleans()):
            del raw[data.draw(where) :]
        small_file.write_bytes(raw)
        try:
            params = load(
                open_checkpoint(small_file.parent), plan_of(tensors), torch.float32, threads=2
            )
        except CheckpointError:
            return
        assert {name: param.shape for name, param in params.items()} == {
            n: t.shape for n, t in tensors.items()
        }
        if bytes(raw) == original:
            for name, param in params.items():
                torch.testing.assert_close(param, tensors[name].float(), rtol=0, atol=0)
    finally:
        small_file.write_bytes(original)
