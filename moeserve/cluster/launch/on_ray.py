"""Ray: an actor for each machine in a placement group. It starts the part as its child and carries
what is said.

Ray starts an actor again where it can, on another node if need be; the launcher then starts its
part again.
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

CONNECT_S = 5.0
PLACE_S = 60.0  # for Ray to find the nodes, an autoscaler to start some
STRATEGIES = {"spread": "STRICT_SPREAD", "pack": "PACK"}
_REMEDY = "Check `ray status`, and that Ray's Python on all nodes has moeserve"


def on_ray(nodes: int | None, address: str | None, placement: str, gpus: int) -> list[LaunchTarget]:
    """Return as many machines, every node of the cluster if None, each with a CPU and so many GPUs
    of a node. Raises ConfigError without Ray, or if there is no room."""
    with ConfigError.instead_of(ImportError, "--ray", "; install Ray: pip install 'moeserve[ray]'"):
        import ray
        from ray.util.placement_group import placement_group, placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    try:
        if address and "://" not in address:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port[:9]) < 65536:
                raise ValueError("must be HOST:PORT or ray://HOST:10001")
            socket.create_connection(
                (host, int(port)), CONNECT_S
            ).close()  # Ray itself tries for minutes
        ray.init(address or "auto", log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--ray-address {address or 'auto'}: {_first_line(error)}; run this on a node of a"
            " cluster of Ray "
            "(`ray start` makes it one), or give --ray-address ray://HEAD:10001"
        ) from None
    bundle = {"CPU": 1} | ({"GPU": gpus} if gpus else {})
    nodes = nodes or sum(it["Alive"] for it in ray.nodes())
    group = placement_group([bundle] * nodes, strategy=STRATEGIES[placement])
    if not group.wait(PLACE_S):
        free = ray.available_resources()
        raise ConfigError(
            f"--ray: no room within {PLACE_S:g} s for {nodes} machines of {bundle},"
            f" {STRATEGIES[placement]}; "
            f"free are {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs (see `ray"
            " status`)"
        )
    made = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=-1)(PartActor)
    here = ray.get_runtime_context().get_node_id()
    chosen = placement_group_table(group)["bundles_to_node_id"]
    ordered = sorted(
        range(nodes), key=lambda bundle: chosen[bundle] != here
    )  # machine 0 is here if it can be
    places = [PlacementGroupSchedulingStrategy(group, bundle) for bundle in ordered]
    actors = [made.options(scheduling_strategy=place).remote() for place in places]
    return [RayTarget(f"ray-{rank}", (), _REMEDY, actor) for rank, actor in enumerate(actors)]


class PartActor:
    """Runs on a node of Ray: its child is the part."""

    def __init__(self) -> None:
        os.environ.pop(
            "OMP_NUM_THREADS", None
        )  # Ray sets it to the actor's CPUs; --threads decides
        self._part: ProcessConnection | None = None

    async def start(self) -> str:
        """Start a part, in place of one that is left. Return the node's address."""
        import ray

        await self.kill()
        address = str(ray.util.get_node_ip_address())
        self._part = await ProcessConnection.open((sys.executable, *PART, address))
        return address

    async def read(self) -> bytes:
        """Return what the part said, b"" at its end."""
        return await self._part.out.read(MAX_LINE_BYTES) if self._part else b""

    async def write(self, data: bytes) -> None:
        """Say something to the part."""
        if self._part:
            self._part.write(data)

    async def kill(self) -> None:
        """End the part at once."""
        if self._part:
            await self._part.close()


@dataclass(frozen=True, slots=True)
class RayTarget(LaunchTarget):
    """A machine that Ray chooses, by its actor."""

    actor: Any = None

    async def connect(self) -> PartConnection:
        """Start the part, once Ray has a place for the actor. Raises PartNotStarted."""
        import ray
        from ray.exceptions import RayError

        # Ray keeps a call that may be tried again until the actor is there, and sends it at once
        # then.
        call = self.actor.start.options(max_task_retries=-1).remote()
        try:
            address = await call
        except RayError as error:
            raise PartNotStarted(_first_line(error)) from None
        finally:
            ray.cancel(call)  # without effect on one that is done
        to_stderr(f"moeserve launch: {self.name} is on {address}")
        return RayConnection(self.actor)


class RayConnection(PartConnection):
    """A part's stdin and stdout by calls of its actor."""

    def __init__(self, actor: Any) -> None:
        super().__init__(asyncio.StreamReader(limit=MAX_LINE_BYTES))
        self._actor = actor
        self._unsent = asyncio.Queue[bytes]()
        self._tasks = [
            spawn(self._read(), name="read of a part", on_error=self._failed),
            spawn(self._send(), name="write to a part", on_error=self._failed),
        ]

    def _failed(self, name: str, error: Exception) -> None:
        """End a part that cannot be reached: the launcher starts it again."""
        log_error(name, error)
        self.kill()

    def write(self, data: bytes) -> None:
        """Send to the part."""
        self._unsent.put_nowait(data)

    def kill(self) -> None:
        """End the part, if its actor is there."""
        for task in self._tasks:
            task.cancel()
        self._actor.kill.remote()

    async def close(self) -> None:
        """End the part, without waiting for an actor that may be gone."""
        self.kill()
        await asyncio.wait(self._tasks)

    async def _send(self) -> None:
        from ray.exceptions import RayError

        with suppress(RayError):  # _read says so
            while True:  # one call at a time: Ray may run calls of an async actor in another order
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
