"""Heads for multi-token prediction: one more decoder layer, which guesses the token after the next
one.

At position p it reads the model's hidden state h_p behind the last norm and the token at p + 1:

    x_p = W [norm(embedding of token p + 1), norm(h_p)]
    h'_p = norm(layer(x_p)), whose scores are the LM head's for the token at p + 2

Embeddings and LM head are the model's own. The same head guesses the token after that from h'_p and
its own guess, as often as is asked for; a checkpoint's further heads are not loaded. Under tensor
parallelism it is shared out as the model's layers are; every rank has all experts of its layer.

Source: arXiv 2412.19437, section 2.2; the order in W is that of the weights.
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
from moeserve.moe.placement.placement import Placement
from moeserve.ops.inputs import RowContext
from moeserve.ops.table import Ops


def with_mtp(spec: ModelSpec) -> ModelSpec:
    """Return the spec whose drafter is the model's own head. Raises ConfigError without one."""
    if spec.mtp is None:
        raise ConfigError(
            f"speculate=mtp: {spec.architecture} has no head for multi-token "
            "prediction here, or none in this "
            "config.json; use another proposer, e.g. ngram:4"
        )
    return spec.drafting((spec.mtp,))


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """Makes what a head's layer reads, [T, D], of embeddings and hidden states [T, D]."""

    embed_norm: Norm
    hidden_norm: Norm
    product: ColumnLinear

    def __call__(self, embedded_TD: Tensor, hidden_TD: Tensor, context: RowContext) -> Tensor:
        """Return the product of both, normed and side by side."""
        both = torch.cat((self.embed_norm(embedded_TD), self.hidden_norm(hidden_TD)), -1)
        return self.product(both, context)


def mtp_load_plan(spec: ModelSpec, present: Collection[str], world: World) -> LoadPlan:
    """Plan a head's parameters: embed_norm, hidden_norm, merge, norm, those of its layer."""
    (layer,) = spec.draft_layers
    names = FAMILIES[spec.architecture].names
    width = spec.hidden_size
    plan = WeightPlan(width, names, present, replace(world, ep=False), _placement(spec))
    begin, theirs = (part.format(spec.num_layers) for part in (names.mtp.begin, names.mtp.layer))
    for ours, name in (
        ("embed_norm", names.mtp.embed_norm),
        ("hidden_norm", names.mtp.hidden_norm),
        ("norm", names.mtp.norm),
    ):
        plan.add(ours, (width,), f"{begin}{name}.weight")
    plan.add("merge", (width, 2 * width), f"{begin}{names.mtp.merge}.weight", sharded=True)
    plan_layer(plan, spec, layer, "layer.", theirs, theirs)
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
    """Build the head of a model and empties `params`; arguments as for `build_decoder`."""
    world = replace(world or World(), ep=False)
    build = make_builder(
        spec, params, ops, world, tp, _placement(spec), None, 1, max_tokens, max_position
    )
    embed_norm, hidden_norm, norm = (
        build_norm(build, spec, name) for name in ("embed_norm", "hidden_norm", "norm")
    )
    merge = Merge(embed_norm, hidden_norm, build.columns("merge", spec.hidden_size))
    layer = build_layer(build, spec, spec.draft_layers[0], "layer.", 0)
    build.slots.finish()
    head = Decoder(spec, ops, model.embed_VD, [layer], norm, model.head, merge)
    head.slots = build.slots
    return head


def _placement(spec: ModelSpec) -> Placement:
    """Return where a head's experts are: all on each rank."""
    return Placement.initial(1, max(1, spec.num_experts), 1)
