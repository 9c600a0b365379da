"""Builds the layers of feed-forward blocks, and estimates their workspace.

Shapes: T tokens, D model width, I inner width of an expert, K experts per token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.build import Builder
from moeserve.blocks.feed_forward import Dense, MoE
from moeserve.blocks.linear import (
    FP32,
    INT64,
    ConstantExpert,
    GatedMLP,
    SharedMLP,
    SoftCapped,
    gathered_bytes,
    pack_gate,
)
from moeserve.blocks.norm import Norm
from moeserve.blocks.router_mlp import RouterMLP
from moeserve.blocks.weight_slots import Pack
from moeserve.comm.tensor import ALONE
from moeserve.errors import CheckpointError
from moeserve.moe.all2all.layout import MAX_TERMS
from moeserve.moe.experts.base import Experts, ExpertWeights
from moeserve.moe.layer import MoELayer, SharedExpert
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.routing import HashRouter, Router, ZeroExpertRouter
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import RowContext
from moeserve.ops.linear import LARGEST_PAD, LinearMethod, padded_rows
from moeserve.ops.table import Ops

# The choice bias of an expert that every token uses, greater than any score.
ALWAYS = 2.0**20
# (x [T', D], context, micro-batch[, residual stream]) -> [T', D]. `LayerSpec` decides whether the
# residual stream is passed.
FeedForwardLayer = Callable[..., Any]


def build_feed_forward(spec: Dense | MoE, build: Builder, name: str) -> FeedForwardLayer:
    """Build a feed-forward block. name: prefix of its parameters."""
    if isinstance(spec, Dense):
        return DenseLayer(build.gated(name, spec.size, build.tp, spec.activation))
    if spec.beside is not None:
        return build_beside(spec, spec.beside, build, name)
    if spec.apart is not None:
        mlp = build.gated(name + "dense_", spec.apart.size, build.tp, spec.apart.activation)
        return DenseAndExperts(mlp, build_moe(spec, build, name))
    if spec.router_size:
        return StateRouted(build_moe(spec, build, name), build.width)
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
    if spec.out_bias:
        assert spec.shared is None, spec
        shared = ConstantExpert(build.slots.load((name + "experts_bias",), lambda ops, bias: bias))
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
class StateRouted:
    """Experts, and a router with an input of its own (ZAYA)."""

    moe: MoELayer
    width: int  # D

    def __call__(self, x_TN: Tensor, context: RowContext, ubatch: UBatch) -> Tensor:
        """Return the block's output [T, D].

        x_TN: the input of the experts, then that of the router, [T, D + R].
        """
        x_TD = x_TN[:, : self.width].contiguous()
        return self.moe(x_TD, context, ubatch, x_TN[:, self.width :].contiguous())


@dataclass(eq=False)
class DenseAndExperts:
    """A dense MLP and experts with the same input and separate outputs (LongCat)."""

    mlp: GatedMLP
    moe: MoELayer

    def __call__(self, x_TD: Tensor, context: RowContext, ubatch: UBatch) -> Tensor:
        """Return the output of the MLP, then that of the experts, [T, 2 * D]."""
        routed_TD = self.moe(x_TD, context, ubatch)
        return torch.cat((self.mlp(x_TD, context), routed_TD), 1)


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
    bias_E = None
    if rule.bias:
        bias_E = build.fp32(
            name + "router_choice_bias",
            lambda bias: torch.nn.functional.pad(bias, (0, spec.num_always), value=ALWAYS),
        )
    scale_E = build.fp32(name + "expert_scale") if spec.expert_scale else None
    if spec.router_factor:
        scale_E = build.fp32(name + "router_factor", lambda factor: factor.repeat(spec.num_experts))
    gate = _build_gate(spec, build, name)
    if spec.hashed:
        table_VK = build.slots.load((name + "router_table",), _expert_ids(spec, name))
        return HashRouter(gate, spec.top_k, rule, build.ops, experts_VK=table_VK)
    if spec.num_choices > spec.num_experts:
        assert not (spec.identities and spec.num_empty), spec
        return ZeroExpertRouter(
            gate,
            spec.top_k,
            rule,
            build.ops,
            bias_E,
            scale_E,
            num_experts=spec.num_experts,
            returns_input=spec.identities > 0,
        )
    return Router(gate, spec.top_k, rule, build.ops, bias_E, scale_E)


def _expert_ids(spec: MoE, name: str) -> Pack:
    """Return the function that checks the table of a router by token id."""

    def checked(ops: Ops, ids_VK: Tensor) -> Tensor:
        if (ids_VK < 0).any() or (ids_VK >= spec.num_experts).any():
            raise CheckpointError(
                f"{name}mlp.gate.tid2eid names experts beyond the {spec.num_experts} of "
                "config.json; use the config.json that came with the weights, or download the "
                "model again"
            )
        return ids_VK.long()

    return checked


def _build_gate(spec: MoE, build: Builder, name: str) -> LinearMethod:
    """Build what computes the router's logits."""
    gate: LinearMethod = build.linear(name + "router")
    if spec.router_size:
        first = build.linear(name + "router_first")
        second = build.linear(name + "router_second")
        norm_R = build.norm(name + "router_norm")
        gate = RouterMLP(build.ops, norm_R, build.eps, first, second, gate)
    return SoftCapped(gate, spec.router_cap, build.ops) if spec.router_cap else gate


def dense_workspace(inner: int, width: int, tokens: int, itemsize: int, tp_size: int) -> int:
    """Return an upper bound of the bytes of a dense block; see `feed_forward_workspace`."""
    # Gate and up, their product and a temporary: 4 * inner. The input and the output: 2 * width.
    num_bytes = tokens * (4 * inner + 2 * width) * itemsize
    return num_bytes + gathered_bytes(tokens, inner + width, itemsize, tp_size)


def moe_workspace(spec: MoE, width: int, tokens: int, itemsize: int, tp_size: int) -> int:
    """Return an upper bound of the bytes of an MoE block; see `feed_forward_workspace`."""
    dense_blocks = (spec.shared, spec.beside, spec.apart, Dense(size=0))
    dense_size = max(block.size for block in dense_blocks if block)
    # A dense MLP or shared expert, as in `dense_workspace`.
    dense = tokens * (4 * dense_size + 2 * width) * itemsize
    own = padded_rows(-(-tokens // tp_size), LARGEST_PAD)  # tokens that this rank sends to experts
    pairs = own * spec.top_k  # pairs of a token and one of its experts
    # The inputs and results of all pairs, and four index arrays.
    grouped = pairs * (2 * width * itemsize + 4 * INT64)
    # One expert, if all tokens choose the same one: as in `dense_workspace`.
    expert = own * (4 * spec.size + 2 * width) * itemsize
    # The router's logits, two fp32 copies, and three index arrays.
    scores = tokens * spec.num_choices * (itemsize + 2 * FP32 + 3 * INT64)
    # Terms of the sums over a token's experts: as received, and two fp32 copies. Then the sums.
    combine = MAX_TERMS * (itemsize + 2 * FP32) + own * width * itemsize
    return (
        grouped
        + max(expert, combine, dense + combine, scores)
        + gathered_bytes(tokens, width, itemsize, tp_size)
    )
