"""The HTTP server under the app: aiohttp's connection handling with every limit set, and its errors in our shape.

aiohttp's own defaults would inflate compressed bodies, wait for ever for a request's head, keep idle connections for
an hour, and go on computing for a client that has left.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web_protocol import RequestHandler

from moeserve.config import ServerConfig
from moeserve.errors import AddressInUse, ConfigError, RequestError
from moeserve.server.app import MAX_HEADER_BYTES, request_id_of
from moeserve.server.errors import (
    BadHttp,
    HeadersTooLarge,
    RequestTimeout,
    UriTooLong,
    as_request_error,
    error_body,
    error_response,
)

log = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 30.0
KEEPALIVE_S = 75.0
MAX_PATH_BYTES = 8190
MAX_HEADERS = 128
BACKLOG = 1024

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Connection(RequestHandler):
    """One client connection. `head_since`: when an unfinished request head began to arrive."""

    __slots__ = ("head_since",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.head_since: float | None = None
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages or self._request_in_progress:
            self.head_since = None
        elif self.head_since is None:
            self.head_since = self._loop.time()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """A request that the parser refused, or a fault that the app let through."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, so no error can be told")
        request_id = request_id_of(request)
        error = _parse_error(exc) if status == 400 else as_request_error(exc or RuntimeError(message), request_id)
        response = error_response(error, request_id)
        response.force_close()
        return response

    def refuse_slow_head(self) -> None:
        error = RequestTimeout(f"the request's head did not arrive within {HEAD_TIMEOUT_S:g} s")
        body = error_body(error, "")
        head = f"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        if self.transport is not None:
            self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self.force_close()


def _parse_error(exc: BaseException | None) -> RequestError:
    text = str(exc)
    if isinstance(exc, LineTooLong):
        if str(exc.args[1]) == str(MAX_HEADER_BYTES):  # the limit that was passed tells which line it was
            return HeadersTooLarge(f"a header is too long; all together may have {MAX_HEADER_BYTES} bytes")
        return UriTooLong(f"the URL is longer than {MAX_PATH_BYTES} bytes")
    if isinstance(exc, BadHttpMessage) and "many" in text:
        return HeadersTooLarge(f"more than {MAX_HEADERS} headers")
    return BadHttp("this is not an HTTP/1.1 request")


class HttpServer(web.Server):
    """Makes a `Connection` for each client."""

    def __init__(self, handler: Handler) -> None:
        super().__init__(handler, handler_cancellation=True, request_factory=self._request)
        self._settings: dict[str, Any] = {
            "keepalive_timeout": KEEPALIVE_S,
            "max_line_size": MAX_PATH_BYTES,
            "max_field_size": MAX_HEADER_BYTES,
            "max_headers": MAX_HEADERS,
            "lingering_time": 2.0,
            "auto_decompress": False,
            "access_log": None,
        }

    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._settings)

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        # client_max_size 0: `read_json` counts itself, against the configured limit
        return web.BaseRequest(message, payload, protocol, writer, task, self._loop, client_max_size=0)

    async def watch_heads(self, timeout_s: float = HEAD_TIMEOUT_S) -> None:
        """Ends connections that dribble their request's head. Runs until cancelled."""
        while True:
            await asyncio.sleep(timeout_s / 8)
            now = self._loop.time()
            for connection in self.connections:
                assert isinstance(connection, Connection)
                if connection.head_since is not None and now - connection.head_since > timeout_s:
                    connection.refuse_slow_head()


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises AddressInUse or ConfigError, before anything is loaded."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {config.host}: {error}") from error
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)  # clients may connect from now on; they are answered once the loop runs
    except OSError as error:
        sock.close()
        if error.errno in (98, 48):  # EADDRINUSE on Linux and on macOS
            raise AddressInUse(
                f"port {config.port} of {config.host} is in use; choose another with --port, or --port 0 for any"
            ) from error
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


@asynccontextmanager
async def listening(sock: socket.socket, handler: Handler) -> AsyncIterator[HttpServer]:
    """Answers on `sock` inside the block; at its end what still runs is cut off."""
    loop = asyncio.get_running_loop()
    server = HttpServer(handler)
    acceptor = await loop.create_server(server, sock=sock, backlog=BACKLOG)
    heads = asyncio.create_task(server.watch_heads(), name="slow heads")
    try:
        yield server
    finally:
        heads.cancel()
        acceptor.close()
        server.pre_shutdown()
        await server.shutdown(0.5)
        await asyncio.gather(heads, return_exceptions=True)
