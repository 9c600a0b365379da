"""Picks the runner class for a device."""

from pathlib import Path

import torch

from moeserve.blocks.kinds import MIXERS
from moeserve.comm.nccl import why_not
from moeserve.comm.world import World
from moeserve.config import Config
from moeserve.errors import ConfigError
from moeserve.models.spec import ModelSpec
from moeserve.moe.all2all.registry import BACKENDS
from moeserve.moe.experts.registry import EXPERT_KERNELS, check_kernels
from moeserve.moe.placement.placement import Placement
from moeserve.runner.base import ONE, ModelRunnerBase
from moeserve.runner.devices import DEVICES, check_device
from moeserve.speculation import PROPOSERS

SPLIT = 512  # positions: kernels/attention_plan.py splits long contexts after so many


def make_runner(
    config: Config,
    spec: ModelSpec,
    model_dir: Path,
    world: World = ONE,
    placement: Placement | None = None,
    *,
    grouped: bool = False,
) -> ModelRunnerBase:
    """Return a runner that has not loaded anything yet: wrap it in a `ThreadedRunner` and call
    `prepare` there.

    world: this rank's place. placement: of the experts (default: the initial one). grouped: it will
    join others, now or later. Raises ConfigError for settings that cannot work, and for `device:
    cuda` without a device.
    """
    for registry in (DEVICES, BACKENDS, EXPERT_KERNELS, MIXERS, PROPOSERS):
        registry.load_plugins()
    asked = config.device.device
    check_device(asked)
    check_kernels(config.device.kernels)
    on_cuda = torch.cuda.is_available() and asked in ("auto", "cuda")
    if asked == "cuda" and not on_cuda:
        raise ConfigError(
            f"device cuda was asked for, but torch {torch.__version__} sees no CUDA "
            "device. Install a CUDA build of "
            "torch and a driver, or use --device cpu."
        )
    if config.device.compile and not on_cuda:
        raise ConfigError(
            "compile is for CUDA; on CPUs native kernels do it all: leave `compile` out"
        )
    if config.device.compile and config.device.exact:
        raise ConfigError(
            f"compile with determinism={config.device.determinism}: generated code "
            "does not promise that bits do not "
            "depend on the batch; leave one of them out"
        )
    if config.parallel.comm_sms is not None and not on_cuda:
        raise ConfigError(
            f"parallel.comm_sms={config.parallel.comm_sms} says what communication "
            "takes of a GPU, and the model "
            "runs on CPUs: leave it out, or use --device cuda"
        )
    if (
        on_cuda
        and world.tp_size > 1
        and (why := why_not(max(world.tp_size, world.ranks_on_host))) is not None
    ):
        raise ConfigError(f"tp={world.tp_size}: {why}; use fewer ranks, or --device cpu")
    if on_cuda and config.device.kernels != "torch" and SPLIT % config.cache.block_size:
        raise ConfigError(
            f"block_size={config.cache.block_size} must divide {SPLIT} on CUDA, e.g. 16, 32 or 64"
        )
    runner = DEVICES["cuda" if on_cuda else "cpu"] if asked == "auto" else DEVICES[asked]
    return runner(config, spec, model_dir, world, placement, grouped=grouped)
