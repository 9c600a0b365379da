"""Bugs planted in background tasks: who is informed, and what is still served."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from moeserve.actor.actor import Inbox
from moeserve.actor.process import Death
from moeserve.actor.zmq_wire import PeerGone
from moeserve.cluster import engine_supervisor, forks, host, node
from moeserve.cluster.engine_group import EngineGroup
from moeserve.cluster.engine_state import EngineState, WireLost
from moeserve.cluster.engine_supervisor import EngineSupervisor
from moeserve.cluster.fleet_state import FleetState
from moeserve.cluster.forks import LocalHost
from moeserve.cluster.heartbeat import ProgressMonitor
from moeserve.cluster.host import Ended, RemoteHost, Start
from moeserve.cluster.link import EngineGone
from moeserve.cluster.node import NodeAgent
from moeserve.config import Config, ParallelConfig
from tests.cluster.test_fleet import Open, answers, fleet, some, until

__all__ = ["fleet"]  # a fixture


def fails(*args: Any, **options: Any) -> Any:
    raise ZeroDivisionError("planted")


async def test_a_beat_that_fails_is_logged_and_the_next_one_comes(
    fleet: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_supervisor, "INTERVAL_S", 0.02)
    async with fleet(2) as front:
        ping = ProgressMonitor.ping
        monkeypatch.setattr(ProgressMonitor, "ping", fails)
        await until(lambda: "'engine 0 heartbeat' failed: ZeroDivisionError" in caplog.text)
        monkeypatch.setattr(ProgressMonitor, "ping", ping)
        assert await (await some(front, 4, 50)) == answers(4, 50)
        assert front.healthy


async def test_a_reader_that_fails_ends_its_engine_and_kills_the_process(
    fleet: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(2) as front:
        pids = [engine.pid for engine in front.fleet.view.engines]
        assert all(pids)
        monkeypatch.setattr(EngineSupervisor, "_handle", fails)
        await until(lambda: front.failure is not None)
        assert "the supervision of engine" in str(front.failure)
        assert "planted" in str(front.failure)
        await until(lambda: any(engine.pid is None for engine in front.fleet.view.engines))


async def test_an_error_in_the_state_machine_ends_the_fleet_and_every_request(
    fleet: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(2) as front:
        streams = await some(front, 4, 5_000)
        monkeypatch.setattr(FleetState, "_on_output", fails)
        with pytest.raises(Exception, match="the engine stopped while this request ran"):
            await streams
        assert "the fleet failed: ZeroDivisionError('planted')" in str(front.failure)


async def test_a_group_that_fails_ends_the_fleet(
    fleet: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineGroup, "_send_joins", fails)
    async with fleet(2, ready=False) as front:
        await until(lambda: front.failure is not None)
        assert "the group of engine 0 failed: ZeroDivisionError" in str(front.failure)


async def test_a_link_to_a_machine_that_fails_loses_the_machine_and_its_processes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wire:
        def __init__(self, inbox: Inbox[Any]) -> None:
            self.address = "tcp://nowhere:1"
            self.inbox = inbox
            self.closed = False

        async def connected(self, deadline_s: float) -> None:
            pass

        def send(self, msg: Any) -> bool:
            return True

        def close(self) -> None:
            self.closed = True

    wires: list[Wire] = []

    def listen(address: str, *, inbox: Inbox[Any], **options: Any) -> Wire:
        wires.append(Wire(inbox))
        return wires[-1]

    monkeypatch.setattr(host, "listen", listen)
    machine = RemoteHost(1, 2, "127.0.0.1", None)
    machine.admit("/folder")
    process = await machine.start("engine 1", b"{}")
    monkeypatch.setattr(RemoteHost, "_on_message", fails)
    wires[0].inbox.put(Ended(1, Death("engine 1", 7, 0, 1.0, ())))
    death = await asyncio.wait_for(process.death(), 15)
    assert death.stranded
    assert "its link failed: ZeroDivisionError" in death.reason
    await until(lambda: "'node-1 link' failed: ZeroDivisionError" in caplog.text)
    assert machine.is_missing
    assert wires[0].closed
    assert not machine.is_taken, "another agent may come"


class QuietWire:
    """The wire of an agent, without machine 0."""

    greeted = True

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    async def connected(self, deadline_s: float) -> None:
        pass

    def send(self, msg: Any) -> bool:
        self.told.append(msg)
        return True

    def close(self) -> None:
        pass


async def test_an_engine_whose_life_fails_in_the_agent_is_reported_dead(
    monkeypatch: pytest.MonkeyPatch, short_dir: Any
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(NodeAgent, "_take_orphan_or_start", fails)
    open_wire: Callable[..., Any] = lambda inbox: QuietWire(told)  # noqa: E731
    agent = NodeAgent(Config(), LocalHost(str(short_dir)), open_wire)
    monkeypatch.setattr(agent, "_adapt_order", lambda order: order)
    agent.handle(Start(5, "engine 1", b"{}"))
    await until(lambda: bool(told))
    (ended,) = told
    assert (ended.id, ended.death.exit_code) == (5, -signal.SIGKILL)
    assert "the agent of its machine failed: ZeroDivisionError" in ended.death.reason


async def test_a_sweep_that_fails_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, short_dir: Any
) -> None:
    monkeypatch.setattr(node, "KEEP_S", 0.0)
    monkeypatch.setattr(node, "end_all", fails)
    orphans: Any = {"engine 9": object()}
    agent = NodeAgent(Config(), LocalHost(str(short_dir)), lambda inbox: QuietWire([]), orphans)
    await agent.on_start()
    await until(lambda: "'sweep of orphaned engines' failed" in caplog.text)
    await agent.on_stop()


async def test_without_the_keeper_of_the_fork_server_engines_still_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, short_dir: Any
) -> None:
    monkeypatch.setattr(forks, "ForkServer", fails)
    local = LocalHost(str(short_dir))
    local.keep_fork_server(Config(parallel=ParallelConfig(dp=2)))
    await until(lambda: "'fork server' failed: ZeroDivisionError" in caplog.text)
    child = await local.start("engine 0", b"{}")
    assert (await child.death()).exit_code == 1  # that is no order
    await local.close()


async def test_the_end_of_an_engine_is_reported_even_if_a_late_loss_fills_the_outbox() -> None:
    """Otherwise its supervision would end before the report, and nobody would ever read it."""
    outbox: Inbox[Any] = Inbox("front end", 1)
    events: list[Any] = []

    def report(event: Any) -> None:
        events.append(event)
        outbox.put(event)

    supervisor = EngineSupervisor(
        "engine 0",
        LocalHost("/nowhere"),
        Config(),
        state=lambda: EngineState(rank=0, host="node-0", machine=0, loaded=True),
        report=report,
        outbox=outbox,
    )
    reading = asyncio.create_task(supervisor._read())
    outbox.put("unread")
    supervisor._inbox.put(PeerGone("engine 0 has closed its connection"))
    await asyncio.sleep(0)
    dying = asyncio.create_task(supervisor.on_death(Death("engine 0", 7, -9, 1.0, ()), None))
    await asyncio.sleep(0)
    assert not events
    await outbox.drain(wait=False)
    await until(lambda: events == [WireLost()])
    for _ in range(5):
        await asyncio.sleep(0)
    assert not dying.done()
    await outbox.drain(wait=False)
    await asyncio.wait_for(dying, 15)
    assert [type(event) for event in events] == [WireLost, EngineGone]
    reading.cancel()
