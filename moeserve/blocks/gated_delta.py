"""The gated delta net in numbers: a recurrence with the delta rule behind a short convolution (Qwen3-Next, Qwen3.5).

D model width, G heads of queries and keys, H of values, d and v their widths, K inputs of the convolution.

Source: arXiv 2412.06464.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.mixer import CacheTensor, divisors
from moeserve.blocks.recurrent import RecurrentMixer, conv_cache, recurrence_cache

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta(RecurrentMixer):
    """A mixer: H heads with a state [d, v] each.

    conv: inputs of the convolution, K. by_head: whether the checkpoint has the parts of each query head side by side,
    in in_proj_qkvz and in_proj_ba (Qwen3-Next), or a tensor per part (Qwen3.5).
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv: int
    by_head: bool

    rope = None

    @property
    def possible_tp(self) -> list[int]:
        """Each rank gets equally many query heads, and the value heads that these serve."""
        return divisors(self.num_k_heads)

    @property
    def sharing(self) -> str:
        """See `Mixer`."""
        return f"{self.num_k_heads} recurrent heads"

    def local(self, tp_size: int) -> tuple[int, int, int, int]:
        """Returns one rank's query heads, value heads, and columns of queries and keys together and of values."""
        keys, values = self.num_k_heads // tp_size, self.num_v_heads // tp_size
        return keys, values, 2 * keys * self.k_dim, values * self.v_dim

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """See `Mixer`: the convolution's inputs, then the state, k, u and s of ops/recurrence.py."""
        keys, values, qk, v = self.local(tp_size)
        state = recurrence_cache(keys, values, self.k_dim, self.v_dim)
        return *conv_cache(qk + v, self.conv), *state

    def products(self, width: int) -> list[tuple[int, int]]:
        """See `Mixer`."""
        _, _, qk, v = self.local(1)
        return [(qk + 2 * v, width), (2 * self.num_v_heads, width), (width, v)]

    def plan(self, plan: WeightPlan, ours: str, theirs: str) -> None:
        """Adds in, gates, conv, decay, dt_bias, norm and out."""
        tp, rank = plan.world.tp_size, plan.world.tp_rank
        qk, v, heads = self.num_k_heads * self.k_dim, self.num_v_heads * self.v_dim, self.num_v_heads

        def rows(name: str, count: int, above: int = 0, total: int | None = None) -> tuple[str, int, slice]:
            each = count // tp
            part = slice(above + rank * each, above + (rank + 1) * each)
            return plan.spell(theirs, f"linear_attn.{name}"), total or count, part

        if self.by_head:
            plan.stack(ours + "in", [rows("in_proj_qkvz.weight", 2 * (qk + v))], plan.width)
            plan.stack(ours + "gates", [rows("in_proj_ba.weight", 2 * heads)], plan.width)
        else:
            parts = [rows("in_proj_qkv.weight", *part, 2 * qk + v) for part in ((qk, 0), (qk, qk), (v, 2 * qk))]
            plan.stack(ours + "in", [*parts, rows("in_proj_z.weight", v)], plan.width)
            plan.stack(ours + "gates", [rows(f"in_proj_{x}.weight", heads) for x in "ba"], plan.width)
        plan.stack(ours + "conv", [rows("conv1d.weight", total) for total in (qk, qk, v)], 1, self.conv, fp32=True)
        plan.stack(ours + "decay", [rows("A_log", heads)], fp32=True)
        plan.stack(ours + "dt_bias", [rows("dt_bias", heads)], fp32=True)
        plan.add(ours + "norm", (self.v_dim,), plan.spell(theirs, "linear_attn.norm.weight"))
        plan.add(ours + "out", (plan.width, v), plan.spell(theirs, "linear_attn.out_proj.weight"), sharded=True)
