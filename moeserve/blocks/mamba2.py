"""The specification of Mamba-2: a convolution, then a linear recurrence with one decay per head.

Shapes: D model width, G groups of heads that share B (which writes the state) and C (which reads
it), H heads, d width of B and C, v width of a head, K kernel size of the convolution.

Source: arXiv 2405.21060.
"""

from dataclasses import dataclass

from moeserve.blocks.mixer import CacheTensor, RecurrentMixer, conv_cache, recurrence_cache
from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(RecurrentMixer):
    """H heads with a state [d, v] each (Granite 4, Nemotron 3)."""

    # Ranks shard groups, because norms are over all heads of a group.
    tp_units = "num_groups", "group(s) of recurrent heads"
    num_heads: int  # H
    num_groups: int  # G
    state_dim: int  # d
    head_dim: int  # v
    conv: int  # K
    time_limit: tuple[float, float]  # minimum and maximum of time steps

    def local(self, tp_size: int) -> tuple[int, int, int, int]:
        """Return a rank's groups, heads, width of all heads, and width of B."""
        groups = self.num_groups // tp_size
        heads = self.num_heads // tp_size
        return groups, heads, heads * self.head_dim, groups * self.state_dim

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """See `Mixer`: the convolution's inputs; state, k, u and s of ops/recurrence.py."""
        groups, heads, inner, shared = self.local(tp_size)
        state = recurrence_cache(groups, heads, self.state_dim, self.head_dim)
        return *conv_cache(inner + 2 * shared, self.conv), *state

    def products(self, width: int) -> list[tuple[int, int]]:
        _, heads, inner, shared = self.local(1)
        return [(2 * (inner + shared) + heads, width), (width, inner)]

    def plan(self, plan: WeightPlan, param_prefix: str, tensor_prefix: str) -> None:
        """Add in, conv, conv_bias, decay, dt_bias, skip, norm and out."""
        block = plan.block(param_prefix, tensor_prefix, "mamba.")
        _, heads, inner, shared = self.local(1)

        def shares(name: str, *counts: int) -> list[tuple[str, int, slice]]:
            """Return this rank's share of each part of a tensor with stacked parts."""
            return [block.share(name, count) for count in counts]

        block.stack("in", shares("in_proj.weight", inner, inner, shared, shared, heads), plan.width)
        convolved = inner, shared, shared
        block.stack("conv", shares("conv1d.weight", *convolved), 1, self.conv, fp32=True)
        block.stack("conv_bias", shares("conv1d.bias", *convolved), fp32=True)
        block.add("decay", (heads,), self.decay_tensor, sharded=True, fp32=True)
        block.add("dt_bias", (heads,), "dt_bias", sharded=True, fp32=True)
        block.add("skip", (heads,), "D", sharded=True, fp32=True)
        block.add("norm", (inner,), "norm.weight", sharded=True)
        block.add("out", (plan.width, inner), "out_proj.weight", sharded=True)
