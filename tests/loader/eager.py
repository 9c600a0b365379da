"""Load all parameters of a plan at once."""

from __future__ import annotations

from typing import Any

import torch

from moeserve.loader.checkpoint import Checkpoint
from moeserve.loader.load_plan import LoadPlan
from moeserve.loader.weights import Params


def load(
    checkpoint: Checkpoint, plan: LoadPlan, dtype: torch.dtype, **options: Any
) -> dict[str, Any]:
    with Params(checkpoint, plan, dtype, **options) as params:
        return dict(params)
