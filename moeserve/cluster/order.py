"""The order to start an engine process, and the command line of moeserve's processes.

An `EngineOrder` is sent over stdin, so that no other process can read its token.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from moeserve.comm.world import World
from moeserve.config import Config, ParallelConfig, ServerConfig
from moeserve.messages import PlacementTable

BUILDER = "moeserve.cluster.build:build_runner"


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's part in a fleet."""

    world: World = World()
    grouped: bool = False  # it needs a Join before it serves
    placement: PlacementTable | None = None  # of the experts to load
    folder: str = ""  # private directory on the engine's machine, for sockets


def role_of(
    parallel: ParallelConfig,
    dp_rank: int,
    machines: Sequence[int],
    placement: PlacementTable | None,
    *,
    is_one_group: bool,
) -> Role:
    """Return the role of an engine.

    Args:
        dp_rank: the number of the engine.
        machines: the machine of each engine.
        placement: the placement of the experts.
        is_one_group: whether all engines form one group.
    """
    tp = parallel.tp
    machine = machines[dp_rank]
    ranks_on_host = machines.count(machine) * tp
    host_rank = machines[:dp_rank].count(machine) * tp
    if is_one_group:
        world = World(
            rank=dp_rank * tp,
            size=len(machines) * tp,
            tp_size=tp,
            ranks_on_host=ranks_on_host,
            host_rank=host_rank,
        )
    else:
        world = World(
            size=tp, tp_size=tp, ep=False, ranks_on_host=ranks_on_host, host_rank=host_rank
        )
    return Role(world=world, grouped=is_one_group or tp > 1, placement=placement)


class EngineOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order to start an engine."""

    config: Config
    address: str  # at which the front end listens
    token: str  # proves the engine's identity
    born_s: float  # monotonic time of the start
    builder: str = BUILDER  # `module:function` that makes the runner, see assemble.py
    role: Role = Role()


def without_secrets(config: Config) -> Config:
    """Return the settings for an engine, without those that only the front end needs (API keys)."""
    server = config.server
    kept = ServerConfig(
        log_level=server.log_level,
        log_format=server.log_format,
        shutdown_timeout=server.shutdown_timeout,
    )
    return replace(config, server=kept)


def command_of(module: str) -> list[str]:
    """Return the command that runs `module` with this interpreter."""
    # -P omits the working directory from sys.path, so that a file torch.py there is not imported.
    # If the working directory is moeserve's own checkout, it must stay on the path.
    checkout = Path(__file__).resolve().parents[2]
    safe_path_flag = [] if str(checkout) == os.getcwd() else ["-P"]
    return [sys.executable, *safe_path_flag, "-m", module]
