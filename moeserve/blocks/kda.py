"""Kimi delta attention in numbers: a gated delta net that forgets each element of a key by itself (Kimi-Linear).

D model width, H heads, d their width, K inputs of the convolutions. Decays and output gates are products through a
narrow middle of d elements.

Source: Kimi Linear (arXiv 2510.26692).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.mixer import CacheTensor, divisors
from moeserve.blocks.recurrent import RecurrentMixer, conv_cache, recurrence_cache

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta(RecurrentMixer):
    """A mixer: H heads with a state [d, d] each. conv: inputs of the convolutions, K."""

    num_heads: int
    head_dim: int
    conv: int

    rope = None

    @property
    def possible_tp(self) -> list[int]:
        """Each rank gets equally many heads."""
        return divisors(self.num_heads)

    @property
    def sharing(self) -> str:
        """See `Mixer`."""
        return f"{self.num_heads} recurrent heads"

    @property
    def size(self) -> int:
        """The width of all heads."""
        return self.num_heads * self.head_dim

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """See `Mixer`: the convolutions' inputs, then the state, k, u and s of ops/recurrence.py."""
        heads, width = self.num_heads // tp_size, self.head_dim
        state = recurrence_cache(heads, heads, width, width, decays=width)
        return *conv_cache(3 * heads * width, self.conv), *state

    def products(self, width: int) -> list[tuple[int, int]]:
        """See `Mixer`."""
        up = self.size, self.head_dim
        return [(3 * self.size, width), (2 * self.head_dim + self.num_heads, width), up, up, (width, self.size)]

    def plan(self, plan: WeightPlan, ours: str, theirs: str) -> None:
        """Adds in, narrow, conv, decays, gates, decay, dt_bias, norm and out."""
        tp, rank = plan.world.tp_size, plan.world.tp_rank

        def rows(name: str, count: int) -> tuple[str, int, slice]:
            part = count // tp
            return plan.spell(theirs, f"self_attn.{name}"), count, slice(rank * part, (rank + 1) * part)

        def narrow(name: str) -> tuple[str, int, slice]:
            return plan.spell(theirs, f"self_attn.{name}_proj.weight"), self.head_dim, slice(0, self.head_dim)

        size, d, heads = self.size, self.head_dim, self.num_heads
        plan.stack(ours + "in", [rows(f"{x}_proj.weight", size) for x in "qkv"], plan.width)
        plan.stack(ours + "narrow", [narrow("f_a"), narrow("g_a"), rows("b_proj.weight", heads)], plan.width)
        plan.stack(ours + "conv", [rows(f"{x}_conv1d.weight", size) for x in "qkv"], 1, self.conv, fp32=True)
        plan.stack(ours + "decays", [rows("f_b_proj.weight", size)], d)
        plan.stack(ours + "gates", [rows("g_b_proj.weight", size)], d)
        plan.add(ours + "decay", (1, 1, heads, 1), plan.spell(theirs, "self_attn.A_log"), fp32=True)  # of all ranks
        plan.stack(ours + "dt_bias", [rows("dt_bias", size)], fp32=True)
        plan.add(ours + "norm", (d,), plan.spell(theirs, "self_attn.o_norm.weight"))
        plan.add(ours + "out", (plan.width, size), plan.spell(theirs, "self_attn.o_proj.weight"), sharded=True)
