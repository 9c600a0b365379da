"""From a model directory to a model on a device: the loader reads, the family shapes, the ops table computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from moeserve.loader import weights
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.spec import ModelSpec
from moeserve.models.registry import family
from moeserve.ops.table import pick_ops
from moeserve.runner.model import Model

Progress = Callable[[str, int], None]  # a human's word for the phase, percent of the whole
READ_FROM, READ_TO = 5, 85  # percent of start-up that reading the weights takes


def load_model(
    spec: ModelSpec,
    model_dir: Path,
    device: torch.device,
    dtype: torch.dtype,
    max_tokens: int,
    progress: Progress,
) -> Model:
    """max_tokens: tokens of the largest step. Raises ConfigError or CheckpointError with what is wrong and where."""
    checkpoint = open_checkpoint(model_dir)
    of = family(spec)
    plan = of.weight_plan(spec, checkpoint.tensors.keys())
    ops = pick_ops(device, dtype)
    last = READ_FROM

    def read(done: int, total: int) -> None:
        nonlocal last
        percent = READ_FROM + (READ_TO - READ_FROM) * done // max(1, total)
        if percent > last:
            last = percent
            progress("reading the weights", percent)

    params = weights.load(checkpoint, plan, dtype, device=device, progress=read)
    progress("packing the weights for their kernels", READ_TO)
    return of.build(spec, params, ops, dtype, max_tokens=max_tokens)
