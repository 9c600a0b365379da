"""Mamba-2 in numbers: a linear recurrence with one decay per head, behind a short convolution
(Granite 4, Nemotron 3).

D model width, G groups of heads with the same B (what writes the state) and C (what reads it), H
heads, d width of B and C, v of a head, K inputs of the convolution.

Source: arXiv 2405.21060.
"""

from dataclasses import dataclass

from moeserve.blocks.mixer import CacheTensor, RecurrentMixer, conv_cache, recurrence_cache
from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(RecurrentMixer):
    """A mixer: H heads with a state [d, v] each.

    conv: inputs of the convolution, K. time_limit: the least and the largest step of time.
    """

    shared = "num_groups", "groups of recurrent heads"  # a norm is over all heads of a group
    num_heads: int
    num_groups: int
    state_dim: int
    head_dim: int
    conv: int
    time_limit: tuple[float, float]

    def local(self, tp_size: int) -> tuple[int, int, int, int]:
        """Return one rank's groups, heads, and columns of heads and of groups."""
        groups = self.num_groups // tp_size
        heads = self.num_heads // tp_size
        return groups, heads, heads * self.head_dim, groups * self.state_dim

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """The convolution's inputs, then the state, k, u and s of ops/recurrence.py."""
        groups, heads, inner, shared = self.local(tp_size)
        state = recurrence_cache(groups, heads, self.state_dim, self.head_dim)
        return *conv_cache(inner + 2 * shared, self.conv), *state

    def products(self, width: int) -> list[tuple[int, int]]:
        _, heads, inner, shared = self.local(1)
        return [(2 * (inner + shared) + heads, width), (width, inner)]

    def plan(self, plan: WeightPlan, ours: str, theirs: str) -> None:
        """Add in, conv, conv_bias, decay, dt_bias, skip, norm and out."""
        block, (_, heads, inner, shared) = plan.block(ours, theirs, "mamba."), self.local(1)

        def rows(name: str, *counts: int) -> list[tuple[str, int, slice]]:
            """Return this rank's rows of each part of a tensor; parts lie one below the other."""
            return [block.share(name, count) for count in counts]

        block.stack("in", rows("in_proj.weight", inner, inner, shared, shared, heads), plan.width)
        convolved = inner, shared, shared
        block.stack("conv", rows("conv1d.weight", *convolved), 1, self.conv, fp32=True)
        block.stack("conv_bias", rows("conv1d.bias", *convolved), fp32=True)
        for mine, name in (("decay", "A_log"), ("dt_bias", "dt_bias"), ("skip", "D")):
            block.add(mine, (heads,), name, sharded=True, fp32=True)
        block.add("norm", (inner,), "norm.weight", sharded=True)
        block.add("out", (plan.width, inner), "out_proj.weight", sharded=True)
