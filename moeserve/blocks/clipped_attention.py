"""The specification of attention with clipped heads, relative logits and convolutions (Inkling 2).

It differs from `RelativeAttention`:

- Queries, keys and relative states are scaled down if their L2 norm is above a threshold, the first
  and the last after a learned scale. Values have an RMS norm without weights.
- Each query has an attention sink of its own per head. Results have a gate per element.
- A convolution with K taps is (x + conv(x)) / sqrt(K + 1).
- In dynamic layers, queries, keys and values have inputs of their own, and each token adds taps to
  those of the convolutions of keys and values, which are (x + conv(x)) / sqrt(2 K + 1).

Shapes: D model width, H query heads, G KV heads, d width of a head, R width of a relative state, K
kernel size of convolutions.

Source: huggingface.co/thinkingmachines/Inkling-2-Small-MXFP8.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.attention import Attention
from moeserve.blocks.relative_attention import RelativeAttention

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedAttention(RelativeAttention):
    """Grouped-query attention with relative logits and clipped heads."""

    clip_norm: float  # the greatest L2 norm of queries and keys
    relative_clip: float  # the greatest L2 norm of relative states
    dynamic: bool = False

    def products(self, width: int) -> list[tuple[int, int]]:
        taps = [(2 * self.num_kv_heads * self.conv, width)] if self.dynamic else []
        return [*RelativeAttention.products(self, width), (self.num_heads, width), *taps]

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add q, k, v, out, gate, sink, relative, profiles, the scales of clipped heads, and the
        convolutions.
        """
        block = plan.block(param_prefix, tensor_prefix, "self_attn.")
        local = self.local_heads(plan.world)
        width = plan.width
        dim = self.head_dim

        def rows(size: int, *, kv: bool = False) -> tuple[int, slice]:
            """Return the number of a tensor's rows, and this rank's, for heads of `size` rows."""
            total = self.num_kv_heads if kv else self.num_heads
            first = local.first_kv if kv else local.first
            count = local.count_kv if kv else local.count
            return total * size, slice(first * size, (first + count) * size)

        block.stack("q", [("q_proj.weight", *rows(dim))], width)
        block.stack("k", [("k_proj.weight", *rows(dim, kv=True))], width)
        block.stack("v", [("v_proj.weight", *rows(dim, kv=True))], width)
        block.stack("relative", [("r_proj.weight", *rows(self.relative_dim))], width)
        block.stack("sink", [("sink_proj.weight", *rows(1))], width)
        block.add("profiles", (self.extent, self.relative_dim), "rel_logits_proj.proj")
        block.stack("q_scale", [("q_l2_clip.scale", *rows(1))], dim, fp32=True)
        block.stack(
            "relative_scale", [("rel_l2_clip.scale", *rows(1))], self.relative_dim, fp32=True
        )
        results = self.num_heads * dim
        block.add("gate", (results, width), "gate_proj.weight", sharded=True)
        block.add("out", (width, results), "o_proj.weight", sharded=True)
        layer = plan.block(param_prefix, tensor_prefix)
        layer.add("out_conv", (width, 1, self.conv), "attn_sconv.conv1d.weight", fp32=True)
        channels = rows(dim, kv=True)
        if not self.dynamic:
            parts = [(f"{x}_sconv.conv1d.weight", *channels) for x in "kv"]
            block.stack("conv", parts, 1, self.conv, fp32=True)
            return
        for x in "kv":
            # Transposed; see `Names.transposed`
            block.stack(
                f"{x}_conv", [(f"{x}_sconv.static_weight", *channels)], self.conv, fp32=True
            )
            taps = f"{x}_sconv.weight_proj.weight", *rows(self.conv, kv=True)
            block.stack(f"{x}_taps", [taps], width)

    def obstacle(self, kernels: str) -> str:
        if kernels == "native":
            return Attention.obstacle(self, kernels)
        return f"{kernels.capitalize()} kernels do not support relative logits"
