"""An exception in a background task is handled by its owner: nothing ends in silence."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from types import SimpleNamespace

import pytest

from moeserve.cluster.launch import protocol
from moeserve.server import run as run_module
from moeserve.server import tls as tls_module
from moeserve.server.app import App
from moeserve.server.http import Connection, HttpServer, StreamWatch
from moeserve.server.reload import Reloads
from moeserve.server.routes import ROUTES
from tests.server.conftest import until
from tests.server.test_operations import certificate


class Planted(Exception):
    """The exception that the tests plant."""


class Broken:
    """A method that raises the first `times` times, and then does as `work` does."""

    def __init__(self, times: int, work=lambda *args: None) -> None:
        self.left = times
        self.calls = 0
        self._work = work

    def __call__(self, *args):
        self.calls += 1
        if self.left:
            self.left -= 1
            raise Planted("planted")
        return self._work(*args)


@pytest.fixture
async def spawned():
    """A function that runs a coroutine until the test ends."""
    tasks = []

    def start(coroutine) -> asyncio.Task:
        tasks.append(asyncio.create_task(coroutine))
        return tasks[-1]

    yield start
    for task in tasks:
        assert not task.done(), "the timer has ended"
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Stream:
    """A silent SseStream."""

    started = True
    sending = False
    sent_at_s = 0.0

    def __init__(self, ping) -> None:
        self._ping = ping
        self.dropped = 0

    async def ping(self) -> None:
        self._ping()

    def drop(self) -> None:
        self.dropped += 1


class StrangeStream(Stream):
    """One that cannot even be looked at."""

    @property
    def sending(self) -> bool:
        raise Planted("planted")


async def test_a_stream_that_raises_is_dropped_and_others_are_pinged(spawned, caplog):
    strange = StrangeStream(Broken(0))
    bad = Stream(Broken(10**9))
    good = Stream(Broken(0))
    spawned(StreamWatch({strange, bad, good}, 0.02, stall_s=9.0).run())
    await until(lambda: strange.dropped and bad.dropped)
    before = good._ping.calls
    await until(lambda: good._ping.calls > before + 2)
    assert not good.dropped
    assert "planted" in caplog.text


async def test_a_ping_that_meets_the_end_of_its_stream_is_harmless(launch, caplog):
    """The ping is due in the same turn of the loop in which the stream ends."""
    async with launch(sse_ping_s=60.0) as live:
        live.engine.gate.clear()
        body = {"prompt": "a", "stream": True, "max_tokens": 3}
        asking = asyncio.create_task(live.events("/v1/completions", body))
        await until(lambda: live.context.streams)
        (stream,) = live.context.streams
        finish = stream.finish

        async def finish_and_ping():
            pinging = asyncio.create_task(stream.ping())
            response = await finish()
            await pinging
            await stream.ping()
            return response

        stream.finish = finish_and_ping
        live.engine.gate.set()
        assert len(await asking) == 3
        assert "Error" not in caplog.text


async def test_reading_that_raises_is_tried_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("moeserve.server.reload.CHECK_S", 0.01)
    path = tmp_path / "file"
    path.write_text("one")
    read = Broken(2, path.read_text)
    seen = []
    use = Broken(1, seen.append)
    reloads = Reloads()
    reloads.add([str(path)], read, use)
    reloads.add([str(tmp_path / "none")], Broken(10**9), seen.append)
    async with reloads.watching():
        path.write_text("two...")
        await until(lambda: seen == ["two..."])
        assert (read.left, use.left) == (0, 0)
        assert caplog.text.count("not reloaded") == 1  # told once, not at each try
        for _ in range(3):  # the handler stays, though one of the two raises each time
            before = len(seen)
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda before=before: len(seen) > before)


async def test_files_that_change_between_two_readings_leave_the_old_certificate(
    launch, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("moeserve.server.reload.CHECK_S", 0.01)
    cert, key = certificate(tmp_path / "one", "one")
    new_cert, new_key = certificate(tmp_path / "two", "two")
    async with launch(ssl_certfile=cert, ssl_keyfile=key) as live:
        tls = live.context.tls
        before = tls._present
        opening = tls_module.ssl.create_default_context

        def changing(purpose):
            """Replaces the key in the middle of a reading."""
            os.replace(new_key, key)
            monkeypatch.undo()
            monkeypatch.setattr("moeserve.server.reload.CHECK_S", 0.01)
            return opening(purpose)

        monkeypatch.setattr(tls_module.ssl, "create_default_context", changing)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: "not reloaded" in caplog.text)
        assert tls._present is before
        context = ssl.create_default_context(cafile=cert)
        async with live.session.get(f"{live.url}/livez", ssl=context) as response:
            assert response.status == 200
        os.replace(new_cert, cert)
        await until(lambda: tls._present is not before)
        os.kill(os.getpid(), signal.SIGHUP)  # it does not end the process
        await asyncio.sleep(0.02)


async def test_a_report_that_raises_is_followed_by_the_next(monkeypatch, caplog, spawned):
    monkeypatch.setenv(protocol.NNODES, "2")
    monkeypatch.setattr(protocol, "REPORT_S", 0.01)
    sent = []
    monkeypatch.setattr(protocol, "report_state", sent.append)
    spawned(protocol.report_changes(Broken(2, lambda: "ready")))
    await until(lambda: sent == ["ready"])
    assert "planted" in caplog.text


async def test_a_slow_head_that_cannot_be_refused_is_closed(live, monkeypatch, caplog):
    server = HttpServer(App(live.context, ROUTES), 60.0)
    acceptor = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    port = acceptor.sockets[0].getsockname()[1]
    first = await asyncio.open_connection("127.0.0.1", port)
    second = await asyncio.open_connection("127.0.0.1", port)
    await until(lambda: len(server.connections) == 2)
    refuse = Connection.refuse_slow_head
    broken = Broken(1, refuse)
    monkeypatch.setattr(Connection, "refuse_slow_head", lambda self: broken(self))
    heads = asyncio.create_task(server.watch_heads(0.2))
    async with asyncio.timeout(20):
        answers = [await reader.read() for reader, _ in (first, second)]
    assert sorted(answer[:12] for answer in answers) == [b"", b"HTTP/1.1 408"]
    assert "planted" in caplog.text
    assert not heads.done()
    heads.cancel()
    for _, writer in (first, second):
        writer.close()
    acceptor.close()
    await server.shutdown(0.1)


async def test_a_journal_that_raises_is_followed_again(monkeypatch, caplog):
    async def follow(root, is_ours):
        broken()
        return SimpleNamespace(streams={"a": "stream"})

    broken = Broken(2)
    monkeypatch.setattr(run_module, "follow", follow)
    monkeypatch.setattr(run_module, "JOURNAL_PAUSE_S", 0.01)
    assert await run_module._previous_streams(None, asyncio.Event()) == ["stream"]
    assert caplog.text.count("planted") >= 2


async def test_a_journal_that_always_raises_costs_streams_but_not_the_turn(monkeypatch):
    broken = Broken(10**9)
    monkeypatch.setattr(run_module, "follow", broken)
    monkeypatch.setattr(run_module, "JOURNAL_PAUSE_S", 0.01)
    is_ours = asyncio.Event()
    following = asyncio.create_task(run_module._previous_streams(None, is_ours))
    await until(lambda: broken.calls > 2)
    is_ours.set()
    assert await following == []
