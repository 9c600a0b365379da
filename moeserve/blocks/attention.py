"""Grouped-query attention in numbers: heads, norms, rotary embedding, and which earlier tokens a
query sees.

D model width, H query heads and G KV heads of the model, d width of queries and keys, v of values.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moeserve.blocks.mixer import CacheTensor, Mixer, QueryScale
from moeserve.comm.world import World

if TYPE_CHECKING:
    from moeserve.blocks.weights import WeightPlan
    from moeserve.ops.inputs import HeadShape


@dataclass(frozen=True, slots=True)
class Heads:
    """The rank's query heads [first, first + count) and the KV heads that they read."""

    first: int
    count: int
    first_kv: int
    count_kv: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Mixer):
    """A mixer: softmax attention of H query heads on G KV heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_dim: int | None = None  # of values; None: head_dim
    qkv_bias: bool = False
    out_bias: bool = False
    # RMS norms of queries and keys: per head (Qwen3), over all heads together (OLMoE), or per head
    # without weights (Llama-4).
    qk_norm: Literal["none", "head", "full", "unit"] = "none"
    norm_last: bool = False  # norms follow the rotation (Hunyuan)
    value_norm: bool = False  # of each value head, without weights (Gemma 4)
    clip: float | None = None  # the largest magnitude of queries, keys and values (OLMoE)
    scale: float | None = None  # of scores; None: head_dim ** -0.5
    query_scale: QueryScale | None = None  # grows with the position (Llama-4)
    shared_kv: bool = False  # values are the keys before norm and rotation (Gemma 4)
    value_scale: float = 1.0  # (MiMo-V2)
    sinks: bool = False  # a score per head that takes weight and gives no value (gpt-oss)
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0: unchanged
    # Results are multiplied by the sigmoid of one more product, for each head (Step-3.5) or each
    # element (Trinity).
    gate: Literal["none", "head", "element"] = "none"
    gate_in_q: bool = False  # q_proj has a head's gates below its queries (Qwen3-Next)
    inputs: int = 1  # rows of the model's width, side by side, that qkv reads (EAGLE-3: 2)

    @property
    def value_dim(self) -> int:
        """The width of values."""
        return self.v_dim or self.head_dim

    @property
    def is_one_call(self) -> bool:
        """Whether nothing is between the steps of attention, so that kernels may join them."""
        between = (
            self.qk_norm == "full"
            or self.query_scale
            or self.gate != "none"
            or self.value_scale != 1.0
        )
        return not between

    @property
    def possible_tp(self) -> list[int]:
        """Each rank gets equally many query heads, and whole KV heads or a part of one's queries.

        12 query heads on 4 KV heads -> [1, 2, 4, 12]
        """
        heads = self.num_heads
        kv = self.num_kv_heads
        return [
            tp for tp in range(1, heads + 1) if heads % tp == 0 and (kv % tp == 0 or tp % kv == 0)
        ]

    @property
    def sharing(self) -> str:
        return f"{self.num_heads} query heads on {self.num_kv_heads} KV heads"

    def local_heads(self, world: World) -> Heads:
        """Return this rank's heads; a KV head that several ranks need is computed and cached by
        each of them.

        8 query heads on 2 KV heads, rank 3 of 4 -> queries 6 and 7, KV head 1
        """
        tp = world.tp_size
        rank = world.tp_rank
        assert tp in self.possible_tp, (tp, self)
        queries = self.num_heads // tp
        return Heads(
            rank * queries, queries, rank * self.num_kv_heads // tp, self.local_kv_heads(tp)
        )

    def local_kv_heads(self, tp_size: int) -> int:
        """Return the number of KV heads in each rank's cache."""
        return max(1, self.num_kv_heads // tp_size)

    def cache(self, tp_size: int) -> tuple[CacheTensor, ...]:
        heads = self.local_kv_heads(tp_size)
        return CacheTensor("k", heads, self.head_dim), CacheTensor("v", heads, self.value_dim)

    def head_shape(self, tp_size: int) -> "HeadShape":
        from moeserve.ops.inputs import HeadShape  # has torch

        return HeadShape(
            self.num_heads // tp_size, self.local_kv_heads(tp_size), self.head_dim, self.value_dim
        )

    def products(self, width: int) -> list[tuple[int, int]]:
        heads = self.num_heads * self.head_dim
        results = self.num_heads * self.value_dim
        qkv = heads + self.num_kv_heads * (
            self.head_dim + (0 if self.shared_kv else self.value_dim)
        )
        gates = {"none": 0, "head": self.num_heads, "element": results}[self.gate]
        return [(qkv, self.inputs * width), (width, results), *([(gates, width)] if gates else [])]

    def obstacle(self, kernels: str) -> str:
        if kernels == "fa3":
            from moeserve.kernels.flash_attention import misfit  # has torch

            return misfit(self.head_dim, self.value_dim, sinks=self.sinks)
        from moeserve.ops.native_layer import HEAD_DIMS  # has torch

        known = self.head_dim in HEAD_DIMS
        return (
            ""
            if known
            else f"{kernels.capitalize()} attention does not know heads of width {self.head_dim}"
        )

    def plan(self, plan: "WeightPlan", ours: str, theirs: str) -> None:
        """Add qkv, out and gate with their biases, q_norm and k_norm, and sinks."""
        block = plan.block(ours, theirs, "self_attn.")
        dim = self.head_dim
        v_dim = self.value_dim
        width = plan.width
        local = self.local_heads(plan.world)
        results = self.num_heads * v_dim

        def rows(first: int, count: int, total: int, size: int) -> tuple[int, slice]:
            return total * size, slice(first * size, (first + count) * size)

        kv = local.first_kv, local.count_kv, self.num_kv_heads
        each = dim + v_dim if self.gate_in_q else dim
        parts = [
            ("q_proj", *rows(local.first, local.count, self.num_heads, each)),
            ("k_proj", *rows(*kv, dim)),
            ("k_proj" if self.shared_kv else "v_proj", *rows(*kv, v_dim)),
        ]
        block.stack(
            "qkv", [(f"{x}.weight", n, taken) for x, n, taken in parts], self.inputs * width
        )
        if self.qkv_bias:
            block.stack("qkv_bias", [(f"{x}.bias", n, taken) for x, n, taken in parts])
        if self.qk_norm in ("head", "full"):
            for x, n, _ in parts[:2]:
                size = dim if self.qk_norm == "head" else n  # of q_proj without gates
                block.add(f"{x[0]}_norm", (size,), f"{x[0]}_norm.weight")
        block.add("out", (width, results), "o_proj.weight", sharded=True)
        if self.out_bias:
            block.add("out_bias", (width,), "o_proj.bias", sharded=True)
        if self.gate != "none" and not self.gate_in_q:
            gates = results if self.gate == "element" else self.num_heads
            block.add("gate", (gates, width), "gate_proj.weight", sharded=True)
        if self.sinks:
            block.add("sinks", (self.num_heads,), "sinks", sharded=True)
