"""Reads the header of one safetensors file and checks every entry before it is used.

Format: 8 bytes little-endian header length, a JSON object {tensor: {dtype, shape, data_offsets}}, then the tensors'
bytes without gaps or overlap up to the end of the file (github.com/huggingface/safetensors). A header is a few bytes
per tensor, so a file of any size is checked in milliseconds; no weight is touched.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from moeserve.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
_MAX_DIMS = 32
_MAX_SHOWN = 200  # characters of a name in an error
_NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_AGAIN = "the file is damaged; download it again"

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The place of a tensor: `offset` and `num_bytes` in `path`, both checked against the file's size."""

    name: str
    path: Path
    dtype: str  # the format's word, a key of DTYPE_BITS
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[_Count], msgspec.Meta(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Count, _Count]


_decode_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_entry = msgspec.json.Decoder(_Entry).decode
_decode_metadata = msgspec.json.Decoder(dict[str, str]).decode


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Returns all tensors of the file. Raises CheckpointError with the file, the tensor and what is wrong with it."""
    try:
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, num_bytes - 8):
                raise CheckpointError(
                    f"{path}: a header of {length} bytes does not fit into a file of {num_bytes} bytes "
                    f"(limit {MAX_HEADER_BYTES}); {_AGAIN}, or it is not a safetensors file"
                )
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if len(header) < length or header[:1] != b"{":
        raise CheckpointError(f"{path}: the header is not a JSON object of {length} bytes; {_AGAIN}")
    tensors = _parse(path, header)
    _check_layout(path, tensors, start=8 + length, end=num_bytes)
    return {tensor.name: tensor for tensor in tensors}


def _parse(path: Path, header: bytes) -> list[TensorInfo]:
    """The entries in order of their place in the file."""
    try:
        entries = _decode_header(header)
        _decode_metadata(entries.pop("__metadata__", b"{}"))
    except _NOT_JSON as error:
        raise CheckpointError(f"{path}: bad header: {error}; {_AGAIN}") from None
    tensors = [_tensor(path, name, raw, 8 + len(header)) for name, raw in entries.items()]
    return sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes))


def _tensor(path: Path, name: str, raw: msgspec.Raw, base: int) -> TensorInfo:
    """One entry; `base` is where the tensors begin in the file."""
    where = f"{path}: tensor {name[:_MAX_SHOWN]!r}"
    try:
        entry = _decode_entry(raw)
    except _NOT_JSON as error:
        raise CheckpointError(f"{where} has a bad header entry: {error}; {_AGAIN}") from None
    begin, end = entry.data_offsets
    bits = DTYPE_BITS.get(entry.dtype)
    if bits is None:
        raise CheckpointError(f"{where} has the unknown dtype {entry.dtype[:_MAX_SHOWN]!r}; {_AGAIN}")
    if math.prod(entry.shape) * bits != (end - begin) * 8:
        raise CheckpointError(
            f"{where} of shape {entry.shape} and dtype {entry.dtype} cannot lie at bytes {begin} to {end}; {_AGAIN}"
        )
    return TensorInfo(name, path, entry.dtype, tuple(entry.shape), base + begin, end - begin)


def _check_layout(path: Path, tensors: list[TensorInfo], start: int, end: int) -> None:
    """Tensors follow each other without gap or overlap, and the last one ends where the file does."""
    for tensor in tensors:
        if tensor.offset != start:
            what = "overlaps the tensor before it" if tensor.offset < start else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {tensor.name!r} {what}; {_AGAIN}")
        start += tensor.num_bytes
        if start > end:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} ends at byte {start}, but the file has only {end} bytes; "
                "it is truncated: download it again"
            )
    if start != end:
        raise CheckpointError(f"{path}: the tensors end at byte {start}, but the file has {end} bytes; {_AGAIN}")
