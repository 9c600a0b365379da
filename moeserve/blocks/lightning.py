"""Lightning attention in numbers: a recurrence whose decay is a constant of each head and layer
(Ling 2.6).

D model width, H heads, d their width.

Source: Lightning Attention-2 (arXiv 2401.04658), Ring-linear (2510.19338).
"""

from dataclasses import dataclass
from math import gcd

from moeserve.blocks.mixer import CacheTensor, RecurrentMixer, divisors, recurrence_cache
from moeserve.blocks.rope import RopeSpec
from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Lightning(RecurrentMixer):
    """A mixer: H heads with a state [d, d] each, and norms of queries and keys per head.

    decay: of the layer; heads' log decays are `slopes` times -decay. norm_groups: parts of the
    results of all heads, each with an RMS norm of its own.
    """

    num_heads: int
    head_dim: int
    rope: RopeSpec
    decay: float
    norm_groups: int

    @property
    def possible_tp(self) -> list[int]:
        """Each rank gets equally many heads and norms."""
        return divisors(gcd(self.num_heads, self.norm_groups))

    @property
    def sharing(self) -> str:
        return f"{self.num_heads} recurrent heads in {self.norm_groups} groups"

    @property
    def log_decays(self) -> list[float]:
        """The log decay of each head: those of ALiBi (arXiv 2108.12409), times -decay.

        2 heads -> [-decay / 16, -decay / 256]
        """
        return [-self.decay * slope for slope in slopes(self.num_heads)]

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """See `Mixer`: the state, k, u and s of ops/recurrence.py."""
        heads = self.num_heads // tp_size
        return recurrence_cache(heads, heads, self.head_dim, self.head_dim)

    def products(self, width: int) -> list[tuple[int, int]]:
        size = self.num_heads * self.head_dim
        return [(3 * size, width), (size, width), (width, size)]

    def plan(self, plan: WeightPlan, ours: str, theirs: str) -> None:
        """Add qkv, gate, q_norm, k_norm, norm and out."""
        block = plan.block(ours, theirs, "attention.")
        size = self.num_heads * self.head_dim
        block.stack("qkv", [block.share("query_key_value.weight", size)] * 3, plan.width)
        block.add("gate", (size, plan.width), "g_proj.weight", sharded=True)
        block.add("norm", (size,), "g_norm.weight", sharded=True)
        block.add("q_norm", (self.head_dim,), "query_layernorm.weight")
        block.add("k_norm", (self.head_dim,), "key_layernorm.weight")
        block.add("out", (plan.width, size), "dense.weight", sharded=True)


def slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes: powers of 2 ** (-8 / n) for n heads, a power of two; others take n,
    then every second one of 2n.

    2 -> [1/16, 1/256]; 3 -> [1/16, 1/256, 1/4]
    """
    whole = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return first if whole == heads else first + slopes(2 * whole)[::2][: heads - whole]
