"""Builds feed-forward blocks, and bounds the memory that they need.

T tokens, D model width, I expert width, K experts per token.
"""

from __future__ import annotations

from moeserve.blocks.build import Builder
from moeserve.blocks.feed_forward import MoE
from moeserve.blocks.linear import SharedMLP, gathered_bytes
from moeserve.comm.tensor import ALONE
from moeserve.moe.all2all.layout import TERMS
from moeserve.moe.experts.base import ExpertWeights
from moeserve.moe.layer import MoELayer, SharedExpert
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.routing import Router
from moeserve.ops.linear import LARGEST_PAD, padded_rows

FP32, INT64 = 4, 8  # bytes


def build_moe(spec: MoE, build: Builder, name: str) -> MoELayer:
    """Returns the MoE block of the layer whose parameters begin with `name`."""
    params, ops, moe = build.params, build.ops, build.shared("MoE plan", build.plan_moe)
    router = build_router(spec, build, name)
    moe = moe.with_activation(spec.activation)
    packed = moe.experts.pack(
        ExpertWeights(
            params.pop(name + "w13"),
            params.pop(name + "w2"),
            *(params.pop(name + bias) if spec.bias else None for bias in ("w13_bias", "w2_bias")),
        )
    )
    shared: SharedExpert | None = None
    if spec.shared:
        mlp = build.gated(
            name + "shared_", spec.shared.size, ALONE, spec.shared.activation
        )  # reads this rank's tokens only
        shared = SharedMLP(ops, params.pop(name + "shared_gate", None), mlp)
    to_physical = LogicalToPhysical(build.placement, build.num_moe, ops.device, counts_on_device=ops.triton)
    build.num_moe += 1
    layer: MoELayer = moe.layer(router, packed, to_physical, shared, build.tp)
    return layer


def build_router(spec: MoE, build: Builder, name: str) -> Router:
    """Returns the router."""
    rule = spec.router
    bias_E = build.norm(name + "router_choice_bias") if rule.bias else None
    scale_E = build.norm(name + "expert_scale") if spec.expert_scale else None
    return Router(build.linear(name + "router"), spec.top_k, rule, build.ops, bias_E, scale_E)


def dense_workspace(inner: int, width: int, tokens: int, size: int, tp_size: int) -> int:
    """Returns an upper bound of the bytes of a dense block; see `FeedForward.workspace`."""
    return tokens * (4 * inner + 2 * width) * size + gathered_bytes(tokens, inner + width, size, tp_size)


def moe_workspace(spec: MoE, width: int, tokens: int, size: int, tp_size: int) -> int:
    """Returns an upper bound of the bytes of an MoE block; see `FeedForward.workspace`."""
    shared = spec.shared.size if spec.shared else 0
    dense = tokens * (4 * shared + 2 * width) * size
    own = padded_rows(-(-tokens // tp_size), LARGEST_PAD)  # tokens that this rank sends to experts
    pairs = own * spec.top_k
    grouped = 2 * pairs * width * size + 4 * pairs * INT64
    expert = own * (4 * spec.size + 2 * width) * size  # all tokens may choose the same expert
    scores = tokens * spec.num_experts * (size + 2 * FP32 + 3 * INT64)
    combine = TERMS * (size + 2 * FP32) + own * width * size
    return grouped + max(expert, combine, dense + combine, scores) + gathered_bytes(tokens, width, size, tp_size)
