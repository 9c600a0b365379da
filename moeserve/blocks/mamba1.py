"""Mamba in numbers: a selective scan behind a short convolution, with norms of what it selects by (Jamba).

D model width, C channels, N numbers of a channel's state, R rank of the steps, K inputs of the convolution.

Source: Mamba (arXiv 2312.00752), Jamba (2403.19887).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.mixer import CacheTensor, divisors
from moeserve.blocks.recurrent import RecurrentMixer, conv_cache

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1(RecurrentMixer):
    """A mixer: C channels with a state [N] each.

    rank: of the product that gives each channel its step. conv: inputs of the convolution, K. conv_bias: of it. bias:
    of the products in and out.
    """

    channels: int
    state: int
    rank: int
    conv: int
    conv_bias: bool = True
    bias: bool = False

    rope = None

    @property
    def possible_tp(self) -> list[int]:
        """Each rank gets equally many channels."""
        return divisors(self.channels)

    @property
    def sharing(self) -> str:
        """See `Mixer`."""
        return f"{self.channels} channels"

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """See `Mixer`: the convolution's inputs, then the state, x, dt and B of ops/selective_scan.py."""
        local = self.channels // tp_size
        return (
            *conv_cache(local, self.conv),
            CacheTensor("state", self.state, local, per_tile=True),
            CacheTensor("x", 1, local),
            CacheTensor("dt", 1, local),
            CacheTensor("b", 1, self.state),
        )

    def products(self, width: int) -> list[tuple[int, int]]:
        """See `Mixer`."""
        channels = self.channels
        selected = self.rank + 2 * self.state
        return [(2 * channels, width), (selected, channels), (channels, self.rank), (width, channels)]

    def plan(self, plan: WeightPlan, ours: str, theirs: str) -> None:
        """Adds in, conv, select, dt, their biases, decay, skip, the norms of dt, B and C, and out."""
        part = plan.rows(self.channels)

        def rows(name: str) -> tuple[str, int, slice]:
            return plan.spell(theirs, f"mamba.{name}"), self.channels, part

        plan.stack(ours + "in", [rows("in_proj.weight")] * 2, plan.width)
        plan.stack(ours + "conv", [rows("conv1d.weight")], 1, self.conv, fp32=True)
        selected = self.rank + 2 * self.state
        plan.add(ours + "select", (selected, self.channels), plan.spell(theirs, "mamba.x_proj.weight"))
        plan.stack(ours + "dt", [rows("dt_proj.weight")], self.rank)
        plan.stack(ours + "dt_shift", [rows("dt_proj.bias")], fp32=True)
        plan.stack(ours + "decay", [rows("A_log")], self.state, fp32=True)
        plan.stack(ours + "skip", [rows("D")], fp32=True)
        for name, size in (("dt", self.rank), ("b", self.state), ("c", self.state)):
            plan.add(f"{ours}{name}_norm", (size,), plan.spell(theirs, f"mamba.{name}_layernorm.weight"))
        if self.conv_bias:
            plan.stack(ours + "conv_bias", [rows("conv1d.bias")], fp32=True)
        plan.add(ours + "out", (plan.width, self.channels), plan.spell(theirs, "mamba.out_proj.weight"), sharded=True)
        if self.bias:
            plan.stack(ours + "in_bias", [rows("in_proj.bias")] * 2)
            plan.add(ours + "out_bias", (plan.width,), plan.spell(theirs, "mamba.out_proj.bias"), sharded=True)
