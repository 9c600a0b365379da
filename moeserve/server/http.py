"""The HTTP layer below the app: connections with limits, errors in the API's shape, event streams.

aiohttp's defaults would decompress bodies, wait forever for a request's head, keep idle connections
for an hour, and continue to compute for a client that has disconnected.
"""

import asyncio
import re
import resource
import socket
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import web
from aiohttp.http import HttpVersion11, RawRequestMessage, StreamWriter
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web_protocol import RequestHandler

from moeserve.actor.tasks import cancel, every, log_error, spawn
from moeserve.errors import ConfigError
from moeserve.server.errors import HttpError, as_request_error, error_body, error_response

HEAD_TIMEOUT_S = 30.0
MAX_PATH_BYTES = 8190
MAX_HEADERS = 128
MAX_HEADER_BYTES = 16 * 1024
MAX_OPEN_FILES = 65_536
MIN_OPEN_FILES = 64  # sockets and files of the server itself
NUM_RESERVED_FILES = 128  # for engines, checkpoints and logs; the rest is for connections
# Pause after the first probe of a half-closed connection; doubled each time
FIRST_PROBE_PAUSE_S = 0.25
MAX_PROBE_PAUSE_S = 4.0
STALL_S = 30.0  # a stream is dropped if its client reads nothing for this long
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"
_STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_ABSOLUTE = re.compile(r"https?://([^/?#]*)([^?#]*)", re.IGNORECASE)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def request_id_of(request: web.BaseRequest) -> str:
    """Return the client's X-Request-Id if it is harmless, otherwise a new id."""
    given = request.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def split_target(request: web.BaseRequest) -> tuple[str, str]:
    """Return the authority and the path of a request's target (RFC 9112, section 3.2).

    Clients of a proxy, and some proxies, send the absolute form, `GET http://host:8000/v1/models`.
    Other targets have no authority.
    """
    target = request.raw_path
    if (absolute := _ABSOLUTE.match(target)) is not None:
        return absolute[1], absolute[2] or "/"
    return "", target.partition("?")[0]


def path_of(request: web.BaseRequest) -> str:
    """Return the path of a request, not decoded."""
    return split_target(request)[1]


def check_headers(request: web.BaseRequest) -> None:
    """Raise HttpError (431) for too many bytes. The parser limits only each header by itself."""
    size = sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
    if size > MAX_HEADER_BYTES:
        what = f"the headers have {size} bytes; at most {MAX_HEADER_BYTES} are allowed"
        raise HttpError(431, "headers_too_large", what)


