"""What one rank keeps in memory, by the rules of the loader and the runner themselves."""

import math
from dataclasses import dataclass, replace

from moeserve.config import Config, Limits
from moeserve.engine.blocks import KVGroup, groups_of
from moeserve.models.spec import ModelSpec, bytes_per_weight
from moeserve.plan.hardware import Device

CONTEXT_BYTES = 1.5e9  # of a GPU's driver, kernels and graphs, beside what is counted here
COPIES = 5  # of received rows that a transport keeps at most (moe/all2all)
FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """The parameters of one rank, and their bytes as kernels read them. expert: of one expert in
    one layer.

    local_experts: places for experts in a layer. embedding: the table, of which a step reads hardly
    anything.
    """

    dense: int
    dense_bytes: float
    head: int
    head_bytes: float
    expert: int
    expert_bytes: float
    embedding_bytes: float
    local_experts: int
    moe_layers: int

    @property
    def total_bytes(self) -> float:
        """All of them in memory."""
        return (
            self.dense_bytes
            + self.head_bytes
            + self.embedding_bytes
            + self.moe_layers * self.local_experts * self.expert_bytes
        )


def rank_weights(spec: ModelSpec, config: Config) -> RankWeights:
    """Count the parameters of rank 0. Those that a checkpoint stores in 4 bits are taken to be its
    experts alone, and 8-bit ones all linear layers, as published checkpoints have them."""
    from moeserve.comm.world import World
    from moeserve.models.load_plan import load_plan
    from moeserve.moe.placement.placement import Placement

    parallel = config.parallel
    world = World(0, parallel.num_ranks, parallel.tp, ep=parallel.ep == "on")
    # One expert a layer is planned and counted as often as it is there: experts are alike.
    one = Placement.initial(
        len(spec.moe_layers), max(1, spec.num_experts), max(1, spec.num_experts)
    )
    plan = load_plan(spec, (), World(0, max(1, spec.num_experts) * parallel.tp, parallel.tp), one)
    itemsize = FP32 if spec.dtype == "float32" else 2
    asked = None if config.model.quantization == "none" else config.model.quantization
    forms = tuple(form for stored in spec.stored if (form := stored.for_floats))
    spec = replace(
        spec, stored=forms if len(forms) == len(spec.stored) else ()
    )  # GPUs widen files that have minima
    narrow = bytes_per_weight(spec, asked, itemsize)
    count = {"dense": 0, "head": 0, "embed": 0}
    num_bytes = dict.fromkeys(count, 0.0)
    for param in plan.params:
        kind = {"embed": "embed", "lm_head": "head"}.get(param.name.split("_bias")[0], "dense")
        if param.name.rsplit(".", 1)[-1].startswith(("w13", "w2")):
            continue
        size = math.prod(param.shape)
        per = (
            FP32
            if param.fp32
            else narrow
            if param.quantised_on_load and (narrow >= 1 or asked)
            else itemsize
        )
        count[kind] += size
        num_bytes[kind] += size * per
    if spec.tie_embeddings:
        count["head"] = count["embed"]
        num_bytes["head"] = num_bytes["embed"]
        num_bytes["embed"] = 0.0
    redundant = parallel.redundant_experts if world.ep else 0
    ranks = world.size if world.ep else 1
    return RankWeights(
        dense=count["dense"],
        dense_bytes=num_bytes["dense"],
        head=count["head"],
        head_bytes=num_bytes["head"],
        expert=spec.expert_weights,
        expert_bytes=spec.expert_weights * narrow,
        embedding_bytes=num_bytes["embed"],
        local_experts=-(-(spec.num_experts + redundant) // ranks),
        moe_layers=len(spec.moe_layers),
    )


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank, and the limits that the scheduler gets with them."""

    weights: float
    workspace: float
    kv: float
    limits: Limits
    groups: tuple[KVGroup, ...]
    bytes_per_token: float  # of KV
    notes: tuple[str, ...]


def rank_memory(spec: ModelSpec, config: Config, device: Device) -> RankMemory:
    """Return the memory of a rank on a device of its own. Raises ConfigError (DoesNotFit) as the
    engine would.
    """
    import torch

    from moeserve.models.workspace import Inflow
    from moeserve.moe.all2all.registry import most_rows
    from moeserve.runner import limits as limits_of
    from moeserve.runner.kv_cache import block_bytes

    limits_of.check(config, spec)
    limits_of.check_block_size(config, spec)
    config = limits_of.with_step_tokens(config, 2048)
    parallel = config.parallel
    dtype = getattr(torch, spec.dtype)
    weights = rank_weights(spec, config)
    inflow = None
    if spec.moe is not None and parallel.ep == "on" and parallel.num_ranks > 1:
        tokens = -(-limits_of.step_tokens(config) // parallel.tp)
        rows = most_rows(tokens, spec.experts_per_token, spec.hidden_size * dtype.itemsize, "cuda")
        inflow = Inflow(
            rows, 1 if parallel.dbo == "off" else 2, COPIES, weights.local_experts + 3
        )  # as a runner's
    workspace = limits_of.workspace_bytes(spec, config, dtype, inflow)
    memory = limits_of.MemoryFacts(
        device.memory, int(weights.total_bytes + CONTEXT_BYTES), device.memory
    )
    limits_of.check_weights_fit(int(weights.total_bytes), memory)
    memory = replace(memory, free=device.memory - memory.used)
    budget = limits_of.kv_budget(memory, config.cache.memory_utilization, workspace)
    groups = groups_of(spec.kv_rules, config.cache.block_size)
    kv_dtype = dtype if config.cache.kv_cache_dtype == "auto" else torch.int8
    sizes = groups, spec, kv_dtype, parallel.tp
    per_block = block_bytes(*sizes)
    states = limits_of.state_room(config, block_bytes(*sizes, pool=1), budget, fill=True)
    limits, notes = limits_of.resolve(
        states.config, spec, groups, per_block, states.budget, fill=True
    )
    limits = replace(limits, num_states=states.num_states)
    return RankMemory(
        weights.total_bytes,
        workspace,
        budget,
        limits,
        groups,
        per_block / config.cache.block_size,
        (*states.notes, *notes),
    )
