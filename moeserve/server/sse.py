"""Server-sent events: frames out, a comment when nothing is said for long, an end for readers that stall.

While the socket takes data each delta is one write. Once it does not, `send` waits, and the front end merges what
comes meanwhile into one delta, so a slow reader costs at most its own answer in memory; see `watch` for its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from aiohttp import web

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
STALL_S = 30.0  # a reader that takes nothing for so long is gone
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class SseStream:
    """One response of events. The status line goes out with `start`: before it, errors can be real statuses."""

    def __init__(self, request: web.BaseRequest, headers: Mapping[str, str]) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**_HEADERS, **headers})
        self._loop = asyncio.get_running_loop()
        self.sent_at = self._loop.time()
        self.sending = False

    @property
    def started(self) -> bool:
        return self._response.prepared

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def start(self) -> None:
        await self._response.prepare(self._request)

    async def send(self, frames: bytes) -> None:
        """Whole frames. Waits while the reader is behind; raises ConnectionError when it is gone."""
        self.sent_at = self._loop.time()
        self.sending = True
        await self._response.write(frames)
        self.sending = False

    async def finish(self) -> web.StreamResponse:
        self.sent_at = self._loop.time()
        self.sending = True
        await self._response.write_eof()
        return self._response

    def drop(self) -> None:
        """Closes the connection at once; the handler is cancelled, and with it the generation."""
        if self._request.transport is not None:
            self._request.transport.abort()


async def watch(streams: set[SseStream], ping_s: float, stall_s: float = STALL_S) -> None:
    """Serves all streams with one timer: pings the silent ones, drops the stalled ones. Runs until cancelled."""
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
                    pings.create_task(_ping(stream))  # it may take as long as the reader likes


async def _ping(stream: SseStream) -> None:
    with suppress(ConnectionError):  # its own handler is being cancelled
        await stream.send(PING)
