"""Reads single experts of a checkpoint while the model serves, for ranks that take over an expert
from another rank.

The bytes are the file's own, so an expert is the same wherever it is and however often it moved.
The checks:

- The files are opened once, at start; a file that replaces one under its name later is not read.
- Size and modification time of a file must be those of the start, before and after each expert is
  read.
- Each expert is read twice, and both reads must agree to the bit. This finds a write in between
  that kept size and time (a file mapped by its writer, say), and a fault of the memory that
  received the bytes.
- Its CRC-32 is kept: whenever the expert comes back to this rank, it must be the same.

Damage from before the first read of an expert is not found: safetensors files carry no checksums.
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
from moeserve.ops.quantised import Quantised, QuantizeTo, Weight, quantisation_of

CPU = torch.device("cpu")
READ_BYTES = 2**20  # small: between two reads the background gives way to the model
Work = Callable[
    [int], None
]  # called after each little piece of work with the bytes it read; may sleep, or raise


@dataclass(eq=False, repr=False)
class ExpertFiles:
    """The experts in a checkpoint's files.

    plan(layer, expert): the load plan of that expert of that MoE layer, parameters w13 [1, 2I, D]
    and w2 [1, D, I]. Create the object before the model is loaded and call `check` after, so that
    both certainly read the same files.
    """

    checkpoint: Checkpoint
    plan: Callable[[int, int], LoadPlan]
    dtype: torch.dtype
    device: torch.device = CPU
    asked: QuantizeTo | None = None

    def __post_init__(self) -> None:
        self._reader = Reader(self.checkpoint)
        self._paths = {tensor.path for tensor in self.checkpoint.tensors.values()}
        self._marks = {path: self._mark(path) for path in self._paths}
        self._crcs: dict[tuple[int, int], int] = {}

    def check(self) -> None:
        """Raises CheckpointError if a file was changed, or replaced under its name, since this
        object was created.
        """
        self._check_marks(self._paths)
        for path in self._paths:
            with CheckpointError.instead_of(OSError, path, f"; {_CHANGED}"):
                now = path.stat()
            if not os.path.samestat(now, self._reader.stat(path)):
                raise CheckpointError(
                    f"{path} was replaced while the model was loaded: start again"
                )

    @torch.inference_mode()
    def read(self, layer: int, expert: int, work: Work = lambda num_bytes: None) -> tuple[Any, ...]:
        """Returns an expert's w13 [2I, D] and w2 [D, I], and its biases if it has any, as the model
        has them.

        Raises CheckpointError when a file cannot be read or is not what it was. One thread at a
        time.
        """
        plan = self.plan(layer, expert)
        name = f"expert {expert} of MoE layer {layer}"
        paths = {part.path for piece in plan.pieces for part in self.checkpoint.parts(piece.source)}
        self._check_marks(paths)
        once = self._fill(plan, work)
        twice = self._fill(plan, work)
        self._check_marks(paths)
        crc = 0
        for a, b in zip(once, twice, strict=True):
            for left, right in zip(_parts(a), _parts(b), strict=True):
                if not torch.equal(left, right):
                    raise CheckpointError(
                        f"{name} was not the same when it was read again; {_CHANGED}"
                    )
                crc = zlib.crc32(right.cpu().numpy().data, crc)
                work(0)
        if self._crcs.setdefault((layer, expert), crc) != crc:
            known = self._crcs[layer, expert]
            raise CheckpointError(f"{name} has CRC-32 {crc:08x}, earlier {known:08x}; {_CHANGED}")
        params = zip(plan.params, once, strict=True)
        return tuple(self._quantised(param, weight, name, work)[0] for param, weight in params)

    def fingerprint(self) -> str:
        """Returns the checkpoint's fingerprint; call `check` before. Raises CheckpointError."""
        return fingerprint(self.checkpoint)

    def identity(self) -> str:
        """Returns the fingerprint with size and modification time of each file as it was opened."""
        return repr(
            (self.fingerprint(), sorted((path.name, *mark) for path, mark in self._marks.items()))
        )

    def close(self) -> None:
        """Closes the files."""
        self._reader.close()

    def _fill(self, plan: LoadPlan, work: Work) -> list[Weight]:
        weights = []
        for param in plan.params:
            pieces = [piece for piece in plan.pieces if piece.param == param.name]
            weights.append(empty_weight(self.checkpoint, param, pieces, self.dtype, self.device))
            for piece in pieces:
                for job in self._reader.jobs(piece, weights[-1], READ_BYTES):
                    work(job())
        return weights

    def _quantised(self, param: Param, weight: Weight, name: str, work: Work) -> Weight:
        if self.asked is None or isinstance(weight, Quantised) or not param.quantised_on_load:
            return weight
        quantised, jobs = quantisation_of(weight, self.asked, name, self.checkpoint.activations)
        for job in jobs:
            job()
            work(0)
        return quantised

    def _mark(self, path: Path) -> tuple[int, int]:
        status = self._reader.stat(path)
        return status.st_size, status.st_mtime_ns

    def _check_marks(self, paths: set[Path]) -> None:
        for path in paths:
            if self._mark(path) != self._marks[path]:
                raise CheckpointError(
                    f"{path} is not what it was at start (size or time of change); {_CHANGED}"
                )


_CHANGED = "the checkpoint was written to while the model serves: restore the file, or start again"


def _parts(weight: Weight) -> Iterator[Tensor]:
    """Yield a weight in small pieces of bytes, since NaN does not equal itself."""
    for part in weight.parts if isinstance(weight, Quantised) else (weight,):
        yield from torch.split(part.view(-1).view(torch.uint8), READ_BYTES)
