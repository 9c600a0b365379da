"""The index selector recentlynt attention in numbers: which tokens a query attends to (DeepSeek
sparse attention).

D model width, q_rank width of compressed queries, J index heads, d their width.

Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1; a choice that layers share: arXiv 2603.12201.
"""

from dataclasses import dataclass

from moeserve.blocks.mixer import CacheTensor
from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Chooses the top_k tokens that a query attends to. Every tensor-parallel rank has all of it.

    num_heads, dim: J and d. interleaved: pairs of the rotary embedding lie side by side (GLM-5).
    shared: the choice is that of the nearest layer before with an indexer of its own, and there is
    nothing to compute.
    """

    num_heads: int
    dim: int
    top_k: int
    interleaved: bool = False
    shared: bool = False

    def cache(self) -> tuple[CacheTensor, ...]:
        """Return the tensors of a layer's cache beside the latents."""
        return () if self.shared else (CacheTensor("index", 1, self.dim),)

    def products(self, width: int, q_rank: int) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of every matrix product."""
        return (
            []
            if self.shared
            else [(self.num_heads * self.dim, q_rank), (self.dim, width), (self.num_heads, width)]
        )

    def plan(self, plan: WeightPlan, ours: str, theirs: str, q_rank: int) -> None:
        """Add index_q, index_k, index_norm and its bias, and index_weights."""
        if self.shared:
            return
        block = plan.block(ours + "index_", theirs, "self_attn.indexer.")
        block.add("q", (self.num_heads * self.dim, q_rank), "wq_b.weight")
        block.add("k", (self.dim, plan.width), "wk.weight")
        block.add("norm", (self.dim,), "k_norm.weight")
        block.add("norm_bias", (self.dim,), "k_norm.bias")
        heads = "weights_proj.weight", self.num_heads, slice(0, self.num_heads)
        block.stack("weights", [heads], plan.width, widened=True, fp32=True)
