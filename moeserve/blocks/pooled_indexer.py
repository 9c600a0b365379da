"""The specification of an indexer over pooled keys, for latent attention (GLM-5.3).

The tokens of a request are divided into groups of R consecutive ones, from position 0 on. A group
that is complete has one index key: per element, a weighted mean of its tokens' keys,

    key = sum over tokens t of softmax_t(g_t + b_t) k_t

Here g_t is a product of token t, and b_t a bias of its place in the group. A query scores the
complete groups up to itself as DeepSeek-V3.2's indexer scores tokens, and attends to the tokens of
the best groups, and to those of its own incomplete group.

Shapes: D model width, q_rank width of compressed queries, J index heads, d their width.

Source: huggingface.co/zai-org/GLM-5.3-Flash.
"""

from dataclasses import dataclass

from moeserve.blocks.indexer import Indexer
from moeserve.blocks.mixer import CacheTensor
from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledIndexer(Indexer):
    """Selects the groups of tokens that a query attends to. It is not sharded over ranks.

    `top_k` counts the tokens of all selected groups, and R - 1 tokens of an incomplete one. Heads
    are not rotated.
    """

    group: int  # R, a divisor of d

    @property
    def read_width(self) -> int:
        return self.dim // self.group

    def cache(self) -> tuple[CacheTensor, ...]:
        """See `Indexer`: each token's key and g, and one key per group."""
        if self.shared:
            return ()
        return (
            CacheTensor("index_tokens", 1, 2 * self.dim),
            CacheTensor("index_groups", 1, self.read_width),
        )

    def products(self, width: int, q_rank: int) -> list[tuple[int, int]]:
        if self.shared:
            return []
        return [(self.num_heads * self.dim, q_rank), (2 * self.dim, width), (self.num_heads, width)]

    def plan(self, plan: WeightPlan, param_prefix: str, tensor_prefix: str, q_rank: int) -> None:
        """Add index_q, index_k (keys, then g), index_norm and its bias, index_place_bias (b), and
        index_weights.
        """
        if self.shared:
            return
        block = plan.block(param_prefix + "index_", tensor_prefix, "self_attn.indexer.")
        block.add("q", (self.num_heads * self.dim, q_rank), "wq_b.weight")
        names = ("wk.weight", "index_kpool_compress_gate")
        block.stack("k", [(name, self.dim, slice(0, self.dim)) for name in names], plan.width)
        block.add("norm", (self.dim,), "k_norm.weight")
        block.add("norm_bias", (self.dim,), "k_norm.bias")
        block.add("place_bias", (self.group, self.dim), "index_kpool_compress_ape", fp32=True)
        heads = "weights_proj.weight", self.num_heads, slice(0, self.num_heads)
        block.stack("weights", [heads], plan.width, widened=True, fp32=True)
