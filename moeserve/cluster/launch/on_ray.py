"""`moeserve launch --ray`: an actor per machine, in a placement group.

The actor starts the part as its child process and passes on its stdin and stdout. If an actor is
lost, Ray restarts it, maybe on another node, and the launcher starts its part again.
"""

import asyncio
import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moeserve.actor.process import one_line, to_stderr
from moeserve.actor.tasks import log_error, spawn
from moeserve.cluster.launch.connection import (
    MAX_LINE_BYTES,
    PartConnection,
    PartNotStarted,
    ProcessConnection,
)
from moeserve.cluster.launch.targets import PART, LaunchTarget
from moeserve.errors import ConfigError

CONNECT_TIMEOUT_S = 5.0
PLACEMENT_TIMEOUT_S = 60.0  # includes starting nodes (autoscaler)
STRATEGIES = {"spread": "STRICT_SPREAD", "pack": "PACK"}
_REMEDY = "Check `ray status`, and that Ray's Python on all nodes has moeserve"


def start_ray_actors(
    nodes: int | None, address: str | None, placement: str, gpus: int
) -> list[LaunchTarget]:
    """Start actors in a placement group, and return them as machines.

    Raises ConfigError if Ray is not installed or not reachable, or if there is no room.

    Args:
        nodes: the number of machines; None for every node of the cluster.
        address: the Ray cluster; None for the one of this node.
        placement: a key of STRATEGIES: "spread" (one machine per node) or "pack" (few nodes).
        gpus: GPUs per machine. Each machine also gets a CPU.
    """
    with ConfigError.instead_of(ImportError, "--ray", "; install Ray: pip install 'moeserve[ray]'"):
        import ray
        from ray.util.placement_group import placement_group, placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    try:
        if address and "://" not in address:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port[:9]) < 65536:
                raise ValueError("must be HOST:PORT or ray://HOST:10001")
            # Test the connection first, because Ray itself would try for minutes.
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(address or "auto", log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--ray-address {address or 'auto'}: {_first_line(error)}; run this on a node of a Ray"
            " cluster (see `ray start`), or give --ray-address ray://HEAD:10001"
        ) from None
    bundle = {"CPU": 1} | ({"GPU": gpus} if gpus else {})
    nodes = nodes or sum(node["Alive"] for node in ray.nodes())
    group = placement_group([bundle] * nodes, strategy=STRATEGIES[placement])
    if not group.wait(PLACEMENT_TIMEOUT_S):
        free = ray.available_resources()
        raise ConfigError(
            f"--ray: no room within {PLACEMENT_TIMEOUT_S:g} s for {nodes} machines of {bundle},"
            f" {STRATEGIES[placement]}; {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs"
            " are free (see `ray status`)"
        )
    actor_class = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=-1)(PartActor)
    own_node = ray.get_runtime_context().get_node_id()
    node_of = placement_group_table(group)["bundles_to_node_id"]
    # Bundles on the node of this process come first, so that machine 0 is here if possible.
    bundle_indices = sorted(range(nodes), key=lambda index: node_of[index] != own_node)
    actors = []
    for index in bundle_indices:
        place = PlacementGroupSchedulingStrategy(group, index)
        actors.append(actor_class.options(scheduling_strategy=place).remote())
    return [
        RayTarget(name=f"ray-{rank}", command=(), remedy=_REMEDY, actor=actor)
        for rank, actor in enumerate(actors)
    ]


class PartActor:
    """The actor that runs on a node of Ray. Its child process is the part."""

    def __init__(self) -> None:
        # Ray sets it to the actor's number of CPUs, but the setting --threads decides.
        os.environ.pop("OMP_NUM_THREADS", None)
        self._part: ProcessConnection | None = None

    async def start(self) -> str:
        """Kill the previous part, if any, and start another. Return the node's address."""
        import ray

        await self.kill()
        address = str(ray.util.get_node_ip_address())
        self._part = await ProcessConnection.open((sys.executable, *PART, address))
        return address

    async def read(self) -> bytes:
        """Return output of the part, b"" at its end."""
        return await self._part.out.read(MAX_LINE_BYTES) if self._part else b""

    async def write(self, data: bytes) -> None:
        """Write to the part's stdin."""
        if self._part:
            self._part.write(data)

    async def kill(self) -> None:
        """Kill the part."""
        if self._part:
            await self._part.close()


@dataclass(frozen=True, slots=True)
class RayTarget(LaunchTarget):
    """A machine that Ray has chosen. It has no command: its actor starts the part."""

    actor: Any = None  # handle of a `PartActor`

    async def connect(self) -> PartConnection:
        """Start the part once its actor runs. Raises PartNotStarted."""
        import ray
        from ray.exceptions import RayError

        # With unlimited retries (-1), Ray queues the call until the actor runs.
        call = self.actor.start.options(max_task_retries=-1).remote()
        try:
            address = await call
        except RayError as error:
            raise PartNotStarted(_first_line(error)) from None
        finally:
            ray.cancel(call)  # has no effect if the call is done
        to_stderr(f"moeserve launch: {self.name} is on {address}")
        return RayConnection(self.actor)


class RayConnection(PartConnection):
    """A part's stdin and stdout, over calls of its actor."""

    def __init__(self, actor: Any) -> None:
        super().__init__(asyncio.StreamReader(limit=MAX_LINE_BYTES))
        self._actor = actor
        self._unsent = asyncio.Queue[bytes]()
        self._tasks = [
            spawn(self._read(), name="read of a part", on_error=self._on_task_failed),
            spawn(self._send(), name="write to a part", on_error=self._on_task_failed),
        ]

    def _on_task_failed(self, name: str, error: Exception) -> None:
        """Kill a part that cannot be reached. The launcher will start it again."""
        log_error(name, error)
        self.kill()

    def write(self, data: bytes) -> None:
        self._unsent.put_nowait(data)

    def kill(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._actor.kill.remote()

    async def close(self) -> None:
        """Kill the part, without waiting for an actor that may be gone."""
        self.kill()
        await asyncio.wait(self._tasks)

    async def _send(self) -> None:
        from ray.exceptions import RayError

        with suppress(RayError):  # the actor is lost, which `_read` reports
            while True:  # one call at a time, because Ray may reorder calls of an async actor
                await self._actor.write.remote(await self._unsent.get())

    async def _read(self) -> None:
        from ray.exceptions import RayError

        try:
            while data := await self._actor.read.remote():
                self.out.feed_data(data)
        except RayError as error:
            self.out.feed_data(f"Ray: {_first_line(error)}\n".encode())
        finally:
            self.out.feed_eof()


def _first_line(error: BaseException) -> str:
    return one_line(str(error).strip().partition("\n")[0])
