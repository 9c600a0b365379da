"""How an engine process is started: its command line, and its start document, which nobody else can
read.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

import msgspec

import moeserve
from moeserve.comm.world import World
from moeserve.config import Config, ParallelConfig, ServerConfig
from moeserve.messages import PlacementTable

BUILDER = "moeserve.cluster.build:build_runner"


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's place among others. grouped: it serves after a Join only. placement: of the
    experts that it loads.

    folder: private, on the engine's machine, for its sockets.
    """

    world: World = World()
    grouped: bool = False
    placement: PlacementTable | None = None
    folder: str = ""


def role_of(
    parallel: ParallelConfig,
    together: bool,
    number: int,
    machines: Sequence[int],
    placement: PlacementTable | None,
) -> Role:
    """Returns the role of engine `number` among those on `machines` (of each). together: all of
    them form one group.
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
    """The order to start an engine. address: where the front end listens. token: proves the
    engine's identity.

    born_s: monotonic time of the start. builder: `module:function` that makes the runner, see
    assemble.py.
    """

    config: Config
    address: str
    token: str
    born_s: float
    builder: str = BUILDER
    role: Role = Role()


def without_secrets(config: Config) -> Config:
    """Returns the settings that an engine may know: API keys stay in the front end."""
    server = config.server
    kept = ServerConfig(
        log_level=server.log_level,
        log_format=server.log_format,
        shutdown_timeout=server.shutdown_timeout,
    )
    return replace(config, server=kept)


def command_of(module: str) -> list[str]:
    """Returns the command that runs `module` with this interpreter."""
    # -P: a file torch.py in the user's folder must not become the engine's torch. From a bare
    # checkout, though, the folder is where moeserve itself is.
    root = os.path.dirname(os.path.dirname(os.path.abspath(moeserve.__file__)))
    safe = [] if root == os.getcwd() else ["-P"]
    return [sys.executable, *safe, "-m", module]
