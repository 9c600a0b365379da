"""A model in numbers: one frozen record per checkpoint, read from its config.json, and what follows from it: the heads
that a rank computes, and the size. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeserve.comm.world import World
from moeserve.errors import ConfigError
from moeserve.ops.rules import RouterRule

_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}  # of a quantised weight without scales
_USUAL_GROUP = 64  # of int4 weights that are quantised on loading
_MOST_GROUP = 128  # of int4 weights: GPUs have the scales of larger groups several times


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding. kind: `default`, `linear`, `llama3` or `yarn`; numbers as in config.json's rope_parameters."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # on cos and sin


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """The format of a checkpoint's quantised weights.

    packed: in words of 32 bits. rows, group: outputs and inputs that share a scale, 0 for all. zeros: with zero points.
    activations: the config quantises them, too, which not all kernels do.
    """

    kind: Literal["int8", "int4", "fp8"]
    packed: bool = False
    rows: int = 1
    group: int = 0
    zeros: bool = False
    activations: bool = False

    @property
    def values_dtype(self) -> str:
        """The dtype of the values as safetensors spells it."""
        return "I32" if self.packed else "F8_E4M3" if self.kind == "fp8" else "I8"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The numbers of scales along the outputs and the inputs of a weight [..., N, K]."""
        sizes = zip(shape[-2:], (self.rows, self.group), strict=True)
        rows, columns = (-(-size // step) if step else 1 for size, step in sizes)
        return rows, columns


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The numbers that shape a decoder. `windows[i]` is layer i's sliding window in tokens, None for full attention;
    `moe_layers[i]` says whether layer i routes to experts or is dense."""

    architecture: str  # config.json's class name, e.g. Qwen3MoeForCausalLM
    dtype: str  # the checkpoint's own: float32, bfloat16, float16
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    intermediate_size: int = 0  # of dense MLP layers
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0  # intermediate width of one expert
    shared_expert_size: int = 0  # 0: none
    moe_layers: tuple[bool, ...] = ()
    windows: tuple[int | None, ...] = ()
    router: RouterRule = RouterRule()  # noqa: RUF009  # frozen
    rope: RopeSpec = RopeSpec()
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"  # per head (Qwen3) or over the whole width (OLMoE)
    clip_qkv: float | None = None
    tie_embeddings: bool = False
    attention_scale: float | None = None  # None: head_dim ** -0.5
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    stored: StoredFormat | None = None  # of quantised weights; None: there are none

    @property
    def scale(self) -> float:
        """The factor on attention scores before the softmax."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer routes to experts; without `moe_layers` all are dense."""
        return layer < len(self.moe_layers) and self.moe_layers[layer]


@dataclass(frozen=True, slots=True)
class Heads:
    """The rank's query heads [first, first + count) and the KV heads that they read."""

    first: int
    count: int
    first_kv: int
    count_kv: int


def possible_tp(spec: ModelSpec) -> list[int]:
    """Returns the numbers of ranks that an engine may have.

    Each rank gets equally many query heads, and whole KV heads or a part of one's queries.
    12 query heads on 4 KV heads -> [1, 2, 4, 12]
    """
    heads, kv = spec.num_heads, spec.num_kv_heads
    return [tp for tp in range(1, heads + 1) if heads % tp == 0 and (kv % tp == 0 or tp % kv == 0)]


def local_heads(spec: ModelSpec, world: World) -> Heads:
    """Returns this rank's heads; a KV head that several ranks need is computed and cached by each of them.

    8 query heads on 2 KV heads, rank 3 of 4 -> queries 6 and 7, KV head 1. Raises ConfigError with the possible tp.
    """
    tp, rank = world.tp_size, world.tp_rank
    possible = possible_tp(spec)
    if tp not in possible:
        raise ConfigError(
            f"tp={tp} cannot share out {spec.num_heads} query heads on {spec.num_kv_heads} KV heads evenly; "
            f"choose tp from {', '.join(map(str, possible))}"
        )
    queries = spec.num_heads // tp
    return Heads(rank * queries, queries, rank * spec.num_kv_heads // tp, local_kv_heads(spec, tp))


def local_kv_heads(spec: ModelSpec, tp_size: int) -> int:
    """The number of KV heads in each rank's cache."""
    return max(1, spec.num_kv_heads // tp_size)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers of parameters. active: those that compute one token, without the embedding table."""

    total: int
    active: int


def model_size(spec: ModelSpec) -> ModelSize:
    """Counts the matrices of a model; norms and biases are a rounding error (< 0.1 %).

    Qwen3-30B-A3B (D 2048, 48 layers, E 128, K 8, I 768) -> about 30.5e9 and 3.0e9
    """
    width, moe = spec.hidden_size, sum(spec.moe_layers)
    attention = 2 * width * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    expert, head = 3 * width * spec.expert_size, spec.vocab_size * width
    always = spec.num_layers * attention + (spec.num_layers - moe) * 3 * width * spec.intermediate_size
    always += moe * width * (spec.num_experts + 3 * spec.shared_expert_size) + head
    total = always + moe * spec.num_experts * expert + (0 if spec.tie_embeddings else head)
    return ModelSize(total, always + moe * spec.experts_per_token * expert)


def bytes_per_weight(spec: ModelSpec, asked: str | None, itemsize: int) -> float:
    """Returns a linear layer's bytes per weight, scales included. asked: the kind it becomes on loading."""
    form = spec.stored
    if form is None and asked == "int4":
        form = StoredFormat(kind="int4", group=_USUAL_GROUP)
    if form is None:
        return _BYTES.get(asked or "", itemsize)
    group = min(form.group or _MOST_GROUP, _MOST_GROUP) if form.kind == "int4" else form.group
    return _BYTES[form.kind] + ((8 if form.zeros else 4) / group if group else 0.0)
