"""HTTP below the API: framing, limits, slow and vanishing clients, and one format of errors."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import tracemalloc

import pytest
import uvloop

from moeserve.config import ServerConfig
from moeserve.server import body as body_module
from moeserve.server import http as http_module
from moeserve.server.http import StreamWatch
from tests.server.conftest import live_server

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).encode()


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


def post(path: str, data: bytes, *lines: str) -> bytes:
    length = (
        ()
        if any("encoding: chunked" in line for line in lines)
        else (f"Content-Length: {len(data)}",)
    )
    return (
        head("POST", path, "Content-Type: application/json", "Connection: close", *length, *lines)
        + data
    )


def error_of(answer: bytes) -> tuple[int, dict[str, object]]:
    top, _, rest = answer.partition(b"\r\n\r\n")
    error = json.loads(rest)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(top.split()[1]), error


RAW = [
    ("garbage", b"\x16\x03\x01 hello\r\n\r\n", 400, "invalid_http"),
    ("no such path", head("GET", "/nothing", "Connection: close"), 404, "not_found"),
    ("two slashes", head("GET", "//v1/models", "Connection: close"), 404, "not_found"),
    ("dots", head("GET", "/v1/%2e%2e/metrics", "Connection: close"), 404, "not_found"),
    ("slash at the end", head("GET", "/livez/", "Connection: close"), 404, "not_found"),
    ("wrong method", head("GET", CHAT, "Connection: close"), 405, "method_not_allowed"),
    (
        "preflight",
        head("OPTIONS", CHAT, "Origin: http://evil.example", "Connection: close"),
        405,
        "method_not_allowed",
    ),
    ("long path", head("GET", "/" + "a" * 65_536), 414, "uri_too_long"),
    ("long header", head("GET", "/livez", "A: " + "a" * 20_000), 431, "headers_too_large"),
    (
        "many headers",
        head("GET", "/livez", *[f"A{i}: 1" for i in range(10_000)]),
        431,
        "headers_too_large",
    ),
    (
        "headers too large together",
        head("GET", "/livez", *[f"A{i}: {'a' * 1000}" for i in range(20)], "Connection: close"),
        431,
        "headers_too_large",
    ),
    (
        "no content type",
        head("POST", CHAT, "Content-Length: 2", "Connection: close") + b"{}",
        415,
        None,
    ),
    (
        "text",
        post(CHAT, BODY).replace(b"application/json", b"text/plain"),
        415,
        "unsupported_media_type",
    ),
    (
        "other charset",
        post(CHAT, BODY).replace(b"/json", b"/json; charset=latin-1"),
        415,
        "unsupported_media_type",
    ),
    (
        "gzip",
        post(CHAT, gzip.compress(b"0" * 10**7), "Content-Encoding: gzip"),
        415,
        "unsupported_media_type",
    ),
    (
        "too long",
        head("POST", CHAT, "Content-Type: application/json", "Content-Length: 99999999999"),
        413,
        None,
    ),
    ("both lengths", post(CHAT, BODY, "Transfer-Encoding: chunked"), 400, "invalid_http"),
    (
        "bad chunks",
        post(CHAT, b"zz\r\n{}\r\n0\r\n\r\n", "Transfer-encoding: chunked"),
        400,
        "invalid_http",
    ),
    ("id with line end", post("/nothing", b"", "X-Request-Id: a\tb"), 404, "not_found"),
]


@pytest.mark.parametrize(("name", "data", "status", "code"), RAW, ids=[case[0] for case in RAW])
async def test_raw_request(live, name, data, status, code):
    answer = await live.raw(data)
    got, error = error_of(answer)
    assert got == status
    assert code is None or error["code"] == code
    lower = answer.lower()
    assert b"x-request-id: " in lower
    assert b"access-control" not in lower
    assert len(answer) < 1500
    if status == 405:
        assert b"\r\nallow: post\r\n" in lower
    assert (await live.get("/livez"))[0] == 200


async def test_an_endless_header_ends_the_connection(live):
    answer = await live.raw(head("GET", "/livez", "A: " + "a" * 8_000_000))
    assert (
        answer == b"" or error_of(answer)[0] == 431
    )  # the answer may be lost to the data that still comes
    assert (await live.get("/livez"))[0] == 200


async def test_a_body_without_length_stops_at_the_limit(launch):
    async with launch(max_request_bytes=100_000) as live:
        chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
        tracemalloc.start()
        answer = await live.raw(post(CHAT, chunk * 40, "Transfer-encoding: chunked"))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert error_of(answer)[0] == 413
        assert peak < 12_000_000  # what this test itself holds is most of it


async def test_endless_trailers_are_refused(live):
    trailers = b"".join(b"A%d: %s\r\n" % (i, b"a" * 1000) for i in range(2000))
    answer = await live.raw(
        post(CHAT, b"2\r\n{}\r\n0\r\n" + trailers, "Transfer-encoding: chunked")
    )
    assert answer == b"" or error_of(answer)[0] in (400, 413, 431)
    assert (await live.get("/livez"))[0] == 200


async def test_chunked_bodies_and_expect_work(live):
    data = b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
    assert b" 200 OK" in await live.raw(post(CHAT, data, "Transfer-encoding: chunked"))
    answer = await live.raw(post(CHAT, BODY, "Expect: 100-continue"))
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answer.replace(interim, b"").startswith(b"HTTP/1.1 200 OK")
    assert answer.startswith(interim)


async def test_requests_one_after_another_on_one_connection(live):
    one = post(CHAT, BODY).replace(b"Connection: close\r\n", b"")
    answer = await live.raw(one + one + post(CHAT, BODY))
    assert answer.count(b"HTTP/1.1 200 OK") == 3


async def test_targets_in_absolute_form(live):
    """Clients of a proxy send them, and some proxies pass them on."""
    close = "Connection: close"
    for target in (
        "http://localhost/livez",
        "HTTP://user@127.0.0.1:8400/livez?x",
        "https://[::1]/livez",
    ):
        assert b" 200 OK" in await live.raw(head("GET", target, close)), target
    assert b"<html" in await live.raw(head("GET", "http://localhost", close))
    assert b" 200 OK" in await live.raw(post(f"http://localhost{CHAT}", BODY))
    answer = await live.raw(head("GET", "http://localhost/v1/messages?a=b", close))
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert b"request_id" in answer  # in the shape of that API
    for wrong in ("ftp://localhost/livez", "localhost:80", "http:/livez"):
        assert error_of(await live.raw(head("GET", wrong, close)))[0] in (400, 404)


async def test_options_of_the_whole_server(launch):
    for settings in ({}, {"api_key": ("right",)}):
        async with launch(**settings) as live:
            answer = await live.raw(head("OPTIONS", "*", "Connection: close"))
            assert answer.startswith(b"HTTP/1.1 204 No Content\r\n")
            assert b"\r\nAllow: GET, HEAD, POST, DELETE, OPTIONS\r\n" in answer


async def half_closed(live, data: bytes):
    """Send and close the sending side, as `nc -N` does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(data)
    await writer.drain()
    writer.write_eof()
    return reader, writer


