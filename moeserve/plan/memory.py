"""Memory of one rank: weights, workspace and KV cache, by the rules of loader and runner."""

import math
from dataclasses import dataclass, replace

from moeserve.config import Config, Limits
from moeserve.engine.blocks import KVGroup, groups_of
from moeserve.errors import ConfigError
from moeserve.models.spec import ModelSpec, bytes_per_weight
from moeserve.plan.hardware import Device

CONTEXT_BYTES = 1.5e9  # of the GPU driver, kernels and CUDA graphs, which are not counted here
MAX_COPIES = 5  # copies of received activations that an all-to-all keeps (moe/all2all)
FP32 = 4  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """The number of parameters of one rank, and their bytes as kernels read them."""

    dense_params: int  # everything but experts, LM head and embedding
    dense_bytes: float
    head_params: int
    head_bytes: float
    expert_params: int  # of one expert in one layer
    expert_bytes: float
    embedding_bytes: float  # apart from the others, because a step reads only a few of its rows
    num_local_experts: int  # expert slots in a layer, redundant ones included
    num_moe_layers: int

    @property
    def total_bytes(self) -> float:
        """The memory of all weights."""
        return (
            self.dense_bytes
            + self.head_bytes
            + self.embedding_bytes
            + self.num_moe_layers * self.num_local_experts * self.expert_bytes
        )


def rank_weights(spec: ModelSpec, config: Config) -> RankWeights:
    """Count the parameters of rank 0.

    In a 4-bit checkpoint only the experts are assumed to be quantized, in an 8-bit checkpoint all
    linear layers, as in published checkpoints.
    """
    from moeserve.comm.world import World
    from moeserve.models.load_plan import load_plan
    from moeserve.moe.placement.placement import Placement

    parallel = config.parallel
    world = World(rank=0, size=parallel.num_ranks, tp_size=parallel.tp, ep=parallel.ep == "on")
    # Plan a rank with a single expert per layer, and multiply: all experts have the same size.
    num_ranks = max(1, spec.num_experts)
    placement = Placement.initial(len(spec.moe_layers), num_ranks, num_ranks)
    plan_world = World(rank=0, size=num_ranks * parallel.tp, tp_size=parallel.tp)
    plan = load_plan(spec, (), plan_world, placement)
    itemsize = FP32 if spec.dtype == "float32" else 2
    quantization = None if config.model.quantization == "none" else config.model.quantization
    # GPUs widen stored formats that have minima (GGUF) to floats.
    forms = tuple(form for stored in spec.stored if (form := stored.for_float_activations))
    spec = replace(spec, stored=forms if len(forms) == len(spec.stored) else ())
    quantized_bytes = bytes_per_weight(spec, quantization, itemsize)
    num_params = {"dense": 0, "head": 0, "embed": 0}
    num_bytes = dict.fromkeys(num_params, 0.0)
    for param in plan.params:
        is_of_experts = param.name.rsplit(".", 1)[-1].startswith(("w13", "w2"))
        if is_of_experts:  # `spec.expert_weights` counts these
            continue
        kind = {"embed": "embed", "lm_head": "head"}.get(param.name.split("_bias")[0], "dense")
        size = math.prod(param.shape)
        per_weight: float = itemsize
        if param.fp32:
            per_weight = FP32
        elif param.quantized_on_load and (quantized_bytes >= 1 or quantization):
            per_weight = quantized_bytes
        num_params[kind] += size
        num_bytes[kind] += size * per_weight
    if spec.tie_embeddings:
        num_params["head"] = num_params["embed"]
        num_bytes["head"] = num_bytes["embed"]
        num_bytes["embed"] = 0.0
    num_redundant = parallel.redundant_experts if world.ep else 0
    return RankWeights(
        dense_params=num_params["dense"],
        dense_bytes=num_bytes["dense"],
        head_params=num_params["head"],
        head_bytes=num_bytes["head"],
        expert_params=spec.expert_weights,
        expert_bytes=spec.expert_weights * quantized_bytes,
        embedding_bytes=num_bytes["embed"],
        num_local_experts=-(-(spec.num_experts + num_redundant) // world.num_expert_ranks),
        num_moe_layers=len(spec.moe_layers),
    )


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank, and the scheduler limits that follow from them."""

    weight_bytes: float
    workspace_bytes: float
    kv_bytes: float
    limits: Limits
    groups: tuple[KVGroup, ...]
    bytes_per_token: float  # of the KV cache
    notes: tuple[str, ...]  # remarks about the limits, for people


def rank_memory(spec: ModelSpec, config: Config, device: Device) -> RankMemory:
    """Return the memory of a rank that has a device to itself.

    Raises ConfigError (DoesNotFit) if the engine would not start.
    """
    import torch

    from moeserve.models.workspace import Inflow
    from moeserve.moe.all2all.registry import most_rows
    from moeserve.runner import limits as limits_of
    from moeserve.runner.kv_cache import block_bytes

    limits_of.check(config, spec)
    if spec.diffusion is not None:
        raise ConfigError(
            f"{spec.architecture} decodes blocks of tokens (docs/diffusion.md). How many steps a "
            "block takes is not known before it is served, so it cannot be planned."
        )
    limits_of.check_block_size(config, spec)
    config = limits_of.with_step_tokens(config, 2048)
    parallel = config.parallel
    dtype = getattr(torch, spec.dtype)
    weights = rank_weights(spec, config)
    inflow = None
    if spec.moe is not None and parallel.ep == "on" and parallel.num_ranks > 1:
        # The same arguments as in the runner (runner/base.py).
        num_tokens = -(-limits_of.step_tokens(config) // parallel.tp)
        row_bytes = spec.hidden_size * dtype.itemsize
        inflow = Inflow(
            rows=most_rows(num_tokens, spec.experts_per_token, row_bytes, "cuda"),
            ubatches=1 if parallel.dbo == "off" else 2,
            copies=MAX_COPIES,
            moving=weights.num_local_experts + 3,
        )
    workspace = limits_of.workspace_bytes(spec, config, dtype, inflow)
    memory = limits_of.MemoryFacts(
        limit=device.memory,
        used=int(weights.total_bytes + CONTEXT_BYTES),
        free=device.memory,
    )
    limits_of.check_weights_fit(int(weights.total_bytes), memory)
    memory = replace(memory, free=device.memory - memory.used)
    budget = limits_of.kv_budget(memory, config.cache.memory_utilization, workspace)
    groups = groups_of(spec.kv_rules, config.cache.block_size)
    kv_dtype = torch.int8 if config.cache.kv_cache_dtype == "int8" else dtype
    per_block = block_bytes(groups, spec, kv_dtype, parallel.tp)
    per_state = block_bytes(groups, spec, kv_dtype, parallel.tp, pool=1)
    states = limits_of.state_memory(config, per_state, budget, fill=True)
    limits, notes = limits_of.resolve(
        states.config, spec, groups, per_block, states.budget, fill=True
    )
    limits = replace(limits, num_states=states.num_states)
    return RankMemory(
        weight_bytes=weights.total_bytes,
        workspace_bytes=workspace,
        kv_bytes=budget,
        limits=limits,
        groups=groups,
        bytes_per_token=per_block / config.cache.block_size,
        notes=(*states.notes, *notes),
    )
