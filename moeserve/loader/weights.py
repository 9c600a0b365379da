"""Carries out a load plan: bytes go from the files straight into the parameters, many ranges at a
time.

A range whose dtype is already right is read by `preadv` into the parameter itself; any other range
passes through a small buffer per thread. A parameter is read when it is asked for, so memory holds
what was made of earlier parameters, and a few buffers, used again and again. Nothing is mapped: a
file that shrinks meanwhile is an error, not a crash. Headers and plan are compared before the first
byte is allocated.
"""

import math
import os
import threading
import weakref
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterator
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
from moeserve.loader.gguf_quants import dense, fill, read_blocks
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
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored_format import StoredFormat, common_format
from moeserve.loader.unpack import unpack
from moeserve.ops.quantised import PART, Asked, Quantised, Weight, dequantised, quantisation_of

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
    "F8_E4M3": torch.uint8,
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
    "I32": torch.int32,
}
ALIGNED = 64  # bytes, as torch's own tensors are: libraries choose code by it
READ_BYTES = (
    8 * 2**20
)  # large enough that calls cost nothing, small enough to share out among threads


def empty_weight(
    checkpoint: Checkpoint,
    param: Param,
    pieces: list[Piece],
    dtype: torch.dtype,
    device: torch.device,
) -> Weight:
    """Returns uninitialised memory for a parameter in the format of the files."""
    form = format_of(checkpoint, param, pieces)
    if form is None:
        return torch.empty(param.shape, dtype=torch.float32 if param.fp32 else dtype, device=device)
    empty = _empty_stored(form, param.shape, dtype, device)
    return replace(empty, activations=form.rows_as(checkpoint.activations))


def format_of(checkpoint: Checkpoint, param: Param, pieces: list[Piece]) -> StoredFormat | None:
    """Returns the format that a parameter has from the files; None if it is not quantised."""
    stored = [checkpoint.stored.get(piece.source) for piece in pieces]
    forms = [weight.form if weight else None for weight in stored]
    form = common_format(forms, is_packed(param.name), checkpoint.activations)
    if (
        form
        and form.layout == "ggml"
        and checkpoint.obstacle(form.kind, form.group, param.shape[-1])
    ):
        return None
    return None if param.widened else form