async def test_a_client_that_sends_no_more_gets_its_answers(live):
    live.engine.gate.clear()
    one = post(CHAT, BODY).replace(b"Connection: close\r\n", b"")
    reader, writer = await half_closed(live, one + one)
    async with asyncio.timeout(20):
        while not live.engine.rows:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.sleep(2 * http_module.FIRST_PROBE_PAUSE_S)
        assert live.engine.rows
        live.engine.gate.set()
        answer = await reader.read()
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answer.replace(interim, b"").startswith(b"HTTP/1.1 200 OK")
    assert answer.startswith(interim)
    writer.close()


async def test_a_stream_goes_to_a_client_that_sends_no_more(live):
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 5}).encode()
    reader, writer = await half_closed(live, post("/v1/completions", body))
    async with asyncio.timeout(20):
        assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_sends_no_more_and_then_leaves_aborts(live, stream):
    live.engine.gate.clear()
    body = json.dumps({"prompt": "a", "stream": stream, "max_tokens": 5}).encode()
    _, writer = await half_closed(live, post("/v1/completions", body))
    async with asyncio.timeout(20):
        while not live.engine.rows:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        writer.close()
        while live.context.running or live.engine.rows:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_the_loop_that_serves_does_the_same(tokenizer):
    async def scenario():
        async with live_server(tokenizer) as live:
            await test_a_client_that_sends_no_more_gets_its_answers(live)
            await test_a_client_that_sends_no_more_and_then_leaves_aborts(live, False)

    uvloop.run(scenario())


