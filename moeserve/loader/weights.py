"""Carries out a WeightPlan: bytes go from the files straight into the parameters, many ranges at a time.

A range whose dtype and layout are already right is read by `preadv` into the parameter itself; anything else passes
through a small buffer per thread. So memory stays at the weights plus a few buffers, and nothing is ever mapped: a file
that shrinks meanwhile is an error, not a crash. Headers and plan are compared before the first byte is allocated.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.loader.check_plan import check_plan
from moeserve.loader.checkpoint import Checkpoint
from moeserve.loader.plan import Index, Piece, WeightPlan
from moeserve.loader.safetensors_file import TensorInfo

Progress = Callable[[int, int], None]  # (bytes read so far, bytes in all)

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
READ_BYTES = 8 * 2**20  # large enough that calls cost nothing, small enough to share out among threads


def load(
    checkpoint: Checkpoint,
    plan: WeightPlan,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    threads: int | None = None,
) -> dict[str, Tensor]:
    """The plan's parameters by name, contiguous, of `dtype` (float32, bfloat16 or float16) on `device`.

    progress is called in this thread. threads: concurrent reads (default: one per core, 2 to 16). Raises
    CheckpointError if plan and checkpoint do not fit each other, a file cannot be read, or float16 cannot hold a value.
    """
    check_plan(checkpoint, plan)
    device = torch.device(device)
    params = {param.name: torch.empty(param.shape, dtype=dtype, device=device) for param in plan.params}
    reads = [
        read
        for piece in sorted(plan.pieces, key=lambda piece: _place(checkpoint.tensors[piece.source]))
        for read in reads_of(piece, checkpoint.tensors[piece.source], params[piece.param])
    ]
    threads = threads or max(2, min(16, os.cpu_count() or 1))
    total, done = sum(read.num_bytes for read in reads), 0
    with Reader(checkpoint) as reader, ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
        try:
            for num_bytes in pool.map(reader.carry_out, reads):
                done += num_bytes
                if progress is not None:
                    progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return params


def _place(tensor: TensorInfo) -> tuple[str, int]:
    return tensor.path.name, tensor.offset


@dataclass(frozen=True, slots=True)
class Read:
    """One range of a file and where it goes. `into` is a view of the parameter in the source's order of dimensions."""

    tensor: TensorInfo
    offset: int
    shape: tuple[int, ...]  # of the bytes that are read
    take: Index  # what of them is wanted
    into: Tensor

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.tensor.dtype].itemsize


def reads_of(piece: Piece, tensor: TensorInfo, param: Tensor, limit: int | None = None) -> Iterator[Read]:
    """What carries out a piece: reads of at most about `limit` bytes each (default: READ_BYTES)."""
    into = param[piece.at]
    if piece.transpose:
        into = into.transpose(-1, -2)
    take = tuple(
        range(size)[part] if isinstance(part, int) else slice(*part.indices(size))
        for part, size in zip(piece.take, piece.shape, strict=False)
    )
    take += tuple(slice(0, size, 1) for size in piece.shape[len(take) :])
    assert all(isinstance(part, int) or part.step == 1 for part in take), piece
    yield from _split(tensor, tensor.offset, piece.shape, take, into, limit or READ_BYTES)


def _split(
    tensor: TensorInfo, offset: int, shape: tuple[int, ...], take: Index, into: Tensor, limit: int
) -> Iterator[Read]:
    """The reads, of about `limit` bytes each, that bring `take` of a row-major array at `offset`."""
    if not shape:
        shape, take, into = (1,), (slice(0, 1, 1),), into.unsqueeze(0)
    first, rest = take[0], take[1:]
    row_bytes = math.prod(shape[1:]) * DTYPES[tensor.dtype].itemsize
    if isinstance(first, int):
        yield from _split(tensor, offset + first * row_bytes, shape[1:], rest, into, limit)
        return
    if row_bytes > limit and len(shape) > 1:
        for row in range(first.start, first.stop):
            yield from _split(tensor, offset + row * row_bytes, shape[1:], rest, into[row - first.start], limit)
        return
    step = max(1, limit // max(row_bytes, 1))
    for row in range(first.start, first.stop, step):
        stop = min(row + step, first.stop)
        part = into[row - first.start : stop - first.start]
        yield Read(tensor, offset + row * row_bytes, (stop - row, *shape[1:]), (slice(None), *rest), part)


class Reader:
    """Open files, and one buffer per thread for what has to be converted on its way."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._files: dict[Path, int] = {}
        self._paths = {tensor.path for tensor in checkpoint.tensors.values()}
        self._local = threading.local()

    def __enter__(self) -> Reader:
        for path in self._paths:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                self.__exit__()
                raise CheckpointError(f"{path} cannot be opened: {error}") from None
        return self

    def __exit__(self, *exc: object) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    @torch.inference_mode()  # per thread: the caller's mode does not reach this one
    def carry_out(self, read: Read) -> int:
        """Does one read; returns its number of bytes. Runs in any thread; reading and converting drop the GIL."""
        if not read.num_bytes:
            return 0
        into, source_dtype = read.into, DTYPES[read.tensor.dtype]
        wanted = (read.shape[0], *_shape_of(read))
        direct = into.device.type == "cpu" and into.dtype == source_dtype and wanted == read.shape
        if direct and into.is_contiguous():
            self._fill(read, into)
            return read.num_bytes
        buffer = self._buffer(read.num_bytes, pinned=into.device.type == "cuda").view(source_dtype).view(read.shape)
        self._fill(read, buffer)
        into.copy_(buffer[read.take])
        if into.dtype == torch.float16 and source_dtype != torch.float16:
            _check_range(read)
        return read.num_bytes

    def _buffer(self, num_bytes: int, pinned: bool) -> Tensor:
        have: Tensor | None = getattr(self._local, "buffer", None)
        if have is None or have.numel() < num_bytes:
            have = torch.empty(max(num_bytes, READ_BYTES), dtype=torch.uint8, pin_memory=pinned)
            self._local.buffer = have
        return have[:num_bytes]

    def stat(self, path: Path) -> os.stat_result:
        """Of the file that was opened, whatever its name means by now."""
        try:
            return os.fstat(self._files[path])
        except OSError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def _fill(self, read: Read, target: Tensor) -> None:
        flat = target.as_strided((target.numel(),), (1,))  # a size of 1 may have any stride, which `view` refuses
        memory: memoryview = flat.view(torch.uint8).numpy().data
        offset, left = read.offset, len(memory)
        try:
            while left:
                count = os.preadv(self._files[read.tensor.path], [memory[-left:]], offset)
                if count == 0:
                    raise CheckpointError(
                        f"{read.tensor.path} ended inside tensor {read.tensor.name!r}: the file was changed while it "
                        "was read; start again when it is complete"
                    )
                offset, left = offset + count, left - count
        except OSError as error:
            raise CheckpointError(f"{read.tensor.path}: tensor {read.tensor.name!r}: {error}") from None


def _shape_of(read: Read) -> tuple[int, ...]:
    """Sizes after the first dimension that `take` leaves."""
    sizes = zip(read.take[1:], read.shape[1:], strict=True)
    return tuple(len(range(size)[part]) for part, size in sizes if isinstance(part, slice))


def _check_range(read: Read) -> None:
    if not torch.isfinite(read.into).all():
        raise CheckpointError(
            f"{read.tensor.path}: tensor {read.tensor.name!r} has values that float16 cannot hold (65504 at most); "
            "use --dtype bfloat16 or float32"
        )
