"""Ops, the table of kernels that model code calls. `ops/pick.py` chooses one at start."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from moeserve.config import Lossless
from moeserve.errors import ConfigError
from moeserve.ops import (
    attention,
    elementwise,
    latent,
    native_layer,
    recurrence,
    selected,
    selective_scan,
)
from moeserve.ops.inputs import PlanAttention
from moeserve.ops.linear import PackLinear
from moeserve.ops.native import native
from moeserve.ops.rules import Activation

log = logging.getLogger(__name__)
Choice = Literal["auto", "native", "torch", "triton", "deep_gemm", "flashinfer"]


@dataclass(frozen=True, slots=True)
class Ops:
    """A table of the kernels that model code calls.

    The functions of the same names in this package document meaning, shapes and examples.
    """

    device: torch.device
    dtype: torch.dtype
    description: str  # the implementation of every kernel and the reason, on one line
    # Number of rows -> number of rows to compute, for rows of a step or of an expert. The
    # additional rows may have any content.
    pad_rows: Callable[[int], int]
    pack_linear: PackLinear  # packs a weight, and returns its linear layer
    pack_heads: latent.PackHeads  # packs a weight with one product per head
    act_mul: Callable[[Tensor, Activation], Tensor]
    sigmoid_gate: Callable[[Tensor], Tensor]
    sigmoid_mul: Callable[[Tensor, Tensor], Tensor]
    soft_cap: Callable[[Tensor, float], Tensor]
    native: bool = False  # the table of csrc/, which has kernels for experts, too
    triton: bool = False  # the table of kernels/, which has kernels for experts, too
    kernels_setting: str = "auto"  # the setting `kernels`
    exact: bool = True  # batch-invariant: a row's bits depend on the row alone
    allocate: native_layer.Allocate = native_layer.allocate_new  # memory for packed weights
    write_experts: native_layer.WriteExperts | None = None  # to disk (expert_memory)
    lossless: Lossless = "off"  # the bf16 weights that are compressed to 12 bits
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = elementwise.rms_norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = (
        elementwise.add_rms_norm
    )
    embedding: Callable[[Tensor, Tensor], Tensor] = elementwise.embedding
    # Triton's also takes num_tokens, on the device.
    route: Callable[..., tuple[Tensor, Tensor]] = elementwise.route
    qk_norm_rope_cache: Callable[..., Tensor] = elementwise.qk_norm_rope_cache
    latent_rope_cache: Callable[..., Tensor] = latent.latent_rope_cache
    sigmoid: Callable[[Tensor], Tensor] = elementwise.sigmoid
    softplus: Callable[[Tensor], Tensor] = elementwise.softplus
    plan_tiles: recurrence.PlanTiles = recurrence.plan_tiles
    causal_conv: Callable[..., Tensor] = recurrence.causal_conv
    recurrence: Callable[..., Tensor] = recurrence.recurrence
    selective_scan: Callable[..., Tensor] = selective_scan.selective_scan
    index_select: Callable[..., Tensor] = selected.index_select
    # `attention` gets the metadata of this table's `plan_attention`; Triton's also takes `out`.
    plan_attention: PlanAttention = attention.plan_attention
    attention: Callable[..., Tensor] = attention.attention
    # Fused blocks, which compute a whole block in one call; None: this table has none.
    attention_block: Callable[..., Callable[..., Tensor]] | None = None
    latent_block: Callable[..., Callable[..., Tensor]] | None = None
    recurrent_block: Callable[..., Callable[..., Tensor]] | None = None
    mlp_block: Callable[..., Callable[[Tensor], Tensor]] | None = None
    # Compiles a function with torch.compile, if enabled (ops/traced.py).
    compile: Callable[[Any], Any] = lambda function: function
    # Excludes a function from compilation.
    opaque: Callable[[Any], Any] = lambda function: function
    # (kind, inputs per scale (0: all), inputs) -> why such quantized weights are unsupported; "" if
    # they are supported. None: no quantized weights are supported.
    weight_obstacle: Callable[[str, int, int], str] | None = None

    def packing_into(
        self,
        allocate: native_layer.Allocate,
        write_experts: native_layer.WriteExperts | None = None,
    ) -> "Ops":
        """Return the native table, with packed weights in memory from `allocate`.

        write_experts: writes experts to disk. The weights of `pack_heads` are not in memory from
            `allocate`, because their parameter is packed in two parts, and memory is kept by
            parameter.
        """
        assert self.native
        pack_linear = partial(
            native_layer.NativeLinear, allocate=allocate, lossless=self.lossless == "all"
        )
        return replace(
            self, allocate=allocate, write_experts=write_experts, pack_linear=pack_linear
        )

    @property
    def supports_lossless(self) -> bool:
        """Whether the kernels support bf16 weights compressed to 12 bits."""
        module: Any = native()
        return (
            self.native and self.dtype == torch.bfloat16 and module.serving_isa() == "avx512_bf16"
        )

    def with_lossless(self, which: Lossless) -> "Ops":
        """Return the table that compresses these bf16 weights to 12 bits.

        Raises ConfigError if the kernels do not support it.
        """
        if which in ("auto", "off"):
            return self
        if not self.supports_lossless:
            raise ConfigError(
                f"lossless_compression={which} needs bfloat16 weights on a CPU with AVX512-BF16, "
                f"but here {self.dtype} is computed by {self.description}; use "
                "lossless_compression=off"
            )
        pack_linear = partial(native_layer.NativeLinear, lossless=which == "all")
        log.info(
            "bf16 weights of %s are compressed to 12 bits",
            "experts" if which == "experts" else "all linear layers",
        )
        return replace(self, lossless=which, pack_linear=pack_linear)
