"""Many clients, slow ones and large bodies: the server answers others meanwhile, and gives
everything back.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import sys
from asyncio.subprocess import PIPE

import pytest

from moeserve.errors import ConfigError
from moeserve.server import body, http
from moeserve.server.app import App
from moeserve.server.http import HttpServer
from moeserve.server.routes import ROUTES

CHAT = "/v1/chat/completions"
HEAD = (
    "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    "Content-Length: {}\r\n\r\n"
)
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


@pytest.fixture
async def patient(live):
    """Yield a function that serves with other limits on its own port."""
    servers = []

    async def start(**limits: float) -> int:
        server = HttpServer(App(live.context, ROUTES), keepalive_s=60.0)
        server._max_connections = limits.get("room", server._max_connections)
        acceptor = await asyncio.get_running_loop().create_server(
            server, "127.0.0.1", 0, backlog=1024
        )
        heads = asyncio.create_task(server.watch_heads(limits.get("head_s", 30.0)))
        servers.append((server, acceptor, heads))
        return acceptor.sockets[0].getsockname()[1]

    yield start
    for server, acceptor, heads in servers:
        heads.cancel()
        acceptor.close()
        await server.shutdown(0.1)


IDLE_CLIENTS = """
import resource, socket, sys
port, wanted, request = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = [socket.create_connection(("127.0.0.1", port)) for _ in range(wanted)]
print("open", flush=True)
sys.stdin.readline()
for one in held:
    one.sendall(request)
answers = {one.recv(12) for one in held}
print(*answers, flush=True)
sys.stdin.readline()
"""


@pytest.mark.full("http", keep=1)
@pytest.mark.parametrize("wanted", [1000, 10_000])
async def test_idle_connections(patient, wanted):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < wanted + 500:
        pytest.skip(f"only {hard} open files are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted + 500), hard))
    try:
        port = await patient(room=wanted + 100, head_s=300)
        gc.collect()  # what earlier tests left would close meanwhile
        before = len(os.listdir("/proc/self/fd"))
        words = [sys.executable, "-c", IDLE_CLIENTS, str(port), str(wanted), LIVEZ.decode()]
        clients = await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE)
        assert await clients.stdout.readline() == b"open\n"
        async with asyncio.timeout(20):
            body = json.dumps(
                {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "stream": True}
            ).encode()
            reader, writer = await connect(port)
            writer.write(HEAD.format(CHAT, len(body)).encode() + body)
            assert b"data: [DONE]" in await reader.readuntil(b"0\r\n\r\n")
            writer.close()
        assert len(os.listdir("/proc/self/fd")) >= before + wanted
        clients.stdin.write(b"\n")
        assert await clients.stdout.readline() == b"b'HTTP/1.1 200'\n"  # each of them
        await clients.communicate(b"\n")
        async with asyncio.timeout(20):
            while len(os.listdir("/proc/self/fd")) > before + 10:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_the_oldest_idle_connection_makes_room(live, patient):
    port = await patient(room=4)
    live.engine.gate.clear()
    reader, busy = await connect(port)
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).encode()
    busy.write(HEAD.format(CHAT, len(body)).encode() + body)
    async with asyncio.timeout(20):
        while not live.engine.rows:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        idle = [await connect(port) for _ in range(3)]
        late, writer = await connect(port)
        writer.write(LIVEZ)
        assert status_of(await late.readuntil(b"\r\n")) == 200
        assert await idle[0][0].read() == b""  # it was closed
        live.engine.gate.set()
        assert status_of(await reader.readuntil(b"\r\n")) == 200
    for one in (busy, writer, *[writer for _, writer in idle]):
        one.close()


async def test_making_room_looks_at_no_busy_connection(live, patient, monkeypatch):
    port = await patient(room=3)
    live.engine.gate.clear()
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).encode()
    busy = [await connect(port) for _ in range(3)]
    for _, writer in busy:
        writer.write(HEAD.format(CHAT, len(body)).encode() + body)
    async with asyncio.timeout(20):
        while len(live.engine.rows) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    looks = []
    is_idle = http.Connection.idle.fget
    idle = property(lambda self: looks.append(self) or is_idle(self))
    monkeypatch.setattr(http.Connection, "idle", idle)
    late = [await connect(port) for _ in range(20)]
    async with asyncio.timeout(20):
        for reader, _ in late[:-1]:
            assert await reader.read() == b""
        assert len(looks) == len(late) - 1
        late[-1][1].write(LIVEZ)
        assert status_of(await late[-1][0].readuntil(b"\r\n")) == 200
        live.engine.gate.set()
        for reader, _ in busy:
            assert status_of(await reader.readuntil(b"\r\n")) == 200
    for _, writer in busy + late:
        writer.close()


async def test_who_says_nothing_or_one_byte_at_a_time_is_sent_away(patient):
    port = await patient(head_s=0.3)
    silent, nobody = await connect(port)
    slow, writer = await connect(port)

    async def drip() -> None:
        for byte in LIVEZ * 100:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    async with asyncio.timeout(20):
        for reader in (silent, slow):
            # Not up to the end: bytes that arrive after it reset the connection.
            assert status_of(await reader.readuntil(b"\r\n")) == 408
    dripping.cancel()
    for one in (nobody, writer):
        one.close()


async def test_a_slow_byte_of_a_body_wins_no_time(live, monkeypatch):
    monkeypatch.setattr(body, "READ_TIMEOUT_S", 0.3)
    reader, writer = await connect(live.port)
    writer.write(HEAD.format(CHAT, 1000).encode())

    async def drip() -> None:
        for _ in range(500):
            writer.write(b" ")
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    async with asyncio.timeout(20):
        assert status_of(await reader.readuntil(b"\r\n")) == 408
    dripping.cancel()
    writer.close()


async def test_large_bodies_share_their_memory(launch, monkeypatch):
    monkeypatch.setattr(body, "MAX_COUNTED_BYTES", 300_000)
    async with launch(max_request_bytes=200_000) as live:
        waiting = []
        for _ in range(2):  # two large bodies that do not end
            reader, writer = await connect(live.port)
            writer.write(HEAD.format(CHAT, 150_000).encode() + b" " * 140_000)
            waiting.append((reader, writer))
        async with asyncio.timeout(20):
            while live.context.body_memory.num_bytes < 200_000:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            padded = json.dumps(
                {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
            ).encode()
            status, answer, response = await live.post(CHAT, padded + b" " * 150_000)
            assert (status, answer["error"]["code"]) == (503, "server_overloaded")
            assert int(response.headers["Retry-After"]) >= 1
            assert (await live.post(CHAT, padded))[0] == 200
            for _, writer in waiting:
                writer.transport.abort()
            while live.context.body_memory.num_bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            assert (await live.post(CHAT, padded + b" " * 150_000))[0] == 200
        assert live.context.body_memory.num_bytes == 0


def test_the_file_limit_is_raised_to_what_is_allowed():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        http.raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, http.MAX_OPEN_FILES), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_limit_of_files_in_which_no_server_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http.resource, "getrlimit", lambda kind: (20, 20))
    with pytest.raises(ConfigError, match=r"may open 20 files .* needs 64 .* ulimit -n 1024"):
        http.raise_file_limit()
