"""HTTP under the app: aiohttp's connection handling with every limit set, its errors in our shape,
and event streams.

aiohttp's own defaults would inflate compressed bodies, wait for ever for a request's head, keep
idle connections for an hour, and go on computing for a client that has left.
"""

import asyncio
import re
import resource
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from aiohttp import web
from aiohttp.http import StreamWriter
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web_protocol import RequestHandler

from moeserve.server.errors import HttpError, as_request_error, error_body, error_response

HEAD_TIMEOUT_S = 30.0
KEEPALIVE_S = 75.0
MAX_PATH_BYTES = 8190
MAX_HEADERS = 128
MAX_HEADER_BYTES = 16 * 1024
MAX_FILES = 65_536
RESERVED_FILES = 128  # that are not for connections: engines, checkpoints, logs
STALL_S = 30.0  # a reader of events that takes nothing for so long is gone
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def request_id_of(request: web.BaseRequest) -> str:
    """Returns the client's own id if it is a harmless one, otherwise a new one."""
    given = request.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def check_headers(request: web.BaseRequest) -> None:
    """Raises HttpError (431); the parser limits only each header by itself."""
    size = sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
    if size > MAX_HEADER_BYTES:
        what = f"the headers have {size} bytes; at most {MAX_HEADER_BYTES} are allowed"
        raise HttpError(431, "headers_too_large", what)


class Connection(RequestHandler):
    """One client connection. head_since: when an unfinished request head began to arrive; the first
    one is awaited from the start, so that nobody stays without a word."""

    head_since: float | None = None

    @property
    def idle(self) -> bool:
        """Whether it is open and no request of it is being answered."""
        return self.transport is not None and not self._messages and not self._request_in_progress

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        super().connection_made(transport)
        self.head_since = self._loop.time()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio; notes whether a request's head is on its way."""
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
        """Returns the answer to a request that the parser refused, or to a fault that the app let
        through.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, so no error can be sent")
        request_id = request_id_of(request)
        error = (
            _parse_error(exc)
            if status == 400
            else as_request_error(exc or RuntimeError(message), request_id)
        )
        response = error_response(error, request_id)
        response.force_close()
        return response

    def refuse_slow_head(self) -> None:
        """Answers 408 and closes the connection."""
        error = HttpError(
            408, "request_timeout", f"the request's head did not arrive within {HEAD_TIMEOUT_S:g} s"
        )
        body = error_body(error, "")
        head = f"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        if self.transport is not None:
            self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self.force_close()


def _parse_error(error: BaseException | None) -> HttpError:
    if isinstance(error, LineTooLong):
        if str(error.args[1]) == str(
            MAX_HEADER_BYTES
        ):  # the limit that was passed tells which line it was
            what = f"a header is too long; all together may have {MAX_HEADER_BYTES} bytes"
            return HttpError(431, "headers_too_large", what)
        return HttpError(414, "uri_too_long", f"the URL is longer than {MAX_PATH_BYTES} bytes")
    if isinstance(error, BadHttpMessage) and "many" in str(error):
        return HttpError(431, "headers_too_large", f"more than {MAX_HEADERS} headers")
    return HttpError(400, "invalid_http", "this is not an HTTP/1.1 request")


def raise_file_limit() -> None:
    """Lets this process open as many files as it may, up to MAX_FILES: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HttpServer(web.Server):
    """aiohttp's server with a `Connection` for each client.

    Where the process may open no more files, the oldest connection that is idle makes room for a
    new one.
    """

    def __init__(self, handler: Handler) -> None:
        self._room = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILES, 16)
        super().__init__(
            handler,
            handler_cancellation=True,
            keepalive_timeout=KEEPALIVE_S,
            max_line_size=MAX_PATH_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            lingering_time=2.0,
            auto_decompress=False,
            access_log=None,
        )

    def __call__(self) -> RequestHandler:
        """Returns the protocol of a new connection."""
        if len(self._connections) >= self._room:
            idle = [one for one in self._connections if isinstance(one, Connection) and one.idle]
            for connection in idle[: len(self._connections) - self._room + 1]:
                connection.force_close()
        return Connection(self, loop=self._loop, **self._kwargs)

    async def watch_heads(self, timeout_s: float = HEAD_TIMEOUT_S) -> None:
        """Ends connections whose request heads take longer than `timeout_s` to arrive. Runs until
        cancelled.
        """
        while True:
            await asyncio.sleep(timeout_s / 8)
            now = self._loop.time()
            for connection in self.connections:
                assert isinstance(connection, Connection)
                if connection.head_since is not None and now - connection.head_since > timeout_s:
                    connection.refuse_slow_head()


class SseStream:
    """One response of server-sent events. The status line goes out with `start`: until then an
    error can set it.

    While the socket takes data (`free`), each delta is one `write`. When it is full, `send` waits,
    and the front end merges the deltas that come meanwhile into one, so a slow reader costs at most
    its own answer in memory. sending, sent_at: whether a write waits for the reader, and when the
    last one began; `watch` reads both.
    """

    def __init__(self, request: web.BaseRequest, headers: Mapping[str, str]) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**_SSE_HEADERS, **headers})
        self._loop = asyncio.get_running_loop()
        self.sent_at = self._loop.time()
        self.sending = False
        self._transport: asyncio.WriteTransport | None = None
        self._chunked = False

    @property
    def started(self) -> bool:
        """Whether the status line has been sent."""
        return self._response.prepared

    async def start(self) -> None:
        """Sends the status line and the headers."""
        writer = await self._response.prepare(self._request)
        assert isinstance(writer, StreamWriter)
        self._chunked = writer.chunked
        self._transport = writer.transport

    @property
    def free(self) -> bool:
        """Whether the connection is open and everything written has left, so that `write` may be
        called.
        """
        transport = self._transport
        return (
            transport is not None
            and not transport.get_write_buffer_size()
            and not transport.is_closing()
        )

    def write(self, frames: bytes) -> None:
        """Sends whole frames now, past aiohttp's writer, whose bookkeeping costs more than its one
        system call.
        """
        assert self._transport is not None
        self.sent_at = self._loop.time()
        self._transport.write(b"%x\r\n%b\r\n" % (len(frames), frames) if self._chunked else frames)

    async def send(self, frames: bytes) -> None:
        """Sends whole frames. Waits while the reader is behind; raises ConnectionError when the
        reader is gone.
        """
        self.sent_at = self._loop.time()
        self.sending = True
        await self._response.write(frames)
        self.sending = False

    async def finish(self) -> web.StreamResponse:
        """Ends the body and returns the response, as aiohttp's handlers do."""
        self.sent_at = self._loop.time()
        self.sending = True
        await self._response.write_eof()
        return self._response

    def drop(self) -> None:
        """Closes the connection at once, which cancels the handler and so aborts the generation."""
        if self._request.transport is not None:
            self._request.transport.abort()


async def watch(streams: set[SseStream], ping_s: float, stall_s: float = STALL_S) -> None:
    """Pings silent streams and drops stalled ones, all with one timer. Runs until cancelled."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as pings:
        while True:
            await asyncio.sleep(min(ping_s, stall_s, 4.0) / 4)
            now = loop.time()
            for stream in streams:
                silent_s = now - stream.sent_at
                if stream.sending and silent_s > stall_s:
                    stream.drop()
                elif stream.started and not stream.sending and silent_s > ping_s:
                    pings.create_task(_ping(stream))  # a task: it ends when the reader takes it


async def _ping(stream: SseStream) -> None:
    with suppress(ConnectionError):  # its own handler is being cancelled
        await stream.send(PING)
