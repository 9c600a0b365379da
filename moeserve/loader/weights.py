"""Executes a load plan: reads checkpoint files into the model's parameters, in parallel.

- Headers are checked against the plan before anything is allocated.
- Parameters are read one at a time, when the model takes them out of `Params`. So memory holds the
  finished parameters and a few reused buffers, but never a second copy of the checkpoint.
- A range whose dtype already matches is read by `preadv` directly into the parameter. Any other
  range is converted through a small buffer per thread.
- Files are not mapped, so a file that is truncated meanwhile causes an error, not SIGBUS.
"""

import math
import os
import threading
import weakref
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import Checkpoint
from moeserve.loader.gguf_quants import decode, decode_into, dense, fill, read_raw
from moeserve.loader.load_plan import (
    Block,
    Index,
    LoadPlan,
    Param,
    Piece,
    blocks_of,
    check_plan,
    is_packed,
    part_shape,
)
from moeserve.loader.row_table import RowFiles, Rows, RowTable, TableShard
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored import with_shape
from moeserve.loader.stored_format import StoredFormat, common_format
from moeserve.loader.unpack import Read, unpack
from moeserve.ops.quantized import (
    CPU_JOB_ELEMENTS,
    Quantized,
    QuantizeTo,
    Weight,
    dequantized,
    quantization_of,
)

