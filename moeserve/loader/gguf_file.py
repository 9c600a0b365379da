"""Reads the headers of GGUF files (llama.cpp's format, versions 2 and 3): metadata and tensors.

Files are not trusted: every count and length is checked against the bytes left in the file before
anything is read or allocated for it. No weight is read. A model may be split into files named
NAME-00001-of-0000N.gguf, of which the first has the metadata.

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
from typing import Any, BinaryIO, NamedTuple

from moeserve.errors import CheckpointError
from moeserve.loader.files import has_gguf_name, model_file
from moeserve.loader.safetensors_file import TensorInfo


class TensorType(NamedTuple):
    """A type of tensors, whose elements are stored in blocks."""

    name: str
    block_size: int  # elements
    block_bytes: int


TYPES = {  # by the number in the file
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    30: TensorType("BF16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    22: TensorType("IQ2_S", 256, 82),
    18: TensorType("IQ3_XXS", 256, 98),
    21: TensorType("IQ3_S", 256, 110),
    19: TensorType("IQ1_S", 256, 50),
    29: TensorType("IQ1_M", 256, 56),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
    42: TensorType("Q2_0", 64, 18),
}
_FIRST_OF_IK_LLAMA = 97  # types of ik_llama.cpp, a fork of llama.cpp, have these numbers
_NUMBERS = {  # number of a metadata type -> format of `struct`
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
_MAX_HEADER_BYTES = 2**28  # the vocabulary and merges of a large model have about 2**24
_MAX_ITEMS = 2**23  # items of an array
_MAX_DIMS = 4  # dimensions of a tensor
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header of one file."""

    path: Path
    metadata: Mapping[str, Any]  # numbers, strings, lists of strings, and NumPy arrays of numbers
    # In the order of the file. dtype is a name of `TYPES`; shape is as in PyTorch, [rows, columns].
    tensors: tuple[TensorInfo, ...]


def read_model(path: Path) -> list[GGUFHeader]:
    """Return the headers of all files of a model, given its first file. Raises CheckpointError."""
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    name = _SPLIT.fullmatch(path.name)
    num_files = int(name[3]) if name else 1
    if not isinstance(count, int) or max(1, count) != num_files:
        raise _error(
            path,
            f"split.count is {repr(count)[:80]}, which does not match the file's name; rename it "
            "back",
        )
    headers = [first]
    for number in range(2, num_files + 1):
        assert name is not None
        part = f"{name[1]}-{number:05d}-of-{name[3]}{name[4]}"
        if not (path.parent / part).is_file():
            raise CheckpointError(
                f"{path.parent / part} is missing: the model has {num_files} files; download "
                "all of them"
            )
        headers.append(read_gguf(path.parent / part))
        found = headers[-1].metadata.get("split.no")
        if not isinstance(found, int) or found != number - 1:
            raise _error(
                headers[-1].path,
                f"split.no is {repr(found)[:80]}, but by the file's name {number - 1}",
            )
    total = sum(len(header.tensors) for header in headers)
    stated = first.metadata.get("split.tensors.count", total)
    if not isinstance(stated, int) or stated != total:
        raise _error(
            path,
            f"split.tensors.count is {repr(stated)[:80]}, but the files have {total} tensors",
        )
    return headers


def first_file(path: Path) -> Path:
    """Return the file of a split model that has its metadata: `path`, or file 00001 beside it."""
    name = _SPLIT.fullmatch(path.name)
    return path.with_name(f"{name[1]}-00001-of-{name[3]}{name[4]}") if name else path


def models_in(folder: Path) -> list[Path]:
    """Return the first file of each model in a directory, without image encoders (mmproj)."""
    files = (path for path in folder.glob("*") if has_gguf_name(path))
    return sorted({first_file(path) for path in files if not path.name.startswith("mmproj")})


def read_gguf(path: Path) -> GGUFHeader:
    """Return the header of one file, checked. Raises CheckpointError."""
    real = model_file(path.parent, path.name)
    with CheckpointError.instead_of(OSError, f"{path} cannot be read"):
        status = real.stat()
        return _read(real, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)  # the config, tokenizer and weights of a model are read separately
