"""Reads the headers of GGUF files, llama.cpp's format (versions 2 and 3): metadata, and where each
tensor lies.

Every count and length is compared with what is left of the file before anything is read or
allocated for it. No weight is read. A model may be split into files NAME-00001-of-0000N.gguf: the
first one has the metadata.

Source: github.com/ggml-org/ggml, docs/gguf.md.
"""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from moeserve.errors import CheckpointError
from moeserve.loader.files import has_gguf_name, model_file
from moeserve.loader.safetensors_file import TensorInfo

TYPES = {  # number -> name, elements and bytes of a block; the names of others are for messages
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    39: ("MXFP4", 32, 17),
}
_OTHERS = {
    10: "Q2_K",
    11: "Q3_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8
_ARRAY = 9
_MAX_HEADER = 2**28  # bytes; vocabularies and merges of large models have about 2**24
_MAX_ITEMS = 2**23  # of an array
_MAX_DIMS = 4
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """metadata: numbers, texts, and arrays as lists or NumPy arrays. tensors: shapes as PyTorch has
    them, [rows, columns]; dtype: a name of `TYPES`."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[TensorInfo, ...]


def read_model(path: Path) -> list[GGUFHeader]:
    """Returns the headers of all files of the model whose first file is `path`. Raises
    CheckpointError.
    """
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    name = _SPLIT.fullmatch(path.name)
    if (
        not isinstance(count, int)
        or (count > 1) != (name is not None and int(name[3]) > 1)
        or (name is not None and int(name[3]) != max(1, count))
    ):
        raise _error(
            path,
            f"split.count is {count!r}, which is not what the file's name says; give it its own "
            "name",
        )
    headers = [first]
    for number in range(2, int(name[3]) + 1 if name else 2):
        assert name is not None
        part = f"{name[1]}-{number:05d}-of-{name[3]}{name[4]}"
        if not (path.parent / part).is_file():
            raise CheckpointError(
                f"{path.parent / part} is missing: the model has {int(name[3])} files; download it"
            )
        headers.append(read_gguf(path.parent / part))
        if (found := headers[-1].metadata.get("split.no")) != number - 1:
            raise _error(
                headers[-1].path, f"split.no is {found!r}, and the file's name says {number - 1}"
            )
    total = sum(len(header.tensors) for header in headers)
    if first.metadata.get("split.tensors.count", total) != total:
        raise _error(
            path,
            f"split.tensors.count is {first.metadata['split.tensors.count']}, the files have "
            f"{total}",
        )
    return headers


def first_file(path: Path) -> Path:
    """Return the file of a split model that has its metadata: `path`, or file 00001 beside it."""
    name = _SPLIT.fullmatch(path.name)
    return path.with_name(f"{name[1]}-00001-of-{name[3]}{name[4]}") if name else path


def models_in(folder: Path) -> list[Path]:
    """Return the first file of each model in a folder; files for images (mmproj) are none."""
    files = (path for path in folder.glob("*") if has_gguf_name(path))
    return sorted({first_file(path) for path in files if not path.name.startswith("mmproj")})


def read_gguf(path: Path) -> GGUFHeader:
    """Return the checked header of one file. Raises CheckpointError with the wrong value."""
    real = model_file(path.parent, path.name)
    with CheckpointError.instead_of(OSError, f"{path} cannot be read"):
        status = real.stat()
        return _read(real, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)  # several parts of a process ask for the same header
def _read(path: Path, size: int, mtime_ns: int) -> GGUFHeader:
    with path.open("rb", buffering=2**20) as file:
        cursor = _Cursor(path, file, min(size, _MAX_HEADER))
        magic = cursor.take(4, "the magic number")
        version = cursor.number("I", "the version")
        if magic != b"GGUF":
            raise _error(path, f"it begins with {magic!r}, not b'GGUF'")
        if version not in (2, 3):
            hint = "; it is big-endian" if version in (0x02000000, 0x03000000) else ""
            raise CheckpointError(
                f"{path} is GGUF version {version}{hint}; supported: 2 and 3, little-endian"
            )
        num_tensors, num_values = (
            cursor.count(what, 12) for what in ("tensors", "metadata values")
        )
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.text("a metadata key")
            if key in metadata:
                raise _error(path, f"the metadata key {key[:80]!r} is there twice")
            metadata[key] = cursor.value(cursor.number("I", key), key)
        alignment = metadata.get("general.alignment", 32)
        if (
            not isinstance(alignment, int)
            or alignment < 1
            or alignment & (alignment - 1)
            or alignment > 2**20
        ):
            raise _error(
                path, f"general.alignment is {alignment!r}, not a power of two up to 2**20"
            )
        infos = [_tensor(cursor) for _ in range(num_tensors)]
    start = -(-cursor.position // alignment) * alignment
    return GGUFHeader(path, metadata, tuple(_placed(path, infos, start, alignment, size)))


class _Cursor:
    """Takes values from a file whose header has at most `end` bytes."""

    def __init__(self, path: Path, file: BinaryIO, end: int) -> None:
        self.path = path
        self._file = file
        self._end = end
        self.position = 0

    def take(self, count: int, what: str) -> bytes:
        """Returns the next bytes."""
        if count > self._end - self.position:
            left = (
                f"{self._end - self.position} bytes are left"
                + " of the largest header that is read" * (self._end == _MAX_HEADER)
            )
            raise _error(self.path, f"{what[:80]!r} needs {count} bytes, and {left}")
        self.position += count
        data = self._file.read(count)
        if len(data) < count:
            raise _error(self.path, "the file became shorter while it was read")
        return data

    def number(self, kind: str, what: str) -> Any:
        """Returns a number. kind: as `struct` spells it."""
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind), what))[0]

    def count(self, what: str, least: int) -> int:
        """Return a count of items of at least `least` bytes, which must fit into the header."""
        count: int = self.number("Q", what)
        if count > min(_MAX_ITEMS, (self._end - self.position) // least):
            raise _error(self.path, f"it claims {count} {what[:80]}, more than there is room for")
        return count

    def text(self, what: str) -> str:
        """Returns a string of UTF-8."""
        try:
            return self.take(self.number("Q", what), what).decode()
        except UnicodeDecodeError as error:
            raise _error(self.path, f"{what[:80]!r} is not UTF-8: {error}") from None

    def value(self, kind: int, what: str) -> Any:
        """Returns a metadata value of a type."""
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            return self.number(_number_type(self.path, kind, what), what)
        kind = self.number("I", what)
        if kind == _STRING:
            return [self.text(what) for _ in range(self.count(f"items of {what}", 8))]
        code = _number_type(self.path, kind, what)  # of arrays of arrays no model needs any
        size = struct.calcsize(code)
        count = self.count(f"items of {what}", size)
        import numpy as np  # here: whoever asks for a config waits for it otherwise

        return np.frombuffer(self.take(count * size, what), np.dtype(code).newbyteorder("<"))


def _number_type(path: Path, kind: int, what: str) -> str:
    if kind not in _NUMBERS:
        nested = " (an array of arrays)" if kind == _ARRAY else ""
        raise _error(path, f"{what[:80]!r} has values of type {kind}{nested}, which is not known")
    return _NUMBERS[kind]


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Returns name, dimensions, type and offset."""
    name = cursor.text("a tensor's name")
    num_dims = cursor.number("I", name)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise _error(
            cursor.path, f"tensor {name[:80]!r} has {num_dims} dimensions, not 1 to {_MAX_DIMS}"
        )
    *dims, kind, offset = struct.unpack(f"<{num_dims}QIQ", cursor.take(num_dims * 8 + 12, name))
    return name, tuple(dims), kind, offset


def _placed(
    path: Path,
    infos: list[tuple[str, tuple[int, ...], int, int]],
    start: int,
    alignment: int,
    size: int,
) -> list[TensorInfo]:
    """Returns the tensors in the order of the file, of known types, in the file, and none over
    another.
    """
    tensors = []
    names = set()
    for name, dims, kind, offset in infos:
        what = f"tensor {name[:80]!r}"
        if name in names:
            raise _error(path, f"{what} is there twice")
        names.add(name)
        if kind not in TYPES:
            known = ", ".join(known for known, _, _ in TYPES.values())
            raise CheckpointError(
                f"{path}: {what} is of type {_OTHERS.get(kind, kind)}; supported: {known}. "
                "Download another one"
            )
        dtype, elements, num_bytes = TYPES[kind]
        if dims[0] % elements:
            raise _error(
                path, f"{what} has rows of {dims[0]}, and {dtype} has blocks of {elements}"
            )
        length = math.prod(dims) // elements * num_bytes
        if offset % alignment or length > size - start - offset:
            raise _error(
                path,
                f"{what} has {length} bytes at {offset} of the data, which has "
                f"{max(0, size - start)} in all "
                f"and an alignment of {alignment}",
            )
        tensors.append(TensorInfo(name, path, dtype, dims[::-1], start + offset, length))
    tensors.sort(key=lambda tensor: tensor.offset)
    for before, after in pairwise(tensors):
        if before.offset + before.num_bytes > after.offset:
            raise _error(path, f"tensors {before.name[:80]!r} and {after.name[:80]!r} overlap")
    return tensors


def _error(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or incomplete: {what}; download it again")