DTYPES = {  # name in the files -> dtype of the bytes as they are read
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
    "F8_E4M3": torch.uint8,
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
# The same alignment as torch's own tensors: libraries choose code paths by it.
ALIGNMENT_BYTES = 64
# Bytes per read: large enough that system calls take a negligible part of the time, small enough to
# keep all threads busy.
MAX_READ_BYTES = 8 * 2**20


def empty_weight(
    checkpoint: Checkpoint,
    param: Param,
    pieces: list[Piece],
    dtype: torch.dtype,
    device: torch.device,
) -> Weight:
    """Return an uninitialized parameter: quantized if `format_of` returns a format for it."""
    weight_format = format_of(checkpoint, param, pieces)
    if weight_format is None:
        if param.int64:
            dtype = torch.int64
        elif param.fp32:
            dtype = torch.float32
        return torch.empty(param.shape, dtype=dtype, device=device)
    empty = _empty_quantized(weight_format, param.shape, dtype, device)
    return replace(empty, activations=weight_format.activation_format(checkpoint.activations))


def format_of(checkpoint: Checkpoint, param: Param, pieces: list[Piece]) -> StoredFormat | None:
    """Return the quantized format in which a parameter is loaded; None if it is not quantized."""
    if param.widened or param.on_disk:
        return None  # it is dequantized on load, or when a row is read
    stored = [checkpoint.stored.get(piece.source) for piece in pieces]
    piece_formats = [weight.format if weight else None for weight in stored]
    weight_format = common_format(
        piece_formats, is_linear=is_packed(param.name), activations=checkpoint.activations
    )
    if weight_format is None or weight_format.layout != "ggml":
        return weight_format
    # Weights of a GGUF file are dequantized if no kernel supports them. Weights in other layouts
    # that no kernel supports are an error (runner/load.py).
    num_inputs = param.shape[-1]
    obstacle = checkpoint.obstacle(weight_format.kind, weight_format.group, num_inputs)
    return None if obstacle else weight_format


def _empty_quantized(
    weight_format: StoredFormat, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Quantized:
    group = weight_format.group
    if weight_format.kind == "int4" and not group:
        # int4 kernels need groups, so all inputs are one group, rounded up to a multiple of 8.
        group = -(-shape[-1] // 8) * 8
    empty = Quantized.empty(
        weight_format.kind, group, weight_format.zeros, dtype=dtype, shape=shape, device=device
    )
    mins = torch.empty_like(empty.scales) if weight_format.mins else None
    supers = None
    if weight_format.supers:
        # One super-scale for 256 inputs
        super_scales = torch.empty(*shape[:-1], shape[-1] // 256, device=device)
        super_mins = torch.empty_like(super_scales) if weight_format.mins else None
        supers = super_scales, super_mins
    return replace(
        empty,
        rows=weight_format.rows,
        mins=mins,
        supers=supers,
        scale_dtype=DTYPES[weight_format.scales],
        bits=weight_format.bits,
        codes=weight_format.codes,
        super_factor=weight_format.super_factor,
    )


def _outer_scale(tensor: TensorInfo, piece: Piece, read: Read) -> Tensor:
    """Return the factors of a piece's matrices, fp32: one for each expert of the piece, or one."""
    *sizes, _, _ = piece.shape
    if math.prod(tensor.shape) == 1:
        factors = read(with_shape(tensor), ())
    else:
        factors = read(with_shape(tensor, *sizes), piece.take[: len(sizes)])
    factors = factors.float()
    if not factors.isfinite().all():
        raise CheckpointError(f"{tensor} has NaN or infinity; download it again")
    return factors


def _stored_bytes(piece: Piece, checkpoint: Checkpoint) -> int:
    """Return about how many bytes of the files a piece covers, for the progress report."""
    num_bytes = checkpoint.parts(piece.source)[0].num_bytes
    return math.prod(piece.taken_shape) * num_bytes // (math.prod(piece.shape) or 1)


def _in_order_of_files(pieces: Iterable[Piece], checkpoint: Checkpoint) -> list[Piece]:
    def file_position(piece: Piece) -> tuple[Path, int]:
        values = checkpoint.parts(piece.source)[0]
        return values.path, values.offset

    return sorted(pieces, key=file_position)


def _split_rows(piece: Piece, index: Index) -> Iterator[tuple[Piece, Index]]:
    """Split a piece that takes whole rows of one matrix into pieces of a few rows each.

    index: where `piece` goes in the parameter. Yields each new piece and where it goes.
    """
    row_dim = len(piece.shape) - 2
    taken_rows = piece.take[row_dim] if len(piece.take) > row_dim else slice(None)
    rows = range(piece.shape[row_dim])[taken_rows]
    if isinstance(rows, int):
        yield piece, index
        return
    # At most 2**22 values each: smaller pieces would cost more calls than they save in waiting.
    max_rows = max(1, 16 * CPU_JOB_ELEMENTS // piece.shape[-1])
    for start in range(0, len(rows), max_rows):
        part = rows[start : start + max_rows]
        take = (*piece.take[:row_dim], slice(part.start, part.stop, part.step))
        yield replace(piece, take=take), (*index, slice(start, start + len(part)))


def _split_experts(piece: Piece) -> Iterator[tuple[Piece, Index]]:
    """Split a piece of several experts into one piece per expert.

    Yields each new piece and where it goes in the part of the parameter that `piece` fills.
    """
    experts = piece.take[0] if piece.take else slice(None)
    if len(piece.shape) < 3 or isinstance(experts, int):
        yield piece, ()
        return
    for i, expert in enumerate(range(piece.shape[0])[experts]):
        yield replace(piece, take=(expert, *piece.take[1:])), (i,)


def _first_row(piece: Piece) -> int:
    """Return the first row of a parameter that a piece fills."""
    rows = piece.at[0]
    assert isinstance(rows, slice), piece
    return int(rows.start)


class ReusedMemory:
    """A pool of buffers for short-lived tensors.

    Reuse saves page faults, which take longer than reading data into the pages.
    """

    def __init__(self) -> None:
        # Each buffer, and a weak reference to the view of it that its last tensor keeps alive.
        self._buffers: list[tuple[NDArray[np.uint8], weakref.ref[Any]]] = []

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialized tensor of the same shape and dtype, in a free buffer if any.

        A buffer is free when no view of its last tensor is alive.
        """
        num_bytes = tensor.nbytes
        free = [
            buffer
            for buffer, view_of in self._buffers
            if view_of() is None and num_bytes <= len(buffer) - ALIGNMENT_BYTES <= 2 * num_bytes
        ]
        buffer = min(free, key=len) if free else np.empty(num_bytes + ALIGNMENT_BYTES, np.uint8)
        begin = -buffer.ctypes.data % ALIGNMENT_BYTES
        used = buffer[begin : begin + num_bytes]
        self._buffers = [other for other in self._buffers if other[0] is not buffer]
        self._buffers.append((buffer, weakref.ref(used)))
        return torch.from_numpy(used).view(tensor.dtype).view(tensor.shape)


class Reader:
    """Reads pieces of a checkpoint into parameters, from any number of threads.

    Holds the open files, a pool of buffers for parameters that kernels repack, and a conversion
    buffer per thread. Raises CheckpointError if a file cannot be read or does not fit.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[Path, int] = {}
        self._thread_local = threading.local()
        self._reused = ReusedMemory()
        for path in {tensor.path for tensor in checkpoint.tensors.values()}:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                self.close()
                raise CheckpointError(f"{path} cannot be opened: {error}") from None

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def allocate(
        self, param: Param, pieces: list[Piece], dtype: torch.dtype, device: torch.device
    ) -> Weight:
        """Return an uninitialized parameter, for `jobs` to fill."""
        weight = empty_weight(self._checkpoint, param, pieces, dtype, device)
        if device.type != "cpu" or not is_packed(param.name):
            return weight
        # Short-lived: kernels keep a packed copy instead.
        if isinstance(weight, Quantized):
            return weight.each(self._reused.empty_like)
        return self._reused.empty_like(weight)

    def row_table(self, param: Param, pieces: Sequence[Piece], dtype: torch.dtype) -> Rows:
        """Return a table that stays in the files. It opens them itself."""
        tensors = self._checkpoint.tensors
        shards = [TableShard(_first_row(piece), tensors[piece.source]) for piece in pieces]
        stored = self._checkpoint.stored.get(pieces[0].source)

        def decode_rows(rows: Tensor) -> Tensor:
            if stored is None:
                return rows.view(DTYPES[shards[0].tensor.dtype]).to(dtype)
            raw = read_raw(stored.values, (), lambda tensor, take: rows)
            return dense(decode(stored.values, raw)).to(dtype)

        files = RowFiles(sorted(shards, key=lambda shard: shard.first))
        return RowTable(files, decode_rows)

    def jobs(
        self, piece: Piece, weight: Weight, max_bytes: int | None = None
    ) -> Iterator[Callable[[], int]]:
        """Yield jobs that copy a piece into the parameter `weight`, for any threads in any order.

        Each job returns the number of bytes that it read. A quantized weight, or each expert of it,
        is one job, because its values and scales are decoded together. Only weights of GGUF files
        are split by rows, because their blocks have their own scales.

        max_bytes: bytes per read (default: MAX_READ_BYTES).
        """
        max_bytes = max_bytes or MAX_READ_BYTES
        into = weight[piece.at]
        if piece.source in self._checkpoint.stored:
            parts = _split_experts(piece)
            layout = self._checkpoint.stored[piece.source].format.layout
            if layout == "ggml" and not piece.transposed:
                parts = (few_rows for part, index in parts for few_rows in _split_rows(part, index))
            for part, index in parts:
                yield partial(self._read_quantized, part, into[index], max_bytes)
        else:
            assert isinstance(into, Tensor)
            yield from self._read_jobs(
                self._checkpoint.tensors[piece.source],
                piece.take,
                into.mT if piece.transposed else into,
                max_bytes,
            )

    def _read_jobs(
        self, tensor: TensorInfo, take: Index, into: Tensor, max_bytes: int
    ) -> Iterator[Callable[[], int]]:
        """Yield reads of at most `max_bytes` each that fill `into` from a part of a tensor."""
        max_elements = max(1, max_bytes // DTYPES[tensor.dtype].itemsize)
        for block in blocks_of(tensor.shape, take, max_elements):
            yield partial(self.read, tensor, block, into[block.at])

    @torch.inference_mode()
    def _read_quantized(self, piece: Piece, into: Weight, max_bytes: int) -> int:
        def read(tensor: TensorInfo, take: Index) -> Tensor:
            raw = torch.empty(part_shape(tensor.shape, take), dtype=DTYPES[tensor.dtype])
            for job in self._read_jobs(tensor, take, raw, max_bytes):
                job()
            return raw

        stored = self._checkpoint.stored[piece.source]
        if stored.format.layout == "ggml":
            raw = read_raw(stored.values, piece.take, read)
            if isinstance(into, Quantized) and stored.outer_scale is None:
                decode_into(stored.values, raw, into)
                return _stored_bytes(piece, self._checkpoint)
            blocks = decode(stored.values, raw)
            if stored.outer_scale is not None:
                blocks = blocks.scaled(_outer_scale(stored.outer_scale, piece, read))
            if isinstance(into, Quantized):
                fill(blocks, into)
            else:
                values = dense(blocks)
                into.copy_(values.mT if piece.transposed else values)
                _check_fits(into, stored.values)
        elif isinstance(into, Quantized):
            unpack(stored, piece, into, read)
        else:  # the parameter is not kept quantized
            quantized = _empty_quantized(
                stored.format, piece.taken_shape, into.dtype, torch.device("cpu")
            )
            unpack(stored, piece, quantized, read)
            into.copy_(dequantized(quantized))
            _check_fits(into, stored.values)
        return _stored_bytes(piece, self._checkpoint)

    def check_zero(self, bias: TensorInfo) -> int:
        """Raise CheckpointError unless a bias that the model does not have is zero.

        Returns 0, the number of bytes for the progress report, as the jobs of `jobs` do.
        """
        raw = torch.empty(bias.shape, dtype=DTYPES[bias.dtype])
        for job in self._read_jobs(bias, (), raw, MAX_READ_BYTES):
            job()
        if raw.any():
            raise CheckpointError(
                f"{bias} is not zero, but the model in config.json has no such bias; download "
                "it again"
            )
        return 0

    @torch.inference_mode()  # the mode is per thread: the caller's does not apply here
    def read(self, tensor: TensorInfo, block: Block, into: Tensor) -> int:
        """Fill `into` from a block of a tensor, and return the number of bytes used.

        Thread-safe. Reading and converting release the GIL.
        """
        dtype = DTYPES[tensor.dtype]
        staging = into
        is_direct = block.whole and into.is_contiguous()
        if not is_direct or into.device.type != "cpu" or into.dtype != dtype:
            num_bytes = math.prod(block.shape) * dtype.itemsize
            staging = (
                self._buffer(num_bytes, pinned=into.device.type == "cuda")
                .view(dtype)
                .view(block.shape)
            )
        self._pread_into(tensor, tensor.offset + block.first * dtype.itemsize, staging)
        if staging is not into:
            into.copy_(staging[block.index])
        if dtype != torch.float16:  # values of float16 files fit into any dtype
            _check_fits(into, tensor)
        return into.numel() * dtype.itemsize

    def _buffer(self, num_bytes: int, pinned: bool) -> Tensor:
        """Return the first `num_bytes` of this thread's conversion buffer."""
        buffer: Tensor | None = getattr(self._thread_local, "buffer", None)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = torch.empty(
                max(num_bytes, MAX_READ_BYTES), dtype=torch.uint8, pin_memory=pinned
            )
            self._thread_local.buffer = buffer
        return buffer[:num_bytes]

    def stat(self, path: Path) -> os.stat_result:
        """Return the status of the opened file, even if its path now leads to another file."""
        with CheckpointError.instead_of(OSError, path):
            return os.fstat(self._files[path])

    def _pread_into(self, tensor: TensorInfo, offset: int, into: Tensor) -> None:
        """Fill a contiguous tensor from the bytes of the file from `offset` on."""
        # Not `into.view(-1)`, because that keeps the stride of a single element, and `view(uint8)`
        # needs stride 1.
        flat = into.as_strided((into.numel(),), (1,))
        memory: memoryview = flat.view(torch.uint8).numpy().data
        num_left = len(memory)
        with CheckpointError.instead_of(OSError, f"{tensor.path}: tensor {tensor.name!r}"):
            while num_left:
                num_read = os.preadv(self._files[tensor.path], [memory[-num_left:]], offset)
                if num_read == 0:
                    raise CheckpointError(
                        f"{tensor.path} ended inside tensor {tensor.name!r}: the file was changed "
                        "while it was read; start again when it is complete"
                    )
                offset += num_read
                num_left -= num_read


def _check_fits(into: Tensor, tensor: TensorInfo) -> None:
    if into.dtype == torch.float16 and not torch.isfinite(into).all():
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name!r} has values that float16 cannot hold (65504 "
            "at most); use --dtype bfloat16 or float32"
        )


class Params(UserDict[str, Any]):
    """A load plan's parameters by name, read from the files on access.

    Use it as a context manager. Every access reads the parameter again, so `pop` each one once.
    Values are contiguous tensors of `dtype` (float32, bfloat16 or float16), or `Quantized` if the
    checkpoint is quantized.

    device: of the parameters; on "meta" nothing is read, and nothing checked.
    quantize_to: the kind to which linear layers are quantized that are not quantized in the files.
    progress: called with the bytes read so far and the total, in the accessing thread.
    threads: concurrent reads (default: one per core, from 2 to 16).
    reader: the class that reads the files (loader/dummy.py has another one).

    Raises CheckpointError at once if plan and checkpoint do not match. Raises it on access if a
    file cannot be read, float16 cannot hold a value, or a weight to quantize is not finite.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: LoadPlan,
        dtype: torch.dtype,
        *,
        device: torch.device | str = "cpu",
        quantize_to: QuantizeTo | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        threads: int | None = None,
        reader: type[Reader] = Reader,
    ) -> None:
        super().__init__({param.name: param for param in plan.params})
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = torch.device(device)
        self._quantize_to = quantize_to
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        self._sources = {piece.source for piece in plan.pieces}

        pieces: Iterable[Piece] = plan.pieces
        self._progress = progress
        self._num_bytes_read = 0
        self._total_bytes = 0
        if self._device.type != "meta":  # a model of many experts has thousands of pieces
            check_plan(checkpoint, plan)
            pieces = _in_order_of_files(plan.pieces, checkpoint)
            on_disk = {param.name for param in plan.params if param.on_disk}
            self._total_bytes = sum(
                _stored_bytes(piece, checkpoint)
                for piece in plan.pieces
                if piece.param not in on_disk
            )
        for piece in pieces:
            self._pieces[piece.param].append(piece)
        self._threads = threads or max(2, min(16, os.cpu_count() or 1))
        self._reader_type = reader

    def __enter__(self) -> "Params":
        self._reader = self._reader_type(self._checkpoint)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="load")
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._reader.close()

    def __getitem__(self, name: str) -> Any:
        param = self.data[name]
        return self._read(param) if isinstance(param, Param) else param

    def _read(self, param: Param) -> Any:
        pieces = self._pieces[param.name]
        if param.on_disk:
            return self._reader.row_table(param, pieces, self._dtype)
        weight = self._reader.allocate(param, pieces, self._dtype, self._device)
        is_meta = self._device.type == "meta"
        if not is_meta:
            self._run_jobs(list(self._jobs(pieces, weight)))
        if (
            self._quantize_to is None
            or isinstance(weight, Quantized)
            or not param.quantized_on_load
        ):
            return weight
        quantized, rounding_jobs = quantization_of(
            weight, self._quantize_to, param.name, self._checkpoint.activations
        )
        if not is_meta:
            for _ in self._pool.map(lambda job: job(), rounding_jobs):
                pass  # waits for the job, and raises its error
        return quantized

    def _jobs(self, pieces: list[Piece], weight: Weight) -> Iterator[Callable[[], int]]:
        for piece in pieces:
            yield from self._reader.jobs(piece, weight)
        for piece in pieces:
            stored = self._checkpoint.stored.get(piece.source)
            if stored and stored.bias and stored.bias.name not in self._sources:
                yield partial(self._reader.check_zero, stored.bias)

    def _run_jobs(self, jobs: list[Callable[[], int]]) -> None:
        for num_bytes in self._pool.map(lambda job: job(), jobs):
            self._num_bytes_read += num_bytes
            self._progress(self._num_bytes_read, self._total_bytes)