class Connection(RequestHandler):
    """One client connection."""

    # When an incomplete request head began to arrive. The first head's time starts at connect.
    head_began_at_s: float | None = None
    half_closed = False  # the client has closed its sending side, and waits for its answers

    def __init__(
        self, server: "HttpServer", loop: asyncio.AbstractEventLoop, **options: Any
    ) -> None:
        super().__init__(server, loop=loop, **options)
        self._server = server
        self._num_answered = 0  # requests
        self._is_answering = False  # in finish_response, so the head may have been sent
        self._last_message: tuple[Any, Any] | None = None  # head and body of the last request

    @property
    def idle(self) -> bool:
        """Whether the connection is open and waits for a request."""
        return self.transport is not None and self._num_answered == self._request_count

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.head_began_at_s = self._loop.time()
        self._server.idle_connections[self] = None

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.idle_connections.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages:
            self._last_message = self._messages[-1]
        if not self.idle:
            self.head_began_at_s = None
            self._server.idle_connections.pop(self, None)
        elif self.head_began_at_s is None:
            self.head_began_at_s = self._loop.time()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        self._is_answering = True
        result = await super().finish_response(request, resp, start_time)
        self._is_answering = False
        self._num_answered += 1
        if self.idle:
            if self.half_closed:
                self.close()
            else:
                self._server.idle_connections[self] = None
        return result

    def eof_received(self) -> bool:  # type: ignore[override]  # as in asyncio.Protocol
        """Handle the client's end of stream. Return whether the connection stays open.

        The client may have disconnected, or wait for its answer (`nc -N`): TCP does not tell which.
        A client that has received a part of a stream counts as disconnected.
        """
        super().eof_received()
        if self.transport is None or self._has_sent_head() or not self._awaits_answer():
            return False
        self.half_closed = True
        self._probe_client(FIRST_PROBE_PAUSE_S)
        return True

    def _awaits_answer(self) -> bool:
        """Return whether the client may still wait for an answer: complete requests arrived, by
        HTTP/1.1 and without TLS.

        asyncio closes TLS in both directions at once.
        """
        if self.idle or self._last_message is None:
            return False
        assert self.transport is not None
        head, body = self._last_message
        return (
            isinstance(head, RawRequestMessage)
            and head.version == HttpVersion11
            and body.is_eof()
            and self.transport.get_extra_info("ssl_object") is None
        )

    def _has_sent_head(self) -> bool:
        """Return whether a handler has sent the head of a stream."""
        request = self._current_request
        return request is not None and request.writer.output_size > 0

    def _probe_client(self, pause_s: float) -> None:
        """Abort the connection if the client has disconnected; otherwise probe again after a pause.

        A disconnected client answers any bytes with a reset. Before an answer begins, an interim
        response (100 Continue) is sent as a probe, which a client that still waits ignores. Nothing
        reads the socket any more, so the event loop does not notice the reset.
        """
        if self.transport is None:
            return
        sock = self.transport.get_extra_info("socket")
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not (self._has_sent_head() or self._is_answering):
            self.transport.write(_CONTINUE)
        self._loop.call_later(pause_s, self._probe_client, min(2 * pause_s, MAX_PROBE_PAUSE_S))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to a request that the parser refused, or after a bug in the app."""
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
        """Answer 408 and close the connection."""
        what = f"the request's head did not arrive within {HEAD_TIMEOUT_S:g} s"
        body = error_body(HttpError(408, "request_timeout", what), "")
        head = (
            "HTTP/1.1 408 Request Timeout\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        if self.transport is not None:
            self.transport.write(head.encode() + body)
        self.force_close()


def _parse_error(error: BaseException | None) -> HttpError:
    if isinstance(error, LineTooLong):
        # The parser reports the exceeded limit, not the line.
        if str(error.args[1]) == str(MAX_HEADER_BYTES):
            what = f"a header is too long; all together may have {MAX_HEADER_BYTES} bytes"
            return HttpError(431, "headers_too_large", what)
        return HttpError(414, "uri_too_long", f"the URL is longer than {MAX_PATH_BYTES} bytes")
    if isinstance(error, BadHttpMessage) and "many" in str(error):  # "Too many headers received"
        return HttpError(431, "headers_too_large", f"more than {MAX_HEADERS} headers")
    return HttpError(400, "invalid_http", "this is not an HTTP/1.1 request")


def raise_file_limit() -> None:
    """Raise the limit of open files as far as allowed, up to MAX_OPEN_FILES.

    Each connection needs one. Raises ConfigError if the limit is too low for the sockets to the
    engine.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if wanted < MIN_OPEN_FILES:
        raise ConfigError(
            f"this process may open {wanted} files at a time, a server needs {MIN_OPEN_FILES} at "
            "least; raise the limit: ulimit -n 1024"
        )
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HttpServer(web.Server):
    """aiohttp's server with a `Connection` for each client.

    When no more files can be opened, each new connection closes the connection that has been idle
    for the longest time.
    """

    def __init__(self, handler: Handler, keepalive_s: float) -> None:
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if num_files == resource.RLIM_INFINITY:
            num_files = MAX_OPEN_FILES
        self._max_connections = max(num_files - NUM_RESERVED_FILES, 16)
        # In the order in which they became idle
        self.idle_connections: dict[Connection, None] = {}
        super().__init__(
            handler,
            handler_cancellation=True,
            keepalive_timeout=keepalive_s,
            max_line_size=MAX_PATH_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            lingering_time=2.0,
            auto_decompress=False,
            access_log=None,
        )

    def __call__(self) -> RequestHandler:
        """Return the protocol of a new connection."""
        if len(self._connections) >= self._max_connections:
            self._close_oldest_idle()
        return Connection(self, self._loop, **self._kwargs)

    def _close_oldest_idle(self) -> None:
        while self.idle_connections:
            oldest = next(iter(self.idle_connections))
            del self.idle_connections[oldest]
            if oldest.idle:
                oldest.force_close()
                return

    async def watch_heads(self, timeout_s: float = HEAD_TIMEOUT_S) -> None:
        """End connections whose request heads take too long to arrive. Run until cancelled."""
        name = "slow heads"
        await every(timeout_s / 8, lambda: self._refuse_slow_heads(timeout_s), name=name)

    def _refuse_slow_heads(self, timeout_s: float) -> None:
        now = self._loop.time()
        for connection in self.connections:
            assert isinstance(connection, Connection)
            if connection.head_began_at_s is None or now - connection.head_began_at_s <= timeout_s:
                continue
            try:
                connection.refuse_slow_head()
            except Exception as error:
                log_error("slow heads", error)
                connection.force_close()


