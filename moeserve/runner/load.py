"""From a model directory to this rank's part of the model on a device: the loader reads, the family shapes, the ops
table computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moeserve.loader import weights
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.experts import ExpertFiles
from moeserve.loader.plan import WeightPlan
from moeserve.loader.spec import ModelSpec
from moeserve.models.registry import family
from moeserve.moe.all2all.base import All2All
from moeserve.moe.placement.placement import Placement
from moeserve.ops.table import Choice, pick_ops
from moeserve.parallel.tensor import TensorParallel
from moeserve.parallel.world import World
from moeserve.runner.memory import MemoryFacts, check_weights_fit
from moeserve.runner.model import Model

Progress = Callable[[str, int], None]  # a human's word for the phase, percent of the whole
READ_FROM, READ_TO = 5, 85  # percent of start-up that reading the weights takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which part of the model a rank holds, and what connects it with the others.

    placement: the experts of each rank; None for a model without any. backends: in order of preference. max_tokens: of
    one step on one rank.
    """

    world: World
    placement: Placement | None
    tp: TensorParallel
    backends: Sequence[All2All]
    lanes: int
    max_tokens: int


def load_model(
    spec: ModelSpec,
    model_dir: Path,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Choice,
    shard: Shard,
    memory: MemoryFacts,
    progress: Progress,
) -> tuple[Model, ExpertFiles]:
    """The model, and where its experts can be read one by one. memory: what the device has.

    Raises ConfigError (CheckpointError, DoesNotFit) with what is wrong and where.
    """
    checkpoint = open_checkpoint(model_dir)
    of = family(spec)
    names = checkpoint.tensors.keys()
    plan = of.weight_plan(spec, names, shard.world, shard.placement)
    check_weights_fit(weight_bytes(plan, dtype), memory)
    files = ExpertFiles(checkpoint, lambda layer, expert: of.expert_plan(spec, names, layer, [expert]), dtype, device)
    ops = pick_ops(device, dtype, kernels, head_dim=spec.head_dim)
    last = READ_FROM

    def read(done: int, total: int) -> None:
        nonlocal last
        percent = READ_FROM + (READ_TO - READ_FROM) * done // max(1, total)
        if percent > last:
            last = percent
            progress("reading the weights", percent)

    params = weights.load(checkpoint, plan, dtype, device=device, progress=read)
    progress("packing the weights for their kernels", READ_TO)
    model = of.build(
        spec,
        params,
        ops,
        dtype,
        world=shard.world,
        tp=shard.tp,
        placement=shard.placement,
        backends=shard.backends,
        lanes=shard.lanes,
        max_tokens=shard.max_tokens,
    )
    files.check()
    return model, files


def weight_bytes(plan: WeightPlan, dtype: torch.dtype) -> int:
    """Of the parameters that a rank loads."""
    return sum(math.prod(param.shape) for param in plan.params) * dtype.itemsize
