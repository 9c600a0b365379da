"""The specification of attention to the last tokens and to compressed entries (DeepSeek-V4).

Keys and values are the same vectors, and all heads share them. A query sees

- the last N tokens, its own included, and
- for each complete window of m tokens that ends no later than the query, one entry: a sum of the
  tokens' vectors, with a softmax over the window per element as weights. With overlap, an entry
  also has the tokens of the window before. An indexer may select the entries that a query sees.

One softmax covers both, and an attention sink. The last p elements of a head are rotated by the
position, in values too, so results are rotated back by the position of the query. The output is a
low-rank product per group of heads, followed by one product.

Cache: entries have one row per m tokens. The vectors of the last tokens, and what later entries are
computed from, are a state: rows of the tokens of a tile, and those that the tile needs of the
tokens before it.

Shapes: D model width, H heads, d their width, p their rotated part, N tokens of the window, m
tokens of an entry, q_rank width of compressed queries, G groups of heads, R rank of a group's
output, J index heads.

Source: DeepSeek-V4 (technical report, section 2.3), transformers' deepseek_v4.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moeserve.blocks.mixer import CacheRead, CacheTensor, Mixer
from moeserve.ops.rules import TILE

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan
    from moeserve.ops.inputs import HeadShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor:
    """Reduces each window of `every` tokens to one entry of `dim` elements."""

    name: str  # of the module in the checkpoint
    dim: int
    every: int  # m
    overlap: bool  # an entry also has the tokens of the window before

    @property
    def values(self) -> int:
        """The values of a token: one per element, and with overlap one more for the next entry."""
        return self.dim * (2 if self.overlap else 1)

    @property
    def columns(self) -> int:
        """The inputs of a token: its values, and as many scores."""
        return 2 * self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryIndexer:
    """Selects the `top_k` entries that a query sees, as `Indexer` selects tokens."""

    num_heads: int  # J
    dim: int
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention(Mixer):
    """Attention of H heads to the last N tokens and to compressed entries."""

    tp_units = "groups", "groups of heads"
    num_heads: int  # H
    head_dim: int  # d
    rope_dim: int  # p
    window: int  # N
    q_rank: int
    groups: int  # G
    group_rank: int  # R
    every: int  # m; 0: no entries
    overlap: bool = False
    indexer: EntryIndexer | None = None  # None: a query sees all entries

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """The compressor of entries, followed by that of the indexer's keys."""
        if not self.every:
            return ()
        entries = Compressor(
            name="compressor.", dim=self.head_dim, every=self.every, overlap=self.overlap
        )
        if self.indexer is None:
            return (entries,)
        return entries, replace(entries, name="compressor.indexer.", dim=self.indexer.dim)

    @property
    def columns(self) -> int:
        """The inputs of a token to all compressors."""
        return sum(compressor.columns for compressor in self.compressors)

    @property
    def num_before(self) -> int:
        """The most tokens before a tile whose inputs later entries need, at least 1.

        They are those of an incomplete window and, with overlap, of the window before.
        """
        complete = self.every if self.overlap else 0
        return max(1, complete + max(0, self.every - TILE))

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """Return the entries and the index keys; without entries the state."""
        if not self.every:
            return self._window()
        return tuple(
            CacheTensor(name, 1, compressor.dim, every=self.every)
            for name, compressor in zip(("entries", "index"), self.compressors, strict=False)
        )

    def tiled_state(self, tp_size: int) -> tuple[CacheTensor, ...]:
        if not self.every:
            return ()
        inputs = CacheTensor("inputs", 1, self.columns)
        border = CacheTensor("inputs_border", self.num_before, self.columns, per_tile=True)
        return *self._window(), inputs, border

    def _window(self) -> tuple[CacheTensor, ...]:
        """Return the rows of the last tokens: of a tile, and those before the tile."""
        return (
            CacheTensor("rows", 1, self.head_dim),
            CacheTensor("rows_border", self.window - 1, self.head_dim, per_tile=True),
        )

    def head_shape(self, tp_size: int) -> "HeadShape":
        from moeserve.ops.inputs import HeadShape  # has torch

        return HeadShape(self.num_heads // tp_size, 1, self.head_dim, self.head_dim)

    def reads(self, tp_size: int) -> tuple[CacheRead, ...]:
        operations = 4 * self.num_heads // tp_size * self.head_dim
        reads = [CacheRead(self.window, self.head_dim, operations)]
        if self.every:
            window = self.indexer.top_k * self.every if self.indexer else None
            per_token = -(-self.head_dim // self.every)
            reads.append(CacheRead(window, per_token, operations // self.every))
        if self.indexer:
            width = -(-self.indexer.dim // self.every)
            reads.append(CacheRead(None, width, 2 * self.indexer.num_heads * width))
        return tuple(reads)

    def products(self, width: int) -> list[tuple[int, int]]:
        heads = self.num_heads * self.head_dim
        products = [
            (self.q_rank, width),
            (heads, self.q_rank),
            (self.head_dim, width),
            (self.groups * self.group_rank, heads // self.groups),
            (width, self.groups * self.group_rank),
        ]
        if self.every:
            products.append((self.columns, width))
        if self.indexer:
            queries = self.indexer.num_heads * self.indexer.dim
            products += [(queries, self.q_rank), (self.indexer.num_heads, width)]
        return products

    def obstacle(self, kernels: str) -> str:
        return "compressed attention is not supported" if kernels == "fa3" else ""

    def cache_obstacle(self, dtype: str) -> str:
        if dtype in ("auto", "float"):
            return ""
        return "compressed entries are cached in the dtype of activations only"

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add q_a, q_norm, q_b, kv_a, kv_norm, out_groups, out, sinks, and those of compressors
        and indexer.
        """
        block = plan.block(param_prefix, tensor_prefix, "self_attn.")
        heads = self.num_heads * self.head_dim
        block.add("q_a", (self.q_rank, plan.width), "q_a_proj.weight")
        block.add("q_norm", (self.q_rank,), "q_a_norm.weight", fp32=True)
        block.add("q_b", (heads, self.q_rank), "q_b_proj.weight", sharded=True)
        block.add("kv_a", (self.head_dim, plan.width), "kv_proj.weight")
        block.add("kv_norm", (self.head_dim,), "kv_norm.weight", fp32=True)
        ranks = self.groups * self.group_rank
        block.stack(
            "out_groups",
            [block.share("o_a_proj.weight", ranks)],
            heads // self.groups,
            widened=True,
        )
        block.add("out", (plan.width, ranks), "o_b_proj.weight", sharded=True)
        block.add("sinks", (self.num_heads,), "sinks", sharded=True, fp32=True)
        if not self.every:
            return
        sources = [
            (f"{compressor.name}{product}_proj.weight", compressor.values)
            for compressor in self.compressors
            for product in ("kv", "gate")
        ]
        block.stack(
            "compress", [(name, rows, slice(0, rows)) for name, rows in sources], plan.width
        )
        for prefix, compressor in zip(("entry", "index_key"), self.compressors, strict=False):
            shape = (self.every, compressor.values)
            block.add(f"{prefix}_bias", shape, f"{compressor.name}position_bias", fp32=True)
            name = f"{compressor.name}kv_norm.weight"
            block.add(f"{prefix}_norm", (compressor.dim,), name, fp32=True)
        if self.indexer is not None:
            queries = self.indexer.num_heads * self.indexer.dim
            module = "compressor.indexer."
            block.add("index_q", (queries, self.q_rank), f"{module}q_b_proj.weight")
            weights = f"{module}scorer.weights_proj.weight"
            block.add("index_weights", (self.indexer.num_heads, plan.width), weights, fp32=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKeyAttention(CompressedAttention):
    """Attention to the last tokens alone, with a cache row per token (DeepSeek-V4's MTP head).

    The rule has the window.
    """

    every: int = 0

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        return (CacheTensor("rows", 1, self.head_dim),)
