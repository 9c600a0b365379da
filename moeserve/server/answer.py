"""Runs a request to its end: as one JSON body, or as a stream of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from moeserve.errors import RequestError
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.generation import Delta, Generation
from moeserve.messages import Logprobs
from moeserve.sampling import SamplingParams
from moeserve.server.chunks import Chunks, Counts
from moeserve.server.context import HttpCall
from moeserve.server.errors import as_request_error, error_body
from moeserve.server.http import DONE, SseStream
from moeserve.server.requests import Sampling


class _Aborted(RequestError):
    """The request was ended by its id; its reader gets finish_reason "abort"."""


class RunningRequest:
    """The generations of one HTTP request, one per prompt, as one async iterator of (prompt index, delta)."""

    def __init__(self, generations: list[Generation], n: int, owner: str) -> None:
        self.generations = generations
        self.owner = owner
        self._open = {(prompt, index) for prompt in range(len(generations)) for index in range(n)}
        self._queue: asyncio.Queue[tuple[int, Delta] | RequestError] = asyncio.Queue()
        self._pumps: list[asyncio.Task[None]] = []
        self._aborted: list[tuple[int, Delta]] | None = None  # the ends of sequences that were aborted by id
        if len(generations) > 1:
            self._pumps = [asyncio.create_task(self._pump(*numbered)) for numbered in enumerate(generations)]

    def __aiter__(self) -> RunningRequest:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        if not self._open:
            raise StopAsyncIteration
        if self._aborted is None:
            try:
                prompt, delta = await self._next()
            except _Aborted:
                self._aborted = [(p, Delta(i, finish_reason="abort")) for p, i in sorted(self._open)]
            else:
                if delta.finish_reason is not None:
                    self._open.discard((prompt, delta.index))
                return prompt, delta
        if not self._aborted:
            raise StopAsyncIteration
        return self._aborted.pop(0)

    async def _next(self) -> tuple[int, Delta]:
        if not self._pumps:
            return 0, await self.generations[0].__anext__()
        item = await self._queue.get()
        if isinstance(item, RequestError):
            raise item
        return item

    async def _pump(self, prompt: int, generation: Generation) -> None:
        try:
            async for delta in generation:
                self._queue.put_nowait((prompt, delta))
        except RequestError as error:
            self._queue.put_nowait(error)

    async def abort(self) -> int:
        """Ends the request; its reader gets finish_reason "abort". Returns how many sequences were running."""
        num_open = len(self._open)
        for generation in self.generations:
            await generation.aclose()
            generation.fail(_Aborted("aborted"))
        return num_open

    async def aclose(self) -> None:
        """Aborts what still runs; there is no reader any more."""
        for pump in self._pumps:
            pump.cancel()
        for generation in self.generations:
            await generation.aclose()


@asynccontextmanager
async def running_request(
    call: HttpCall, front: FrontEnd, prompts: list[list[int]], params: SamplingParams, request: Sampling
) -> AsyncIterator[RunningRequest]:
    """Runs all prompts or none inside the block, at whose end sequences that are still running are aborted.

    The request is known under its id meanwhile. Raises what `FrontEnd.generate` raises for the first refused prompt.
    """
    front.admit(len(prompts) * params.n)
    generations: list[Generation] = []
    try:
        for prompt in prompts:
            generation = await front.generate(
                prompt,
                params,
                priority=request.priority or 0,
                salt=call.salt(request.cache_salt),
                request_id=call.id,
            )
            generations.append(generation)
    except BaseException:
        for generation in generations:
            await generation.aclose()
        raise
    running = RunningRequest(generations, params.n, call.caller.owner)
    same_id = call.context.running.setdefault(call.id, [])
    same_id.append(running)
    try:
        yield running
    finally:
        same_id.remove(running)
        if not same_id:
            del call.context.running[call.id]
        await running.aclose()


@dataclass
class Collected:
    """One finished sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None
    prompt_logprobs: list[Logprobs | None] | None = None


async def collect(running: RunningRequest, n: int, counts: Counts) -> list[list[Collected]]:
    """Returns the sequences as [prompt][sequence] once all have ended."""
    found = [[Collected() for _ in range(n)] for _ in running.generations]
    texts: dict[tuple[int, int], list[str]] = {}
    async for prompt, delta in running:
        counts.add(delta)
        into = found[prompt][delta.index]
        texts.setdefault((prompt, delta.index), []).append(delta.text)
        into.token_ids += delta.token_ids
        into.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            into.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            into.finish_reason = delta.finish_reason
            into.stop_reason = delta.stop_reason
    for (prompt, index), pieces in texts.items():
        found[prompt][index].text = "".join(pieces)
    return found


async def stream_answer(call: HttpCall, running: RunningRequest, chunks: Chunks) -> web.StreamResponse:
    """Sends the chunks. Until the first delta an error is a real status; later, an error event before [DONE]."""
    context = call.context
    stream = SseStream(call.request, call.headers())
    first = asyncio.ensure_future(running.__anext__())
    context.streams.add(stream)
    try:
        await asyncio.wait([first], timeout=context.config.sse_ping_s)
        if not first.done():  # the queue is long: headers and pings show that the request is alive
            await stream.start()
            await stream.send(chunks.opening() or b": ok\n\n")
        await _relay(stream, running, chunks, await first)
    except Exception as error:
        if isinstance(error, ConnectionError) or not stream.started:
            raise
        event = b"data: " + error_body(as_request_error(error, call.id), call.id) + b"\n\n"
        await stream.send(event + DONE)
    finally:
        first.cancel()
        context.streams.discard(stream)
    return await stream.finish()


async def _relay(stream: SseStream, running: RunningRequest, chunks: Chunks, first: tuple[int, Delta]) -> None:
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
