"""The terms of a generating request: priority, cache salt, deadline, rate limits and stream.

`read_generation_request` reads the body of a generating request and computes its terms, once.
`running_request` runs prompts under them.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar

from aiohttp import web

from moeserve.config import ServerConfig
from moeserve.errors import DeadlineExceeded, InvalidRequest
from moeserve.frontend.admission import Reservation
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.generation import Generation
from moeserve.sampling import SamplingParams
from moeserve.server.auth import Caller
from moeserve.server.call import RESUME_HEADER, HttpCall
from moeserve.server.requests import Sampling
from moeserve.server.resume import StreamKey, identify_stream
from moeserve.server.running import AnswerHead, Counts, RunningRequest
from moeserve.version import __version__

TIMEOUT_HEADER = "X-Request-Timeout"
MAX_TIMEOUT_S = 86_400.0

S = TypeVar("S", bound=Sampling)


class Terms:
    """The terms of one generating request, from its key, its headers and its body."""

    def __init__(self, call: HttpCall, request: Sampling, stream_key: StreamKey | None) -> None:
        self.call = call
        self.stream_key = stream_key  # None: the answer cannot be resumed
        self.priority = _priority(call.caller, request.priority)
        self.salt = _salt(call, request.cache_salt)
        timeout_s = _timeout_s(call.request, call.context.config) if call.has_deadline else None
        self._deadline_s = None if timeout_s is None else call.began_at_s + timeout_s

    @property
    def resumes(self) -> bool:
        """Whether the request resumes a stream, which was admitted and charged when it began."""
        return self.stream_key is not None and self.stream_key.known_log is not None

    def time_left_s(self) -> float | None:
        """Return the seconds until the request's deadline; None for no limit."""
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()

    def admit(
        self, front: FrontEnd, num_sequences: int
    ) -> AbstractContextManager[Reservation | None]:
        """Reserve the admission of the request's sequences; None if the request resumes a stream.

        Raises what `FrontEnd.admit` raises.
        """
        if self.resumes:
            return nullcontext()
        return front.admit(num_sequences, within_s=self.time_left_s(), priority=self.priority)

    def charge(self, num_prompt_tokens: int) -> None:
        """Count the request against the rate limits of its key. Raises RateLimited.

        A request that resumes a stream counts as a request; its tokens were charged before.
        """
        if self.call.caller.rate_limits is not None:
            self.call.caller.rate_limits.charge_prompt(0 if self.resumes else num_prompt_tokens)

    def settle(self, generations: Sequence[Generation]) -> None:
        """Charge the generated tokens that were not charged yet, and record the time of the first
        one.
        """
        call = self.call
        sequences = [sequence for generation in generations for sequence in generation.sequences]
        call.first_token_at_s = min(
            (s.first_token_at_s for s in sequences if s.first_token_at_s is not None), default=None
        )
        if call.caller.rate_limits is not None:
            num_tokens = sum(len(sequence.tokens) for sequence in sequences)
            num_charged = 0
            # Only a request with one prompt can be resumed.
            if (stream_log := generations[0].stream_log) is not None:
                num_charged = stream_log.num_charged_tokens
                stream_log.num_charged_tokens = max(num_tokens, num_charged)
            call.caller.rate_limits.charge_answer(max(0, num_tokens - num_charged))

    async def resume(self, front: FrontEnd, options: dict[str, Any]) -> Generation | None:
        """Return the generation that the request resumes; None for a new request.

        Raises RequestError; DeadlineExceeded if the known part cannot be replayed in time.
        """
        stream_key = self.stream_key
        if stream_key is None or front.resumable is None:
            return None
        if stream_key.known_log is None or stream_key.position is None:
            return None
        try:
            async with asyncio.timeout(self.time_left_s()):
                return await front.resumable.resume(
                    stream_key.known_log,
                    parser=options.get("parser"),
                    delta_ends=stream_key.position.delta_ends(),
                )
        except TimeoutError:
            raise DeadlineExceeded("the stream was not replayed before the deadline") from None

    def make_resumable(self, front: FrontEnd, generation: Generation) -> None:
        """Keep the generation of a new stream, so that it can be resumed."""
        stream_key = self.stream_key
        if stream_key is None or stream_key.known_log is not None or front.resumable is None:
            return
        front.resumable.make_resumable(
            generation,
            id=stream_key.id,
            created=stream_key.created,
            digest=stream_key.digest,
            owner=self.call.caller.owner,
        )


async def read_generation_request(call: HttpCall, kind: type[S]) -> tuple[S, Terms]:
    """Return the body of a generating request, checked, and its terms. Raises RequestError."""
    request, body = await call.read_with_raw(kind)
    front = call.context.front
    stream_key = None
    if RESUME_HEADER in call.request.headers or (front is not None and front.resumable is not None):
        stream_key = identify_stream(call, body)
    return request, Terms(call, request, stream_key)


