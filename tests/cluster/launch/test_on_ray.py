"""The parts of `launch --ray` that need no Ray: an actor's part, and a connection by its calls."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from moeserve.cluster.launch import on_ray
from moeserve.cluster.launch.connection import MAX_LINE_BYTES, ProcessConnection
from moeserve.cluster.launch.on_ray import PartActor, RayConnection

ECHO = (
    "import sys\nprint('x' * 3_000_000)\nprint('here',"
    " flush=True)\nsys.stdout.write(sys.stdin.read(2))"
)


class Lost(Exception):
    pass


class Handle:
    """An actor's handle: `handle.name.remote(...)` begins a call, and what it returns can be
    awaited.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.lost = False
        self.slow = 0.0

    def __getattr__(self, name: str) -> Any:
        method = type("Method", (), {"remote": staticmethod(self._call(name))})
        method.options = staticmethod(lambda **options: method)  # type: ignore[attr-defined]
        return method

    def _call(self, name: str) -> Callable[..., asyncio.Task[Any]]:
        async def call(*args: Any) -> Any:
            if name == "write":
                delay_s = self.slow
                self.slow = 0.0
                await asyncio.sleep(delay_s)
            done = await getattr(self.actor, name)(*args)
            if self.lost:
                raise Lost("The actor died.\nmore of it")
            return done

        return lambda *args: asyncio.create_task(call(*args))


@pytest.fixture
async def handle(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Handle]:
    errors = type(sys)("ray.exceptions")
    errors.RayError = Lost  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
    module = type(sys)("ray")
    module.cancel = lambda call: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    actor = PartActor()
    assert "OMP_NUM_THREADS" not in os.environ  # Ray's, which would bound every part
    actor._part = await ProcessConnection.open((sys.executable, "-c", ECHO))
    yield Handle(actor)
    await actor.kill()


async def until_here(connection: RayConnection) -> None:
    """The line before is longer than any buffer: of it at most the end comes."""
    while (line := await connection.readline()) != b"here\n":
        assert line.startswith(b"x")
        assert len(line) <= MAX_LINE_BYTES + 1


async def test_lines_go_both_ways(handle: Handle) -> None:
    connection = RayConnection(handle)
    await until_here(connection)
    connection.write(b"a")
    connection.write(b"b")
    assert [await connection.readline(), await connection.readline()] == [b"ab", b""]
    await connection.close()


async def test_what_is_written_arrives_in_its_order(handle: Handle) -> None:
    """Though Ray may run a later call of an async actor before an earlier one."""
    connection = RayConnection(handle)
    await until_here(connection)
    handle.slow = 0.05
    connection.write(b"a")
    connection.write(b"b")
    assert await connection.readline() == b"ab"
    await connection.close()


async def test_an_actor_that_is_lost_is_the_end_and_says_why(handle: Handle) -> None:
    connection = RayConnection(handle)
    await until_here(connection)
    handle.lost = True
    await handle.actor.kill()
    assert [await connection.readline(), await connection.readline()] == [
        b"Ray: The actor died.\n",
        b"",
    ]
    await connection.close()


async def test_a_silent_part_is_killed(handle: Handle) -> None:
    connection = RayConnection(handle)
    await until_here(connection)
    connection.kill()
    assert await connection.readline() == b""
    await connection.close()
    assert await handle.actor.read() == b""


async def test_an_actor_without_a_place_has_not_started(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle.lost = True
    monkeypatch.setattr(handle.actor, "start", handle.actor.kill)
    with pytest.raises(on_ray.PartNotStarted, match=r"^The actor died\.$"):
        await on_ray.RayTarget("ray-1", (), "", handle).connect()
