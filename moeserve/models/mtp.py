"""The MTP (multi-token prediction) head: one more decoder layer that predicts the token after the
next one. It is used as the drafter of speculative decoding.

At position p it reads h_p, the model's hidden state after the final norm, and the token at p + 1:

    x_p = W [norm(embedding of token p + 1), norm(h_p)]
    h'_p = norm(layer(x_p))

The LM head turns h'_p into logits for the token at p + 2. To draft more tokens, the same head runs
again with h'_p and its own token; further heads of a checkpoint are not loaded. Embeddings and LM
head are the model's.

With tensor parallelism, the head is divided like the model's layers, but every rank holds all
experts of its layer.

Source: arXiv 2412.19437, section 2.2. The order of the inputs of W is that of published weights.
"""

from collections.abc import Collection, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.linear import ColumnLinear
from moeserve.blocks.norm import Norm
from moeserve.blocks.weights import WeightPlan
from moeserve.comm.tensor import ALONE, TensorParallel
from moeserve.comm.world import World
from moeserve.errors import ConfigError
from moeserve.loader.load_plan import LoadPlan
from moeserve.models.build import build_layer, build_norm, make_builder
from moeserve.models.decoder import Decoder
from moeserve.models.load_plan import plan_layer
from moeserve.models.registry import FAMILIES
from moeserve.models.spec import ModelSpec
from moeserve.models.streams_mtp import build_streams_mtp, plan_streams_mtp, with_streams_mtp
from moeserve.moe.placement.placement import Placement
from moeserve.ops.inputs import RowContext
from moeserve.ops.table import Ops


def with_mtp(spec: ModelSpec) -> ModelSpec:
    """Return the spec with the model's MTP head as drafter. Raises ConfigError if it has none."""
    if spec.mtp is None:
        raise ConfigError(
            f"speculate=mtp: {spec.architecture} has no head for multi-token prediction that is "
            "supported here, or config.json lists none; use another proposer, e.g. ngram:4"
        )
    if spec.mtp.attn_connection is not None:
        return with_streams_mtp(spec)
    return spec.with_drafter((spec.mtp,))


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """Computes the input of the MTP layer, x_p above, from embeddings and hidden states."""

    embed_norm: Norm
    hidden_norm: Norm
    product: ColumnLinear

    def __call__(self, embedded_TD: Tensor, hidden_TD: Tensor, context: RowContext) -> Tensor:
        """Return [T, D] from two inputs of [T, D]."""
        both = torch.cat((self.embed_norm(embedded_TD), self.hidden_norm(hidden_TD)), -1)
        return self.product(both, context)


def mtp_load_plan(spec: ModelSpec, present: Collection[str], world: World) -> LoadPlan:
    """Return the plan for loading an MTP head.

    The parameters are embed_norm, hidden_norm, merge, norm, and those of its layer.
    """
    (layer,) = spec.draft_layers
    names = FAMILIES[spec.architecture].names.of(present)
    width = spec.hidden_size
    plan = WeightPlan(width, names, present, replace(world, ep=False), _placement(spec))
    if layer.attn_connection is not None:
        return plan_streams_mtp(spec, plan, names.mtp, present)
    begin = names.mtp.begin.format(spec.num_layers)
    tensor_prefix = names.mtp.layer.format(spec.num_layers)
    for param, name in (
        ("embed_norm", names.mtp.embed_norm),
        ("hidden_norm", names.mtp.hidden_norm),
        ("norm", names.mtp.norm),
    ):
        plan.add(param, (width,), f"{begin}{name}.weight")
    plan.add("merge", (width, 2 * width), f"{begin}{names.mtp.merge}.weight", sharded=True)
    plan_layer(plan, spec, layer, "layer.", tensor_prefix, tensor_prefix)
    return plan.finish(present)


def build_mtp(
    spec: ModelSpec,
    params: MutableMapping[str, Any],
    ops: Ops,
    model: Decoder,
    *,
    world: World | None = None,
    tp: TensorParallel = ALONE,
    max_tokens: int = 1,
    max_position: int | None = None,
) -> Decoder:
    """Build the MTP head of `model`. The other arguments are those of `build_decoder`."""
    world = replace(world or World(), ep=False)
    build = make_builder(
        spec,
        params,
        ops,
        world,
        tp,
        _placement(spec),
        backends=None,
        ubatches=1,
        max_tokens=max_tokens,
        max_position=max_position,
    )
    if spec.draft_layers[0].attn_connection is not None:
        return build_streams_mtp(spec, build, model)
    merge = Merge(
        embed_norm=build_norm(build, spec, "embed_norm"),
        hidden_norm=build_norm(build, spec, "hidden_norm"),
        product=build.columns("merge", spec.hidden_size),
    )
    layer = build_layer(build, spec, spec.draft_layers[0], "layer.", group=0)
    norm = build_norm(build, spec, "norm")
    build.slots.finish()
    head = Decoder(
        spec, ops, model.embed_VD, layers=[layer], norm=norm, head=model.head, merge=merge
    )
    head.weight_slots = build.slots
    return head


def _placement(spec: ModelSpec) -> Placement:
    """Return the placement of the head's experts: all of them on each rank."""
    return Placement.initial(num_layers=1, num_experts=max(1, spec.num_experts), num_ranks=1)
