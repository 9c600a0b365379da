"""From a model directory to a model on a device: the loader reads, the family shapes, the ops table computes."""

from __future__ import annotations

from pathlib import Path

import torch

from moeserve.config import Config
from moeserve.loader.spec import ModelSpec
from moeserve.runner.base import Progress
from moeserve.runner.model import Model


def load_model(spec: ModelSpec, model_dir: Path, device: torch.device, dtype: torch.dtype, progress: Progress) -> Model:
    raise NotImplementedError


def workspace_of(spec: ModelSpec, config: Config, dtype: torch.dtype) -> int:
    raise NotImplementedError