def _read(path: Path, file_bytes: int, mtime_ns: int) -> GGUFHeader:
    with path.open("rb", buffering=2**20) as file:
        cursor = _Cursor(path, file, min(file_bytes, _MAX_HEADER_BYTES))
        magic = cursor.raw(4, "the magic number")
        version = cursor.number("I", "the version")
        if magic != b"GGUF":
            raise _error(path, f"it begins with {magic!r}, not b'GGUF'")
        if version not in (2, 3):
            hint = "; it is big-endian" if version in (0x02000000, 0x03000000) else ""
            raise CheckpointError(
                f"{path} is GGUF version {version}{hint}; supported: 2 and 3, little-endian"
            )
        num_tensors = cursor.count("tensors", item_bytes=12)
        num_values = cursor.count("metadata values", item_bytes=12)
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.text("a metadata key")
            if key in metadata:
                raise _error(path, f"the metadata key {key[:80]!r} occurs twice")
            metadata[key] = cursor.value(cursor.number("I", key), key)
        alignment = metadata.get("general.alignment", 32)
        if (
            not isinstance(alignment, int)
            or alignment < 1
            or alignment & (alignment - 1)
            or alignment > 2**20
        ):
            raise _error(
                path,
                f"general.alignment is {repr(alignment)[:80]}, not a power of two up to 2**20",
            )
        entries = [_read_entry(cursor) for _ in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors = _check_tensors(
        path, entries, data_start=data_start, alignment=alignment, file_bytes=file_bytes
    )
    return GGUFHeader(path, metadata, tuple(tensors))


class _Cursor:
    """Reads values from the header of a file, of which at most `end` bytes are read.

    what: the name of the value in errors.
    """

    def __init__(self, path: Path, file: BinaryIO, end: int) -> None:
        self.path = path
        self._file = file
        self._end = end
        self.position = 0

    def raw(self, count: int, what: str) -> bytes:
        """Read the next `count` bytes."""
        if count > self._end - self.position:
            limit = " of the largest header that is read" if self._end == _MAX_HEADER_BYTES else ""
            raise _error(
                self.path,
                f"{what[:80]!r} needs {count} bytes, but {self._end - self.position} bytes are "
                f"left{limit}",
            )
        self.position += count
        data = self._file.read(count)
        if len(data) < count:
            raise _error(self.path, "the file became shorter while it was read")
        return data

    def number(self, code: str, what: str) -> Any:
        """Read a number. code: its format in `struct`."""
        return struct.unpack("<" + code, self.raw(struct.calcsize("<" + code), what))[0]

    def count(self, what: str, item_bytes: int) -> int:
        """Read a number of items that follow, of at least `item_bytes` bytes each."""
        count: int = self.number("Q", what)
        if count > min(_MAX_ITEMS, (self._end - self.position) // item_bytes):
            raise _error(self.path, f"it claims {count} {what[:80]}, more than there is room for")
        return count

    def text(self, what: str) -> str:
        """Read a UTF-8 string."""
        try:
            return self.raw(self.number("Q", what), what).decode()
        except UnicodeDecodeError as error:
            raise _error(self.path, f"{what[:80]!r} is not UTF-8: {error}") from None

    def value(self, kind: int, what: str) -> Any:
        """Read a metadata value of the type with the number `kind`."""
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            return self.number(_number_type(self.path, kind, what), what)
        kind = self.number("I", what)
        if kind == _STRING:
            num_strings = self.count(f"items of {what}", item_bytes=8)
            return [self.text(what) for _ in range(num_strings)]
        code = _number_type(self.path, kind, what)  # no model uses arrays of arrays
        size = struct.calcsize(code)
        count = self.count(f"items of {what}", size)
        import numpy as np  # slow to import, and not needed by readers of safetensors models

        return np.frombuffer(self.raw(count * size, what), np.dtype(code).newbyteorder("<"))


def _number_type(path: Path, kind: int, what: str) -> str:
    if kind not in _NUMBERS:
        nested = " (an array of arrays)" if kind == _ARRAY else ""
        raise _error(path, f"{what[:80]!r} has values of type {kind}{nested}, which is not known")
    return _NUMBERS[kind]


class _TensorEntry(NamedTuple):
    """A tensor in the header of a file, unchecked."""

    name: str
    dims: tuple[int, ...]  # from the innermost one on
    kind: int  # number of its type
    offset: int  # within the data


def _read_entry(cursor: _Cursor) -> _TensorEntry:
    name = cursor.text("a tensor's name")
    num_dims = cursor.number("I", name)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise _error(
            cursor.path, f"tensor {name[:80]!r} has {num_dims} dimensions, not 1 to {_MAX_DIMS}"
        )
    *dims, kind, offset = struct.unpack(f"<{num_dims}QIQ", cursor.raw(num_dims * 8 + 12, name))
    return _TensorEntry(name, tuple(dims), kind, offset)


def _check_tensors(
    path: Path, entries: list[_TensorEntry], *, data_start: int, alignment: int, file_bytes: int
) -> list[TensorInfo]:
    """Return the tensors in the order of the file.

    Raises CheckpointError for duplicate names, unsupported types, tensors beyond the end of the
    file, and overlaps. data_start: offset of the data in the file.
    """
    tensors = []
    names = set()
    for name, dims, kind, offset in entries:
        what = f"tensor {name[:80]!r}"
        if name in names:
            raise _error(path, f"{what} occurs twice")
        names.add(name)
        if kind not in TYPES:
            known = ", ".join(known_type.name for known_type in TYPES.values())
            owner = " of ik_llama.cpp" if kind >= _FIRST_OF_IK_LLAMA else ""
            raise CheckpointError(
                f"{path}: {what} is of type {kind}{owner}; supported: {known}. Download another "
                "quantization of the model"
            )
        tensor_type = TYPES[kind]
        if dims[0] % tensor_type.block_size:
            raise _error(
                path,
                f"{what} has rows of {dims[0]}, but {tensor_type.name} has blocks of "
                f"{tensor_type.block_size}",
            )
        num_bytes = math.prod(dims) // tensor_type.block_size * tensor_type.block_bytes
        data_bytes = max(0, file_bytes - data_start)
        if offset % alignment or num_bytes > file_bytes - data_start - offset:
            raise _error(
                path,
                f"{what} has {num_bytes} bytes at offset {offset} of the data, which has "
                f"{data_bytes} bytes in all and an alignment of {alignment}",
            )
        tensors.append(
            TensorInfo(
                name=name,
                path=path,
                dtype=tensor_type.name,
                shape=dims[::-1],
                offset=data_start + offset,
                num_bytes=num_bytes,
            )
        )
    tensors.sort(key=lambda tensor: tensor.offset)
    for before, after in pairwise(tensors):
        if before.offset + before.num_bytes > after.offset:
            raise _error(path, f"tensors {before.name[:80]!r} and {after.name[:80]!r} overlap")
    return tensors


def _error(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or incomplete: {what}; download it again")
