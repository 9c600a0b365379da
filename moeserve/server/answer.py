"""Answers a request in its dialect: as one JSON body, or as a stream of events."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import partial
from typing import TypeVar

from aiohttp import web

from moeserve.frontend.generation import Delta
from moeserve.server.chat_request import ChatRequest
from moeserve.server.conversation import Conversation, conversation
from moeserve.server.errors import as_request_error
from moeserve.server.http import SseStream
from moeserve.server.numbered import Numbered
from moeserve.server.running import Deltas, RunningRequest
from moeserve.server.terms import Terms
from moeserve.server.writer import StreamWriter, Writer

W = TypeVar("W", bound=Writer)


async def answer_chat(
    terms: Terms,
    request: ChatRequest,
    make_writer: Callable[[Conversation], W],
    *,
    naming: Callable[[], AbstractContextManager[None]],
    context: Sequence[int] = (),
    while_running: Callable[[W], AbstractContextManager[None]] | None = None,
) -> web.StreamResponse:
    """Run a conversation, and answer in the dialect of its request.

    Args:
        terms: The terms of the request.
        request: The conversation.
        make_writer: Makes the dialect's writer.
        naming: A context in which errors name the dialect's fields.
        context: Token ids of earlier turns.
        while_running: A context for the time in which the answer is generated.
    """
    with naming():
        async with conversation(terms, request, context) as chat:
            writer = make_writer(chat)
            with nullcontext() if while_running is None else while_running(writer):
                if request.stream:
                    return await stream_answer(terms, chat.running, writer)
                await write_all(chat.running, writer)
        return terms.call.answer(writer.whole())


async def write_all(running: RunningRequest, writer: Writer) -> None:
    """Add all deltas to a whole answer. Raises RequestError."""
    async with aclosing(running.deltas()) as deltas:
        async for prompt, delta in deltas:
            writer.add(prompt, delta)


async def stream_answer(
    terms: Terms, running: RunningRequest, writer: StreamWriter
) -> web.StreamResponse:
    """Send the events. An error before the first delta sets the HTTP status; a later one becomes
    the events of `writer.failure`.
    """
    call = terms.call
    streams = call.context.streams
    stream = SseStream(call.request, call.headers(), writer.media_type)
    streams.add(stream)
    stream_log = running.generations[0].stream_log
    position = None if terms.stream_key is None else terms.stream_key.position
    try:
        async with aclosing(running.deltas()) as deltas:
            if stream_log is not None:
                writer = Numbered(writer, stream_log.entry.id, len(stream_log.sequences))
            stream.make_ping = writer.ping
            if position is not None and isinstance(writer, Numbered):
                frames = await writer.resume(deltas, position)
                running.generations[0].end_replay()
                await stream.start()
                await stream.send(frames or b": ok\n\n")
            else:
                await _begin(stream, deltas, writer, call.context.config.sse_ping_s)
            running.set_write_directly(partial(_send_now, stream, writer))
            async for prompt, delta in deltas:
                if frames := writer.frames(prompt, delta):
                    await stream.send(frames)
            await stream.send(writer.closing())
    except Exception as error:
        if isinstance(error, ConnectionError) or not stream.started:
            raise
        request_error = as_request_error(error, call.id)
        call.error = request_error.code or request_error.type
        await stream.send(writer.failure(request_error, call.id))
    finally:
        streams.discard(stream)
        running.set_write_directly(None)
    return await stream.finish()


def _send_now(stream: SseStream, writer: StreamWriter, delta: Delta) -> bool:
    """Send a delta at once and return True, unless it is the last one or the socket is full."""
    if delta.finish_reason is not None or not stream.can_write:
        return False
    if frames := writer.frames(0, delta):
        stream.write(frames)
    return True


async def _begin(stream: SseStream, deltas: Deltas, writer: StreamWriter, ping_s: float) -> None:
    """Send the opening events and the first delta."""
    first = asyncio.ensure_future(anext(deltas))
    try:
        await asyncio.wait([first], timeout=ping_s)
        if not first.done():  # a long queue: headers and pings keep the connection open
            await stream.start()
            await stream.send(writer.opening() or writer.ping())
        prompt, delta = await first
    finally:
        if first.cancel():
            await asyncio.wait([first])
    opening = b"" if stream.started else writer.opening()
    frames = opening + writer.frames(prompt, delta)  # may raise, too
    if not stream.started:
        await stream.start()
    if frames:
        await stream.send(frames)
