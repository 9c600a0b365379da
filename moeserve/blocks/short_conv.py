"""The short convolution in numbers: a causal convolution of each channel between two gates (LFM2).

D model width, K inputs of the convolution.

Source: LFM2 Technical Report (arXiv 2511.23404).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.mixer import CacheTensor, divisors
from moeserve.blocks.recurrent import RecurrentMixer, conv_cache

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv(RecurrentMixer):
    """A mixer: D channels, each convolved over its last K inputs. conv: K. bias: of all three steps."""

    channels: int
    conv: int
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
        """See `Mixer`: the convolution's inputs."""
        return conv_cache(self.channels // tp_size, self.conv)

    def products(self, width: int) -> list[tuple[int, int]]:
        """See `Mixer`."""
        return [(3 * self.channels, width), (width, self.channels)]

    def plan(self, plan: WeightPlan, ours: str, theirs: str) -> None:
        """Adds in, conv and out with their biases."""
        part = plan.rows(self.channels)

        def rows(name: str) -> tuple[str, int, slice]:
            return plan.spell(theirs, f"conv.{name}"), self.channels, part

        for ending, width, conv in (("weight", (plan.width,), (1, self.conv)), ("bias", (), ()))[: 1 + self.bias]:
            mine = "" if ending == "weight" else "_bias"
            plan.stack(f"{ours}in{mine}", [rows(f"in_proj.{ending}")] * 3, *width)
            plan.stack(f"{ours}conv{mine}", [rows(f"conv.{ending}")], *conv, fp32=True)
        plan.add(ours + "out", (plan.width, self.channels), plan.spell(theirs, "conv.out_proj.weight"), sharded=True)
        if self.bias:
            plan.add(ours + "out_bias", (plan.width,), plan.spell(theirs, "conv.out_proj.bias"), sharded=True)
