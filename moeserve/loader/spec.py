"""A model in numbers: one frozen record per checkpoint, read from its config.json. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """The rule by which a token chooses its experts. Scores in fp32; ties go to the lowest expert id.

    score: softmax over all experts, then top-k (`softmax`), or top-k of the logits, then softmax over the chosen
    (`softmax_selected`, GraniteMoE and gpt-oss). renormalize: divide the chosen weights by their sum.
    """

    score: Literal["softmax", "softmax_selected"] = "softmax"
    renormalize: bool = False


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
    attention_factor: float | None = None


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
    router: RouterSpec = RouterSpec()
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
