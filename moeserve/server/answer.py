"""Runs a request to its end: as one JSON body, or as a stream of chunks in OpenAI's shape.

A plain chunk costs one JSON encoding of its text and two concatenations: what stays the same in all
chunks of a choice is encoded once. Only chunks with logprobs, token ids or running usage are built
as structs.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
from aiohttp import web

from moeserve import protocol
from moeserve.actor.tasks import cancel, log_error, spawn
from moeserve.errors import DeadlineExceeded, RequestError
from moeserve.frontend.admission import Reservation
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.generation import Delta, Generation
from moeserve.protocol import CachedTokens, CompletionDetails, Usage
from moeserve.sampling import SamplingParams
from moeserve.server.app import HttpCall
from moeserve.server.errors import as_request_error, error_body
from moeserve.server.http import DONE, SseStream
from moeserve.server.logprobs import LogprobFormat
from moeserve.server.requests import Sampling, StreamOptions
from moeserve.server.resume import Numbered

MARK = "\0"  # stands for the text of a chunk in its template

Deltas = AsyncGenerator[tuple[int, Delta]]
OpenChoice = protocol.OpenChatChoice | protocol.OpenCompletionChoice
encode = msgspec.json.Encoder().encode


@dataclass
class Counts:
    """Token counts of one HTTP request, as OpenAI bills them: each prompt once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_reasoning: int = 0

    def add(self, delta: Delta) -> None:
        """Counts the tokens of a delta."""
        self.completion_tokens += len(delta.token_ids)
        self.num_reasoning += delta.num_reasoning
        if delta.num_drafts:
            self.num_drafts += delta.num_drafts
            self.num_accepted += delta.num_accepted
        if delta.cached_tokens is not None and delta.index == 0:
            self.cached_tokens += delta.cached_tokens

    def usage(self) -> Usage:
        """Returns the counts in OpenAI's shape."""
        total = self.prompt_tokens + self.completion_tokens
        details = CompletionDetails(reasoning_tokens=self.num_reasoning)
        if self.num_drafts:
            details.accepted_prediction_tokens = self.num_accepted
            details.rejected_prediction_tokens = self.num_drafts - self.num_accepted
        return Usage(
            self.prompt_tokens,
            self.completion_tokens,
            total,
            CachedTokens(self.cached_tokens),
            details,
        )


class RequestAborted(RequestError, http_status=499, code="request_aborted"):
    """The request was ended by its id: on purpose, so clients should not send it again."""


class RunningRequest:
    """The generations of one HTTP request, one per prompt, each of n sequences. owner: see
    `Caller`.

    aborted: set once it was ended by its id; its reader gets finish_reason "abort".
    """

    def __init__(self, generations: list[Generation], n: int, owner: str) -> None:
        self.generations = generations
        self.owner = owner
        self.aborted: RequestAborted | None = None
        self._open = {(prompt, index) for prompt in range(len(generations)) for index in range(n)}
        # The next delta of any of several prompts. What comes while it waits here is merged by its
        # generation, as for one prompt, so a slow reader costs no more than its own answers.
        self._queue: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue(maxsize=1)
        self._pumps: list[asyncio.Task[None]] = []
        if len(generations) > 1:
            self._pumps = [
                spawn(self._pump(i, one), name=f"deltas of prompt {i}", on_error=log_error)
                for i, one in enumerate(generations)
            ]

    async def deltas(self) -> Deltas:
        """Yields (prompt number, delta) until all sequences have ended. Raises RequestError."""
        try:
            while self._open:
                prompt, delta = await self._next()
                if delta.finish_reason is not None:
                    self._open.discard((prompt, delta.index))
                yield prompt, delta
        except RequestAborted as error:
            self.aborted = error
            for prompt, index in sorted(self._open):
                delta = Delta(index, finish_reason="abort")
                if (sequence := self.generations[prompt].sequences[index]).parser is not None:
                    sequence.read(delta)  # what it held back
                yield prompt, delta

    async def _next(self) -> tuple[int, Delta]:
        if not self._pumps:
            return 0, await self.generations[0].__anext__()
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def _pump(self, prompt: int, generation: Generation) -> None:
        try:
            async for delta in generation:
                await self._queue.put((prompt, delta))
        except Exception as error:  # of any kind: whoever reads the answer gets it
            await self._queue.put(error)

    def give_to(self, taker: Callable[[Delta], bool] | None) -> None:
        """Sets the taker of a request of one prompt (see `Generation`)."""
        if not self._pumps:
            self.generations[0].taker = taker

    async def abort(self) -> int:
        """Ends the request; its reader gets finish_reason "abort". Returns how many sequences were
        running.
        """
        num_open = len(self._open)
        for generation in self.generations:
            generation.abort()
            generation.fail(RequestAborted("the request was ended by its id"))
        return num_open

    def expire(self) -> None:
        """Ends the request, whose time is over, with an error."""
        for generation in self.generations:
            generation.abort()
            generation.fail(
                DeadlineExceeded("the request did not finish in the time that it was given")
            )

    async def aclose(self) -> None:
        """Aborts what still runs, unless it is resumable; there is no reader any more."""
        await cancel(*self._pumps)
        for generation in self.generations:
            await generation.aclose()


