"""The specification of a mixture of attention heads: a router chooses experts for each token, which
have projections of queries and of outputs. All experts attend to the same keys and values.

Shapes: D model width, E experts, K experts per token, G KV heads, d width of a head. An expert has
a query head for each KV head.

Source: JetMoE (arXiv 2404.07413), after Mixture of Attention Heads (2210.05144).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.attention import heads_obstacle
from moeserve.blocks.mixer import CacheTensor, Mixer
from moeserve.loader.load_plan import LoadPlan, Param, Piece

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan
    from moeserve.ops.inputs import HeadShape


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfAttention(Mixer):
    """K of E attention experts for each token."""

    tp_units = "num_kv_heads", "KV heads"
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        heads = self.num_kv_heads // tp_size
        return CacheTensor("k", heads, self.head_dim), CacheTensor("v", heads, self.head_dim)

    def head_shape(self, tp_size: int) -> "HeadShape":
        from moeserve.ops.inputs import HeadShape  # has torch

        heads = self.num_kv_heads // tp_size
        return HeadShape(self.top_k * heads, heads, self.head_dim, self.head_dim)

    def products(self, width: int) -> list[tuple[int, int]]:
        """See `Mixer`. The products of all experts are computed for every token."""
        kv = self.num_kv_heads * self.head_dim
        queries = self.num_experts * kv
        return [(queries + 2 * kv, width), (self.num_experts, width), (width, queries)]

    def obstacle(self, kernels: str) -> str:
        return heads_obstacle(kernels, self.head_dim, self.head_dim)

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add qkv (the queries of all experts first), attn_router, out, and out_bias."""
        block = plan.block(param_prefix, tensor_prefix, "self_attention.")
        kv = self.num_kv_heads * self.head_dim
        block.add("attn_router", (self.num_experts, plan.width), "experts.router.layer.weight")
        block.add("out_bias", (plan.width,), "experts.bias", sharded=True)
        own_heads = plan.rows(kv)
        own_columns = plan.rows(plan.width)
        rows = own_heads.stop - own_heads.start
        columns = own_columns.stop - own_columns.start
        qkv = param_prefix + "qkv"
        out = param_prefix + "out"
        module = tensor_prefix + "self_attention."
        pieces = []
        for expert in range(self.num_experts):
            start = expert * rows
            pieces.append(
                Piece(
                    module + "experts.input_linear.weight",
                    (self.num_experts, kv, plan.width),
                    qkv,
                    at=(slice(start, start + rows),),
                    take=(expert, own_heads),
                )
            )
            pieces.append(
                Piece(
                    module + "experts.output_linear.weight",
                    (self.num_experts, plan.width, kv),
                    out,
                    at=(slice(0, columns), slice(expert * kv, (expert + 1) * kv)),
                    take=(expert, own_columns),
                )
            )
        for part in range(2):  # keys, values
            start = (self.num_experts + part) * rows
            pieces.append(
                Piece(
                    module + "kv_proj.weight",
                    (2 * kv, plan.width),
                    qkv,
                    at=(slice(start, start + rows),),
                    take=(slice(part * kv + own_heads.start, part * kv + own_heads.stop),),
                )
            )
        params = (
            Param(qkv, ((self.num_experts + 2) * rows, plan.width)),
            Param(out, (columns, self.num_experts * kv)),
        )
        plan.extend(LoadPlan(params, tuple(pieces)))
