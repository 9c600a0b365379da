"""The specifications of compressed convolutional attention (CCA), as two layers: `ConvolvedHeads`
makes queries, keys and values, which `ConvolvedAttention` attends with.

Queries and keys of narrow heads pass two causal convolutions: one per channel, then one per head,
which reads two tokens. Means of queries and keys before the convolutions are added to the results.
The second half of the elements of values comes from the token before.

Shapes: D model width, H query heads and G KV heads, d their width, K inputs of the first
convolution.

Source: Compressed Convolutional Attention (arXiv 2510.04476), ZAYA1.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moeserve.blocks.attention import heads_obstacle
from moeserve.blocks.mixer import CacheTensor, Mixer, RecurrentMixer, conv_cache

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan
    from moeserve.ops.inputs import HeadShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolvedHeads(RecurrentMixer):
    """The projections and convolutions. The output has this rank's queries, keys and values."""

    tp_units = "num_kv_heads", "KV heads"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    conv: int  # K

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """See `Mixer`: the inputs of the first convolution, and its results beside the values."""
        kv = self.num_kv_heads * self.head_dim // tp_size
        queries = self.num_heads * self.head_dim // tp_size
        delayed = conv_cache(queries + 2 * kv, 2)
        return (
            *conv_cache(queries + kv, self.conv),
            *(replace(tensor, name=f"delay_{tensor.name}") for tensor in delayed),
        )

    def products(self, width: int) -> list[tuple[int, int]]:
        heads = self.num_heads + self.num_kv_heads
        inputs = (heads + self.num_kv_heads) * self.head_dim
        return [(inputs, width), (heads * self.head_dim, 2 * self.head_dim)]

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add qkv, conv and conv_bias, mix and mix_bias."""
        block = plan.block(param_prefix, tensor_prefix, "self_attn.qkv_proj.")
        dim = self.head_dim
        queries = self.num_heads * dim
        kv = self.num_kv_heads * dim
        own_queries = plan.rows(queries)
        own_kv = plan.rows(kv)
        half = kv // 2
        # Values: the first half of the elements, then the half that comes from the token before.
        values = (
            ("v_proj_current.weight", half, slice(own_kv.start, min(own_kv.stop, half))),
            ("v_proj_delayed.weight", half, slice(max(own_kv.start - half, 0), own_kv.stop - half)),
        )
        used = [part for part in values if part[2].start < part[2].stop]
        plan.on_other_ranks.update(
            block.tensor_prefix + block.module + name
            for name, _, own_rows in values
            if own_rows.start >= own_rows.stop
        )
        parts = [("q_proj.weight", queries, own_queries), ("k_proj.weight", kv, own_kv), *used]
        block.pick("qkv", parts, plan.width)
        own_keys = slice(queries + own_kv.start, queries + own_kv.stop)
        for param, module, tail in (
            ("conv", "conv_qk_depthwise", (1, self.conv)),
            ("mix", "conv_qk_grouped", (dim, 2)),
        ):
            weight = f"{module}.weight"
            bias = f"{module}.bias"
            rows = ((weight, queries + kv, own_queries), (weight, queries + kv, own_keys))
            block.pick(param, rows, *tail, fp32=True)
            rows = ((bias, queries + kv, own_queries), (bias, queries + kv, own_keys))
            block.pick(param + "_bias", rows, fp32=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolvedAttention(Mixer):
    """Attention with queries, keys and values that are the layer's input.

    Queries and keys have L2 norms, and keys a factor per head.
    """

    tp_units = "num_kv_heads", "KV heads"
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        heads = self.num_kv_heads // tp_size
        return CacheTensor("k", heads, self.head_dim), CacheTensor("v", heads, self.head_dim)

    def head_shape(self, tp_size: int) -> "HeadShape":
        from moeserve.ops.inputs import HeadShape  # has torch

        return HeadShape(
            self.num_heads // tp_size, self.num_kv_heads // tp_size, self.head_dim, self.head_dim
        )

    def products(self, width: int) -> list[tuple[int, int]]:
        return [(width, self.num_heads * self.head_dim)]

    def obstacle(self, kernels: str) -> str:
        return heads_obstacle(kernels, self.head_dim, self.head_dim)

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add key_factor and out."""
        block = plan.block(param_prefix, tensor_prefix, "self_attn.")
        block.add("key_factor", (self.num_kv_heads,), "qk_norm.temp", sharded=True, fp32=True)
        results = self.num_heads * self.head_dim
        block.add("out", (plan.width, results), "o_proj.weight", sharded=True)
