"""How an engine process is started: its command line, and its start document.

Nobody else can read the document.
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
    """An engine's part among the engines of a fleet."""

    world: World = World()
    grouped: bool = False  # it serves after a Join only
    placement: PlacementTable | None = None  # of the experts that it loads
    folder: str = ""  # private, on the engine's machine, for its sockets


def role_of(
    parallel: ParallelConfig,
    together: bool,
    number: int,
    machines: Sequence[int],
    placement: PlacementTable | None,
) -> Role:
    """Return the role of engine `number`.

    Args:
        together: all engines form one group.
        machines: of each engine.
        placement: of the experts.
    """
    tp = parallel.tp
    machine = machines[number]
    here = machines.count(machine) * tp
    before = machines[:number].count(machine) * tp
    if together:
        world = World(number * tp, len(machines) * tp, tp, ranks_on_host=here, host_rank=before)
    else:
        world = World(size=tp, tp_size=tp, ep=False, ranks_on_host=here, host_rank=before)
    return Role(world=world, grouped=together or tp > 1, placement=placement)


class EngineOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order to start an engine."""

    config: Config
    address: str  # where the front end listens
    token: str  # proves the engine's identity
    born_s: float  # monotonic time of the start
    builder: str = BUILDER  # `module:function` that makes the runner, see assemble.py
    role: Role = Role()


def without_secrets(config: Config) -> Config:
    """Return the settings that an engine may know: API keys stay in the front end."""
    server = config.server
    kept = ServerConfig(
        log_level=server.log_level,
        log_format=server.log_format,
        shutdown_timeout=server.shutdown_timeout,
    )
    return replace(config, server=kept)


def command_of(module: str) -> list[str]:
    """Return the command that runs `module` with this interpreter."""
    # -P: a file torch.py in the user's folder must not become the engine's torch. In a bare
    # checkout, though, moeserve itself is found by that folder.
    root = Path(__file__).resolve().parents[2]
    safe = [] if str(root) == os.getcwd() else ["-P"]
    return [sys.executable, *safe, "-m", module]
