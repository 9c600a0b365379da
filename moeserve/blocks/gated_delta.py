"""The specification of the gated delta net: a convolution, then a delta rule (Qwen3-Next, 3.5).

Shapes: D model width, G heads of queries and keys, H heads of values, d and v their widths, K
kernel size of the convolution.

Source: arXiv 2412.06464.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from moeserve.blocks.mixer import CacheTensor, RecurrentMixer, conv_cache, recurrence_cache
from moeserve.blocks.weights import WeightPlan

Source = tuple[str, int, slice]  # of `WeightPlan.pick`


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta(RecurrentMixer):
    """H heads with a state [d, v] each."""

    # Ranks shard query heads, each with the value heads that use it.
    tp_units = ("num_k_heads", "recurrent heads")
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv: int  # K
    # The checkpoint has in_proj_qkvz, grouped by query head (Qwen3-Next), and not in_proj_qkv and
    # in_proj_z (Qwen3.5).
    inputs_by_head: bool = False
    gates_by_head: bool = False  # the same for in_proj_ba, and in_proj_b and in_proj_a
    inputs_in_one: bool = False  # in_proj has the rows of in_proj_qkv, _z, _b and _a (Lara)
    # Value heads h, h + G, h + 2G, ... of the checkpoint use query head h (GGUF's Qwen3.5). False:
    # the value heads of a query head are adjacent.
    tiled: bool = False
    output_gate: Literal["silu", "sigmoid"] = "silu"  # activation of output gates

    def local(self, tp_size: int) -> tuple[int, int, int, int]:
        """Return a rank's query heads, value heads, width of queries plus keys, width of values."""
        keys = self.num_k_heads // tp_size
        values = self.num_v_heads // tp_size
        return keys, values, 2 * keys * self.k_dim, values * self.v_dim

    @property
    def places(self) -> list[int]:
        """The place in the checkpoint of each value head, for value heads sorted by query head.

        For example 2 query heads and 4 value heads -> [0, 1, 2, 3], or tiled [0, 2, 1, 3].
        """
        if not self.tiled:
            return list(range(self.num_v_heads))
        groups = self.num_k_heads
        return [
            first + group for group in range(groups) for first in range(0, self.num_v_heads, groups)
        ]

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """See `Mixer`: the convolution's inputs; state, k, u and s of ops/recurrence.py."""
        keys, values, qk, v = self.local(tp_size)
        state = recurrence_cache(keys, values, self.k_dim, self.v_dim)
        return *conv_cache(qk + v, self.conv), *state

    def products(self, width: int) -> list[tuple[int, int]]:
        _, _, qk, v = self.local(1)
        return [(qk + 2 * v, width), (2 * self.num_v_heads, width), (width, v)]

    def plan(self, plan: WeightPlan, param_prefix: str, tensor_prefix: str) -> None:
        """Add in, gates, conv, decay, dt_bias, norm and out.

        The rows of value heads are sorted by query head. The columns of out are in the order of the
        checkpoint: in quantized weights, they cannot be moved.
        """
        block = plan.block(param_prefix, tensor_prefix, "linear_attn.")
        qk = self.num_k_heads * self.k_dim
        v = self.num_v_heads * self.v_dim
        heads = self.num_v_heads
        keys = plan.rows(qk)
        queries_and_keys = [keys, slice(qk + keys.start, qk + keys.stop)]

        def values(width: int, name: str, total: int, first: int = 0) -> list[Source]:
            """Return sources for `pick`: rows of value heads, `width` each, from row `first`."""
            return [(name, total, rows) for rows in self._value_rows(plan, width, first)]

        def convolved(name: str, total: int) -> list[Source]:
            """Return sources for `pick`: rows of queries, keys and values, the first ones."""
            parts = [(name, total, rows) for rows in queries_and_keys]
            return [*parts, *values(self.v_dim, name, total, first=2 * qk)]

        inputs = self._input_rows()
        if self.inputs_by_head:
            block.add("in", (2 * (qk + v), plan.width), "in_proj_qkvz.weight", sharded=True)
        else:
            name, total, _ = inputs["qkv"]
            output_gates = values(self.v_dim, *inputs["z"])
            block.pick("in", [*convolved(name, total), *output_gates], plan.width)
        if self.gates_by_head:
            block.add("gates", (2 * heads, plan.width), "in_proj_ba.weight", sharded=True)
        else:
            gates = [part for x in "ba" for part in values(1, *inputs[x])]
            block.pick("gates", gates, plan.width)
        block.pick("conv", convolved("conv1d.weight", 2 * qk + v), 1, self.conv, fp32=True)
        block.pick("decay", values(1, self.decay_tensor, heads), fp32=True)
        block.pick("dt_bias", values(1, "dt_bias", heads), fp32=True)
        block.add("norm", (self.v_dim,), "norm.weight")
        block.add("out", (plan.width, v), "out_proj.weight", sharded=True)

    def _input_rows(self) -> dict[str, tuple[str, int, int]]:
        """Return (tensor, number of its rows, first row) of each part of the inputs."""
        heads = self.num_v_heads
        v = heads * self.v_dim
        sizes = {"qkv": 2 * self.num_k_heads * self.k_dim + v, "z": v, "b": heads, "a": heads}
        if not self.inputs_in_one:
            return {part: (f"in_proj_{part}.weight", size, 0) for part, size in sizes.items()}
        starts = accumulate(sizes.values(), initial=0)
        total = sum(sizes.values())
        return {
            part: ("in_proj.weight", total, first)
            for part, first in zip(sizes, starts, strict=False)
        }

    def _value_rows(self, plan: WeightPlan, width: int, first: int) -> list[slice]:
        """Return the rows of this rank's value heads, `width` each, sorted by query head.

        first: the first row of value heads in their tensor.
        """
        if not self.tiled:
            rows = plan.rows(self.num_v_heads * width)
            return [slice(first + rows.start, first + rows.stop)]
        starts = (first + place * width for place in self.places[plan.rows(self.num_v_heads)])
        return [slice(start, start + width) for start in starts]
