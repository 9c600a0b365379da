"""A real HTTP server on a loopback port with answers that a test sets in advance."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Answers each request with the next reply of `script`; the last reply repeats.

    `seen` records the method, path and JSON body of every request.
    """

    def __init__(self) -> None:
        self.script: list[Reply] = []
        self.seen: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections: set[object] = set()
        self.url = ""
        self.vanished = asyncio.Event()  # a client closed its connection while its handler ran

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.seen.append((request.method, request.path, body))
        self.headers.append({k.lower(): v for k, v in request.headers.items()})
        self.connections.add(request.transport)
        reply = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        try:
            return await reply(request)
        except (asyncio.CancelledError, ConnectionError):
            self.vanished.set()
            raise


def answer(body: Any, status: int = 200, **headers: str) -> Reply:
    async def reply(request: web.Request) -> web.StreamResponse:
        return web.json_response(
            body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    return reply


def error(
    status: int,
    code: str | None = None,
    message: str = "no",
    param: str | None = None,
    **headers: str,
) -> Reply:
    body = {"error": {"message": message, "type": "some_type", "param": param, "code": code}}
    return answer(body, status, x_request_id="req-7", **headers)


def hang_up() -> Reply:
    """Close the connection without an answer."""

    async def reply(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    return reply


def stream(*pieces: bytes, forever: bool = False, cut: bool = False) -> Reply:
    """Send the pieces one by one.

    With `forever`, wait until the client disconnects; with `cut`, break the connection.
    """

    async def reply(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "X-Request-Id": "req-9"}
        )
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if forever:
            await asyncio.Event().wait()
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return reply
