"""Machines that are drained, return, are replaced or get more engines: real agents."""

# ruff: noqa: F401, F811  (fixtures)

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from moeserve.errors import Conflict, InvalidRequest
from moeserve.frontend.front_end import FrontEnd

from .test_fleet import answers, fleet, some, until
from .test_node import BOOT_S, Cluster, Node, cluster

Make = Callable[..., Cluster]


def hosts(front: FrontEnd) -> list[str]:
    return [engine.host for engine in front.fleet.view.engines]


def machines(front: FrontEnd) -> list[str]:
    return list(front.fleet.view.machines.values())


async def ends(node: Node, *codes: int) -> None:
    await asyncio.to_thread(node.ends, *codes)


@pytest.mark.parametrize("ep", ["on", "off"])
async def test_a_drained_machine_costs_no_token_and_returns_with_its_engines(
    cluster: Make, ep: str
) -> None:
    two = cluster(dp=4)
    two.parallel["ep"] = ep
    node = two.node()
    async with two.fleet() as front:
        streams = await some(front, 8, 400)
        assert await front.fleet.scaling.drain(1) == 4
        await ends(node)
        assert hosts(front) == ["node-0", "node-0"]
        assert machines(front) == ["here", "drained"]
        assert front.fleet.view.complete
        assert front.healthy
        with pytest.raises(Conflict, match="node-1 is drained already"):
            await front.fleet.scaling.drain(1)
        again = two.node()
        await until(lambda: front.ready.max_num_seqs == 32, BOOT_S)
        assert front.fleet.dp == 4
        assert machines(front) == ["here", "here"]
        assert len(again.engines(front)) == 2
        assert await streams == answers(8, 400)
        assert front.stats.total.restarts == 0
    again.ends()


async def test_a_lost_machine_can_be_drained_so_that_nobody_waits_for_it(cluster: Make) -> None:
    two = cluster()
    node = two.node()
    async with two.fleet() as front:
        streams = await some(front, 6, 300)
        node.process.kill()
        await until(lambda: machines(front) == ["here", "missing"])
        with pytest.raises(Conflict, match="node-1 is missing; start it again, or drain it"):
            await front.fleet.scaling.scale(3)
        assert await front.fleet.scaling.drain(1) == 2
        assert await streams == answers(6, 300)
        assert machines(front) == ["here", "drained"]


async def test_another_machine_takes_the_place_of_one_that_fell_silent(cluster: Make) -> None:
    two = cluster()
    old = two.node()
    async with two.fleet() as front:
        streams = await some(front, 6, 300)
        (engine,) = old.engines(front)
        for process in (old.process, engine):
            os.kill(process.pid, signal.SIGSTOP)
        await until(lambda: machines(front) == ["here", "missing"])
        new = two.node()
        assert await streams == answers(6, 300)
        (other,) = new.engines(front)
        assert other.pid != engine.pid
        for process in (engine, old.process):
            os.kill(process.pid, signal.SIGCONT)
        await ends(old, 1)
        assert "machine 0 is lost" in old.log.read_text()
        assert front.fleet.view.complete


async def test_scaling_fills_the_machines_that_are_here_evenly_and_takes_the_last_engines_back(
    cluster: Make,
) -> None:
    two = cluster(dp=3)
    two.node()
    async with two.fleet() as front:
        streams = await some(front, 8, 500)
        assert hosts(front) == ["node-0", "node-0", "node-1"]
        scale = front.fleet.scaling.scale
        assert await scale(6) == 3
        assert hosts(front) == ["node-0"] * 3 + ["node-1"] * 3
        assert sorted(engine.rank for engine in front.fleet.view.engines) == list(range(6))
        assert await scale(3) == 6
        assert hosts(front) == ["node-0", "node-0", "node-1"]
        assert await scale(1) == 3
        assert machines(front) == ["here", "here"]
        assert await scale(2) == 1
        assert hosts(front) == ["node-0", "node-1"]
        assert await front.fleet.scaling.drain(1) == 2
        assert await scale(2) == 1
        assert hosts(front) == ["node-0", "node-0"]
        again = two.node()
        await until(lambda: front.ready.max_num_seqs == 24, BOOT_S)
        assert hosts(front) == ["node-0", "node-0", "node-1"]
        late = await some(front, 3, 50)
        assert await streams == answers(8, 500)
        assert await late == answers(3, 50)
    again.ends()


async def test_a_machine_that_is_lost_while_its_engines_load_ends_the_change(cluster: Make) -> None:
    two = cluster()
    node = two.node()
    async with two.fleet("newcomers_load_for_ever") as front:
        growing = asyncio.create_task(front.fleet.scaling.scale(4))
        await until(lambda: len(psutil.Process(node.process.pid).children()) == 2)
        node.process.kill()
        with pytest.raises(
            Conflict, match=r"2 engines continue, growing to 4 failed: .*node-1 was lost"
        ):
            await growing
        await front.fleet.scaling.drain(1)
        assert await (await some(front, 2, 50)) == answers(2, 50)


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (0, "machine 0 cannot be drained: it answers HTTP"),
        (1, "there are 1 machines"),
        (-1, "there are 1 machines"),
    ],
)
async def test_machines_that_cannot_be_drained(fleet: Any, machine: int, why: str) -> None:
    async with fleet(2) as front:
        with pytest.raises(InvalidRequest, match=why):
            await front.fleet.scaling.drain(machine)


async def test_the_machine_with_the_last_engines_is_not_drained(cluster: Make) -> None:
    two = cluster()
    two.parallel["ep"] = "off"
    two.node()
    async with two.fleet() as front:
        front.fleet._state.drain(0, 0.0)
        await until(lambda: front.fleet.engines[0].end is not None)
        with pytest.raises(Conflict, match="would stay have failed"):
            await front.fleet.scaling.drain(1)
        assert await (await some(front, 2, 50)) == answers(2, 50)
