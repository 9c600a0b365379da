"""The expert kernels for GPUs: Triton's, and DeepGEMM's and FlashInfer's, which replace some of its
matrix products.

Triton's kernels are grouped matrix products over rows sorted by expert. One kernel computes gate,
up and activation. Weights of 16 or 32 bits keep the checkpoint's layout; quantized weights are
rearranged for their kernels.

T: tokens. P: received rows. D: model width. I: expert width. e: local experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.errors import ConfigError
from moeserve.kernels import deep_gemm, flashinfer_moe
from moeserve.kernels.activation import SWIGLU_ACT, UP_FIRST_ACT, Act, act_of
from moeserve.kernels.align import Alignment, align, align_groups, combine
from moeserve.kernels.configs import Config
from moeserve.kernels.fp8 import BLOCK
from moeserve.kernels.grouped_fp8 import Scaled
from moeserve.moe.all2all.base import Inbound, Layout
from moeserve.moe.experts.base import ExpertsCaps, ExpertWeights, FusedExperts, StackedExperts
from moeserve.moe.experts.registry import ExpertFacts
from moeserve.moe.routing import Router
from moeserve.ops import triton_weights
from moeserve.ops.inputs import RowContext
from moeserve.ops.rules import SWIGLU, Activation


def make(facts: ExpertFacts) -> "TritonExperts":
    """Return Triton's kernel."""
    return TritonExperts()


def make_deep_gemm(facts: ExpertFacts) -> "DeepGemmExperts":
    """Return DeepGEMM's kernel, which may be unavailable (`ExpertsCaps.obstacle`)."""
    ops = facts.ops
    return DeepGemmExperts(
        ops.device,
        is_chosen=facts.is_package_chosen,
        blocks=facts.fp8_blocks,
        exact=ops.exact,
        sizes=facts.sizes,
    )


def make_flashinfer(facts: ExpertFacts) -> "FlashInferExperts":
    """Return FlashInfer's kernel, which may be unavailable (`ExpertsCaps.obstacle`)."""
    ops = facts.ops
    return FlashInferExperts(
        ops.device,
        is_chosen=facts.is_package_chosen,
        blocks=facts.fp8_blocks,
        exact=ops.exact,
        sizes=facts.sizes,
        dtype=ops.dtype,
        swiglu=facts.swiglu,
    )


NOT_EXACT = "bits of {} may depend on the batch; use --determinism fast"


@dataclass(frozen=True, slots=True)
class PackedTriton:
    """The packed weights of a layer's local experts."""

    kernels: triton_weights.Kernels  # the kernels for the weights' format
    w13: Any  # [e, ...] in the kernels' layout; gate rows, then up rows (FlashInfer: up rows first)
    w2: Any  # [e, ...] in the kernels' layout
    biases: tuple[Tensor, ...]  # fp32 [e, 2I] and [e, D], or empty

    @property
    def parts(self) -> list[Tensor]:
        return [*triton_weights.parts_of(self.w13), *triton_weights.parts_of(self.w2), *self.biases]

    def of_parts(self, parts: Sequence[Tensor]) -> "PackedTriton":
        split = len(triton_weights.parts_of(self.w13))
        end = split + len(triton_weights.parts_of(self.w2))
        w13 = triton_weights.with_parts(self.w13, parts[:split])
        w2 = triton_weights.with_parts(self.w2, parts[split:end])
        return PackedTriton(self.kernels, w13, w2, tuple(parts[end:]))

    def launch(self, num_rows: int, x: Tensor) -> Config:
        """Return the launch parameters of products of `num_rows` rows like x."""
        return self.kernels.launch(num_rows, self.w2, x)

    def run(
        self,
        x: Tensor,
        alignment: Alignment,
        config: Config,
        out: Tensor,
        top_k: int = 1,
        act: Act = SWIGLU_ACT,
    ) -> None:
        """Compute both products: x -> out."""
        kernels = self.kernels
        b13, b2 = self.biases or (None, None)
        if kernels.flashinfer:
            assert act is SWIGLU_ACT, act
            act = UP_FIRST_ACT
        hidden = kernels.gate_up(
            kernels.rows(x, alignment), self.w13, alignment, config, top_k, act, b13
        )
        kernels.down(hidden, self.w2, alignment, config, out, b2)


