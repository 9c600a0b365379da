"""Builds the layers of feed-forward blocks, and estimates their workspace.

Shapes: T tokens, D model width, I inner width of an expert, K experts per token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.feed_forward import Dense, MoE
from moeserve.blocks.linear import (
    FP32,
    INT64,
    GatedMLP,
    SharedMLP,
    gathered_bytes,
    pack_gate,
)
from moeserve.blocks.norm import Norm
from moeserve.blocks.weight_slots import Pack
from moeserve.comm.tensor import ALONE
from moeserve.moe.all2all.layout import MAX_TERMS
from moeserve.moe.experts.base import Experts, ExpertWeights
from moeserve.moe.layer import MoELayer, SharedExpert
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.routing import Router
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import RowContext
from moeserve.ops.linear import LARGEST_PAD, padded_rows
from moeserve.ops.table import Ops

# (x [T', D], context, micro-batch[, residual stream]) -> [T', D]. `LayerSpec` decides whether the
# residual stream is passed.
FeedForwardLayer = Callable[..., Any]


def build_feed_forward(spec: Dense | MoE, build: Builder, name: str) -> FeedForwardLayer:
    """Build a feed-forward block. name: prefix of its parameters."""
    if isinstance(spec, Dense):
        return DenseLayer(build.gated(name, spec.size, build.tp, spec.activation))
    if spec.beside is not None:
        return build_beside(spec, spec.beside, build, name)
    return build_moe(spec, build, name)


def feed_forward_workspace(
    spec: Dense | MoE, *, width: int, tokens: int, itemsize: int, tp_size: int
) -> int:
    """Return an upper bound of the bytes that a call needs in addition to the residual stream.

    width: the width of the model.
    tokens: the number of tokens of a step, including padding.
    itemsize: bytes of an element.
    """
    if isinstance(spec, Dense):
        return dense_workspace(spec.size, width, tokens, itemsize, tp_size)
    return moe_workspace(spec, width, tokens, itemsize, tp_size)


def build_moe(spec: MoE, build: Builder, name: str) -> MoELayer:
    """Build an MoE block. name: prefix of its parameters."""
    ops = build.ops
    moe = build.shared("MoE plan", build.plan_moe)
    router = build_router(spec, build, name)
    moe = moe.with_activation(spec.activation)
    experts = moe.experts
    packed = build.slots.load(
        [name + part for part in ("w13", "w2", "w13_bias", "w2_bias")],
        lambda ops, *weights: experts.pack(ExpertWeights(*weights)),
        partial(_put_experts, experts),
    )
    shared: SharedExpert | None = None
    if spec.shared:
        # Not sharded over ranks: each computes the shared expert for its own tokens.
        mlp = build.gated(name + "shared_", spec.shared.size, ALONE, spec.shared.activation)
        gate = build.slots.load((name + "shared_gate",), pack_gate) if spec.shared.gated else None
        shared = SharedMLP(ops, gate, mlp, spec.shared.scale)
    to_physical = LogicalToPhysical(
        build.placement, build.num_moe, ops.device, counts_on_device=ops.triton
    )
    build.num_moe += 1
    layer: MoELayer = moe.layer(router, packed, to_physical, shared, build.tp)
    return layer


def _put_experts(experts: Experts, packed: Any, pack: Pack, ops: Ops, *weights: Any) -> None:
    """Write new weights of all local experts in place, one expert at a time to save memory."""
    for i in range(weights[0].shape[0]):
        expert = (None if part is None else part[i] for part in weights)
        experts.put(packed, i, experts.pack_expert(*expert))


@dataclass(eq=False, slots=True)
class DenseLayer:
    """An MLP as the feed-forward block of a layer."""

    mlp: GatedMLP

    def __call__(self, x_TD: Tensor, context: RowContext, ubatch: UBatch) -> Tensor:
        """Return the block's output [T, D]."""
        return self.mlp(x_TD, context)


