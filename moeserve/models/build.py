"""Build a decoder from parameters. Each weight is packed for its kernel, and the original is freed
immediately.
"""

import logging
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from moeserve.blocks.build import Builder
from moeserve.blocks.feed_forward import MoE
from moeserve.blocks.feed_forward_layer import build_feed_forward
from moeserve.blocks.kinds import build_connection, build_mixer
from moeserve.blocks.mixer import TILED
from moeserve.blocks.norm import Norm
from moeserve.comm.tensor import ALONE, TensorParallel
from moeserve.comm.world import World, share
from moeserve.models.decoder import Decoder, Layer
from moeserve.models.spec import LayerSpec, ModelSpec
from moeserve.moe.all2all.base import All2All
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.experts.registry import ExpertFacts, make_kernels
from moeserve.moe.placement.placement import Placement
from moeserve.moe.plan import MoENeeds, MoEPlan, plan_moe
from moeserve.ops.table import Ops

log = logging.getLogger(__name__)


def build_decoder(
    spec: ModelSpec,
    params: MutableMapping[str, Any],
    ops: Ops,
    *,
    world: World | None = None,
    tp: TensorParallel = ALONE,
    placement: Placement | None = None,
    backends: Sequence[All2All] | None = None,
    ubatches: int = 1,
    max_tokens: int = 1,
    max_position: int | None = None,
    make: Callable[..., Decoder] = Decoder,
) -> Decoder:
    """Build the decoder of `spec`.

    params: parameters, named as in models/load_plan.py, of `ops.dtype` or Quantized. They are
        removed from the mapping as they are packed.
    tp: the engine's tensor-parallel ranks, as in `world`.
    placement: as for `load_plan`.
    backends: the all-to-all backends to choose from (default: a single rank's).
    ubatches: the most micro-batches of a step.
    max_tokens: the most tokens of a step.
    max_position: the most positions of a request (default: the model's).
    make: the class of the decoder, or a function that takes the same arguments and returns one.

    Raises ConfigError if no pair of all-to-all backend and expert kernel supports the model.
    """
    world = world or World()
    if placement is None:
        placement = Placement.initial(
            len(spec.moe_layers), max(1, spec.num_experts), world.num_expert_ranks
        )
    build = make_builder(
        spec,
        params,
        ops,
        world,
        tp,
        placement,
        backends=backends,
        ubatches=ubatches,
        max_tokens=max_tokens,
        max_position=max_position,
    )
    group_rules = list(dict.fromkeys(spec.kv_rules))  # one KV group per rule
    if spec.state_layers:
        build.state_group = group_rules.index(TILED)
    layers = [
        build_layer(build, spec, layer, f"layers.{i}.", group=group_rules.index(layer.mixer.rule))
        for i, layer in enumerate(spec.layers)
    ]
    slots = build.slots
    embed = slots.load(("embed",), lambda ops, value: value)
    if spec.tie_embeddings and "lm_head" not in params:
        own_rows = share(spec.vocab_size, tp.size, tp.rank)
        slots.derive("lm_head", "embed", lambda value: value[own_rows], value=embed)
    columns = build.columns("lm_head", spec.vocab_size)
    # A single rank has all columns, so it needs no gather.
    head = columns.part if tp.size == 1 else columns
    decoder = make(
        spec=spec,
        ops=ops,
        embed_VD=embed,
        layers=layers,
        norm=build_norm(build, spec, "norm", spec.norm.last_eps_factor)
        if spec.has_final_norm
        else None,
        head=head,
        embed_norm=build_norm(build, spec, "embed_norm") if spec.embedding_norm else None,
        collapse=build_connection(spec.collapse, build, "collapse_"),
    )
    slots.finish()
    decoder.weight_slots = slots
    return decoder


