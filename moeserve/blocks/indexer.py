"""The specification of the indexer of DeepSeek sparse attention: it selects tokens for each query.

Shapes: D model width, q_rank width of compressed queries, J index heads, d their width.

Sources: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1; layers that share a selection: arXiv
2603.12201.
"""

from dataclasses import dataclass

from moeserve.blocks.mixer import CacheTensor
from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Selects the `top_k` tokens that a query attends to. It is not sharded over ranks."""

    num_heads: int  # J
    dim: int  # d
    top_k: int
    interleaved: bool = False  # rotary pairs are adjacent elements (GLM-5)
    rotates_last: bool = False  # the last elements of a head are rotated, not the first (Hy4)
    eps: float = 1e-6  # of the norm of keys
    # Use the selection of the nearest earlier layer with its own indexer, and compute none.
    shared: bool = False

    @property
    def read_width(self) -> int:
        """The number of elements that a query reads per position of its context."""
        return self.dim

    def cache(self) -> tuple[CacheTensor, ...]:
        """Return the tensors of a layer's cache in addition to the latents."""
        return () if self.shared else (CacheTensor("index", 1, self.dim),)

    def products(self, width: int, q_rank: int) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of every matrix product.

        width: the width of the model.
        """
        if self.shared:
            return []
        return [(self.num_heads * self.dim, q_rank), (self.dim, width), (self.num_heads, width)]

    def plan(self, plan: WeightPlan, param_prefix: str, tensor_prefix: str, q_rank: int) -> None:
        """Add index_q, index_k, index_norm and its bias, and index_weights."""
        if self.shared:
            return
        block = plan.block(param_prefix + "index_", tensor_prefix, "self_attn.indexer.")
        block.add("q", (self.num_heads * self.dim, q_rank), "wq_b.weight")
        block.add("k", (self.dim, plan.width), "wk.weight")
        block.add("norm", (self.dim,), "k_norm.weight")
        block.add("norm_bias", (self.dim,), "k_norm.bias")
        heads = "weights_proj.weight", self.num_heads, slice(0, self.num_heads)
        block.stack("weights", [heads], plan.width, widened=True, fp32=True)
