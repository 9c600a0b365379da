"""The load plan of a decoder: its parameters, and the checkpoint tensors that are copied to them.

Families differ only in their `Names`.
"""

from collections.abc import Collection, Sequence

from moeserve.blocks.feed_forward import MoE, spelling
from moeserve.blocks.weights import WeightPlan
from moeserve.comm.world import World
from moeserve.loader.load_plan import LoadPlan
from moeserve.models.registry import FAMILIES
from moeserve.models.spec import LayerSpec, ModelSpec
from moeserve.moe.placement.placement import Placement


def load_plan(
    spec: ModelSpec,
    present: Collection[str],
    world: World | None = None,
    placement: Placement | None = None,
) -> LoadPlan:
    """Return the plan for loading this rank's share of the decoder.

    present: the names of the checkpoint's tensors. placement: which experts this rank holds
    (default: `Placement.initial`). Raises ConfigError if the heads cannot be divided.

    The parameters are embed, norm, lm_head, and for each layer its norms, its scale, and those of
    its blocks and their connections. Names of biases end in _bias. There is no lm_head if it is
    tied to embed, except for GGUF files that have a quantized copy of it.
    """
    world = world or World()
    spec.check_tp(world.tp_size)
    if placement is None:
        placement = Placement.initial(
            len(spec.moe_layers), max(1, spec.num_experts), world.num_expert_ranks
        )
    names = FAMILIES[spec.architecture].names.of(present)
    plan = WeightPlan(spec.hidden_size, names, present, world, placement)
    own_rows = slice(0, spec.vocab_size)
    plan.stack(
        "embed",
        [(names.model + names.embed, spec.embedding_rows or spec.vocab_size, own_rows)],
        spec.hidden_size,
    )
    if spec.embedding_norm:
        plan.add("embed_norm", (spec.hidden_size,), plan.spell(names.model, "embed_norm.weight"))
    if spec.has_final_norm:
        plan.add("norm", (spec.hidden_size,), names.model + names.norm)
    if spec.norm.bias:
        plan.add(
            "norm_bias", (spec.hidden_size,), names.model + names.norm.replace("weight", "bias")
        )
    if not spec.tie_embeddings or (
        names.head in present and any(form.ggml for form in spec.stored)
    ):
        plan.add("lm_head", (spec.vocab_size, spec.hidden_size), names.head, sharded=True)
        if spec.head_bias:
            plan.add(
                "lm_head_bias",
                (spec.vocab_size,),
                names.head.replace("weight", "bias"),
                sharded=True,
            )
    for index, layer in enumerate(spec.layers):
        prefixes = (f"{names.model}{names.layers}.{i}." for i in layer.stored_as or (index, index))
        plan_layer(plan, spec, layer, f"layers.{index}.", *prefixes)
    if spec.collapse is not None:
        spec.collapse.plan(plan, "collapse_", names.model)
    mtp_layers = tuple(
        f"{names.model}{names.layers}.{spec.num_layers + i}." for i in range(spec.num_mtp_layers)
    )
    # The tensors of MTP layers are not read with the model, but by models/mtp.py.
    plan.on_other_ranks.update(name for name in present if name.startswith(mtp_layers))
    return plan.finish([names.head] if spec.tie_embeddings else [])


def plan_layer(
    plan: WeightPlan,
    spec: ModelSpec,
    layer: LayerSpec,
    param_prefix: str,
    mixer_prefix: str,
    feed_forward_prefix: str,
) -> None:
    """Add a layer's parameters to the plan.

    param_prefix: of their names. mixer_prefix, feed_forward_prefix: of the names of each block's
    tensors in the checkpoint.
    """
    layer.mixer.plan(plan, param_prefix, mixer_prefix)
    if layer.feed_forward is not None:
        layer.feed_forward.plan(plan, param_prefix, feed_forward_prefix)
    for norm, name in layer.norms:
        tensor_prefix = mixer_prefix if norm.startswith("attn") else feed_forward_prefix
        plan.add(param_prefix + norm, (plan.width,), plan.spell(tensor_prefix, name + ".weight"))
        if spec.norm.bias:
            plan.add(
                param_prefix + norm + "_bias",
                (plan.width,),
                plan.spell(tensor_prefix, name + ".bias"),
            )
    if layer.attn_connection is not None:
        layer.attn_connection.plan(plan, param_prefix + "attn_connection_", mixer_prefix)
    if layer.mlp_connection is not None:
        layer.mlp_connection.plan(plan, param_prefix + "mlp_connection_", feed_forward_prefix)
    if layer.scaled:
        plan.add(param_prefix + "scale", (1,), plan.spell(mixer_prefix, "layer_scalar"), fp32=True)


def expert_load_plan(
    spec: ModelSpec, present: Collection[str], moe_layer: int, experts: Sequence[int]
) -> LoadPlan:
    """Return the plan for loading some experts of one layer, as rows 0, 1, ... of "w13" and "w2".

    moe_layer: the layer's index among the layers with experts.
    """
    names = FAMILIES[spec.architecture].names.of(present)
    index = spec.moe_layers[moe_layer]
    layer = spec.layers[index]
    number = layer.stored_as[1] if layer.stored_as else index
    tensor_prefix = f"{names.model}{names.layers}.{number}."
    moe = layer.feed_forward
    assert isinstance(moe, MoE)
    return moe.plan_experts(
        spelling(names.experts, present, tensor_prefix), tensor_prefix, experts, spec.hidden_size
    )
