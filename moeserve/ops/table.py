"""The table of kernels that model code calls; `ops/pick.py` chooses one at start."""

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
    """Every kernel that model code calls.

    Meanings, shapes and examples are at the functions of the same names in this package.
    """

    device: torch.device
    dtype: torch.dtype
    chosen: str  # every kernel's implementation and why, on one line
    # The number of rows that so many rows of a step or of an expert are padded to. The padding may
    # hold anything.
    pad_rows: Callable[[int], int]
    pack_linear: PackLinear  # makes a linear layer with a constant weight, in this table's layout
    pack_heads: latent.PackHeads  # makes one product per head
    act_mul: Callable[[Tensor, Activation], Tensor]
    sigmoid_gate: Callable[[Tensor], Tensor]
    sigmoid_mul: Callable[[Tensor, Tensor], Tensor]
    soft_cap: Callable[[Tensor, float], Tensor]
    native: bool = False  # the kernels of csrc/, which have kernels for experts, too
    triton: bool = False  # the kernels of kernels/, which have kernels for experts, too
    asked: str = "auto"  # the `kernels` setting
    exact: bool = True  # a row's bits depend on nothing but the row
    room: native_layer.Room = native_layer.new_room  # memory for packed weights
    to_disk: native_layer.ToDisk | None = None
    lossless: Lossless = "off"  # the bf16 weights that are kept in 12 bits
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
    # Attention gets the metadata of this table's plan_attention; Triton's also gets `out`.
    plan_attention: PlanAttention = attention.plan_attention
    attention: Callable[..., Tensor] = attention.attention
    # Fused blocks: all steps of such a block in one call; None where there is none.
    attention_block: Callable[..., Callable[..., Tensor]] | None = None
    latent_block: Callable[..., Callable[..., Tensor]] | None = None
    recurrent_block: Callable[..., Callable[..., Tensor]] | None = None
    mlp_block: Callable[..., Callable[[Tensor], Tensor]] | None = None
    # Compiles a function where these kernels can be joined (ops/traced.py).
    trace: Callable[[Any], Any] = lambda function: function
    # Hides a function from any trace.
    opaque: Callable[[Any], Any] = lambda function: function
    # (kind, group, inputs) -> why quantised weights with so many inputs, and so many per scale (0:
    # all), are unsupported; empty if they are supported. None: all quantised weights are.
    weight_obstacle: Callable[[str, int, int], str] | None = None

    def packing_into(
        self, room: native_layer.Room, to_disk: native_layer.ToDisk | None = None
    ) -> "Ops":
        """Return the native kernels with packed weights in memory from `room`; experts go to
        the disk, if so asked.

        Not those of heads: a parameter that is packed in two parts has no place of its own there.
        """
        assert self.native
        pack_linear = partial(native_layer.NativeLinear, room=room, lossless=self.lossless == "all")
        return replace(self, room=room, to_disk=to_disk, pack_linear=pack_linear)

    @property
    def compresses(self) -> bool:
        """Whether bf16 weights can be kept in 12 bits."""
        module: Any = native()
        return (
            self.native and self.dtype == torch.bfloat16 and module.serving_isa() == "avx512_bf16"
        )

    def compressing(self, which: Lossless) -> "Ops":
        """Return the kernels with these bf16 weights in 12 bits. Raises ConfigError where there
        are none for it.
        """
        if which == "off":
            return self
        if not self.compresses:
            raise ConfigError(
                f"lossless_compression={which} is for bfloat16 weights on CPUs with "
                f"AVX512-BF16, and here {self.dtype} "
                f"is served by {self.chosen}; use lossless_compression=off"
            )
        pack_linear = partial(native_layer.NativeLinear, lossless=which == "all")
        log.info(
            "bf16 weights of %s are kept in 12 bits",
            "experts" if which == "experts" else "all linear layers",
        )
        return replace(self, lossless=which, pack_linear=pack_linear)
