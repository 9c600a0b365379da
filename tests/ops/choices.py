"""The sets of kernels that a test can request by name."""

from __future__ import annotations

import pytest
import torch

from moeserve.errors import ConfigError
from moeserve.ops.pick import pick_ops
from moeserve.ops.table import Choice, Ops

CHOICES: tuple[Choice, ...] = ("native", "torch")


def ops_of(dtype: torch.dtype, kernels: Choice) -> Ops:
    """Return the ops; skip the test if this machine lacks them."""
    try:
        return pick_ops("cpu", dtype, kernels)
    except ConfigError as error:
        pytest.skip(str(error))
