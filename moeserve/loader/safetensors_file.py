"""Reads the header of one safetensors file (github.com/huggingface/safetensors).

The safetensors library checks every entry: a tensor is as long as its dtype and shape say, and
tensors follow each other without gaps or overlap up to the end of the file. It does not tell where
a tensor lies, so the checked header is decoded here again. No weight is read, so a file of any size
takes milliseconds; it is mapped for that moment only.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from moeserve.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The place of a tensor: `offset` and `num_bytes` in `path`, both checked against the file's
    size.
    """

    name: str
    path: Path
    dtype: str  # as the format spells it, such as "BF16"
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def __str__(self) -> str:
        return f"tensor {self.name!r} in {self.path.name}"


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Returns all tensors of the file, in order. Raises CheckpointError with the file and what is
    wrong with it.
    """
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
            name, path, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin
        )
    return tensors