@asynccontextmanager
async def running_request(
    call: HttpCall,
    front: FrontEnd,
    prompts: list[list[int]],
    params: SamplingParams,
    request: Sampling,
    reservation: Reservation | None,
    **how: Any,
) -> AsyncIterator[RunningRequest]:
    """Runs all prompts or none inside the block, at whose end sequences that are still running are
    aborted.

    reservation: from `call.admit`. how: further arguments of `FrontEnd.generate`. The request is
    known under its id meanwhile. Raises what `FrontEnd.generate` raises for the first refused
    prompt.
    """
    left_s = call.time_left_s()
    call.charge(sum(map(len, prompts)))
    options: dict[str, Any] = {
        "reservation": reservation,
        "priority": call.priority(request.priority),
        "salt": call.salt(request.cache_salt),
        "owner": call.caller.owner,
    }
    if (constraint := request.constraint()) is not None:
        options["grammar_param"] = constraint[1]
    options |= how
    generations = await _begun(call, front, prompts, params, options)
    running = RunningRequest(generations, params.n, call.caller.owner)
    timer = (
        None if left_s is None else asyncio.get_running_loop().call_later(left_s, running.expire)
    )
    same_id = call.context.running.setdefault(call.id, [])
    same_id.append(running)
    try:
        yield running
    except (ConnectionError, asyncio.CancelledError):
        raise  # the reader left, and may come back
    except Exception:
        if not call.goes_on:  # a stream survives a wrong place in it
            await running.abort()
        raise
    finally:
        same_id.remove(running)
        if not same_id:
            del call.context.running[call.id]
        if timer is not None:
            timer.cancel()
        call.settle(generations)
        await running.aclose()


async def _begun(
    call: HttpCall,
    front: FrontEnd,
    prompts: list[list[int]],
    params: SamplingParams,
    options: dict[str, Any],
) -> list[Generation]:
    """Returns the generations of all prompts, or that of the stream with which the request goes on."""
    if (resumed := await call.resumed(front, options.get("parser"))) is not None:
        return [resumed]
    generations: list[Generation] = []
    try:
        for prompt in prompts:
            generations.append(await front.generate(prompt, params, request_id=call.id, **options))
    except BaseException:
        for generation in generations:
            generation.abort()
        raise
    if len(generations) == 1:
        call.record(front, generations[0])
    return generations


async def collect(running: RunningRequest, n: int, counts: Counts) -> list[list[Delta]]:
    """Returns the sequences as [prompt][sequence], each in one delta, once all have ended."""
    found = [[Delta(index) for index in range(n)] for _ in running.generations]
    texts: dict[tuple[int, int], list[str]] = {}
    async for prompt, delta in running.deltas():
        counts.add(delta)
        texts.setdefault((prompt, delta.index), []).append(delta.text)
        found[prompt][delta.index].add(delta)
    for (prompt, index), pieces in texts.items():
        found[prompt][index].text = "".join(pieces)
    return found


class Frames(Protocol):
    """What a stream of some API sends; each is maybe nothing."""

    def opening(self) -> bytes:
        """Returns the frames before the first delta."""

    def frames(self, prompt: int, delta: Delta) -> bytes:
        """Returns the frames of a delta, which it counts."""

    def closing(self) -> bytes:
        """Returns the frames after the last delta."""

    def failure(self, error: RequestError, request_id: str) -> bytes:
        """Returns the frames that end a stream which failed after it began."""


