"""The common part of recurrent layers: tile plans, output projection, L2 norms."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.mixer import Prepare
from moeserve.ops.elementwise import exp
from moeserve.ops.inputs import Positions, RowContext, StepInputs
from moeserve.ops.table import Ops

UNIT_EPS = 1e-6  # epsilon of the L2 norms of queries and keys


@dataclass(frozen=True, slots=True, eq=False)
class PrepareTiles:
    """Makes the plan of tiles that all recurrent layers share."""

    ops: Ops
    group: int

    def __call__(self, step: StepInputs, positions: Positions) -> Any:
        """Return the argument `plan` of `ops.causal_conv` and `ops.recurrence`."""
        return self.ops.plan_tiles(step.groups[self.group], step)


class RecurrentLayer:
    """Base class of recurrent mixers."""

    def __init__(self, build: Builder, name: str, group: int) -> None:
        """Build the common parts. name: prefix of the parameters. group: the layer's KV group."""
        self.ops = build.ops
        self.tp = build.tp
        self.eps = build.eps  # epsilon of norms
        self.prepare: Prepare = build.shared(
            ("tiles", group), partial(PrepareTiles, build.ops, group)
        )
        self.out = build.columns(name + "out", build.width)  # results of all ranks -> D
        self.out_order: Tensor | None = None  # the order in which `out` takes them; None: as is

    def project_back(self, y_TN: Tensor, context: RowContext) -> Tensor:
        """Return the block's output [T, D] from this rank's results."""
        all_TN = self.tp.gather_columns(y_TN, context.channel)
        if self.out_order is not None:
            all_TN = all_TN.index_select(1, self.out_order)
        return self.out(all_TN, context)


def decay_factors(tensor: Tensor, name: str) -> Tensor:
    """Return the factors A of decays, below 0, from a checkpoint's tensor of this name."""
    return -exp(tensor) if name == "A_log" else tensor


def unit_weights(dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return fp32 weights [d] for `unit_heads`: of queries (scaled by d ** -0.5), and of keys."""
    length = torch.full((dim,), dim**-0.5, device=device)
    return length * dim**-0.5, length


def unit_heads(ops: Ops, x_TC: Tensor, weight_d: Tensor) -> Tensor:
    """Return L2-normed heads [T, H, d]: an RMS norm whose weights cancel its factor of sqrt(d)."""
    dim = len(weight_d)
    return ops.rms_norm(x_TC.reshape(-1, dim), weight_d, UNIT_EPS / dim).view(len(x_TC), -1, dim)
