"""Errors of our own code, planted in the readers and watchers of the actor kit."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from moeserve.actor import process as module
from moeserve.actor.actor import Inbox
from moeserve.actor.forking import ForkServer
from moeserve.actor.process import Child
from moeserve.actor.zmq_wire import PeerGone, ZmqWire, connect, listen

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Word(msgspec.Struct, frozen=True, tag=True):
    text: str


def fails(*args: Any, **options: Any) -> Any:
    raise ZeroDivisionError("planted")


def test_a_child_whose_watch_fails_is_killed(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(module._LogLines):
        @property
        def ended(self) -> asyncio.Future[None]:
            raise ZeroDivisionError("planted")

        @ended.setter
        def ended(self, future: asyncio.Future[None]) -> None:
            pass

    monkeypatch.setattr(module, "_LogLines", Broken)

    async def main() -> int:
        child = Child.start("sleeper", [sys.executable, "-c", "pass"], None)
        with pytest.raises(ZeroDivisionError):
            await child.death()
        return child._process.wait()

    run(main())
    assert "'watch of sleeper' failed: ZeroDivisionError" in caplog.text


def test_a_fork_server_whose_imports_are_not_heard_is_replaced(run: Run) -> None:
    async def main() -> None:
        program = "import socket, sys, time; s = socket.socket(fileno=int(sys.argv[1])); "
        program += "s.send(b'no number'); time.sleep(1000)"
        server = ForkServer([sys.executable, "-c", program])
        death = await server.child.death()
        assert death.exit_code == -signal.SIGKILL
        assert "did not do its imports: invalid literal" in death.reason
        assert not server.warm
        await server.close()

    run(main())


@pytest.mark.parametrize("method", ["_read_one", "_take_events"])
def test_a_wire_whose_reader_fails_is_lost_with_the_cause(
    method: str,
    run: Run,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        inbox: Inbox[Any] = Inbox("reader")
        other: Inbox[Any] = Inbox("other")
        reads: ZmqWire[Word, Any] = listen(address, token="t", receives=Word, inbox=inbox)
        writes: ZmqWire[Word, Any] = connect(address, token="t", receives=Word, inbox=other)
        await reads.connected(5)
        await writes.connected(5)
        with monkeypatch.context() as broken:
            broken.setattr(reads, method, fails)
            writes.send(Word("hello"))
            if method == "_take_events":
                reads._on_monitor()
            (gone,) = await inbox.drain(wait=True)
        assert isinstance(gone, PeerGone)
        assert "could not be read: ZeroDivisionError('planted')" in gone.cause
        reads.close()
        writes.close()

    run(main())
    assert "Traceback" in caplog.text
