"""The root process of --standby: what it does when a front end or its agent fails."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace

import pytest

from moeserve.actor.process import Death
from moeserve.config import Config, ParallelConfig, ServerConfig
from moeserve.errors import ConfigError, EngineDied
from moeserve.server import standby
from moeserve.server.standby import FrontEndProcess, FrontEnds, reloads_files
from tests.server.conftest import until


class FakeChild:
    """A process that dies when it is killed."""

    def __init__(self, *, name: str = "front end", exit_code: int = -9) -> None:
        self.name = name
        self.reasons: list[str] = []
        self.signals: list[int] = []
        self.documents: list[bytes] = []
        self._death = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self._death.done()

    def die(self, exit_code: int) -> None:
        if self.alive:
            self._death.set_result(Death(self.name, 1, exit_code, 1.0, ()))

    def kill(self, reason: str) -> None:
        self.reasons.append(reason)
        self.die(-9)

    def terminate(self) -> None:
        self.die(0)

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def hand_over(self, document: bytes) -> None:
        self.documents.append(document)

    async def death(self) -> Death:
        return await asyncio.shield(self._death)


class FakeAgent:
    """An agent whose front end sends heartbeats while `beating`."""

    def __init__(self, *args: object, **options: object) -> None:
        self.num_heartbeats = 0
        self.beating = True
        self.connected = True
        self.snapshot = None
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def continue_from(self, snapshot: object) -> None:
        self.snapshot = snapshot

    async def run(self) -> None:
        await self.failure

    def close(self) -> None:
        pass


class FakeFrontEnd:
    """A FrontEndProcess without a process."""

    made: list[FakeFrontEnd]
    refused = 0  # how many more may not start

    def __init__(self, *args: object, number: int, follows: int, secret: str) -> None:
        if FakeFrontEnd.refused and number:
            FakeFrontEnd.refused -= 1
            raise ConfigError("cannot start front end: Cannot allocate memory")
        self.number = number
        self.child = FakeChild()
        self.agent = FakeAgent()
        self._beating = None
        FakeFrontEnd.made.append(self)

    def serve(self, standing: object) -> None:
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            self.agent.num_heartbeats += self.agent.beating
            await asyncio.sleep(0.002)

    async def close(self) -> None:
        self.child.die(-9)
        if self._beating is not None:
            self._beating.cancel()


@pytest.fixture
async def front_ends(monkeypatch):
    FakeFrontEnd.made = []
    FakeFrontEnd.refused = 0
    monkeypatch.setattr(standby, "FrontEndProcess", FakeFrontEnd)
    monkeypatch.setattr(standby, "HEARTBEAT_S", 0.02)
    it = FrontEnds(Config(), SimpleNamespace(folder="/nowhere"), {}, [])
    life = asyncio.create_task(it.run())
    yield it, life
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)
    await it.close()


async def test_a_front_end_that_cannot_be_started_is_tried_again(front_ends, monkeypatch, caplog):
    _, life = front_ends
    monkeypatch.setattr(standby, "MAX_PAUSE_S", 0.05)
    FakeFrontEnd.refused = 2
    await until(lambda: len(FakeFrontEnd.made) == 2)
    assert "Cannot allocate memory; another one starts in" in caplog.text
    assert not life.done()


async def test_a_front_end_that_falls_silent_is_replaced(front_ends):
    _, life = front_ends
    await until(lambda: len(FakeFrontEnd.made) == 2)
    first = FakeFrontEnd.made[0]
    first.agent.beating = False
    await until(lambda: first.child.reasons)
    assert "did not answer" in first.child.reasons[0]
    second = FakeFrontEnd.made[1]
    await until(lambda: second.agent.num_heartbeats)
    assert not life.done()


async def test_sighup_goes_to_the_front_end_that_serves(front_ends):
    it, _ = front_ends
    await until(lambda: len(FakeFrontEnd.made) == 2)
    it.reload()
    first, second = FakeFrontEnd.made
    assert (first.child.signals, second.child.signals) == ([signal.SIGHUP], [])


def test_sighup_is_taken_where_there_is_something_to_read():
    assert not reloads_files(ServerConfig())
    for field in ("api_key_file", "admin_key_file", "ssl_certfile", "access_log"):
        assert reloads_files(ServerConfig(**{field: "x"}))


@pytest.fixture
async def front_end(monkeypatch):
    child = FakeChild()
    monkeypatch.setattr(standby, "NodeAgent", FakeAgent)
    monkeypatch.setattr(standby.Child, "start", lambda *args, **options: child)
    config = Config(parallel=ParallelConfig(standby=True))
    host = SimpleNamespace(folder="/nowhere")
    it = FrontEndProcess(config, host, {}, [], number=0, follows=-1, secret="")
    it.serve(None)
    yield it
    await it.close()


@pytest.mark.parametrize(
    ("error", "beats", "is_killed"),
    [
        (RuntimeError("planted"), 5, True),
        (EngineDied("machine 0 is lost"), 5, False),  # the end of the front end itself
        (EngineDied("machine 0 is lost: it did not connect"), 0, True),
    ],
)
async def test_a_front_end_without_its_agent_is_ended(front_end, error, beats, is_killed):
    front_end.agent.num_heartbeats = beats
    front_end.agent.failure.set_exception(error)
    await asyncio.wait([front_end._agent_task])
    await asyncio.sleep(0)
    assert bool(front_end.child.reasons) == is_killed
    if is_killed:
        assert str(error) in front_end.child.reasons[0]


async def test_an_agent_of_a_process_that_cannot_start_is_closed(monkeypatch):
    closed = []

    def refuse(*args: object, **options: object) -> None:
        raise ConfigError("cannot start front end 0: Too many open files")

    monkeypatch.setattr(standby, "NodeAgent", FakeAgent)
    monkeypatch.setattr(FakeAgent, "close", lambda self: closed.append(self))
    monkeypatch.setattr(standby.Child, "start", refuse)
    host = SimpleNamespace(folder="/nowhere")
    with pytest.raises(ConfigError, match="Too many open files"):
        FrontEndProcess(Config(), host, {}, [], number=0, follows=-1, secret="")
    assert len(closed) == 1