def _empty_stored(
    form: StoredFormat, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Quantised:
    group = form.group or (
        -(-shape[-1] // 8) * 8 if form.kind == "int4" else 0
    )  # 4 bits always have groups
    empty = Quantised.empty(form.kind, group, form.zeros, dtype, shape, device)
    mins = torch.empty_like(empty.scales) if form.mins else None
    supers = None
    if form.supers:
        d = torch.empty(*shape[:-1], shape[-1] // 256, device=device)
        supers = d, torch.empty_like(d) if form.mins else None
    scales = DTYPES[form.scales]
    return replace(
        empty, rows=form.rows, mins=mins, supers=supers, scale_dtype=scales, bits=form.bits
    )


def _num_bytes(piece: Piece, checkpoint: Checkpoint) -> int:
    return (
        math.prod(piece.taken)
        * checkpoint.parts(piece.source)[0].num_bytes
        // (math.prod(piece.shape) or 1)
    )


def _by_rows(piece: Piece, index: Index) -> Iterator[tuple[Piece, Index]]:
    """Yields pieces for a few rows each of one for a matrix whose rows are whole, and where they
    belong.
    """
    lead = len(piece.shape) - 2
    rows = range(piece.shape[lead])[piece.take[lead] if len(piece.take) > lead else slice(None)]
    if isinstance(rows, int):
        yield piece, index
        return
    count = max(1, 4 * PART // piece.shape[-1])  # of bytes or less, and a part takes 25 calls
    for i in range(0, len(rows), count):
        part = rows[i : i + count]
        take = (*piece.take[:lead], slice(part.start, part.stop, part.step))
        yield replace(piece, take=take), (*index, slice(i, i + len(part)))


def _by_experts(piece: Piece) -> Iterator[tuple[Piece, Index]]:
    """Yields the pieces for the experts of a piece that takes several, and where in its target they
    belong.
    """
    experts = piece.take[0] if piece.take else slice(None)
    if len(piece.shape) < 3 or isinstance(experts, int):
        yield piece, ()
        return
    for i, expert in enumerate(range(piece.shape[0])[experts]):
        yield replace(piece, take=(expert, *piece.take[1:])), (i,)


class ReusedMemory:
    """Memory for tensors that live one after the other: new pages take longer than what is read
    into them.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.uint8], weakref.ref[Any]]] = []  # and who has it now

    def like(self, tensor: Tensor) -> Tensor:
        """Returns an uninitialised tensor such as this one, where another was of which no view is
        left.
        """
        size = tensor.nbytes
        free = [
            part
            for part, user in self._parts
            if user() is None and size <= len(part) - ALIGNED <= 2 * size
        ]
        memory = min(free, key=len) if free else np.empty(size + ALIGNED, np.uint8)
        begin = -memory.ctypes.data % ALIGNED
        used = memory[begin : begin + size]
        self._parts = [other for other in self._parts if other[0] is not memory]
        self._parts.append((memory, weakref.ref(used)))
        return torch.from_numpy(used).view(tensor.dtype).view(tensor.shape)


class Reader:
    """Open files, memory for what is packed once it is read, and one buffer per thread for what has
    to be converted on its way. Raises CheckpointError."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[Path, int] = {}
        self._local = threading.local()
        self._reused = ReusedMemory()
        for path in {tensor.path for tensor in checkpoint.tensors.values()}:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                self.close()
                raise CheckpointError(f"{path} cannot be opened: {error}") from None

    def close(self) -> None:
        """Closes the files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def memory(
        self, param: Param, pieces: list[Piece], dtype: torch.dtype, device: torch.device
    ) -> Weight:
        """Returns what `jobs` fill."""
        weight = empty_weight(self._checkpoint, param, pieces, dtype, device)
        if isinstance(weight, Tensor) and device.type == "cpu" and is_packed(param.name):
            return self._reused.like(weight)  # short-lived: kernels keep it packed
        return weight

    def jobs(
        self, piece: Piece, param: Weight, limit: int | None = None
    ) -> Iterator[Callable[[], int]]:
        """Yields calls that carry out a piece, for any threads in any order; each returns the bytes
        that it read.

        limit: of bytes in one read (default: READ_BYTES). A quantised weight, or one expert's of
        many, is one job.
        """
        limit = limit or READ_BYTES
        if piece.source in self._checkpoint.stored:
            into = param[piece.at]
            parts = _by_experts(piece)
            if self._checkpoint.stored[piece.source].form.layout == "ggml" and not piece.transposed:
                parts = (small for part, index in parts for small in _by_rows(part, index))
            for part, index in parts:
                yield partial(self._carry_out_stored, part, into[index], limit)
        else:
            assert isinstance(param, Tensor)
            target = param[piece.at].mT if piece.transposed else param[piece.at]
            yield from self._reads(
                self._checkpoint.tensors[piece.source], piece.take, target, limit
            )

    def _reads(
        self, tensor: TensorInfo, take: Index, into: Tensor, limit: int
    ) -> Iterator[Callable[[], int]]:
        """Yield reads of at most `limit` bytes each that fill `into` from a part of a tensor."""
        for block in blocks_of(tensor.shape, take, max(1, limit // DTYPES[tensor.dtype].itemsize)):
            yield partial(self.read, tensor, block, into[block.at])

    @torch.inference_mode()
    def _carry_out_stored(self, piece: Piece, into: Weight, limit: int) -> int:
        def read(tensor: TensorInfo, take: Index) -> Tensor:
            """Returns a part of a stored tensor."""
            raw = torch.empty(part_shape(tensor.shape, take), dtype=DTYPES[tensor.dtype])
            for job in self._reads(tensor, take, raw, limit):
                job()
            return raw

        stored = self._checkpoint.stored[piece.source]
        if stored.form.layout == "ggml":
            blocks = read_blocks(stored.values, piece.take, read)
            if isinstance(into, Quantised):
                fill(blocks, into)
            else:
                into.copy_(dense(blocks).mT if piece.transposed else dense(blocks))
                _check_fits(into, stored.values)
        elif isinstance(into, Quantised):
            unpack(stored, piece, into, read)
        else:
            narrow = _empty_stored(stored.form, piece.taken, into.dtype, torch.device("cpu"))
            unpack(stored, piece, narrow, read)
            into.copy_(dequantised(narrow))
            _check_fits(into, stored.values)
        return _num_bytes(piece, self._checkpoint)

    def check_zero(self, bias: TensorInfo) -> int:
        """Raises CheckpointError if a bias that the model does not have is not zero."""
        raw = torch.empty(bias.shape, dtype=DTYPES[bias.dtype])
        for job in self._reads(bias, (), raw, READ_BYTES):
            job()
        if raw.any():
            raise CheckpointError(
                f"{bias} is not zero, and the model in config.json has no such bias; download "
                "it again"
            )
        return 0

    @torch.inference_mode()  # per thread: the caller's mode does not reach this one
    def read(self, tensor: TensorInfo, block: Block, into: Tensor) -> int:
        """Fills `into` from a block; returns the bytes taken. Any thread; reading and converting
        drop the GIL.
        """
        dtype = DTYPES[tensor.dtype]
        target = into
        straight = block.whole and into.is_contiguous()
        if not straight or into.device.type != "cpu" or into.dtype != dtype:
            num_bytes = math.prod(block.shape) * dtype.itemsize
            target = (
                self._buffer(num_bytes, pinned=into.device.type == "cuda")
                .view(dtype)
                .view(block.shape)
            )
        self._fill(tensor, tensor.offset + block.first * dtype.itemsize, target)
        if target is not into:
            into.copy_(target[block.index])
        if dtype != torch.float16:
            _check_fits(into, tensor)
        return into.numel() * dtype.itemsize

    def _buffer(self, num_bytes: int, pinned: bool) -> Tensor:
        have: Tensor | None = getattr(self._local, "buffer", None)
        if have is None or have.numel() < num_bytes:
            have = torch.empty(max(num_bytes, READ_BYTES), dtype=torch.uint8, pin_memory=pinned)
            self._local.buffer = have
        return have[:num_bytes]

    def stat(self, path: Path) -> os.stat_result:
        """Returns the status of the file that was opened, whatever its name means by now."""
        with CheckpointError.instead_of(OSError, path):
            return os.fstat(self._files[path])

    def _fill(self, tensor: TensorInfo, offset: int, target: Tensor) -> None:
        memory: memoryview = (
            target.as_strided((target.numel(),), (1,)).view(torch.uint8).numpy().data
        )
        left = len(memory)
        with CheckpointError.instead_of(OSError, f"{tensor.path}: tensor {tensor.name!r}"):
            while left:
                count = os.preadv(self._files[tensor.path], [memory[-left:]], offset)
                if count == 0:
                    raise CheckpointError(
                        f"{tensor.path} ended inside tensor {tensor.name!r}: the file was "
                        "changed while it "
                        "was read; start again when it is complete"
                    )
                offset = offset + count
                left = left - count


def _check_fits(into: Tensor, tensor: TensorInfo) -> None:
    if into.dtype == torch.float16 and not torch.isfinite(into).all():
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name!r} has values that float16 cannot hold (65504 "
            "at most); use "
            "--dtype bfloat16 or float32"
        )


class Params(UserDict[str, Any]):
    """The plan's parameters by name, each read anew whenever it is asked for: `pop` them. Use it as
    a context.

    Values are contiguous tensors of `dtype` (float32, bfloat16 or float16) on `device`, or
    `Quantised`: where the files have them so, and with `asked` the other linear layers. On "meta"
    they have no values, and nothing is read. progress is called with the bytes done and in all, in
    the thread that asks. threads: concurrent reads (default: one per core, 2 to 16). reader: of the
    files.

    Raises CheckpointError if plan and checkpoint do not fit each other, and when a parameter is
    asked for: if a file cannot be read, float16 cannot hold a value, or a weight that is to be
    quantised is not finite.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: LoadPlan,
        dtype: torch.dtype,
        *,
        device: torch.device | str = "cpu",
        asked: Asked | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        threads: int | None = None,
        reader: type[Reader] = Reader,
    ) -> None:
        check_plan(checkpoint, plan)
        super().__init__({param.name: param for param in plan.params})
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = torch.device(device)
        self._asked = asked
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        self._sources = {piece.source for piece in plan.pieces}
        first = {piece.source: checkpoint.parts(piece.source)[0] for piece in plan.pieces}
        for piece in sorted(
            plan.pieces, key=lambda piece: (first[piece.source].path, first[piece.source].offset)
        ):
            self._pieces[piece.param].append(piece)
        self._progress = progress
        self._done = 0
        self._total = sum(_num_bytes(piece, checkpoint) for piece in plan.pieces)
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

    def _read(self, param: Param) -> Weight:
        pieces = self._pieces[param.name]
        weight = self._reader.memory(param, pieces, self._dtype, self._device)
        is_read = self._device.type != "meta"
        jobs = (
            [job for piece in pieces for job in self._reader.jobs(piece, weight)] if is_read else []
        )
        stored = (self._checkpoint.stored.get(piece.source) for piece in pieces if is_read)
        biases = (weight.bias for weight in stored if weight and weight.bias)
        jobs += [
            partial(self._reader.check_zero, bias)
            for bias in biases
            if bias.name not in self._sources
        ]
        for num_bytes in self._pool.map(lambda job: job(), jobs):
            self._done += num_bytes
            self._progress(self._done, self._total)
        if self._asked is None or isinstance(weight, Quantised) or not param.quantised_on_load:
            return weight
        quantised, rounding = quantisation_of(
            weight, self._asked, param.name, self._checkpoint.activations
        )
        for _ in self._pool.map(lambda job: job(), rounding if is_read else []):
            pass
        return quantised