class SseStream:
    """One streamed response: server-sent events, or another media type.

    `start` sends the status line, so an error can set the status until then. While the socket
    accepts data (`can_write`), each delta is one `write`. When the socket is full, `send` waits,
    and the front end merges the deltas that arrive meanwhile into one. So a slow reader takes at
    most the memory of its own answer.
    """

    def __init__(
        self, request: web.BaseRequest, headers: Mapping[str, str], media_type: str = EVENT_STREAM
    ) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={"Content-Type": media_type, **_STREAM_HEADERS, **headers}
        )
        self._loop = asyncio.get_running_loop()
        self.sent_at_s = self._loop.time()  # when the last write began
        self.sending = False  # a `send` waits for the reader
        self.ended = False  # nothing more may be sent
        self.make_ping: Callable[[], bytes] = lambda: PING  # returns what a silent stream sends
        self._transport: asyncio.WriteTransport | None = None
        self._chunked = False

    @property
    def started(self) -> bool:
        """Whether the status line has been sent."""
        return self._response.prepared

    async def start(self) -> None:
        """Send the status line and the headers."""
        writer = await self._response.prepare(self._request)
        assert isinstance(writer, StreamWriter)
        self._chunked = writer.chunked
        self._transport = writer.transport

    @property
    def can_write(self) -> bool:
        """Whether `write` may be called: the socket is open and has taken all bytes so far."""
        transport = self._transport
        return (
            transport is not None
            and not transport.get_write_buffer_size()
            and not transport.is_closing()
        )

    def write(self, frames: bytes) -> None:
        """Send complete events now, in one piece of HTTP's chunked coding.

        aiohttp's writer would cost more than the system call.
        """
        assert self._transport is not None
        self.sent_at_s = self._loop.time()
        self._transport.write(b"%x\r\n%b\r\n" % (len(frames), frames) if self._chunked else frames)

    async def send(self, frames: bytes) -> None:
        """Send complete events. Wait for a slow reader; raise ConnectionError when it is gone."""
        self.sent_at_s = self._loop.time()
        self.sending = True
        await self._response.write(frames)
        self.sending = False

    async def ping(self) -> None:
        """Send a sign of life, unless the stream is sending already or has ended."""
        if not self.sending and not self.ended:
            with suppress(ConnectionError):  # the reader has left, which ends the handler
                await self.send(self.make_ping())

    async def finish(self) -> web.StreamResponse:
        """End the body and return the response, as aiohttp's handlers do."""
        self.ended = True
        self.sent_at_s = self._loop.time()
        self.sending = True  # stays True, so that StreamWatch drops a client that reads no end
        await self._response.write_eof()
        return self._response

    def drop(self) -> None:
        """Close the connection at once, which cancels the handler and aborts the generation."""
        if self._request.transport is not None:
            self._request.transport.abort()


class StreamWatch:
    """One timer for all streams: pings silent ones and drops stalled ones.

    An error with a stream drops only that stream.
    """

    def __init__(self, streams: set[SseStream], ping_s: float, *, stall_s: float = STALL_S) -> None:
        self._streams = streams
        self._ping_s = ping_s
        self._stall_s = stall_s
        self._pings: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            interval_s = min(self._ping_s, self._stall_s, 4.0) / 4
            await every(interval_s, self._check_all, name="streams")
        finally:
            await cancel(*self._pings)

    def _check_all(self) -> None:
        for stream in list(self._streams):
            try:
                self._ping_or_drop(stream)
            except Exception as error:
                log_error("streams", error)
                stream.drop()

    def _ping_or_drop(self, stream: SseStream) -> None:
        silent_s = asyncio.get_running_loop().time() - stream.sent_at_s
        if stream.sending and silent_s > self._stall_s:
            stream.drop()
        elif stream.started and not stream.sending and silent_s > self._ping_s:
            self._ping(stream)

    def _ping(self, stream: SseStream) -> None:
        def failed(name: str, error: Exception) -> None:
            log_error(name, error)
            stream.drop()

        ping = spawn(stream.ping(), name="ping", on_error=failed)  # ends when the reader reads
        self._pings.add(ping)
        ping.add_done_callback(self._pings.discard)
