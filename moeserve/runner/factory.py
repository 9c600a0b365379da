"""Create the model runner for a device."""

from pathlib import Path

import torch

from moeserve.blocks.kinds import MIXERS
from moeserve.comm.nccl import why_nccl_unsupported
from moeserve.comm.world import World
from moeserve.config import Config
from moeserve.errors import ConfigError
from moeserve.models.spec import ModelSpec
from moeserve.moe.all2all.registry import BACKENDS
from moeserve.moe.experts.registry import EXPERT_KERNELS, check_kernels
from moeserve.moe.placement.placement import Placement
from moeserve.runner.base import SINGLE_RANK, ModelRunnerBase
from moeserve.runner.devices import DEVICES, check_device
from moeserve.speculation import PROPOSERS

SPLIT_LEN = 512  # positions after which kernels/attention_plan.py splits long contexts


def make_runner(
    config: Config,
    spec: ModelSpec,
    model_dir: Path,
    world: World = SINGLE_RANK,
    placement: Placement | None = None,
    *,
    grouped: bool = False,
    folder: str = "",
) -> ModelRunnerBase:
    """Return a runner that has not loaded anything yet. Wrap it in a `ThreadedRunner`, and call
    `prepare` there.

    world: the rank of this process among all ranks.
    placement: the placement of experts; None: the initial one.
    grouped: whether the rank will join a group of engines, now or later.
    folder: the private directory of this server on this machine, if it has one.

    Raises ConfigError for settings that cannot work, and for `device: cuda` without a device.
    """
    for registry in (DEVICES, BACKENDS, EXPERT_KERNELS, MIXERS, PROPOSERS):
        registry.load_plugins()
    device = config.device.device
    check_device(device)
    check_kernels(config.device.kernels)
    on_cuda = torch.cuda.is_available() and device in ("auto", "cuda")
    if device == "cuda" and not on_cuda:
        raise ConfigError(
            f"device=cuda, but torch {torch.__version__} finds no CUDA device. Install a CUDA "
            "build of torch and a driver, or use --device cpu."
        )
    if config.device.compile and not on_cuda:
        raise ConfigError(
            "compile is for CUDA only, because CPUs use native kernels; omit `compile`"
        )
    if config.device.compile and config.device.exact:
        raise ConfigError(
            f"compile with determinism={config.device.determinism}: the bits of compiled code may "
            "depend on the batch; omit one of them"
        )
    if config.parallel.comm_sms is not None and not on_cuda:
        raise ConfigError(
            f"parallel.comm_sms={config.parallel.comm_sms} is the number of a GPU's "
            "multiprocessors for communication, but the model runs on CPUs; omit it, or use "
            "--device cuda"
        )
    if (
        on_cuda
        and world.tp_size > 1
        and (why := why_nccl_unsupported(max(world.tp_size, world.ranks_on_host))) is not None
    ):
        raise ConfigError(f"tp={world.tp_size}: {why}; use fewer ranks, or --device cpu")
    if on_cuda and config.device.kernels != "torch" and SPLIT_LEN % config.cache.block_size:
        raise ConfigError(
            f"block_size={config.cache.block_size} must divide {SPLIT_LEN} on CUDA, e.g. 16, 32 "
            "or 64"
        )
    if device == "auto":
        device = "cuda" if on_cuda else "cpu"
    return DEVICES[device](
        config, spec, model_dir, world, placement, grouped=grouped, folder=folder
    )
