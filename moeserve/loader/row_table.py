"""Large tables of which a step reads few rows, such as those of n-gram embeddings.

A `RowTable` leaves the rows in the checkpoint's files, and keeps recently used ones in memory, at
most CACHE_BYTES. `prefetch` asks the operating system to read the rows that a step will need, so
that the reads from the disk run at the same time, and beside the layers before.
"""

import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.loader.safetensors_file import TensorInfo

CACHE_BYTES = 256 << 20
I64 = NDArray[np.int64]


class Rows(Protocol):
    """A table of `count` rows [width]."""

    @property
    def count(self) -> int: ...

    def prefetch(self, rows_N: Tensor) -> None:
        """Begin to read these rows (int64, on any device)."""

    def read(self, rows_N: Tensor) -> Tensor:
        """Return these rows (int64), [N, width], on the device of their numbers."""

    def replace(self, other: Any) -> None:
        """Read the rows of another table of the same kind from now on."""


@dataclass(frozen=True, slots=True)
class MemoryRows:
    """A table in memory. Row numbers beyond its size begin again at 0 (random weights)."""

    table: Tensor

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.table)

    def prefetch(self, rows_N: Tensor) -> None:
        """Do nothing."""

    def read(self, rows_N: Tensor) -> Tensor:
        """See `Rows`."""
        return self.table.index_select(0, rows_N % len(self.table))

    def replace(self, other: Rows) -> None:
        """See `Rows`."""
        rows = torch.arange(self.count, device=self.table.device)
        self.table.copy_(other.read(rows))


@dataclass(frozen=True, slots=True)
class TableShard:
    """Consecutive rows of a table, in one tensor of the checkpoint."""

    first: int  # the number of its first row in the table
    tensor: TensorInfo


class RowFiles:
    """The shards of a table, in ascending order, with their open files."""

    def __init__(self, shards: Sequence[TableShard]) -> None:
        self._shards = shards
        self._firsts = [shard.first for shard in shards]
        last = shards[-1]
        self.count = last.first + last.tensor.shape[0]
        self.row_bytes = last.tensor.num_bytes // last.tensor.shape[0]
        self._files: dict[Path, int] = {}
        for path in {shard.tensor.path for shard in shards}:
            with CheckpointError.instead_of(OSError, path):
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._files[path])

    def prefetch(self, row: int) -> None:
        """Ask the operating system to read a row."""
        path, offset = self._place(row)
        with suppress(OSError):  # it is only advice
            os.posix_fadvise(self._files[path], offset, self.row_bytes, os.POSIX_FADV_WILLNEED)

    def read(self, row: int, into: NDArray[np.uint8]) -> None:
        """Read a row as it is stored."""
        path, offset = self._place(row)
        with CheckpointError.instead_of(OSError, path):
            num_read = os.preadv(self._files[path], [into.data], offset)
        if num_read != self.row_bytes:
            raise CheckpointError(
                f"{path} ended inside a table that is read while the model serves: the file was "
                "changed; download it again"
            )

    def _place(self, row: int) -> tuple[Path, int]:
        """Return the file of a row, and its offset there."""
        shard = self._shards[bisect_right(self._firsts, row) - 1]
        offset = shard.tensor.offset + (row - shard.first) * self.row_bytes
        return shard.tensor.path, offset


class RowTable:
    """A table of rows in the checkpoint's files. Thread-safe.

    Each row has one place in the cache, which is the remainder of its number, so rows that share a
    place replace each other.

    decode: converts rows of bytes [N, row bytes] to values [N, width].

    Raises CheckpointError if a file cannot be read.
    """

    def __init__(
        self,
        files: RowFiles,
        decode: Callable[[Tensor], Tensor],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._files = files
        self._decode = decode
        places = max(1, min(files.count, cache_bytes // files.row_bytes))
        # Pages take memory only once they are written.
        self._cached = np.zeros((places, files.row_bytes), np.uint8)
        self._row_at = np.full(places, -1, np.int64)  # the row at each place; -1: none
        self._lock = threading.Lock()

    def prefetch(self, rows_N: Tensor) -> None:
        """See `Rows`."""
        rows = np.unique(rows_N.cpu().numpy())
        for row in rows[self._row_at[rows % len(self._row_at)] != rows].tolist():
            self._files.prefetch(row)

    def read(self, rows_N: Tensor) -> Tensor:
        """See `Rows`."""
        rows, places_N = np.unique(rows_N.cpu().numpy(), return_inverse=True)
        values = self._decode(self._bytes_of(rows))
        return values.index_select(0, torch.from_numpy(places_N.reshape(-1))).to(rows_N.device)

    @property
    def count(self) -> int:
        """The number of rows."""
        return self._files.count

    def replace(self, other: "RowTable") -> None:
        """See `Rows`."""
        with self._lock:
            self._files = other._files
            self._row_at.fill(-1)

    def _bytes_of(self, rows: I64) -> Tensor:
        """Return different rows as they are stored, [N, row bytes]."""
        places = rows % len(self._row_at)
        # Not from an array: torch gives an empty one strides of 0, which `view` refuses.
        result = torch.empty((len(rows), self._files.row_bytes), dtype=torch.uint8)
        out = result.numpy()
        with self._lock:
            np.take(self._cached, places, axis=0, out=out)
            missing = np.flatnonzero(self._row_at[places] != rows)
            for i in missing.tolist():
                self._files.read(int(rows[i]), out[i])
            # If several rows have one place, the last one remains there.
            self._cached[places[missing]] = out[missing]
            self._row_at[places[missing]] = rows[missing]
        return result
