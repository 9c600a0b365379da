"""Builds a decoder from parameters: packs every weight for its kernel and drops the original at once."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.attention import Attention
from moeserve.blocks.linear import ColumnLinear, GatedMLP, SigmoidGatedMLP, widened
from moeserve.blocks.rotary import rotary_tables
from moeserve.comm.tensor import ALONE, TensorParallel, share
from moeserve.comm.world import World
from moeserve.loader.spec import Heads, ModelSpec, local_heads
from moeserve.models.decoder import Decoder, FeedForward, Layer
from moeserve.moe.all2all.base import All2All
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.experts.base import Experts, ExpertWeights
from moeserve.moe.experts.grouped_mm import GroupedMM
from moeserve.moe.experts.native import NativeExperts
from moeserve.moe.experts.reference import ReferenceExperts
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.placement.placement import Placement
from moeserve.moe.plan import MoENeeds, MoEPlan, plan_moe
from moeserve.moe.routing import Router
from moeserve.ops.linear import Linear
from moeserve.ops.table import Ops

log = logging.getLogger(__name__)


def build_decoder(
    spec: ModelSpec,
    params: MutableMapping[str, Any],
    ops: Ops,
    dtype: torch.dtype,
    *,
    world: World | None = None,
    tp: TensorParallel = ALONE,
    placement: Placement | None = None,
    backends: Sequence[All2All] | None = None,
    ubatches: int = 1,
    max_tokens: int = 1,
) -> Decoder:
    """Builds the decoder of `spec` and empties `params` (named as in models/load_plan.py, of `dtype` or Quantised).

    tp: the engine's ranks, as `world` has them. placement: as for `load_plan`. ubatches: micro-batches that a step may
    have. max_tokens: rows of one step. Raises ConfigError when no all2all backend and expert kernel fit.
    """
    assert dtype == ops.dtype, (dtype, ops.dtype)
    world = world or World()
    assert (tp.rank, tp.size) == (world.tp_rank, world.tp_size), (tp.rank, tp.size, world)
    if placement is None:
        placement = Placement.initial(sum(spec.moe_layers), max(1, spec.num_experts), world.num_expert_ranks)
    moe = None
    if any(spec.moe_layers):
        needs = MoENeeds(
            hidden_size=spec.hidden_size,
            dtype=str(dtype).removeprefix("torch."),
            device=ops.device.type,
            expert_size=spec.expert_size,
            max_tokens=max_tokens,
            world_size=world.num_expert_ranks,
            tp_size=tp.size,
            replicas=placement.experts_per_rank * placement.num_ranks > spec.num_experts,
            ubatches=ubatches,
            exact=ops.exact,
        )
        kernels: list[Experts] = [GroupedMM(ops), ReferenceExperts(ops)]
        if ops.native:
            kernels.insert(0, NativeExperts(ops.room))
        elif ops.triton:
            from moeserve.moe.experts.triton import TritonExperts  # slow to import: only where it serves

            kernels = [TritonExperts(), *([] if ops.exact else kernels)]
        moe = plan_moe(needs, backends or [LocalAll2All(placement.experts_per_rank)], kernels)
        for line in moe.table().splitlines():
            log.debug("MoE kernels: %s", line)
    build = _Build(spec, params, ops, local_heads(spec, world), tp, placement, moe)
    windows = spec.windows or (None,) * spec.num_layers
    groups = list(dict.fromkeys(windows))
    layers = [build.layer(index, groups.index(window)) for index, window in enumerate(windows)]
    embed = params.pop("embed")
    if spec.tie_embeddings:
        params["lm_head"] = embed[share(spec.vocab_size, tp.size, tp.rank)]
    columns = build.columns("lm_head", spec.vocab_size)
    head = columns.part if tp.size == 1 else partial(columns, channel=0)
    rotary = rotary_tables(spec.rope, spec.head_dim, spec.max_position, ops.device)
    decoder = Decoder(spec, ops, embed, layers, build.norm("norm"), head, rotary, build.heads)
    assert not params, f"parameters that nothing uses: {sorted(params)}"
    return decoder


@dataclass(slots=True)
class _Build:
    spec: ModelSpec
    params: MutableMapping[str, Any]
    ops: Ops
    heads: Heads
    tp: TensorParallel
    placement: Placement
    moe: MoEPlan | None
    num_moe: int = 0  # MoE layers built so far

    def layer(self, index: int, group: int) -> Layer:
        """The decoder layer number `index`. group: its KV group."""
        name = f"layers.{index}."
        return Layer(
            attn_norm=self.norm(name + "attn_norm"),
            attention=self.attention(name),
            mlp_norm=self.norm(name + "mlp_norm"),
            feed_forward=self.experts(name) if self.spec.has_experts(index) else self.dense(name),
            group=group,
        )

    def linear(self, name: str) -> Linear:
        """Packs the weight `name` and its bias, if there is one."""
        return self.ops.pack_linear(self.params.pop(name), self.params.pop(name + "_bias", None))

    def columns(self, name: str, num_columns: int, tp: TensorParallel | None = None) -> ColumnLinear:
        """A product whose columns are sharded; `name` holds this rank's columns."""
        return ColumnLinear(self.part(name, num_columns, tp or self.tp), num_columns, tp or self.tp)

    def part(self, name: str, num_columns: int, tp: TensorParallel, *, parts: int = 1) -> Linear:
        """This rank's columns of such a product, padded to an equal share.

        parts: the number of products of num_columns each that lie one below the other.
        """
        for key in (name, name + "_bias"):
            if key in self.params:
                self.params[key] = widened(self.params.pop(key), num_columns, tp, parts=parts)
        return self.linear(name)

    def norm(self, name: str) -> Tensor:
        """The weights of a norm, in fp32."""
        norm: Tensor = self.params.pop(name).float()
        return norm

    def attention(self, name: str) -> Attention:
        """The attention block of the layer whose parameters begin with `name`."""
        spec, heads = self.spec, self.heads
        head_norms, full_norms = None, None
        if spec.qk_norm != "none":
            q_norm, k_norm = (self.norm(f"{name}{x}_norm") for x in "qk")
            if spec.qk_norm == "full":
                full_norms = q_norm, k_norm
            else:
                head_norms = torch.cat((q_norm.expand(heads.count, -1), k_norm.expand(heads.count_kv, -1)), 0)
        qkv, out = self.linear(name + "qkv"), self.columns(name + "out", spec.hidden_size)
        return Attention(spec, self.ops, heads, self.tp, qkv, out, head_norms, full_norms)

    def gated(self, name: str, inner_size: int, tp: TensorParallel) -> GatedMLP:
        """A SwiGLU block of inner width `inner_size`."""
        gate_up = self.part(name + "gate_up", inner_size, tp, parts=2)
        return GatedMLP(self.ops, gate_up, self.columns(name + "down", self.spec.hidden_size, tp), inner_size, tp)

    def dense(self, name: str) -> FeedForward:
        """The dense feed-forward block of a layer."""
        mlp = self.gated(name, self.spec.intermediate_size, self.tp)

        return lambda x_TD, num_tokens, ubatch: mlp(x_TD, ubatch.index)

    def experts(self, name: str) -> FeedForward:
        """The MoE block of a layer."""
        assert self.moe is not None
        spec, params = self.spec, self.params
        router = Router(self.linear(name + "router"), spec.experts_per_token, spec.router, self.ops)
        packed = self.moe.experts.pack(ExpertWeights(params.pop(name + "w13"), params.pop(name + "w2")))
        shared = None
        if spec.shared_expert_size:
            mlp = self.gated(name + "shared_", spec.shared_expert_size, ALONE)  # reads this rank's tokens only
            shared = SigmoidGatedMLP(self.ops, params.pop(name + "shared_gate"), mlp)
        to_physical = LogicalToPhysical(self.placement, self.num_moe, self.ops.device, counts_on_device=self.ops.triton)
        self.num_moe += 1
        return self.moe.layer(router, packed, to_physical, shared, self.tp)
