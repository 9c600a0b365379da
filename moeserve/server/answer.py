"""RunningAnswer a request to its end: as one JSON body, or as a stream of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from moeserve.errors import InvalidRequest, RequestError
from moeserve.frontend.delta import Delta
from moeserve.frontend.front_end import FrontEnd
from moeserve.messages import Logprobs
from moeserve.sampling import SamplingParams
from moeserve.server.chunks import Chunks, Counts
from moeserve.server.context import HttpCall
from moeserve.server.errors import as_request_error, error_body
from moeserve.server.protocol import Sampling
from moeserve.server.running import RunningAnswer
from moeserve.server.sse import DONE, SseStream


@dataclass
class Collected:
    """One finished sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None
    prompt_logprobs: list[Logprobs | None] | None = None


@asynccontextmanager
async def run(
    call: HttpCall, front: FrontEnd, prompts: list[list[int]], params: SamplingParams, request: Sampling
) -> AsyncIterator[RunningAnswer]:
    """The request, running and known under its id; whatever is left of it is aborted at the end of the block."""
    running = await RunningAnswer.start(
        front,
        prompts,
        params,
        priority=request.priority or 0,
        salt=call.salt(request.cache_salt),
        request_id=call.id,
        owner=call.caller.owner,
    )
    known = call.context.running
    known.setdefault(call.id, []).append(running)
    try:
        async with running:
            yield running
    finally:
        known[call.id].remove(running)
        if not known[call.id]:
            del known[call.id]


async def collect(running: RunningAnswer, n: int, counts: Counts) -> list[list[Collected]]:
    """[prompt][sequence], once all have ended."""
    found = [[Collected() for _ in range(n)] for _ in running.generations]
    parts: dict[tuple[int, int], list[str]] = {}
    async for prompt, delta in running:
        counts.add(delta)
        into = found[prompt][delta.index]
        parts.setdefault((prompt, delta.index), []).append(delta.text)
        into.token_ids += delta.token_ids
        into.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            into.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            into.finish_reason = delta.finish_reason
            into.stop_reason = delta.stop_reason
    for (prompt, index), texts in parts.items():
        found[prompt][index].text = "".join(texts)
    return found


def json_answer(call: HttpCall, body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json", headers=call.headers())


async def stream_answer(call: HttpCall, running: RunningAnswer, chunks: Chunks) -> web.StreamResponse:
    """Until the first delta an error is a real status; afterwards it is an error event before [DONE]."""
    context = call.context
    stream = SseStream(call.request, call.headers())
    first = asyncio.ensure_future(running.__anext__())
    context.streams.add(stream)
    try:
        await asyncio.wait([first], timeout=context.config.sse_ping_s)
        if not first.done():  # a long queue: say so by headers and pings
            await _open(stream, chunks)
        await _relay(stream, running, chunks, await first)
    except RequestError as error:
        if not stream.started:
            raise
        await stream.send(_error_event(error, call.id) + DONE)
    except Exception as error:
        if isinstance(error, ConnectionError) or not stream.started:
            raise
        await stream.send(_error_event(as_request_error(error, call.id), call.id) + DONE)
    finally:
        first.cancel()
        context.streams.discard(stream)
    return await stream.finish()


async def _open(stream: SseStream, chunks: Chunks) -> None:
    await stream.start()
    await stream.send(chunks.opening() or b": ok\n\n")


async def _relay(stream: SseStream, running: RunningAnswer, chunks: Chunks, first: tuple[int, Delta]) -> None:
    frames = b""
    if not stream.started:
        frames = chunks.opening()
        await stream.start()
    frames += chunks.frames(*first)
    if frames:
        await stream.send(frames)
    async for prompt, delta in running:
        frames = chunks.frames(prompt, delta)
        if frames:
            await stream.send(frames)
    await stream.send(chunks.closing() + DONE)


def _error_event(error: RequestError, request_id: str) -> bytes:
    return b"data: " + error_body(error, request_id) + b"\n\n"


def check_unknown(call: HttpCall, unknown: list[str]) -> None:
    """Raises InvalidRequest under --strict; otherwise the answer carries a Warning header."""
    if unknown and call.context.config.strict:
        raise InvalidRequest(f"unknown fields: {', '.join(unknown)}", param=unknown[0], code="unknown_parameter")
    call.unknown = unknown
