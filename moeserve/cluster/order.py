"""What an engine process is told at birth, over its stdin: never on the command line, which everyone can read."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from moeserve.comm.world import World
from moeserve.config import Config, ServerConfig
from moeserve.messages import PlacementTable

BUILDER = "moeserve.cluster.build:build_runner"


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's place among others. grouped: it waits for a Join before it serves. placement: what its ranks load."""

    world: World = World()
    grouped: bool = False
    placement: PlacementTable | None = None


class EngineOrder(msgspec.Struct, frozen=True, kw_only=True):
    """address, token: where the front end listens and how the engine proves that it is ours.

    born_s: monotonic time of the start. builder: `module:function` that makes the runner, see assemble.py.
    """

    config: Config
    address: str
    token: str
    born_s: float
    builder: str = BUILDER
    role: Role = Role()


def without_secrets(config: Config) -> Config:
    """The part of the settings that an engine may know: API keys stay in the front end."""
    server = config.server
    kept = ServerConfig(
        log_level=server.log_level, log_format=server.log_format, shutdown_timeout=server.shutdown_timeout
    )
    return replace(config, server=kept)
