"""The specification of grouped-query attention: heads, norms, rotary embedding, window.

Shapes: D model width, H query heads and G KV heads of the model, d width of queries and keys, v
width of values.
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
    """A rank's query heads [first, first + count), and its KV heads likewise."""

    first: int
    count: int
    first_kv: int
    count_kv: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Mixer):
    """Grouped-query softmax attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_dim: int | None = None  # width of values; None: head_dim
    qkv_bias: bool = False
    out_bias: bool = False
    # RMS norms of queries and keys: per head (Qwen3), over all heads together ("full", OLMoE), or
    # per head without weights ("unit", Llama-4)
    qk_norm: Literal["none", "head", "full", "unit"] = "none"
    norm_last: bool = False  # apply the norms after the rotary embedding (Hunyuan)
    value_norm: bool = False  # an RMS norm of each value head, without weights (Gemma 4)
    clip: float | None = None  # clamp queries, keys and values to this magnitude (OLMoE)
    scale: float | None = None  # factor of scores; None: head_dim ** -0.5
    query_scale: QueryScale | None = None  # position-dependent (Llama-4)
    shared_kv: bool = False  # values are the keys before norm and rotary embedding (Gemma 4)
    value_scale: float = 1.0  # factor of values (MiMo-V2)
    sinks: bool = False  # attention sinks: a learned score per head without a value (gpt-oss)
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0: unchanged
    # Multiply results by the sigmoid of another projection of x, with a gate per head (Step-3.5) or
    # per element (Trinity)
    gate: Literal["none", "head", "element"] = "none"
    gate_act: Literal["sigmoid", "softplus"] = "sigmoid"  # softplus: Laguna
    gate_bias: bool = False  # gates have a bias per head (Beam)
    gate_in_q: bool = False  # q_proj has each head's gates after its queries (Qwen3-Next)
    # Without a rotary embedding: elements that would be a rotary pair are neighbours (GGUF), not
    # half a head apart. The order decides how scores are rounded.
    paired: bool = False
    inputs: int = 1  # the input of qkv is this many times the model's width (EAGLE-3: 2)

    @property
    def value_dim(self) -> int:
        """The width of values."""
        return self.v_dim or self.head_dim

    @property
    def can_be_one_call(self) -> bool:
        """Whether one fused kernel can compute the layer (`ops.attention_block`)."""
        needs_other_steps = (
            self.qk_norm == "full"
            or self.query_scale
            or self.gate != "none"
            or self.value_scale != 1.0
        )
        return not needs_other_steps

    @property
    def possible_tp(self) -> list[int]:
        """The supported tensor-parallel sizes.

        Ranks have equally many query heads. Each has whole KV heads, or some of the query heads of
        one KV head. For example 12 query heads on 4 KV heads -> [1, 2, 4, 12].
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
        """Return this rank's heads. Ranks that share a KV head each compute and cache it.

        For example 8 query heads on 2 KV heads, rank 3 of 4 -> query heads 6 and 7, KV head 1.
        """
        tp = world.tp_size
        rank = world.tp_rank
        assert tp in self.possible_tp, (tp, self)
        count = self.num_heads // tp
        return Heads(
            first=rank * count,
            count=count,
            first_kv=rank * self.num_kv_heads // tp,
            count_kv=self.local_kv_heads(tp),
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
        return heads_obstacle(kernels, self.head_dim, self.value_dim, sinks=self.sinks)

    def plan(self, plan: "WeightPlan", param_prefix: str, tensor_prefix: str) -> None:
        """Add qkv, out and gate with their biases, q_norm and k_norm, and sinks."""
        block = plan.block(param_prefix, tensor_prefix, "self_attn.")
        dim = self.head_dim
        v_dim = self.value_dim
        width = plan.width
        local = self.local_heads(plan.world)
        results = self.num_heads * v_dim

        def rows(first: int, count: int, total: int, size: int) -> tuple[int, slice]:
            """Return the number of a tensor's rows, and this rank's rows, for heads of `size`."""
            return total * size, slice(first * size, (first + count) * size)

        kv = local.first_kv, local.count_kv, self.num_kv_heads
        q_size = dim + v_dim if self.gate_in_q else dim  # rows of a head in q_proj
        parts = [
            ("q_proj", *rows(local.first, local.count, self.num_heads, q_size)),
            ("k_proj", *rows(*kv, dim)),
            ("k_proj" if self.shared_kv else "v_proj", *rows(*kv, v_dim)),
        ]
        block.stack(
            "qkv",
            [(f"{name}.weight", num_rows, own_rows) for name, num_rows, own_rows in parts],
            self.inputs * width,
        )
        if self.qkv_bias:
            block.stack(
                "qkv_bias",
                [(f"{name}.bias", num_rows, own_rows) for name, num_rows, own_rows in parts],
            )
        if self.qk_norm in ("head", "full"):
            for name, num_rows, _ in parts[:2]:
                size = dim if self.qk_norm == "head" else num_rows  # "full": q_proj has no gates
                norm = f"{name[0]}_norm"  # q_norm or k_norm
                block.add(norm, (size,), f"{norm}.weight")
        block.add("out", (width, results), "o_proj.weight", sharded=True)
        if self.out_bias:
            block.add("out_bias", (width,), "o_proj.bias", sharded=True)
        if self.gate != "none" and not self.gate_in_q:
            gates = results if self.gate == "element" else self.num_heads
            block.add("gate", (gates, width), "gate_proj.weight", sharded=True)
            if self.gate_bias:
                block.add("gate_bias", (self.num_heads,), "gate_bias", sharded=True)
        if self.sinks:
            block.add("sinks", (self.num_heads,), "sinks", sharded=True)


def heads_obstacle(kernels: str, head_dim: int, value_dim: int, *, sinks: bool = False) -> str:
    """Return why kernels do not support heads of such widths; see `Mixer.obstacle`."""
    if kernels == "fa3":
        from moeserve.kernels.flash_attention import misfit  # has torch

        return misfit(head_dim, value_dim, sinks=sinks)
    from moeserve.ops.native_layer import HEAD_DIMS  # has torch

    if head_dim in HEAD_DIMS:
        return ""
    return f"{kernels.capitalize()} attention does not support heads of width {head_dim}"