def make_builder(
    spec: ModelSpec,
    params: MutableMapping[str, Any],
    ops: Ops,
    world: World,
    tp: TensorParallel,
    placement: Placement,
    *,
    backends: Sequence[All2All] | None,
    ubatches: int,
    max_tokens: int,
    max_position: int | None,
) -> Builder:
    """Return the builder of layers. The arguments are those of `build_decoder`."""
    assert (tp.rank, tp.size) == (world.tp_rank, world.tp_size), (tp.rank, tp.size, world)
    return Builder(
        width=spec.hidden_size,
        eps=spec.norm_eps,
        max_position=max_position or spec.max_position,
        params=params,
        ops=ops,
        world=world,
        tp=tp,
        placement=placement,
        plan_moe=lambda: _plan_moe(
            spec,
            ops,
            placement,
            world,
            backends=backends,
            ubatches=ubatches,
            max_tokens=max_tokens,
        ),
        norm_shift=spec.norm.shift,
    )


def _plan_moe(
    spec: ModelSpec,
    ops: Ops,
    placement: Placement,
    world: World,
    *,
    backends: Sequence[All2All] | None,
    ubatches: int,
    max_tokens: int,
) -> MoEPlan:
    """Choose the all-to-all backend and the expert kernel, and log the choice."""
    needs = MoENeeds(
        hidden_size=spec.hidden_size,
        dtype=str(ops.dtype).removeprefix("torch."),
        device=ops.device.type,
        expert_size=spec.expert_size,
        max_tokens=max_tokens,
        world_size=world.num_expert_ranks,
        tp_size=world.tp_size,
        biases=spec.moe is not None and spec.moe.bias,
        gated=spec.moe is None or spec.moe.activation.parts == 2,
        replicas=placement.experts_per_rank * placement.num_ranks > spec.num_experts,
        ubatches=ubatches,
        exact=ops.exact,
    )
    blocks = [layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, MoE)]
    facts = ExpertFacts(
        ops=ops,
        experts_per_rank=placement.experts_per_rank,
        hidden_size=spec.hidden_size,
        expert_size=spec.expert_size,
        swiglu=all(block.activation.plain for block in blocks),
        capped=any(block.activation.capped for block in blocks),
        fp8_blocks=any(
            stored.kind == "fp8" and stored.rows == stored.group == 128 for stored in spec.stored
        ),
    )
    backends = backends or [LocalAll2All(placement.experts_per_rank)]
    plan = plan_moe(needs, backends, make_kernels(facts))
    for line in plan.table().splitlines():
        log.debug("MoE kernels: %s", line)
    return plan


def build_norm(build: Builder, spec: ModelSpec, name: str, eps_factor: float = 1.0) -> Norm:
    """Build the norm with the weight `name`, and its bias if the model has one."""
    return Norm(
        ops=build.ops,
        eps=spec.norm_eps * eps_factor,
        weight_D=build.norm(name),
        bias_D=build.fp32(name + "_bias") if spec.norm.bias else None,
        centred=spec.norm.centred,
    )


def build_layer(build: Builder, spec: ModelSpec, layer: LayerSpec, name: str, group: int) -> Layer:
    """Build a layer. name: the prefix of its parameters. group: the index of its KV group."""
    mixer = build_mixer(layer.mixer, build, name, group)
    feed_forward = None
    if layer.feed_forward is not None:
        feed_forward = build_feed_forward(layer.feed_forward, build, name)
    eps_factors = dict(zip(("attn_norm", "mlp_norm"), layer.eps_factors, strict=True))
    return Layer(
        mixer=mixer,
        feed_forward=feed_forward,
        **{
            norm: build_norm(build, spec, name + norm, eps_factors.get(norm, 1.0))
            for norm, _ in layer.norms
        },
        parallel=layer.parallel,
        reads_stream=isinstance(layer.feed_forward, MoE) and layer.feed_forward.beside is not None,
        scale=build.fp32(name + "scale") if layer.scaled else None,
        attn_connection=build_connection(layer.attn_connection, build, name + "attn_connection_"),
        mlp_connection=build_connection(layer.mlp_connection, build, name + "mlp_connection_"),
    )
