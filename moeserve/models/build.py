"""From parameters to a decoder: packs every weight for its kernel and drops the original at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.layers.attention import Attention
from moeserve.layers.mlp import GatedMLP, SigmoidGatedMLP
from moeserve.layers.rotary import RotaryTable
from moeserve.loader.spec import ModelSpec
from moeserve.models.decoder import Decoder, FeedForward, Layer
from moeserve.moe.all2all.base import All2All
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.experts.base import ExpertWeights
from moeserve.moe.experts.reference import ReferenceExperts
from moeserve.moe.lane import Lane
from moeserve.moe.layer import MoELayer
from moeserve.moe.plan import MoENeeds, MoEPlan, plan_moe
from moeserve.moe.routing import Router
from moeserve.ops.linear import Linear
from moeserve.ops.table import Ops
from moeserve.parallel.world import World

log = logging.getLogger(__name__)


def build_decoder(
    spec: ModelSpec,
    params: dict[str, Tensor],
    ops: Ops,
    dtype: torch.dtype,
    *,
    world: World | None = None,
    backends: Sequence[All2All] | None = None,
    max_tokens: int = 1,
    max_position: int | None = None,
) -> Decoder:
    """Build the decoder that `spec` describes. `params` (named as in models/checkpoint.py, of `dtype`) is emptied.

    max_tokens: rows of one step, for backends with a limit. max_position: length of the rotary table, the model's own
    by default. Raises ConfigError when no all2all backend and expert kernel fit.
    """
    assert dtype == ops.dtype, (dtype, ops.dtype)
    build = _Build(spec, params, ops)
    if any(spec.moe_layers):
        needs = MoENeeds(
            hidden_size=spec.hidden_size,
            dtype=str(dtype).removeprefix("torch."),
            device=ops.device.type,
            max_tokens=max_tokens,
            world_size=(world or World()).size,
        )
        build.moe = plan_moe(needs, backends or [LocalAll2All(spec.num_experts)], [ReferenceExperts(ops)])
        for line in build.moe.table().splitlines():
            log.info("MoE kernels: %s", line)
    layers = [build.layer(index) for index in range(spec.num_layers)]
    embed = params.pop("embed")
    head = ops.pack_linear(embed if spec.tie_embeddings else params.pop("lm_head"), None)
    rotary = RotaryTable(spec.rope, spec.head_dim, max_position or spec.max_position, ops.device)
    decoder = Decoder(spec, ops, embed, layers, build.norm("norm"), head, rotary)
    assert not params, f"parameters that nothing uses: {sorted(params)}"
    return decoder


class _Build:
    def __init__(self, spec: ModelSpec, params: dict[str, Tensor], ops: Ops) -> None:
        self.spec = spec
        self.params = params
        self.ops = ops
        self.moe: MoEPlan | None = None
        windows = spec.windows or (None,) * spec.num_layers
        distinct = list(dict.fromkeys(windows))
        self.groups = [distinct.index(window) for window in windows]

    def layer(self, index: int) -> Layer:
        name = f"layers.{index}."
        moe = index < len(self.spec.moe_layers) and self.spec.moe_layers[index]
        return Layer(
            attn_norm=self.norm(name + "attn_norm"),
            attention=self.attention(name),
            mlp_norm=self.norm(name + "mlp_norm"),
            feed_forward=self.experts(name) if moe else self.dense(name),
            group=self.groups[index],
        )

    def linear(self, name: str) -> Linear:
        return self.ops.pack_linear(self.params.pop(name), self.params.pop(name + "_bias", None))

    def norm(self, name: str) -> Tensor:
        return self.params.pop(name).float()

    def attention(self, name: str) -> Attention:
        spec = self.spec
        head_norms, full_norms = None, None
        if spec.qk_norm != "none":
            q_norm, k_norm = (self.norm(f"{name}{x}_norm") for x in "qk")
            if spec.qk_norm == "full":
                full_norms = q_norm, k_norm
            else:
                head_norms = torch.cat((q_norm.expand(spec.num_heads, -1), k_norm.expand(spec.num_kv_heads, -1)), 0)
        return Attention(spec, self.ops, self.linear(name + "qkv"), self.linear(name + "out"), head_norms, full_norms)

    def gated(self, name: str) -> GatedMLP:
        return GatedMLP(self.ops, self.linear(name + "gate_up"), self.linear(name + "down"))

    def dense(self, name: str) -> FeedForward:
        mlp = self.gated(name)

        def run(x_TD: Tensor, num_tokens: int, lane: Lane) -> Tensor:
            return mlp(x_TD)

        return run

    def experts(self, name: str) -> FeedForward:
        assert self.moe is not None
        spec, params = self.spec, self.params
        router = Router(self.linear(name + "router"), spec.experts_per_token, spec.router, self.ops)
        packed = self.moe.experts.pack(ExpertWeights(params.pop(name + "w13"), params.pop(name + "w2")))
        shared = None
        if spec.shared_expert_size:
            shared = SigmoidGatedMLP(self.ops, params.pop(name + "shared_gate"), self.gated(name + "shared_"))
        return MoELayer(router, self.moe.all2all, self.moe.experts, packed, shared)
