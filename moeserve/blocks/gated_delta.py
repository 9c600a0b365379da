"""The specification of the gated delta net: a convolution, then a delta rule (Qwen3-Next, 3.5).

Shapes: D model width, G heads of queries and keys, H heads of values, d and v their widths, K
kernel size of the convolution.

Source: arXiv 2412.06464.
"""

from dataclasses import dataclass

from moeserve.blocks.mixer import CacheTensor, RecurrentMixer, conv_cache, recurrence_cache
from moeserve.blocks.weights import WeightPlan


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
    # The checkpoint has in_proj_qkvz and in_proj_ba, grouped by query head (Qwen3-Next), and not a
    # tensor per part (Qwen3.5).
    by_head: bool

    def local(self, tp_size: int) -> tuple[int, int, int, int]:
        """Return a rank's query heads, value heads, width of queries plus keys, width of values."""
        keys = self.num_k_heads // tp_size
        values = self.num_v_heads // tp_size
        return keys, values, 2 * keys * self.k_dim, values * self.v_dim

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """See `Mixer`: the convolution's inputs; state, k, u and s of ops/recurrence.py."""
        keys, values, qk, v = self.local(tp_size)
        state = recurrence_cache(keys, values, self.k_dim, self.v_dim)
        return *conv_cache(qk + v, self.conv), *state

    def products(self, width: int) -> list[tuple[int, int]]:
        _, _, qk, v = self.local(1)
        return [(qk + 2 * v, width), (2 * self.num_v_heads, width), (width, v)]

    def plan(self, plan: WeightPlan, param_prefix: str, tensor_prefix: str) -> None:
        """Add in, gates, conv, decay, dt_bias, norm and out."""
        block = plan.block(param_prefix, tensor_prefix, "linear_attn.")
        qk = self.num_k_heads * self.k_dim
        v = self.num_v_heads * self.v_dim
        heads = self.num_v_heads
        if self.by_head:
            block.add("in", (2 * (qk + v), plan.width), "in_proj_qkvz.weight", sharded=True)
            block.add("gates", (2 * heads, plan.width), "in_proj_ba.weight", sharded=True)
        else:
            parts = []
            for above, rows in ((0, plan.rows(qk)), (qk, plan.rows(qk)), (2 * qk, plan.rows(v))):
                parts.append(
                    ("in_proj_qkv.weight", 2 * qk + v, slice(above + rows.start, above + rows.stop))
                )
            block.stack("in", [*parts, block.share("in_proj_z.weight", v)], plan.width)
            block.stack(
                "gates", [block.share(f"in_proj_{x}.weight", heads) for x in "ba"], plan.width
            )
        block.stack(
            "conv",
            [block.share("conv1d.weight", total) for total in (qk, qk, v)],
            1,
            self.conv,
            fp32=True,
        )
        block.add("decay", (heads,), "A_log", sharded=True, fp32=True)
        block.add("dt_bias", (heads,), "dt_bias", sharded=True, fp32=True)
        block.add("norm", (self.v_dim,), "norm.weight")
        block.add("out", (plan.width, v), "out_proj.weight", sharded=True)