def _rows(inbound: Inbound, weights: PackedTriton, num_rows: int) -> Any:
    """Return the first rows as a matrix; still in fp8, if they were sent in fp8 and the products
    support that.
    """
    if inbound.scales is None or not isinstance(weights.w13, Scaled):
        return inbound.x.view(-1, inbound.rows.shape[-1])[:num_rows]
    values = inbound.rows.view(-1, inbound.rows.shape[-1])[:num_rows]
    return Scaled(
        values, inbound.scales if inbound.layout is Layout.SLOTTED else inbound.scales[:num_rows]
    )


class TritonExperts(StackedExperts):
    """Triton's kernel, for rows of both layouts, which it reads in place."""

    caps = ExpertsCaps(
        name="triton",
        layouts=frozenset(Layout),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        devices=frozenset({"cuda", "cpu"}),  # cpu: interpreted, in tests
        device_counts=True,
    )

    def __init__(self, activation: Activation = SWIGLU) -> None:
        self._activation = activation

    def pack(self, weights: ExpertWeights) -> PackedTriton:
        kernels = triton_weights.kernels_for(weights.w13_eFD, weights.w2_eDI)
        biases = tuple(
            bias.float().contiguous()
            for bias in (weights.b13_eF, weights.b2_eD)
            if bias is not None
        )
        return PackedTriton(
            kernels, kernels.lay(weights.w13_eFD), kernels.lay(weights.w2_eDI), biases
        )

    def run(self, inbound: Inbound, weights: PackedTriton, out: Tensor) -> None:
        ends_e = inbound.ends_e
        slots_per_expert = inbound.rows.shape[1] if inbound.layout is Layout.SLOTTED else 0
        y = out.view(-1, out.shape[-1])
        if isinstance(ends_e, Tensor):
            num_rows = inbound.max_rows or len(y)
            expected_rows = inbound.expected_rows
        else:
            num_rows = int(inbound.host_counts_e.sum())
            expected_rows = num_rows
            ends_e = torch.from_numpy(ends_e).to(y.device, torch.int32)
        if not num_rows:
            return
        config = weights.launch(expected_rows, y)
        if weights.kernels.flashinfer and config.get("flashinfer"):
            flashinfer_moe.of_sorted(
                inbound.x[:num_rows], ends_e, weights.w13, weights.w2, y[:num_rows]
            )
            return
        alignment = align_groups(ends_e, num_rows, config["block_m"], slots_per_expert)
        weights.run(
            _rows(inbound, weights, len(y) if slots_per_expert else num_rows),
            alignment,
            config,
            y,
            act=act_of(self._activation),
        )

    def can_fuse(self, router: Router) -> bool:
        return router.fusible  # the fused form calls the router without the token ids

    def fuse(self, router: Router) -> FusedExperts:
        return partial(_run_fused, router, act_of(self._activation))


class DeepGemmExperts(TritonExperts):
    """Triton's kernel with DeepGEMM's products of e4m3 blocks.

    They are used if they were measured to be faster for these sizes (e, I, D), or if the user chose
    them (`is_chosen`). blocks: whether the weights are in e4m3 blocks. exact: whether bits must not
    depend on the batch, which these products do not ensure.
    """

    def __init__(
        self,
        device: torch.device,
        is_chosen: bool,
        blocks: bool,
        exact: bool,
        sizes: tuple[int, ...],
    ) -> None:
        super().__init__()
        if not blocks:
            obstacle: str | None = "deep_gemm takes experts in e4m3 blocks of 128 x 128"
        elif exact:
            obstacle = NOT_EXACT.format("deep_gemm")
        elif not is_chosen and not deep_gemm.is_faster(device, *sizes):
            obstacle = deep_gemm.NOT_MEASURED
        else:
            obstacle = deep_gemm.unsupported_reason(device)
        self.caps = replace(
            TritonExperts.caps, name="deep_gemm", biases=False, width_step=BLOCK, obstacle=obstacle
        )
        self._kernels = triton_weights.DEEP_GEMM if is_chosen else triton_weights.W8A8_OR_DEEP_GEMM

    def pack(self, weights: ExpertWeights) -> PackedTriton:
        packed = super().pack(weights)
        if packed.kernels is not triton_weights.W8A8:
            return packed
        return replace(packed, kernels=self._kernels)


