"""A streamed answer, and the server-sent events under it, as the HTML standard defines them."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, Self, TypeVar

import aiohttp
import msgspec
from aiohttp import ClientResponse

from moeserve.client.faults import build_error, read_error
from moeserve.client.transport import unreachable
from moeserve.errors import RequestError, Unreachable
from moeserve.protocol import Answer

T = TypeVar("T", bound=Answer)
Reopen = Callable[[str], Awaitable[ClientResponse]]
END_TIMEOUT_S = 1.0  # time to read the rest of the body after [DONE]
MAX_EVENT_BYTES = 64 * 2**20


class SSEParser:
    """Finds the events in a byte stream that comes in pieces of any size. Lines end in LF or CRLF.

    Works on bytes, so that a character split over two pieces needs no care. Comments and fields
    other than `data` and `id` are skipped; several `data` lines of one event are joined by LF. An
    event that the stream's end cuts off is never returned.

    last_id: the id of the last event that was returned, or of an event before the stream.
    """

    def __init__(self, last_id: str = "") -> None:
        self._partial_line = b""
        self.last_id = last_id
        self._id = last_id  # the id in the last line with one
        self._data_lines: list[bytes] = []  # of the event that has begun
        self._num_data_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of each event that `piece` completes.

        Raises ValueError if an event grows beyond MAX_EVENT_BYTES.
        """
        *lines, self._partial_line = (
            (self._partial_line + piece).replace(b"\r\n", b"\n").split(b"\n")
        )
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data_lines.append(line[5:].removeprefix(b" "))
                self._num_data_bytes += len(line)
            elif line.startswith(b"id:"):
                self._id = line[3:].strip().decode("latin-1")
            elif not line and self._data_lines:
                self.last_id = self._id
                events.append(b"\n".join(self._data_lines))
                self._data_lines = []
                self._num_data_bytes = 0
        if len(self._partial_line) + self._num_data_bytes > MAX_EVENT_BYTES:
            raise ValueError(f"an event of the stream is larger than {MAX_EVENT_BYTES} bytes")
        return events


class Stream(Generic[T]):
    """Async iterator and async context manager over the chunks of one answer.

        async with await client.chat.completions.create(messages=..., stream=True) as stream:
            async for chunk in stream: ...

    `async for` without `async with` is fine too: the socket closes when the stream ends, fails, is
    cancelled or is garbage. An error that the server sends inside the stream is raised; so is an
    end without `[DONE]`, unless events have ids: then `reopen`, called with the last one, returns
    the response that has the rest.
    """

    def __init__(
        self,
        response: ClientResponse,
        kind: type[T],
        silence_s: float,
        reopen: Reopen | None = None,
    ) -> None:
        self.headers: Mapping[str, str] = response.headers
        self.request_id = response.headers.get("x-request-id")
        self._response = response
        self._decode = msgspec.json.Decoder(kind).decode
        self._silence_s = silence_s
        self._reopen = reopen
        self._resumed_after_id = ""  # id of the last event before the stream was opened again
        self._parser = SSEParser()
        self._unread_events: deque[bytes] = deque()
        self._is_done = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            while not self._unread_events:
                if self._is_done:
                    raise StopAsyncIteration
                await self._receive()
            data = self._unread_events.popleft()
            if data == b"[DONE]":
                await self._finish()
                raise StopAsyncIteration
            return self._chunk(data)
        except StopAsyncIteration:
            raise
        except BaseException:
            self.close()
            raise

    async def _receive(self) -> None:
        url = str(self._response.url)
        try:
            piece = await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            await self._resume(unreachable(url, error, self._silence_s))
            return
        if piece:
            self._unread_events.extend(self._parser.feed(piece))
        else:
            await self._resume(
                Unreachable(f"{url}: the stream ended before its [DONE]", code="stream_cut")
            )

    async def _resume(self, fault: Unreachable) -> None:
        """Open the stream again after its last event.

        Raises `fault` if that is not possible, or brought no event the last time.
        """
        last_id = self._parser.last_id
        if self._reopen is None or last_id == self._resumed_after_id:
            raise fault
        self._resumed_after_id = last_id
        self._response.close()
        try:
            self._response = await self._reopen(last_id)
        except RequestError as error:
            raise fault from error
        self._parser = SSEParser(last_id)

    def _chunk(self, data: bytes) -> T:
        if b'"error"' in data and (found := read_error(data)) is not None:
            raise build_error(0, found, self.headers)
        try:
            chunk = self._decode(data)
        except msgspec.MsgspecError as error:
            raise Unreachable(
                f"a chunk of the stream cannot be read: {error}", code="bad_answer"
            ) from error
        chunk.request_id = self.request_id
        return chunk

    async def _finish(self) -> None:
        """Read the rest of the body after [DONE], so that the connection can be used again."""
        self._is_done = True
        self._unread_events.clear()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                while await self._response.content.readany():
                    pass
        except (aiohttp.ClientError, OSError):
            self._response.close()
        else:
            self._response.release()

    def close(self) -> None:
        """Close the socket at once; the server aborts what still runs. Idempotent."""
        if not self._is_done:
            self._is_done = True
            self._unread_events.clear()
            self._response.close()

    async def aclose(self) -> None:
        """Close the socket at once, like `close`."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_is_done"):  # otherwise, __init__ has failed
            self.close()
