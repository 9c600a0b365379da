"""Reads single experts from a checkpoint while the model serves, when an expert moves to this rank.

Weights always come from the files, so an expert has the same bits on every rank, however often it
has moved. Files may have changed since the start, therefore:

- Files are opened once, at the start. A file that replaces one under its name is not read.
- Size and modification time of a file must be unchanged before and after each expert is read.
- Each expert is read twice, and both reads must be bitwise equal. This detects a write in between
  that kept size and time (through a mapping of the file, for example), and faulty memory.
- The CRC-32 of each expert is kept. If the expert comes back to this rank, it must be the same.

Damage before the first read of an expert is not detected: safetensors files have no checksums.
"""

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import Checkpoint, fingerprint
from moeserve.loader.load_plan import LoadPlan, Param
from moeserve.loader.weights import Reader, empty_weight
from moeserve.ops.quantized import Quantized, QuantizeTo, Weight, quantization_of

CPU = torch.device("cpu")
READ_BYTES = 2**20  # small, so that this background work yields to the model often
# Called after each small piece of work with the number of bytes read; may sleep, or raise to end it
OnProgress = Callable[[int], None]


@dataclass(eq=False, repr=False)
class ExpertFiles:
    """The experts in a checkpoint's files.

    Create it before the model is loaded, and call `check` afterwards: then both read the same
    files.
    """

    checkpoint: Checkpoint
    # (MoE layer, expert) -> load plan of the parameters w13 [1, 2I, D] and w2 [1, D, I]
    plan: Callable[[int, int], LoadPlan]
    dtype: torch.dtype
    device: torch.device = CPU
    quantize_to: QuantizeTo | None = None  # quantize weights that are not quantized in the files

    def __post_init__(self) -> None:
        self._reader = Reader(self.checkpoint)
        self._paths = {tensor.path for tensor in self.checkpoint.tensors.values()}
        # path -> (size, modification time) at the start
        self._versions = {path: self._version_of(path) for path in self._paths}
        self._crcs: dict[tuple[int, int], int] = {}  # (layer, expert) -> CRC-32

    def check(self) -> None:
        """Raise CheckpointError if a file has been changed or replaced since the constructor."""
        self._check_unchanged(self._paths)
        for path in self._paths:
            with CheckpointError.instead_of(OSError, path, f"; {_CHANGED}"):
                status = path.stat()
            if not os.path.samestat(status, self._reader.stat(path)):
                raise CheckpointError(
                    f"{path} was replaced while the model was loaded; start again"
                )

    @torch.inference_mode()
    def read(
        self, layer: int, expert: int, on_progress: OnProgress = lambda num_bytes: None
    ) -> tuple[Any, ...]:
        """Return an expert's w13 [2I, D], w2 [D, I] and biases if any, in the model's format.

        Not thread-safe. Raises CheckpointError if a file cannot be read or has changed.
        """
        plan = self.plan(layer, expert)
        name = f"expert {expert} of MoE layer {layer}"
        paths = {part.path for piece in plan.pieces for part in self.checkpoint.parts(piece.source)}
        self._check_unchanged(paths)
        first_read = self._read_weights(plan, on_progress)
        second_read = self._read_weights(plan, on_progress)
        self._check_unchanged(paths)
        crc = 0
        for first, second in zip(first_read, second_read, strict=True):
            for chunk, same_chunk in zip(_chunks(first), _chunks(second), strict=True):
                if not torch.equal(chunk, same_chunk):
                    raise CheckpointError(f"two reads of {name} differ; {_CHANGED}")
                crc = zlib.crc32(same_chunk.cpu().numpy().data, crc)
                on_progress(0)
        if self._crcs.setdefault((layer, expert), crc) != crc:
            earlier_crc = self._crcs[layer, expert]
            raise CheckpointError(
                f"{name} has CRC-32 {crc:08x}, earlier {earlier_crc:08x}; {_CHANGED}"
            )
        return tuple(
            self._quantize(param, weight, name, on_progress)[0]
            for param, weight in zip(plan.params, first_read, strict=True)
        )

    def fingerprint(self) -> str:
        """Return the checkpoint's fingerprint. Call `check` before. Raises CheckpointError."""
        return fingerprint(self.checkpoint)

    def identity(self) -> str:
        """Return the fingerprint, with size and modification time of each opened file."""
        versions = sorted((path.name, *version) for path, version in self._versions.items())
        return repr((self.fingerprint(), versions))

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def _read_weights(self, plan: LoadPlan, on_progress: OnProgress) -> list[Weight]:
        weights = []
        for param in plan.params:
            pieces = [piece for piece in plan.pieces if piece.param == param.name]
            weights.append(empty_weight(self.checkpoint, param, pieces, self.dtype, self.device))
            for piece in pieces:
                for job in self._reader.jobs(piece, weights[-1], READ_BYTES):
                    on_progress(job())
        return weights

    def _quantize(self, param: Param, weight: Weight, name: str, on_progress: OnProgress) -> Weight:
        """Return the weight, quantized if the setting `--quantization` applies to it."""
        if self.quantize_to is None or isinstance(weight, Quantized) or not param.quantized_on_load:
            return weight
        quantized, jobs = quantization_of(
            weight, self.quantize_to, name, self.checkpoint.activations
        )
        for job in jobs:
            job()
            on_progress(0)
        return quantized

    def _version_of(self, path: Path) -> tuple[int, int]:
        """Return size and modification time of a file, to detect changes."""
        status = self._reader.stat(path)
        return status.st_size, status.st_mtime_ns

    def _check_unchanged(self, paths: set[Path]) -> None:
        for path in paths:
            if self._version_of(path) != self._versions[path]:
                raise CheckpointError(
                    f"{path} has changed since the start (size or modification time); {_CHANGED}"
                )


_CHANGED = "the checkpoint changed while the model serves: restore the file, or start again"


def _chunks(weight: Weight) -> Iterator[Tensor]:
    """Yield a weight as small chunks of bytes. As floats, NaN would not be equal to itself."""
    for part in weight.parts if isinstance(weight, Quantized) else (weight,):
        yield from torch.split(part.view(-1).view(torch.uint8), READ_BYTES)
