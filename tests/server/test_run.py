"""The server's life: listens before it loads, drains on the first signal, ends with the engine's
cause.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from moeserve.cluster.link import EngineGone
from moeserve.config import ServerConfig
from moeserve.errors import CheckpointError
from moeserve.frontend.front_end import FrontEnd
from moeserve.messages import Drain
from moeserve.server.auth import Auth
from moeserve.server.context import Context
from moeserve.server.run import bind, run
from moeserve.text.chat_template import ChatTemplate
from tests.server.conftest import until

ASK = {"messages": [{"role": "user", "content": "a"}], "stream": True}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Server:
    """`run` as a task; the engine is ready when `engine.outbox` says so."""

    def __init__(self, engine, tokenizer, shutdown_timeout: float) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        config = ServerConfig(port=0, shutdown_timeout=shutdown_timeout)
        self.context = Context(config, Auth(config))
        self.sock = bind(config)
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.files_read = asyncio.Event()

    @asynccontextmanager
    async def open_it(self):
        await self.files_read.wait()
        front = FrontEnd(
            self.engine,
            model_name="tiny",
            model_dir=Path("/nowhere"),
            tokenizer=self.tokenizer,
            chat_template=ChatTemplate(TEMPLATE),
            defaults={},
            max_queued=10,
        )
        tasks = [asyncio.create_task(front.run()), asyncio.create_task(self.engine.run())]
        yield front
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def start(self) -> asyncio.Task[int]:
        return asyncio.create_task(run(self.context, self.sock, self.fetch))

    async def fetch(self):
        return self.open_it


@pytest.fixture
def server(scripted, tokenizer):
    return Server(scripted, tokenizer, shutdown_timeout=5.0)


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as it:
        yield it


async def status(session, server, path: str) -> tuple[int, str]:
    async with session.get(server.url + path) as response:
        return response.status, (await response.json())["status"]


async def stream(session, server, **fields) -> str:
    async with session.post(server.url + "/v1/chat/completions", json=ASK | fields) as response:
        assert response.status == 200
        return (await response.read()).decode()


async def test_it_answers_while_it_loads_then_serves_then_drains(server, session, capfd):
    life = server.start()
    assert await status(session, server, "/readyz") == (503, "loading")
    server.files_read.set()
    assert await status(session, server, "/livez") == (200, "loading")
    server.engine.outbox.put(server.engine.ready())
    await until(lambda: server.context.started)
    assert await status(session, server, "/readyz") == (200, "ready")
    assert "[DONE]" in await stream(session, server)
    server.engine.gate.clear()
    running = asyncio.create_task(stream(session, server))
    await until(lambda: server.engine.rows)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: server.context.draining)
    assert (await status(session, server, "/readyz"))[0] == 503
    assert (await status(session, server, "/livez"))[0] == 200
    async with session.post(server.url + "/v1/chat/completions", json=ASK) as response:
        assert response.status == 503
    server.engine.gate.set()
    assert '"finish_reason":"stop"' in await running
    assert await life == 0
    assert any(isinstance(msg, Drain) for msg in server.engine.told)


async def test_what_does_not_finish_in_time_ends_as_aborted(scripted, tokenizer, session):
    server = Server(scripted, tokenizer, shutdown_timeout=0.1)
    life = server.start()
    server.files_read.set()
    scripted.outbox.put(scripted.ready())
    await until(lambda: server.context.started)
    scripted.gate.clear()
    running = asyncio.create_task(stream(session, server))
    await until(lambda: scripted.rows)
    os.kill(os.getpid(), signal.SIGINT)
    assert '"finish_reason":"abort"' in await running
    assert await life == 0


async def test_a_signal_while_loading_ends_at_once(server):
    life = server.start()
    server.files_read.set()
    await until(lambda: server.context.front is not None)
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(life, 20) == 0


async def test_a_second_signal_stops_now(server, session, monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    life = server.start()
    server.files_read.set()
    server.engine.outbox.put(server.engine.ready())
    await until(lambda: server.context.started)
    server.engine.gate.clear()
    running = asyncio.create_task(stream(session, server))
    await until(lambda: server.engine.rows)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: server.context.draining)
    assert not codes
    os.kill(os.getpid(), signal.SIGINT)
    await until(lambda: codes == [130])
    server.engine.gate.set()
    await running
    assert await life == 0


async def test_the_banner_tells_how_to_talk_to_it(server, session, capsys):
    life = server.start()
    server.files_read.set()
    server.engine.outbox.put(server.engine.ready())
    await until(lambda: server.context.started)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await life == 0
    shown = capsys.readouterr().out
    assert f"curl -N {server.url}/v1/chat/completions" in shown
    program = shown[shown.index("import asyncio") :].strip().splitlines()
    assert len(program) == 4
    compile("\n".join(program), "banner", "exec")


async def test_nobody_to_read_the_banner_is_no_reason_to_end(server, session, monkeypatch, caplog):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        life = server.start()
        server.files_read.set()
        server.engine.outbox.put(server.engine.ready())
        await until(lambda: server.context.started)
        assert await status(session, server, "/readyz") == (200, "ready")
        assert "could not be printed" in caplog.text
        os.kill(os.getpid(), signal.SIGTERM)
        assert await life == 0
        monkeypatch.undo()
    # closed without an error: what waited in it went nowhere


def test_a_closed_stdout_gives_its_number_to_no_other_file():
    program = (
        "import os, sys; from moeserve.cli.serve import _keep_stdout_open; _keep_stdout_open(); "
        "print('lost', flush=True); print(os.readlink('/proc/self/fd/1'), file=sys.stderr)"
    )
    command = ["bash", "-c", f'exec "{sys.executable}" -c "$0" >&-', program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "/dev/null\n"


async def test_an_engine_that_is_gone_for_good_ends_the_server_with_its_cause(server):
    life = server.start()
    server.files_read.set()
    server.engine.outbox.put(EngineGone(exit_code=3, cause="model.safetensors is truncated"))
    with pytest.raises(CheckpointError, match="truncated"):
        await asyncio.wait_for(life, 20)
