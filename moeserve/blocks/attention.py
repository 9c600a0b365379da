"""Grouped-query attention in numbers: heads, norms, rotary embedding, and which earlier tokens a query sees.

D model width, H query heads and G KV heads of the model, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moeserve.blocks.mixer import CacheTensor
from moeserve.blocks.rope import RopeSpec
from moeserve.comm.world import World
from moeserve.engine.blocks import FULL, KVRule

if TYPE_CHECKING:
    from moeserve.blocks.attention_layer import AttentionLayer
    from moeserve.blocks.build import Builder
    from moeserve.blocks.weights import WeightPlan


@dataclass(frozen=True, slots=True)
class Heads:
    """The rank's query heads [first, first + count) and the KV heads that they read."""

    first: int
    count: int
    first_kv: int
    count_kv: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """A mixer: softmax attention of H query heads on G KV heads.

    qk_norm: RMS norms of queries and keys, per head (Qwen3) or over all heads together (`full`, OLMoE). clip: the
    largest magnitude of queries, keys and values (OLMoE). scale: of scores; None: d ** -0.5. rope: None for NoPE.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    rule: KVRule = FULL
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    clip: float | None = None
    scale: float | None = None

    @property
    def possible_tp(self) -> list[int]:
        """Each rank gets equally many query heads, and whole KV heads or a part of one's queries.

        12 query heads on 4 KV heads -> [1, 2, 4, 12]
        """
        heads, kv = self.num_heads, self.num_kv_heads
        return [tp for tp in range(1, heads + 1) if heads % tp == 0 and (kv % tp == 0 or tp % kv == 0)]

    @property
    def sharing(self) -> str:
        """See `Mixer`."""
        return f"{self.num_heads} query heads on {self.num_kv_heads} KV heads"

    def local_heads(self, world: World) -> Heads:
        """Returns this rank's heads; a KV head that several ranks need is computed and cached by each of them.

        8 query heads on 2 KV heads, rank 3 of 4 -> queries 6 and 7, KV head 1
        """
        tp, rank = world.tp_size, world.tp_rank
        assert tp in self.possible_tp, (tp, self)
        queries = self.num_heads // tp
        return Heads(rank * queries, queries, rank * self.num_kv_heads // tp, self.local_kv_heads(tp))

    def local_kv_heads(self, tp_size: int) -> int:
        """Returns the number of KV heads in each rank's cache."""
        return max(1, self.num_kv_heads // tp_size)

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        """See `Mixer`."""
        return tuple(CacheTensor(name, self.local_kv_heads(tp_size), self.head_dim) for name in ("k", "v"))

    def attention_shape(self, tp_size: int) -> tuple[int, int, int]:
        """See `Mixer`."""
        return self.num_heads // tp_size, self.local_kv_heads(tp_size), self.head_dim

    def products(self, width: int) -> list[tuple[int, int]]:
        """See `Mixer`."""
        heads = self.num_heads * self.head_dim
        return [(heads + 2 * self.num_kv_heads * self.head_dim, width), (width, heads)]

    def obstacle(self, kernels: str) -> str:
        """See `Mixer`."""
        from moeserve.ops.native_layer import HEAD_DIMS  # has torch

        known = self.head_dim in HEAD_DIMS
        return "" if known else f"{kernels.capitalize()} attention does not know heads of width {self.head_dim}"

    def cache_obstacle(self, dtype: str) -> str:
        """See `Mixer`."""
        return ""

    def plan(self, plan: WeightPlan, ours: str, theirs: str) -> None:
        """Adds qkv and out with their biases, q_norm and k_norm."""
        dim, local = self.head_dim, self.local_heads(plan.world)
        heads = slice(local.first * dim, (local.first + local.count) * dim)
        kv_heads = slice(local.first_kv * dim, (local.first_kv + local.count_kv) * dim)
        rows = [("q", self.num_heads * dim, heads), *((x, self.num_kv_heads * dim, kv_heads) for x in "kv")]
        for ending, tail in (("weight", (plan.width,)), ("bias", ()))[: 1 + self.qkv_bias]:
            sources = [(plan.spell(theirs, f"self_attn.{x}_proj.{ending}"), n, part) for x, n, part in rows]
            plan.stack(ours + ("qkv" if ending == "weight" else "qkv_bias"), sources, *tail)
        if self.qk_norm != "none":
            for x, n, _ in rows[:2]:
                size = dim if self.qk_norm == "head" else n
                plan.add(f"{ours}{x}_norm", (size,), plan.spell(theirs, f"self_attn.{x}_norm.weight"))
        out = plan.spell(theirs, "self_attn.o_proj.weight")
        plan.add(ours + "out", (plan.width, self.num_heads * dim), out, sharded=True)
        if self.out_bias:
            plan.add(ours + "out_bias", (plan.width,), plan.spell(theirs, "self_attn.o_proj.bias"), sharded=True)

    def build(self, build: Builder, name: str, group: int) -> AttentionLayer:
        """See `Mixer`."""
        from moeserve.blocks.attention_layer import build_attention

        return build_attention(self, build, name, group)

    def workspace(self, width: int, tokens: int, max_len: int, size: int, tp_size: int) -> int:
        """See `Mixer`."""
        from moeserve.blocks.attention_layer import attention_workspace

        return attention_workspace(self, width, tokens, max_len, size, tp_size)
