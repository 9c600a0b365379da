"""Fixtures of the client's tests: a scripted server and a client that talks to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from moeserve import AsyncClient
from moeserve.client import faults
from tests.client.scripted import Server
from tests.ports import free_port


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    server.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"  # type: ignore[attr-defined]
    yield server
    await runner.cleanup()


@pytest.fixture
async def client(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncClient]:
    monkeypatch.setattr(faults, "FIRST_DELAY_S", 0.001)
    async with AsyncClient(server.url, timeout_s=30) as client:
        yield client


@pytest.fixture
def unused_port() -> int:
    return free_port()
