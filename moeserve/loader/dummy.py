"""Random weights instead of a checkpoint's, for measuring a model of which nothing but its config.json is there."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.loader.checkpoint import Checkpoint
from moeserve.loader.plan import Piece, WeightPlan
from moeserve.loader.safetensors_file import TensorInfo
from moeserve.loader.weights import Params, Reader


class DummyParams(Params):
    """As `Params`, of a checkpoint that has what the plan asks for. Vectors lie around 1; products keep their inputs'
    size, so that nothing overflows and routers choose all experts alike. The same in every start on a device."""

    def __init__(self, checkpoint: Checkpoint, plan: WeightPlan, dtype: torch.dtype, **options: Any) -> None:
        tensors = {p.source: TensorInfo(p.source, checkpoint.model_dir, "BF16", p.shape, 0, 0) for p in plan.pieces}
        super().__init__(replace(checkpoint, tensors=tensors), plan, dtype, **options)
        self._reader = _Dice(Checkpoint(checkpoint.model_dir, {}))


class _Dice(Reader):
    """Reads numbers that no file has."""

    def jobs(self, piece: Piece, param: Any, limit: int | None = None) -> Iterator[Callable[[], int]]:
        yield partial(self._throw, piece.source, param[piece.at])

    @torch.inference_mode()
    def _throw(self, source: str, part: Tensor) -> int:
        dice = torch.Generator(part.device).manual_seed(zlib.crc32(source.encode()))
        if part.dim() == 1:
            part.uniform_(0.5, 1.5, generator=dice)
        else:
            part.normal_(0.0, part.shape[-1] ** -0.5, generator=dice)
        return 0