class FlashInferExperts(TritonExperts):
    """FlashInfer's kernel, which computes products and sums in one, beside Triton's.

    It is used where it was measured to be faster for these sizes (e, I, D), or always if the user
    chose it (`is_chosen`). swiglu: whether all layers have the activation SwiGLU. blocks, exact:
    see `DeepGemmExperts`.
    """

    def __init__(
        self, device: torch.device, is_chosen: bool, blocks: bool, exact: bool,
        sizes: tuple[int, int, int],
        dtype: torch.dtype, swiglu: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self._is_chosen = is_chosen
        if not swiglu:
            obstacle: str | None = "flashinfer takes experts with SwiGLU alone"
        elif exact:
            obstacle = NOT_EXACT.format("flashinfer")
        elif not is_chosen and not flashinfer_moe.is_faster(device, *sizes, dtype):
            obstacle = flashinfer_moe.NOT_MEASURED
        else:
            obstacle = flashinfer_moe.unsupported_reason(device, blocks)
        self.caps = replace(
            TritonExperts.caps,
            name="flashinfer",
            layouts=frozenset({Layout.GROUPED}),
            dtypes=frozenset({"bfloat16"} if blocks else {"bfloat16", "float16"}),
            biases=False,
            width_step=BLOCK if blocks else flashinfer_moe.ALIGNED,
            obstacle=obstacle,
        )

    def pack(self, weights: ExpertWeights) -> PackedTriton:
        """See `Experts`. Raises ConfigError for unsupported weights, if it was chosen by name."""
        packed = super().pack(weights)
        if packed.kernels not in (triton_weights.PLAIN, triton_weights.W8A8):
            if self._is_chosen:
                raise ConfigError(
                    "flashinfer takes experts in 16 bits or e4m3 blocks of 128 x 128; use "
                    "kernels: auto"
                )
            return packed
        launch = packed.kernels.launch
        if self._is_chosen:  # in all steps, not only where it was measured to be faster
            launch = lambda rows, w2, x: flashinfer_moe.CONFIG  # noqa: E731
        kernels = replace(packed.kernels, launch=launch, flashinfer=True)
        return replace(packed, kernels=kernels, w13=flashinfer_moe.swapped(packed.w13))


def _run_fused(
    router: Router, act: Act, x_TD: Tensor, packed: PackedTriton, num_tokens: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Run a whole layer, as `FusedExperts` describes. The host never waits for the device."""
    tokens, width = x_TD.shape
    routing = router(x_TD, RowContext(num_tokens))
    if router.rule.on_input:
        x_TD, routing = routing.on_input(x_TD)
    top_k = routing.ids_TK.shape[1]
    config = packed.launch(tokens * top_k, x_TD)
    alignment = align(routing.ids_TK, packed.w2.shape[0], config["block_m"])
    if packed.kernels.flashinfer and config.get("flashinfer"):
        out_TD = flashinfer_moe.fused_moe(
            x_TD, routing.ids_TK, routing.weights_TK, packed.w13, packed.w2
        )
        return out_TD, alignment.counts_e
    y_ND = x_TD.new_empty((tokens * top_k, width))
    packed.run(x_TD, alignment, config, y_ND, top_k, act)
    out_TD = combine(y_ND.view(tokens, top_k, width), routing.weights_TK, routing.ids_TK)
    return out_TD, alignment.counts_e
