"""The specification of an indexer over groups of tokens, and of attention to the selected groups.

The tokens of a request are divided into groups of R consecutive ones, from position 0 on. A group
that is complete has one index key: the norm of the mean of its tokens' keys, rotated by the
position of its first token. A query scores the complete groups up to itself,

    score = sum over heads j of relu(q_j . k)

and attends to the tokens of the best groups, and to those of its own incomplete group.

Shapes: D model width, J index heads, d their width.

Source: transformers' Qwen4ExpTextQSAIndexer (Qwen3.8-Flash-Next), which divides all scores by
sqrt(d); the order of groups is the same.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeserve.blocks.attention import Attention
from moeserve.blocks.mixer import CacheRead, CacheTensor

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupIndexer:
    """Selects the groups of tokens that a query attends to. It is not sharded over ranks."""

    num_heads: int  # J
    dim: int  # d, a multiple of `group`
    num_groups: int  # the most groups that a query selects
    group: int  # R

    @property
    def top_k(self) -> int:
        """The most tokens that a query sees without selection.

        They are those of all selected groups, and of an incomplete one.
        """
        return self.num_groups * self.group + self.group - 1

    def cache(self) -> tuple[CacheTensor, ...]:
        """Return the tensors of a layer's cache in addition to keys and values.

        They are the tokens' keys, and one key per group.
        """
        return (
            CacheTensor("index_tokens", 1, self.dim),
            CacheTensor("index_groups", 1, self.dim // self.group),
        )

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add index_q, index_k, and their norms."""
        block = plan.block(param_prefix + "index_", tensor_prefix, "self_attn.indexer.")
        queries = self.num_heads * self.dim
        total = queries + self.dim
        if plan.spell(tensor_prefix, block.module + "index_q_proj.weight") in plan.present:  # GGUF
            block.add("q", (queries, plan.width), "index_q_proj.weight")
            block.add("k", (self.dim, plan.width), "index_k_proj.weight")
        else:
            block.pick("q", [("index_qk_proj.weight", total, slice(0, queries))], plan.width)
            block.pick("k", [("index_qk_proj.weight", total, slice(queries, total))], plan.width)
        for name in "qk":
            block.add(f"{name}_norm", (self.dim,), f"{name}_layernorm.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupIndexedAttention(Attention):
    """Grouped-query attention to the tokens that an indexer selects."""

    indexer: GroupIndexer

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        return *Attention.cache(self, tp_size), *self.indexer.cache()

    def reads(self, tp_size: int) -> tuple[CacheRead, ...]:
        """See `Mixer`. The indexer reads all keys of groups; attention reads selected tokens."""
        heads = self.head_shape(tp_size)
        elements = heads.num_kv_heads * (heads.dim + heads.v_dim)
        operations = 2 * heads.num_heads * (heads.dim + heads.v_dim)
        width = self.indexer.dim // self.indexer.group
        return (
            CacheRead(self.indexer.top_k, elements, operations),
            CacheRead(None, width, 2 * self.indexer.num_heads * width),
        )

    def products(self, width: int) -> list[tuple[int, int]]:
        index = (self.indexer.num_heads + 1) * self.indexer.dim
        return [*Attention.products(self, width), (index, width)]

    def cache_obstacle(self, dtype: str) -> str:
        if dtype in ("auto", "float"):
            return ""
        return "index keys (QSA) are cached in the dtype of activations only"

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add the parameters of attention and of the indexer."""
        Attention.plan(self, plan, param_prefix, tensor_prefix)
        self.indexer.plan(plan, param_prefix, tensor_prefix)
