"""Random weights in place of a checkpoint's, for measuring a model of which only config.json is present."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeserve.loader.checkpoint import Checkpoint
from moeserve.loader.load_plan import LoadPlan, Piece
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.stored import StoredWeight
from moeserve.loader.stored_format import StoredFormat
from moeserve.loader.weights import Reader
from moeserve.ops.quantised import E2M1, Quantised


def imagined(model_dir: Path, plan: LoadPlan, form: StoredFormat | None = None) -> Checkpoint:
    """Returns a checkpoint with all that the plan asks for. form: of its linear layers."""
    tensors, stored = {}, {}
    linear = {param.name for param in plan.params if form and param.quantised_on_load}
    for piece in plan.pieces:
        name, shape = piece.source, (piece.shape, piece.transposed)
        tensors[name] = TensorInfo(name, model_dir, "BF16", piece.shape, 0, 0)
        if form and piece.param in linear:
            values, scales, zeros = form.values_shape(*shape), form.scales_shape(*shape), form.zeros_shape(*shape)
            tensors[name] = TensorInfo(name, model_dir, form.values_dtype, values, 0, 0)
            stored[name] = StoredWeight(
                form,
                tensors[name],
                TensorInfo(f"{name}_scale", model_dir, "F32", scales, 0, 0),
                TensorInfo(f"{name}_zero_point", model_dir, "I32", zeros, 0, 0) if form.zeros else None,
            )
    return Checkpoint(model_dir, tensors, stored)


class RandomReader(Reader):
    """A reader of random numbers, seeded by the tensor's name: the same in every start on a device.

    Vectors lie around 1; products keep their inputs' size, so nothing overflows and routers choose all experts alike.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(Checkpoint(checkpoint.model_dir, {}))

    def jobs(self, piece: Piece, param: Any, limit: int | None = None) -> Iterator[Callable[[], int]]:
        """Yields one job, which fills a piece with random numbers."""
        fill = self._fill_quantised if isinstance(param, Quantised) else self._fill_plain
        yield partial(fill, piece.source, param[piece.at])

    @torch.inference_mode()
    def _fill_plain(self, source: str, part: Tensor) -> int:
        generator = torch.Generator(part.device).manual_seed(zlib.crc32(source.encode()))
        if part.dim() == 1:
            part.uniform_(0.5, 1.5, generator=generator)
        else:
            part.normal_(0.0, part.shape[-1] ** -0.5, generator=generator)
        return 0

    @torch.inference_mode()
    def _fill_quantised(self, source: str, part: Quantised) -> int:
        """Fills values of all sizes that the kind has, with one scale for all."""
        plain = torch.empty(part.shape, device=part.values.device)
        self._fill_plain(source, plain)
        steps, most = {"int8": (32, 127), "fp8": (32, 127), "int4": (3, 7), "fp4": (2, 6)}[part.kind]
        scale = part.shape[-1] ** -0.5 / steps
        plain.div_(scale).clamp_(-most, most)
        if part.kind == "fp4":
            sizes = (
                torch.tensor(E2M1[1:8], device=plain.device) - 0.25
            )  # about where one number is nearer than the next
            part.values.copy_(torch.bucketize(plain.abs(), sizes) + 8 * (plain < 0))
        elif part.kind == "fp8":
            part.values.copy_(plain.to(torch.float8_e4m3fn).view(torch.uint8))
        else:
            part.values.copy_(plain.round_() + (8 if part.kind == "int4" else 0))
        part.scales.fill_(scale)
        if part.zeros is not None:
            part.zeros.fill_(8)
        return 0
