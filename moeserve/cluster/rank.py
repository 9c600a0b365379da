"""Create the runner of one rank: of an engine's first (build.py), or another one (tp_worker.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeserve.comm.world import World
from moeserve.config import Config
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.messages import PlacementTable
from moeserve.models.hf_config import read_model_spec

if TYPE_CHECKING:
    from moeserve.runner.base import ModelRunnerBase


def make_rank(
    config: Config,
    world: World,
    table: PlacementTable | None,
    *,
    grouped: bool,
    folder: str = "",
) -> ModelRunnerBase:
    """Return the runner of one rank, with nothing loaded yet. grouped: it needs a Join.
    folder: the private directory of this server on this machine, if it has one.

    Slow imports happen here, so do not call it on an event loop.
    """
    from moeserve.moe.placement.placement import Placement
    from moeserve.runner.factory import make_runner

    model_dir = resolve_model_dir(config.model.model)
    placement = None if table is None else Placement.from_table(table)
    return make_runner(
        config,
        read_model_spec(model_dir),
        model_dir,
        world,
        placement,
        grouped=grouped,
        folder=folder,
    )
