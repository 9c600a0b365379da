"""The specification of lightning attention: a recurrence with a constant decay per head and layer.

Shapes: D model width, H heads, d their width.

Source: Lightning Attention-2 (arXiv 2401.04658), MiniMax-01 (2501.08313), Ring-linear (2510.19338).
"""

from dataclasses import dataclass
from math import gcd

from moeserve.blocks.mixer import CacheTensor, RecurrentMixer, divisors, recurrence_cache
from moeserve.blocks.rope import RopeSpec
from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Lightning(RecurrentMixer):
    """H heads with a state [d, d] each.

    Queries and keys have norms per head and a rotary embedding (Ling 2.6), or queries, keys and
    values have a SiLU (MiniMax-01).
    """

    num_heads: int
    head_dim: int
    rope: RopeSpec | None = None
    decay: float  # the layer's decay; the log decay of a head is its slope times -decay
    norm_groups: int  # groups of heads whose results have a common RMS norm
    norm_eps: float | None = None  # epsilon of the norm of results; None: the model's
    silu: bool = False  # SiLU instead of norms and the factor d ** -0.5 of queries
    by_head: bool = False  # rows of a head's query, key and value are adjacent in the checkpoint

    @property
    def possible_tp(self) -> list[int]:
        """The supported tensor-parallel sizes: ranks have equally many heads and norm groups.

        A single group is normed after ranks have gathered all heads.
        """
        groups = self.num_heads if self.norm_groups == 1 else self.norm_groups
        return divisors(gcd(self.num_heads, groups))

    @property
    def sharing(self) -> str:
        return f"{self.num_heads} recurrent heads in {self.norm_groups} groups"

    @property
    def log_decays(self) -> list[float]:
        """The log decay of each head: its ALiBi slope (arXiv 2108.12409) times -decay.

        2 heads -> [-decay / 16, -decay / 256].
        """
        return [-self.decay * slope for slope in slopes(self.num_heads)]

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """See `Mixer`: the state, k, u and s of ops/recurrence.py."""
        heads = self.num_heads // tp_size
        return recurrence_cache(heads, heads, self.head_dim, self.head_dim)

    def products(self, width: int) -> list[tuple[int, int]]:
        size = self.num_heads * self.head_dim
        return [(3 * size, width), (size, width), (width, size)]

    def plan(self, plan: WeightPlan, param_prefix: str, tensor_prefix: str) -> None:
        """Add qkv, gate, norm, out, and with norms of heads q_norm and k_norm."""
        block = plan.block(param_prefix, tensor_prefix, "attention.")
        size = self.num_heads * self.head_dim
        if self.by_head:
            block.add("qkv", (3 * size, plan.width), "query_key_value.weight", sharded=True)
        else:
            block.stack("qkv", [block.share("query_key_value.weight", size)] * 3, plan.width)
        block.add("gate", (size, plan.width), "g_proj.weight", sharded=True)
        block.add("norm", (size,), "g_norm.weight", sharded=True)
        if not self.silu:
            block.add("q_norm", (self.head_dim,), "query_layernorm.weight")
            block.add("k_norm", (self.head_dim,), "key_layernorm.weight")
        block.add("out", (plan.width, size), "dense.weight", sharded=True)


def slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes of heads.

    For n heads, n a power of two, they are the powers of 2 ** (-8 / n). Otherwise they are those of
    the next lower power of two n, followed by every second slope of 2n heads. For example 2 ->
    [1/16, 1/256]; 3 -> [1/16, 1/256, 1/4].
    """
    n = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * (i + 1) / n) for i in range(n)]
    return first if n == heads else first + slopes(2 * n)[::2][: heads - n]
