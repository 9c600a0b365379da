"""The specification of attention with learned relative logits and short convolutions (Inkling).

Keys and values are convolved before the norm of keys, and so is the block's output:
x becomes x + conv(x). Queries, and a relative state per head, are products of the block's input. A
score's bias is the product of the query's relative state and a learned profile of the distance.

Shapes: D model width, G KV heads, d width of a head, K kernel size of convolutions, R width of a
relative state, E distances with a profile.

Source: huggingface.co/thinkingmachines/Inkling.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.attention import Attention
from moeserve.blocks.mixer import CacheTensor, conv_cache

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeAttention(Attention):
    """Grouped-query attention with relative logits. Convolutions are a state beside the cache."""

    width: int  # D
    conv: int  # K
    relative_dim: int  # R
    extent: int  # E

    def tiled_state(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """See `Mixer`: the inputs of the convolutions of keys and values, and of the output."""
        kv_width = 2 * self.local_kv_heads(tp_size) * self.head_dim
        return *conv_cache(kv_width, self.conv), *conv_cache(self.width, self.conv)

    def products(self, width: int) -> list[tuple[int, int]]:
        return [
            *Attention.products(self, width),
            (self.num_heads * self.relative_dim, width),
            (self.num_heads * self.extent, self.relative_dim),
        ]

    def obstacle(self, kernels: str) -> str:
        if kernels == "native":
            return Attention.obstacle(self, kernels)
        return f"{kernels.capitalize()} kernels do not support relative logits"

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add the parameters of `Attention`, relative, profiles, conv and out_conv."""
        Attention.plan(self, plan, param_prefix, tensor_prefix)
        block = plan.block(param_prefix, tensor_prefix, "self_attn.")
        local = self.local_heads(plan.world)
        states = slice(
            local.first * self.relative_dim, (local.first + local.count) * self.relative_dim
        )
        num_states = self.num_heads * self.relative_dim
        block.stack("relative", [("r_proj.weight", num_states, states)], plan.width)
        block.add("profiles", (self.extent, self.relative_dim), "rel_logits_proj.proj")
        first = local.first_kv * self.head_dim
        channels = slice(first, first + local.count_kv * self.head_dim)
        num_channels = self.num_kv_heads * self.head_dim
        parts = [(f"{x}_sconv.conv1d.weight", num_channels, channels) for x in "kv"]
        block.stack("conv", parts, 1, self.conv, fp32=True)
        layer = plan.block(param_prefix, tensor_prefix)
        layer.add("out_conv", (plan.width, 1, self.conv), "attn_sconv.conv1d.weight", fp32=True)