def _priority(caller: Caller, requested: int | None) -> int:
    """Return the priority of a request.

    Lower numbers run first, so a request cannot ask for a lower number than its key has.
    """
    if caller.priority is None:
        return requested or 0
    if requested is None:
        return caller.priority
    return max(caller.priority, requested)


def _salt(call: HttpCall, requested: str | None) -> str:
    """Return the cache salt. With several keys it includes the owner: cache hits can be timed, so
    keys must not share prefixes.
    """
    owner = call.caller.owner if call.context.auth.several_owners else ""
    return f"{owner}:{requested or ''}" if owner or requested else ""


def _timeout_s(request: web.BaseRequest, config: ServerConfig) -> float | None:
    """Return the seconds that a request may take; None for no limit. Raises InvalidRequest."""
    timeouts_s = [] if config.request_timeout is None else [config.request_timeout]
    if (requested := request.headers.get(TIMEOUT_HEADER)) is not None:
        try:
            timeouts_s.append(float(requested))
        except ValueError:
            timeouts_s.append(math.nan)  # refused below
        if not 0 < timeouts_s[-1] <= MAX_TIMEOUT_S:
            raise InvalidRequest(
                f"{TIMEOUT_HEADER} must be a number of seconds above 0 and at most "
                f"{MAX_TIMEOUT_S:g}",
                param=TIMEOUT_HEADER,
            )
    return min(timeouts_s, default=None)


@asynccontextmanager
async def running_request(
    terms: Terms,
    front: FrontEnd,
    *,
    prompts: list[list[int]],
    params: SamplingParams,
    reservation: Reservation | None,
    **options: Any,
) -> AsyncIterator[RunningRequest]:
    """Run all prompts or none inside the block, and register the request by its id meanwhile.

    At the end of the block, running sequences are aborted, except those of a resumable stream. An
    error other than a lost connection also aborts the stream that the request began.

    Raises what `FrontEnd.generate` raises for the first refused prompt.

    Args:
        terms: The terms of the request.
        front: The front end.
        prompts: Token ids.
        params: The sampling parameters.
        reservation: From `terms.admit`.
        options: Further arguments of `FrontEnd.generate`.
    """
    call = terms.call
    counts = Counts(prompt_tokens=sum(map(len, prompts)))
    call.counts = counts
    terms.charge(counts.prompt_tokens)
    options |= {
        "reservation": reservation,
        "priority": terms.priority,
        "salt": terms.salt,
        "owner": call.caller.owner,
    }
    generations = await _start_generations(terms, front, prompts, params, options)
    running = RunningRequest(
        generations,
        n=params.n,
        owner=call.caller.owner,
        head=_head(terms, front),
        counts=counts,
    )
    time_left_s = terms.time_left_s()
    timer = None
    if time_left_s is not None:
        timer = asyncio.get_running_loop().call_later(time_left_s, running.expire)
    # The client may choose the request id, so several requests may have the same one.
    requests_with_id = call.context.running.setdefault(call.id, [])
    requests_with_id.append(running)
    try:
        yield running
    except (ConnectionError, asyncio.CancelledError):
        raise  # the client disconnected, and may resume the stream
    except Exception:
        if not terms.resumes:  # a failed request to resume does not end the stream
            await running.abort()
        raise
    finally:
        requests_with_id.remove(running)
        if not requests_with_id:
            del call.context.running[call.id]
        if timer is not None:
            timer.cancel()
        terms.settle(generations)
        await running.aclose()


async def _start_generations(
    terms: Terms,
    front: FrontEnd,
    prompts: list[list[int]],
    params: SamplingParams,
    options: dict[str, Any],
) -> list[Generation]:
    """Return the generations of all prompts, or that of the stream that the request resumes."""
    if (resumed := await terms.resume(front, options)) is not None:
        return [resumed]
    generations: list[Generation] = []
    try:
        for prompt in prompts:
            generations.append(
                await front.generate(prompt, params, request_id=terms.call.id, **options)
            )
    except BaseException:  # also a cancellation
        for generation in generations:
            generation.abort()
        raise
    if len(generations) == 1:
        terms.make_resumable(front, generations[0])
    return generations


def _head(terms: Terms, front: FrontEnd) -> AnswerHead:
    assert front.ready is not None
    device = front.ready.device.partition(" ")[0]
    return AnswerHead(
        request_id=terms.call.id,
        created=int(time.time()) if terms.stream_key is None else terms.stream_key.created,
        model=front.model_name,
        fingerprint=f"moeserve-{__version__}-{device}-{front.ready.dtype}",
    )
