"""Headers of GGUF files: real ones as the package that llama.cpp maintains reads them, and hostile
ones.
"""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.errors import CheckpointError
from moeserve.loader.gguf_file import TYPES, read_gguf, read_model
from moeserve.loader.model_dir import resolve_model_dir

Tensors = list[tuple[bytes, tuple[int, ...], int, int]]


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def number(key: bytes, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def header(
    *values: bytes, tensors: Tensors | None = None, magic: bytes = b"GGUF", version: int = 3,
    num_tensors: int | None = None, num_values: int | None = None,
) -> bytes:  # fmt: skip
    infos = b"".join(
        text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        for name, dims, kind, offset in tensors or []
    )
    counts = (
        len(tensors or []) if num_tensors is None else num_tensors,
        len(values) if num_values is None else num_values,
    )
    return magic + struct.pack("<IQQ", version, *counts) + b"".join(values) + infos


def padded(start: bytes, data: int) -> bytes:
    return start + bytes(-len(start) % 32 + data)


ONE: Tensors = [(b"a", (4, 2), 0, 0)]
WHOLE = padded(header(number(b"x", 7), tensors=ONE), 32)
ARRAY = struct.pack("<I", 9)
HOSTILE = {
    "empty": (b"", "needs 4 bytes, but 0"),
    "cut in the counts": (WHOLE[:13], "needs 8 bytes"),
    "cut in a tensor": (header(tensors=ONE)[:-3], "bytes are left"),
    "magic": (header(magic=b"GGJT"), "begins with b'GGJT'"),
    "version 1": (header(version=1), "is GGUF version 1; supported: 2 and 3"),
    "big-endian": (header(version=0x03000000), "it is big-endian"),
    "2^60 tensors": (header(num_tensors=2**60), f"claims {2**60} tensors"),
    "2^60 values": (header(num_values=2**60), f"claims {2**60} metadata values"),
    "a long key": (
        header(struct.pack("<Q", 2**62) + b"a key of some length"),
        f"needs {2**62} bytes",
    ),
    "a long string": (
        header(text(b"k") + struct.pack("<IQ", 8, 2**40) + b"x"),
        f"'k' needs {2**40} bytes",
    ),
    "no UTF-8": (header(text(b"k") + struct.pack("<I", 8) + text(b"\xff\xfe")), "'k' is not UTF-8"),
    "an unknown type": (header(text(b"k") + struct.pack("<I", 13)), "'k' has values of type 13"),
    "a long array": (
        header(text(b"k") + ARRAY + struct.pack("<IQ", 4, 2**60)),
        f"claims {2**60} items of k",
    ),
    "a long array of texts": (
        header(text(b"k") + ARRAY + struct.pack("<IQ", 8, 2**60)),
        f"claims {2**60} items",
    ),
    "arrays in arrays": (header(text(b"k") + ARRAY * 200), r"type 9 \(an array of arrays\)"),
    "a key twice": (header(number(b"x", 1), number(b"x", 2)), "'x' occurs twice"),
    "alignment 0": (padded(header(number(b"general.alignment", 0)), 0), "general.alignment is 0"),
    "alignment 24": (
        padded(header(number(b"general.alignment", 24)), 0),
        "general.alignment is 24",
    ),
    "alignment 2^31": (
        padded(header(number(b"general.alignment", 2**31)), 0),
        "general.alignment is",
    ),
    "a text as alignment": (
        header(text(b"general.alignment") + struct.pack("<I", 8) + text(b"32")),
        "general.alignment is '32'"
    ),
    "no dimensions": (padded(header(tensors=[(b"a", (), 0, 0)]), 32), "has 0 dimensions"),
    "2^32 - 1 dimensions": (
        header(num_tensors=1) + text(b"a") + b"\xff" * 40,
        "has 4294967295 dimensions",
    ),
    "a product that overflows": (
        padded(header(tensors=[(b"a", (2**32, 2**32), 0, 0)]), 32),
        f"has {2**66} bytes",
    ),
    "behind the file": (
        padded(header(tensors=[(b"a", (4, 2), 0, 32)]), 32),
        "has 32 bytes at offset 32",
    ),
    "far behind the file": (
        padded(header(tensors=[(b"a", (4, 2), 0, 2**63)]), 32),
        f"at offset {2**63}",
    ),
    "a cut tensor": (WHOLE[:-1], "has 32 bytes at offset 0 of the data, which has 31"),
    "no data": (header(tensors=ONE), "of the data, which has 0"),
    "an odd offset": (padded(header(tensors=[(b"a", (4, 2), 0, 8)]), 64), "an alignment of 32"),
    "overlap": (padded(header(tensors=[*ONE, (b"b", (16,), 0, 0)]), 64), "'a' and 'b' overlap"),
    "a name twice": (padded(header(tensors=[*ONE, (b"a", (8,), 0, 32)]), 64), "'a' occurs twice"),
    "an unknown kind": (
        padded(header(tensors=[(b"a", (32,), 96, 0)]), 64),
        "is of type 96; supported: F32, F16",
    ),
    "a kind of a fork": (
        padded(header(tensors=[(b"a", (256,), 137, 0)]), 128),
        "is of type 137 of ik_llama.cpp; supported: F32",
    ),
    "half a block": (
        padded(header(tensors=[(b"a", (48, 2), 2, 0)]), 64),
        "rows of 48, but Q4_0 has blocks of 32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_at_once(case: str, tmp_path: Path) -> None:
    data, says = HOSTILE[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=says):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


@given(
    at=st.integers(0, len(WHOLE) - 33), value=st.integers(0, 255), cut=st.integers(0, len(WHOLE))
)
def test_any_damage_is_an_error_or_another_header(
    at: int, value: int, cut: int, tmp_path_factory: Any
) -> None:
    data = bytearray(WHOLE)
    data[at] = value
    path = tmp_path_factory.mktemp("damage") / "model.gguf"
    path.write_bytes(data[:cut])
    try:
        read_gguf(path)
    except CheckpointError:
        return


def test_a_whole_header_is_what_the_package_reads(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_custom_alignment(64)
    values = {
        "text": "ä\n",
        "flag": True,
        "int": -5,
        "float": 0.5,
        "texts": ["a", "", "ü"],
        "numbers": [1, 2, -3],
    }
    for key, value in values.items():
        add = {
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_int64,
            float: writer.add_float64,
        }
        add.get(type(value), writer.add_array)(key, value)
    blocks = np.arange(2 * 3 * 34, dtype=np.uint8).reshape(2, 3, 34)
    writer.add_tensor("q", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("f", np.ones((5, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(path)
    expected = gguf.GGUFReader(path)
    for key, value in values.items():
        got = found.metadata[key]
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == value
    raw = path.read_bytes()
    for tensor, theirs in zip(found.tensors, expected.tensors, strict=True):
        assert (tensor.name, tensor.shape) == (
            theirs.name,
            tuple(int(size) for size in theirs.shape[::-1]),
        )
        assert (tensor.offset, tensor.num_bytes) == (theirs.data_offset, theirs.n_bytes)
        assert raw[tensor.offset : tensor.offset + tensor.num_bytes] == theirs.data.tobytes()


def test_types_have_the_package_s_blocks() -> None:
    for kind, (name, elements, num_bytes) in TYPES.items():
        if name in ("Q1_0", "Q2_0"):  # newer than the package
            continue
        assert gguf.GGMLQuantizationType[name] == kind
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] == (elements, num_bytes)


@pytest.mark.parametrize(
    ("values", "name", "says"),
    [
        (
            [number(b"split.count", 2)],
            "model.gguf",
            "split.count is 2, which does not match the file's name",
        ),
        ([], "m-00001-of-00002.gguf", "split.count is 1"),
        (
            [number(b"split.count", 2)],
            "m-00001-of-00002.gguf",
            "m-00002-of-00002.gguf is missing: the model has 2",
        ),
    ],
)
def test_parts_and_names_must_agree(
    values: list[bytes], name: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(padded(header(*values), 0))
    with pytest.raises(CheckpointError, match=says):
        read_model(tmp_path / name)


def test_parts_must_be_in_their_order_and_all_there(tmp_path: Path) -> None:
    for part in (0, 1):
        values = (
            number(b"split.no", part),
            number(b"split.count", 2),
            number(b"split.tensors.count", 2),
        )
        data = padded(header(*values, tensors=[(b"%d" % part, (8,), 0, 0)]), 32)
        (tmp_path / f"m-0000{part + 1}-of-00002.gguf").write_bytes(data)
    first, second = sorted(tmp_path.glob("*.gguf"))
    assert [tensor.name for each in read_model(first) for tensor in each.tensors] == ["0", "1"]
    whole = second.read_bytes()
    second.write_bytes(first.read_bytes() + bytes(1))
    with pytest.raises(CheckpointError, match=r"split.no is 0, but by the file's name 1"):
        read_model(first)
    two_numbers = text(b"split.no") + ARRAY + struct.pack("<IQII", 4, 2, 1, 1)
    second.write_bytes(padded(header(two_numbers), 1))
    with pytest.raises(CheckpointError, match=r"split.no is array.*, but by the file's name 1"):
        read_model(first)
    second.write_bytes(padded(header(number(b"split.no", 1)), 1) + bytes(len(whole)))
    with pytest.raises(CheckpointError, match=r"split.tensors.count is 2, but the files have 1"):
        read_model(first)


def test_names_of_models(tmp_path: Path) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf"):
        (tmp_path / name).write_bytes(padded(header(), 0))
    first = tmp_path / "m-00001-of-00002.gguf"
    for name in (tmp_path, first, tmp_path / "m-00002-of-00002.gguf"):
        assert resolve_model_dir(str(name)) == first
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"several models \(m-00001-of-00002.gguf, other.gguf\); pass one"
    ):
        resolve_model_dir(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_dir(str(tmp_path)) == tmp_path


def test_a_download_in_the_hugging_face_cache_is_a_link(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    blobs = tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "hash").write_bytes(WHOLE)
    (snapshot / "m.gguf").symlink_to(blobs / "hash")
    assert read_gguf(resolve_model_dir(str(snapshot / "m.gguf"))).metadata["x"] == 7