@dataclass(eq=False)
class DenseBesideExperts:
    """A dense MLP and experts, whose normed outputs are added (Gemma 4).

    Router and experts each have their own norm of the residual stream.
    """

    mlp: GatedMLP
    moe: MoELayer
    router_norm: Norm
    experts_norm: Norm
    dense_post_norm: Norm
    experts_post_norm: Norm

    def __call__(
        self, x_TD: Tensor, context: RowContext, ubatch: UBatch, stream_TD: Tensor
    ) -> Tensor:
        """Return the block's output [T, D].

        x_TD: the input of the MLP.
        stream_TD: the residual stream, which the norms of router and experts read.
        """
        dense_TD = self.dense_post_norm(self.mlp(x_TD, context))
        routed_TD = self.moe(
            self.experts_norm(stream_TD), context, ubatch, self.router_norm(stream_TD)
        )
        return dense_TD + self.experts_post_norm(routed_TD)


def build_beside(spec: MoE, dense: Dense, build: Builder, name: str) -> DenseBesideExperts:
    """Build experts beside a dense MLP. The router's input is scaled by D ** -0.5."""
    scale_of = {"router_norm": build.width**-0.5}
    norms = {
        norm: Norm(build.ops, build.eps, build.norm(name + norm, scale_of.get(norm, 1.0)))
        for norm in ("router_norm", "experts_norm", "dense_post_norm", "experts_post_norm")
    }
    mlp = build.gated(name + "dense_", dense.size, build.tp, dense.activation)
    return DenseBesideExperts(mlp, build_moe(spec, build, name), **norms)


def build_router(spec: MoE, build: Builder, name: str) -> Router:
    """Build the router of an MoE block. name: prefix of its parameters."""
    rule = spec.router
    bias_E = build.fp32(name + "router_choice_bias") if rule.bias else None
    scale_E = build.fp32(name + "expert_scale") if spec.expert_scale else None
    return Router(build.linear(name + "router"), spec.top_k, rule, build.ops, bias_E, scale_E)


def dense_workspace(inner: int, width: int, tokens: int, itemsize: int, tp_size: int) -> int:
    """Return an upper bound of the bytes of a dense block; see `feed_forward_workspace`."""
    # Gate and up, their product and a temporary: 4 * inner. The input and the output: 2 * width.
    num_bytes = tokens * (4 * inner + 2 * width) * itemsize
    return num_bytes + gathered_bytes(tokens, inner + width, itemsize, tp_size)


def moe_workspace(spec: MoE, width: int, tokens: int, itemsize: int, tp_size: int) -> int:
    """Return an upper bound of the bytes of an MoE block; see `feed_forward_workspace`."""
    dense_size = max(block.size for block in (spec.shared, spec.beside, Dense(size=0)) if block)
    # A dense MLP or shared expert, as in `dense_workspace`.
    dense = tokens * (4 * dense_size + 2 * width) * itemsize
    own = padded_rows(-(-tokens // tp_size), LARGEST_PAD)  # tokens that this rank sends to experts
    pairs = own * spec.top_k  # pairs of a token and one of its experts
    # The inputs and results of all pairs, and four index arrays.
    grouped = pairs * (2 * width * itemsize + 4 * INT64)
    # One expert, if all tokens choose the same one: as in `dense_workspace`.
    expert = own * (4 * spec.size + 2 * width) * itemsize
    # The router's logits, two fp32 copies, and three index arrays.
    scores = tokens * spec.num_experts * (itemsize + 2 * FP32 + 3 * INT64)
    # Terms of the sums over a token's experts: as received, and two fp32 copies. Then the sums.
    combine = MAX_TERMS * (itemsize + 2 * FP32) + own * width * itemsize
    return (
        grouped
        + max(expert, combine, dense + combine, scores)
        + gathered_bytes(tokens, width, itemsize, tp_size)
    )