async def test_half_a_body_and_no_more_is_no_request(live):
    reader, writer = await half_closed(live, post(CHAT, BODY)[:-5])
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()


async def test_idle_connections_stay_open_for_the_time_of_the_settings(live):
    # Go's client uses a connection that was idle for 90 s again
    assert ServerConfig().keepalive_timeout > 90
    async with http_server(live, keepalive_s=1.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(20):
            for _ in range(2):
                writer.write(head("GET", "/livez"))
                answer = await reader.readuntil(b"}")
                assert answer.startswith(b"HTTP/1.1 200 OK")
                answered_s = loop.time()
            assert await reader.read() == b""
        assert loop.time() - answered_s >= 0.9
        writer.close()


async def test_request_ids(live):
    for given, kept in (("abc-1.2_3", True), ("x" * 129, False), ("a b", False), ("", False)):
        async with live.session.get(
            live.url + "/livez", headers={"X-Request-Id": given}
        ) as response:
            assert (response.headers["X-Request-Id"] == given) == kept
            assert len(response.headers["X-Request-Id"]) <= 128


async def test_a_slow_head_is_refused(live, monkeypatch):
    monkeypatch.setattr(http_module, "HEAD_TIMEOUT_S", 0.2)
    async with http_server(live, head_s=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez HT")
        answer = await asyncio.wait_for(reader.read(), 20)
        assert error_of(answer)[0] == 408
        writer.close()


def http_server(live, *, keepalive_s=60.0, head_s=30.0):
    from contextlib import asynccontextmanager

    from moeserve.server.app import App
    from moeserve.server.http import HttpServer
    from moeserve.server.routes import ROUTES
    from moeserve.server.run import bind

    @asynccontextmanager
    async def serve():
        sock = bind(live.context.config)
        server = HttpServer(App(live.context, ROUTES), keepalive_s)
        acceptor = await asyncio.get_running_loop().create_server(server, sock=sock)
        heads = asyncio.create_task(server.watch_heads(head_s))
        yield sock.getsockname()[1]
        heads.cancel()
        acceptor.close()
        await server.shutdown(0.1)

    return serve()


async def test_a_slow_body_is_refused(live, monkeypatch):
    monkeypatch.setattr(body_module, "READ_TIMEOUT_S", 0.1)
    answer = await live.raw(post(CHAT, BODY)[:-5])
    assert error_of(answer)[0] == 408


async def test_a_stalled_reader_is_dropped_and_others_go_on(live):
    """It requests an endless answer and reads nothing.

    The socket fills up, and after the timeout the connection is closed.
    """
    asked = {
        "prompt": "a",
        "stream": True,
        "bad_words": ["x"],
        "max_tokens": 250,
        "n": 100,
        "return_token_ids": True,
    }
    data = json.dumps(asked | {"logprobs": 20}).encode()
    watcher = asyncio.create_task(StreamWatch(live.context.streams, 15.0, stall_s=0.2).run())
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", live.port))
    await loop.sock_sendall(sock, post("/v1/completions", data))
    async with asyncio.timeout(20):
        while not any(stream.sending for stream in live.context.streams):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        status, _, _ = await live.post(CHAT, BODY)
        assert status == 200
        while live.context.streams or live.context.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not live.engine.rows
    sock.close()
    watcher.cancel()


class _Stream:
    """An SseStream whose reader takes nothing (`stuck`) or everything."""

    def __init__(self, stuck: bool) -> None:
        self.stuck = stuck
        self.started = True
        self.sending = False
        self.sent_at_s = 0.0
        self.pings = 0
        self.dropped = asyncio.Event()

    async def ping(self) -> None:
        self.sent_at_s = asyncio.get_running_loop().time()
        self.sending = True
        self.pings += 1
        if self.stuck:
            await asyncio.Event().wait()
        self.sending = False

    def drop(self) -> None:
        self.dropped.set()


async def test_a_ping_to_a_stalled_reader_holds_nobody_up():
    stuck = _Stream(True)
    fine = _Stream(False)
    watching = asyncio.create_task(StreamWatch({stuck, fine}, 0.02, stall_s=0.1).run())
    async with asyncio.timeout(20):
        await stuck.dropped.wait()
        while fine.pings < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert stuck.pings == 1
    assert not fine.dropped.is_set()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
