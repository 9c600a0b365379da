"""Reads the header of one safetensors file (github.com/huggingface/safetensors).

The safetensors library checks the header: each tensor has the length of its dtype and shape, and
tensors cover the file up to its end without gaps or overlaps. The library does not return the
offsets of tensors, so the checked header is decoded again here. No weight is read, so a file of
any size takes milliseconds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from moeserve.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file."""

    name: str
    path: Path
    dtype: str  # the format's name for it, such as "BF16"
    shape: tuple[int, ...]
    offset: int  # in the file; offset and num_bytes are checked against its size
    num_bytes: int

    def __str__(self) -> str:
        return f"tensor {self.name!r} in {self.path.name}"


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return all tensors of a file by name, in the file's order. Raises CheckpointError."""
    try:
        with safe_open(path, "np"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except (SafetensorError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"{path} is damaged or incomplete: {str(error)[:300]}; download it again"
        ) from None
    entries.pop("__metadata__", None)
    tensors = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        tensors[name] = TensorInfo(
            name=name,
            path=path,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=8 + length + begin,
            num_bytes=end - begin,
        )
    return tensors
