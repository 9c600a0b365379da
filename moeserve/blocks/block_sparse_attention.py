"""The specification of block-sparse attention: index heads select blocks of tokens.

Shapes: D model width, G KV heads of the model, d width of a head. There is an index head of width d
per KV head, and one index key per token.

Source: MiniMax-M3 (huggingface.co/MiniMaxAI/MiniMax-M3).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.attention import Attention
from moeserve.blocks.mixer import CacheRead, CacheTensor

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSparseAttention(Attention):
    """Grouped-query attention whose queries attend to the best blocks of tokens."""

    block_size: int  # tokens
    top_k: int  # blocks that a query of a KV head attends to
    local: int = 1  # the last blocks, which a query always attends to

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        # `Attention.cache` instead of `super()`, which dataclasses with slots do not support.
        return *Attention.cache(self, tp_size), CacheTensor("index", 1, self.head_dim)

    def reads(self, tp_size: int) -> tuple[CacheRead, ...]:
        """See `Mixer`. Index heads read all index keys; attention reads the selected blocks."""
        shape = self.head_shape(tp_size)
        elements = shape.num_kv_heads * (shape.dim + shape.v_dim)
        selected = CacheRead(
            self.top_k * self.block_size,
            elements,
            2 * shape.num_heads * (shape.dim + shape.v_dim),
        )
        return selected, CacheRead(None, shape.dim, 2 * shape.num_kv_heads * shape.dim)

    def products(self, width: int) -> list[tuple[int, int]]:
        index_rows = (self.num_kv_heads + 1) * self.head_dim
        return [*Attention.products(self, width), (index_rows, width)]

    def obstacle(self, kernels: str) -> str:
        if kernels == "native":
            return Attention.obstacle(self, kernels)
        return f"{kernels.capitalize()} kernels do not support block-sparse attention"

    def cache_obstacle(self, dtype: str) -> str:
        if dtype in ("auto", "float"):
            return ""
        return "block-sparse attention caches keys in the dtype of activations only"

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add the parameters of `Attention`, and index_q, index_k and their norms."""
        Attention.plan(self, plan, param_prefix, tensor_prefix)
        block = plan.block(param_prefix + "index_", tensor_prefix, "self_attn.index_")
        dim = self.head_dim
        local = self.local_heads(plan.world)
        own_rows = slice(local.first_kv * dim, (local.first_kv + local.count_kv) * dim)
        block.stack("q", [("q_proj.weight", self.num_kv_heads * dim, own_rows)], plan.width)
        block.add("k", (dim, plan.width), "k_proj.weight")
        block.add("q_norm", (dim,), "q_norm.weight")
        block.add("k_norm", (dim,), "k_norm.weight")
