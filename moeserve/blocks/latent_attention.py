"""The specification of multi-head latent attention, MLA (DeepSeek-V2, V3, Kimi-K2, GLM).

The KV cache has one compressed entry per token for all heads. Tensor-parallel ranks shard heads,
but each computes and caches whole entries.

Shapes: D model width, H query heads, n and p the parts of a query without and with rotary
embedding, v width of values, L rank of the latents, C = L + p width of a cache entry.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1. The layer computes the absorbed form of its
appendix C.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moeserve.blocks.indexer import Indexer
from moeserve.blocks.mixer import CacheRead, CacheTensor, Mixer, QueryScale
from moeserve.comm.world import World
from moeserve.loader.load_plan import LoadPlan, Param, Piece

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan
    from moeserve.ops.inputs import HeadShape

_KEYS_UP = "self_attn.k_b_proj.weight"
_VALUES_UP = "self_attn.v_b_proj.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(Mixer):
    """Attention of H heads to one latent per token."""

    tp_units = "num_heads", "heads on latents"
    num_heads: int
    nope_dim: int  # n
    rope_dim: int  # p; if `rope` is None, it is not rotated either (Kimi-Linear)
    v_dim: int
    rank: int  # L
    q_rank: int | None  # rank of compressed queries; None: queries are one product (V2-Lite)
    bias: bool = False  # whether the products to latents and the output projection have biases
    scale: float | None = None  # factor of scores; None: (n + p) ** -0.5
    query_scale: QueryScale | None = None  # position-dependent (Mistral 4)
    sinks: bool = False  # attention sinks: a learned score per head without a value (Hy4)
    # Multiply results by the sigmoid of another projection of x, with a gate per head (Ling 3) or
    # per element (Hy4)
    gate: Literal["none", "head", "element"] = "none"
    eps: float = 1e-6  # of the norms of latents and compressed queries
    # Factors of normed compressed queries and of normed latents (LongCat)
    q_factor: float = 1.0
    kv_factor: float = 1.0
    module: str = "self_attn."  # prefix of the tensors' names in the layer
    # Selects the tokens that a query attends to; None: all. Needs compressed queries.
    indexer: Indexer | None = None

    @property
    def entry(self) -> int:
        """The width of a cache entry, C."""
        return self.rank + self.rope_dim

    @property
    def num_gates(self) -> int:
        """The number of gates of all heads."""
        per_head = {"none": 0, "head": 1, "element": self.v_dim}[self.gate]
        return self.num_heads * per_head

    def heads(self, world: World) -> slice:
        """Return this rank's heads."""
        assert self.num_heads % world.tp_size == 0, (world, self)
        count = self.num_heads // world.tp_size
        return slice(world.tp_rank * count, (world.tp_rank + 1) * count)

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        return (
            CacheTensor("latent", 1, self.entry),
            *(self.indexer.cache() if self.indexer else ()),
        )

    def head_shape(self, tp_size: int) -> "HeadShape":
        from moeserve.ops.inputs import HeadShape  # has torch

        return HeadShape(self.num_heads // tp_size, 1, self.entry, self.rank)

    def reads(self, tp_size: int) -> tuple[CacheRead, ...]:
        """See `Mixer`. An indexer reads all of its keys; attention reads selected positions."""
        operations = 2 * self.num_heads // tp_size * (self.entry + self.rank)
        if self.indexer is None:
            return (CacheRead(None, self.entry, operations),)
        selected = CacheRead(self.indexer.top_k, self.entry, operations)
        if self.indexer.shared:
            return (selected,)
        width = self.indexer.read_width
        return selected, CacheRead(None, width, 2 * self.indexer.num_heads * width)

    def products(self, width: int) -> list[tuple[int, int]]:
        queries = self.num_heads * (self.nope_dim + self.rope_dim)
        if self.q_rank is None:
            products = [(queries, width)]
        else:
            products = [(self.q_rank, width), (queries, self.q_rank)]
        products.append((self.entry, width))
        products.append((self.num_heads * (self.nope_dim + self.v_dim), self.rank))
        products.append((width, self.num_heads * self.v_dim))
        if self.num_gates:
            products.append((self.num_gates, width))
        if self.indexer and self.q_rank:
            products += self.indexer.products(width, self.q_rank)
        return products

    def obstacle(self, kernels: str) -> str:
        if kernels != "fa3":
            return ""
        from moeserve.kernels.flash_attention import misfit  # has torch

        return misfit(self.entry, self.rank, latent=True, sinks=self.sinks)

    def cache_obstacle(self, dtype: str) -> str:
        if dtype in ("auto", "float"):
            return ""
        return "latents (MLA) are cached in the dtype of activations only"

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add q (or q_a, q_norm, q_b), kv_a, kv_norm, kv_b, out, gate, sinks, and an indexer's
        parameters.
        """
        block = plan.block(param_prefix, tensor_prefix, self.module)
        heads = self.num_heads
        width = plan.width
        queries = heads * (self.nope_dim + self.rope_dim)
        if self.q_rank is None:
            block.add("q", (queries, width), "q_proj.weight", sharded=True)
        else:
            block.add("q_a", (self.q_rank, width), "q_a_proj.weight")
            block.add("q_norm", (self.q_rank,), "q_a_layernorm.weight")
            block.add("q_b", (queries, self.q_rank), "q_b_proj.weight", sharded=True)
            if self.bias:
                block.add("q_a_bias", (self.q_rank,), "q_a_proj.bias")
            if self.indexer:
                self.indexer.plan(plan, param_prefix, tensor_prefix, self.q_rank)
        block.add("kv_a", (self.entry, width), "kv_a_proj_with_mqa.weight")
        if self.bias:
            block.add("kv_a_bias", (self.entry,), "kv_a_proj_with_mqa.bias")
        block.add("kv_norm", (self.rank,), "kv_a_layernorm.weight")
        if tensor_prefix + _KEYS_UP in plan.present:
            plan.extend(
                self._split_kv_b(param_prefix + "kv_b", tensor_prefix, self.heads(plan.world))
            )
        else:
            up_and_down = block.share("kv_b_proj.weight", heads * (self.nope_dim + self.v_dim))
            block.stack("kv_b", [up_and_down], self.rank, widened=True)
        block.add("out", (width, heads * self.v_dim), "o_proj.weight", sharded=True)
        if self.bias:
            block.add("out_bias", (width,), "o_proj.bias", sharded=True)
        if self.num_gates:
            block.add("gate", (self.num_gates, width), "gate_proj.weight", sharded=True)
        if self.sinks:
            block.add("sinks", (heads,), "sinks", sharded=True)

    def _split_kv_b(self, param: str, tensor_prefix: str, heads: slice) -> LoadPlan:
        """Return the load plan of kv_b from GGUF's two tensors, [H, L, n] and [H, v, L]."""
        pieces = []
        per_head = self.nope_dim + self.v_dim
        k_shape = (self.num_heads, self.rank, self.nope_dim)
        v_shape = (self.num_heads, self.v_dim, self.rank)
        for i, head in enumerate(range(self.num_heads)[heads]):
            start = i * per_head
            k_rows = slice(start, start + self.nope_dim)
            v_rows = slice(start + self.nope_dim, start + per_head)
            pieces.append(
                Piece(
                    tensor_prefix + _KEYS_UP,
                    k_shape,
                    param,
                    at=(k_rows,),
                    take=(head,),
                    transposed=True,
                )
            )
            pieces.append(
                Piece(tensor_prefix + _VALUES_UP, v_shape, param, at=(v_rows,), take=(head,))
            )
        count = heads.stop - heads.start
        return LoadPlan((Param(param, (count * per_head, self.rank), widened=True),), tuple(pieces))