class Chunks(Frames):
    """Frames of one streamed answer. Choice number = prompt number * n + sequence number.

    chunk: the fields that all frames begin with; form: None without logprobs. The subclasses know
    the choices of the two routes; last_choice: the struct of a choice that ends.
    """

    last_choice: type[protocol.ChatChunkChoice] | type[protocol.CompletionChoice]

    def __init__(
        self,
        chunk: protocol.ChatCompletionChunk | protocol.Completion,
        request: Sampling,
        prompts: list[list[int]],
        n: int,
        counts: Counts,
        form: LogprobFormat | None,
    ) -> None:
        options = request.stream_options or StreamOptions()
        self.prompts = prompts
        self.n = n
        self.token_ids = bool(request.return_token_ids)
        self._chunk = chunk
        self._counts = counts
        self._form = form
        self._include_usage = options.include_usage
        self._running_usage = options.continuous_usage_stats
        self._plain = form is None and not self.token_ids and not self._running_usage
        self._head = b"data: " + encode(chunk).removesuffix(b"]}")
        self._tail = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"
        templates = [
            encode(self.choice(index, MARK)).split(encode(MARK))
            for index in range(n * len(prompts))
        ]
        self._before = [self._head + before for before, _ in templates]
        self._after = templates[0][1] + self._tail

    def choice(self, index: int, text: str) -> OpenChoice:
        """Returns a choice that goes on."""
        raise NotImplementedError

    def logprobs(self, index: int, form: LogprobFormat, delta: Delta) -> Any:
        """Returns the logprobs object of a choice."""
        raise NotImplementedError

    def frames(self, prompt: int, delta: Delta) -> bytes:
        """Returns what to send for a delta: maybe nothing, maybe the text and the end of a choice."""
        self._counts.add(delta)
        index = prompt * self.n + delta.index
        out = b""
        if self._plain:
            if delta.text:
                out = self._before[index] + encode(delta.text) + self._after
        elif delta.text or delta.token_ids:
            choice = self.choice(index, delta.text)
            self._add_tokens(choice, delta)
            out = self.frame(choice)
        return (
            out
            if delta.finish_reason is None
            else out + self.ending(index, delta, delta.finish_reason)
        )

    def ending(self, index: int, delta: Delta, reason: str | None) -> bytes:
        """Returns the frame that ends a choice."""
        return self.frame(
            self.last_choice(
                index=index,
                finish_reason=reason,
                stop_reason=delta.stop_reason,
                receipt=delta.receipt,
            )
        )

    def _add_tokens(self, choice: OpenChoice, delta: Delta) -> None:
        """Puts a delta's logprobs and token ids into its choice, if they were asked for."""
        if self._form is not None:
            choice.logprobs = self.logprobs(choice.index, self._form, delta)
        if self.token_ids:
            choice.token_ids = delta.token_ids

    def closing(self) -> bytes:
        """Returns the frame with the usage, if it was asked for, and the end."""
        if not self._include_usage:
            return DONE
        self._chunk.usage = self._counts.usage()
        return b"data: " + encode(self._chunk) + b"\n\n" + DONE

    def failure(self, error: RequestError, request_id: str) -> bytes:
        """Returns what ends a stream that failed."""
        return b"data: " + error_body(error, request_id) + b"\n\n" + DONE

    def frame(self, choice: OpenChoice) -> bytes:
        """Returns the frame of one choice."""
        tail = self._tail
        if self._running_usage:
            tail = b'],"usage":' + encode(self._counts.usage()) + b"}\n\n"
        return self._head + encode(choice) + tail


async def stream_answer(
    call: HttpCall, running: RunningRequest, chunks: Frames
) -> web.StreamResponse:
    """Sends the frames. Until the first delta an error is a real status; later, `chunks.failure`."""
    streams = call.context.streams
    stream = SseStream(call.request, call.headers())
    streams.add(stream)
    log = running.generations[0].stream
    place = None if call.stream is None else call.stream.place
    try:
        async with aclosing(running.deltas()) as deltas:
            if log is not None:
                chunks = Numbered(chunks, log.entry.id, len(log.sequences))
            if place is not None and isinstance(chunks, Numbered):
                frames = await chunks.go_on(deltas, place)
                running.generations[0].caught_up()
                await stream.start()
                await stream.send(frames or b": ok\n\n")
            else:
                await _begin(stream, deltas, chunks, call.context.config.sse_ping_s)
            running.give_to(partial(_send_now, stream, chunks))
            async for prompt, delta in deltas:
                if frames := chunks.frames(prompt, delta):
                    await stream.send(frames)
            await stream.send(chunks.closing())
    except Exception as error:
        if isinstance(error, ConnectionError) or not stream.started:
            raise
        shown = as_request_error(error, call.id)
        call.error = shown.code or shown.type
        await stream.send(chunks.failure(shown, call.id))
    finally:
        streams.discard(stream)
        running.give_to(None)
    return await stream.finish()


def _send_now(stream: SseStream, chunks: Frames, delta: Delta) -> bool:
    """Sends a delta that is neither the last one nor has to wait for the reader; returns whether it
    was one.
    """
    if delta.finish_reason is not None or not stream.free:
        return False
    if frames := chunks.frames(0, delta):
        stream.write(frames)
    return True


async def _begin(stream: SseStream, deltas: Deltas, chunks: Frames, ping_s: float) -> None:
    """Sends the first delta, and what comes before it."""
    first = asyncio.ensure_future(anext(deltas))
    try:
        await asyncio.wait([first], timeout=ping_s)
        if not first.done():  # the queue is long: headers and pings show that the request is alive
            await stream.start()
            await stream.send(chunks.opening() or b": ok\n\n")
        prompt, delta = await first
    finally:
        if first.cancel():
            await asyncio.wait([first])
    opening = b"" if stream.started else chunks.opening()
    frames = opening + chunks.frames(prompt, delta)  # may raise, too
    if not stream.started:
        await stream.start()
    if frames:
        await stream.send(frames)
