"""One request from its head to its answer: id, route, key, handler, and one shape of errors.

`Context` is the state that the handlers share, `HttpCall` one request on its way through a handler;
`routes.py` lists the routes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

import msgspec
from aiohttp import web

from moeserve.config import ServerConfig
from moeserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Overloaded,
    RequestError,
)
from moeserve.frontend.admission import Reservation
from moeserve.frontend.front_end import FrontEnd
from moeserve.messages import Phase, Ready
from moeserve.server.access_log import Observer, answered
from moeserve.server.auth import OPEN, Auth, Caller
from moeserve.server.cors import Cors
from moeserve.server.errors import (
    SERVER,
    HttpError,
    as_request_error,
    error_response,
    shorten,
    shorten_line,
)
from moeserve.server.http import check_headers, request_id_of
from moeserve.server.requests import BodyRoom, convert, decode, read_json, unknown_fields
from moeserve.server.response_store import ResponseStore
from moeserve.server.resume import RESUME_HEADER, StreamKey, stream_key
from moeserve.server.tls import Tls
from moeserve.version import __version__

if TYPE_CHECKING:
    from moeserve.frontend.generation import Generation
    from moeserve.server.answer import Counts, RunningRequest
    from moeserve.server.batches import Batches
    from moeserve.server.http import SseStream
    from moeserve.server.routes import Route
    from moeserve.text.answer_format import AnswerParser

log = logging.getLogger(__name__)

TIMEOUT_HEADER = "X-Request-Timeout"
MAX_TIMEOUT_S = 86_400.0
CLIENT_GONE = 499  # in the log and in the metrics only, because the reader has left

R = TypeVar("R", bound=msgspec.Struct)


@dataclass
class Context:
    """The state of the server. front: None while its process still reads the model's files; probes
    answer already.
    """

    config: ServerConfig
    auth: Auth
    front: FrontEnd | None = None
    draining: bool = False
    started: bool = False  # has been ready at least once
    created: int = field(default_factory=lambda: int(time.time()))
    began: float = field(default_factory=time.monotonic)
    running: dict[str, list[RunningRequest]] = field(
        default_factory=dict
    )  # by id, which two requests may share
    bodies: BodyRoom = field(default_factory=BodyRoom)
    streams: set[SseStream] = field(default_factory=set)
    responses: Counter[tuple[str, int]] = field(
        default_factory=Counter
    )  # (route, status) -> how many
    batches: Batches | None = None  # and the files; None: they are off
    tls: Tls | None = None
    observers: list[Observer] = field(
        default_factory=list
    )  # called with every request that is over, but for probes
    store: ResponseStore = field(init=False)

    def __post_init__(self) -> None:
        self.cors = Cors(self.config) if self.config.allowed_origins else None
        self.store = ResponseStore(self.config.max_stored_responses, self.config.max_stored_bytes)

    @property
    def state(self) -> str:
        """The status that the probes show; see `protocol.StatusResponse`."""
        if self.draining:
            return "draining"
        if self.front is None:
            return "loading"
        return (
            "stalled"
            if self.front.state == "ready" and not self.front.healthy
            else self.front.state
        )

    @property
    def phase(self) -> Phase:
        """The progress of the start, or of a group that forms anew; otherwise the phase is named
        like the state.
        """
        forming = self.front is not None and self.front.phase.percent < 100
        if self.state in ("ready", "draining") or (self.state == "stalled" and not forming):
            return Phase(self.state, 100, time.monotonic() - self.began)
        if self.front is None:
            return Phase("reading the model's files", 0, time.monotonic() - self.began)
        return self.front.phase

    def serving(self, model: str | None = None) -> tuple[FrontEnd, Ready]:
        """Returns the front end and what is known of the model.

        Raises Overloaded (503) while no model is loaded or the server drains, and ModelNotFound if
        `model`, which may be left out, is not the one that is served.
        """
        if self.draining:
            raise Overloaded("the server is shutting down", code="server_draining", retry_after_s=5)
        if self.front is None or self.front.ready is None:
            raise Overloaded(
                f"the model is loading: {self.phase.name}", code="model_loading", retry_after_s=2
            )
        served = self.front.model_name
        if model is not None and model != served:
            what = f"the model {shorten(model)!r} does not exist here; this server has {served!r}"
            raise ModelNotFound(what, param="model")
        return self.front, self.front.ready


@dataclass
class HttpCall:
    """One HTTP request on its way through a handler."""

    context: Context
    request: web.BaseRequest
    id: str
    caller: Caller = OPEN
    tail: str = ""  # what follows a route that ends in a slash
    unknown: list[str] = field(default_factory=list)  # request fields that mean nothing to us
    ignored: list[str] = field(default_factory=list)  # request fields that change nothing here
    counts: Counts | None = None  # of a generating request
    first_at: float | None = None  # when its first token came
    stream: StreamKey | None = None  # of a resumable stream
    error: str = ""  # the code of the error that it was answered with
    began: float = field(default_factory=time.monotonic)

    @property
    def is_anthropic(self) -> bool:
        """Whether the path belongs to Anthropic's API, whose errors have another shape."""
        return (self.request.raw_path.partition("?")[0] + "/").startswith("/v1/messages/")

    async def read(self, kind: type[R]) -> R:
        """Returns the body as a checked struct. Raises a RequestError of status 400, 408, 413, 415
        or 503.
        """
        body = await read_json(
            self.request, self.context.config.max_request_bytes, self.context.bodies
        )
        request, unknown, self.ignored = decode(body, kind)
        self.note_unknown(unknown)
        front = self.context.front
        if RESUME_HEADER in self.request.headers or (
            front is not None and front.resumable is not None
        ):
            self.stream = stream_key(self, body)
        return request

    def query(self, kind: type[R]) -> R:
        """Returns the parameters of the URL as a struct; `?x` alone means true. Raises
        InvalidRequest.
        """
        given = {name: value or "true" for name, value in self.request.query.items()}
        self.note_unknown(unknown_fields(given, kind.__struct_fields__))
        try:
            return convert(given, kind, strict=False)
        except InvalidRequest as error:
            what = error.message.removesuffix(", got a string")
            shown = shorten(given.get(error.param or "", ""))
            raise InvalidRequest(f"{what}, not {shown!r}", param=error.param) from None

    def note_unknown(self, unknown: list[str]) -> None:
        """Raises InvalidRequest under --strict; otherwise the answer carries a Warning header."""
        if unknown and self.context.config.strict:
            raise InvalidRequest(
                f"unknown fields: {', '.join(unknown)}", param=unknown[0], code="unknown_parameter"
            )
        self.unknown = unknown

    def headers(self) -> dict[str, str]:
        """Returns the headers of every answer to this request."""
        headers = {"X-Request-Id": self.id, "Server": SERVER}
        if self.context.cors is not None:
            headers |= self.context.cors.headers(self.request)
        if self.caller.rates is not None:
            headers |= self.caller.rates.headers()
        if self.is_anthropic:
            headers["Request-Id"] = self.id
        warnings = {"unknown fields ignored": self.unknown, "no effect here": self.ignored}
        if self.unknown or self.ignored:
            headers["Warning"] = ", ".join(
                _warning(f"{what}: {', '.join(names)}") for what, names in warnings.items() if names
            )
        return headers

    def answer(self, body: msgspec.Struct, status: int = 200, **headers: str) -> web.Response:
        """Returns the response with `body` as JSON."""
        return web.Response(
            body=msgspec.json.encode(body),
            status=status,
            content_type="application/json",
            headers=self.headers() | headers,
        )

    def priority(self, asked: int | None) -> int:
        """Returns the place in line: what was asked for, but none before that of the caller's key."""
        own = self.caller.priority
        if own is None or asked is None:
            return (own if asked is None else asked) or 0
        return max(own, asked)

    @property
    def goes_on(self) -> bool:
        """Whether the request goes on with a stream, which was admitted and charged when it began."""
        return self.stream is not None and self.stream.recorded is not None

    def admit(
        self, front: FrontEnd, num_sequences: int, priority: int | None
    ) -> AbstractContextManager[Reservation | None]:
        """Reserve room for the request's sequences; None if the request resumes a stream.

        Raises what `FrontEnd.admit` raises.
        """
        if self.goes_on:
            return nullcontext()
        return front.admit(
            num_sequences, within_s=self.time_left_s(), priority=self.priority(priority)
        )

    async def resumed(
        self, front: FrontEnd, parser: Callable[[], AnswerParser] | None
    ) -> Generation | None:
        """Return the generation that the request resumes; None for a new request.

        Raises RequestError; DeadlineExceeded if the known part cannot be replayed in time.
        """
        key = self.stream
        if key is None or key.recorded is None or key.place is None or front.resumable is None:
            return None
        try:
            async with asyncio.timeout(self.time_left_s()):
                return await front.resumable.resume(key.recorded, parser, key.place.cuts())
        except TimeoutError:
            raise DeadlineExceeded("the stream was not replayed in the request's time") from None

    def record(self, front: FrontEnd, generation: Generation) -> None:
        """Keeps the generation of a new stream, so that it can be gone on with."""
        key = self.stream
        if key is not None and key.recorded is None and front.resumable is not None:
            owner = self.caller.owner
            front.resumable.record(
                generation, id=key.id, created=key.created, digest=key.digest, owner=owner
            )

    def charge(self, num_prompt_tokens: int) -> None:
        """Count a generating request against the rates of its key. Raises RateLimited.

        A request that resumes a stream counts as a request; its tokens were charged before.
        """
        if self.caller.rates is not None:
            self.caller.rates.take(0 if self.goes_on else num_prompt_tokens)

    def settle(self, generations: Sequence[Generation]) -> None:
        """Notes what a generating request has come to."""
        sequences = [sequence for generation in generations for sequence in generation.sequences]
        self.first_at = min((s.first_at for s in sequences if s.first_at is not None), default=None)
        if self.caller.rates is not None:
            num = sum(len(sequence.tokens) for sequence in sequences)
            before = 0
            if (stream := generations[0].stream) is not None:
                before = stream.settled
                stream.settled = max(num, stream.settled)
            self.caller.rates.spend(max(0, num - before))

    def time_left_s(self) -> float | None:
        """Returns the seconds until the request must be over; None for no limit. Raises
        InvalidRequest.
        """
        limits = [limit] if (limit := self.context.config.request_timeout) is not None else []
        if (asked := self.request.headers.get(TIMEOUT_HEADER)) is not None:
            try:
                limits.append(float(asked))
            except ValueError:
                limits.append(math.nan)
            if not 0 < limits[-1] <= MAX_TIMEOUT_S:
                what = f"{TIMEOUT_HEADER} must be a number of seconds above 0 and at most {MAX_TIMEOUT_S:g}"
                raise InvalidRequest(what, param=TIMEOUT_HEADER)
        return self.began + min(limits) - time.monotonic() if limits else None

    def salt(self, asked: str | None) -> str:
        """Returns the salt that keeps prefix-cache hits, which can be timed, inside one key's
        requests.
        """
        owner = self.caller.owner if self.context.auth.several_owners else ""
        return f"{owner}:{asked or ''}" if owner or asked else ""

    def head(self, prefix: str, object: str, front: FrontEnd, ready: Ready) -> dict[str, Any]:
        """Returns the fields that whole answers and chunks begin with."""
        return {
            "id": f"{prefix}-{self.id}",
            "object": object,
            "created": int(time.time()) if self.stream is None else self.stream.created,
            "model": front.model_name,
            # changes when the same seed may give other tokens
            "system_fingerprint": f"moeserve-{__version__}-{ready.device.partition(' ')[0]}-{ready.dtype}",
        }


def _warning(text: str) -> str:
    """Return a value of the Warning header (RFC 9111, 5.5), whose text is quoted ASCII."""
    text = text.encode("ascii", "replace").decode().replace('"', "'")
    return f'299 moeserve "{text}"'


class App:
    """The handler of all HTTP requests. It always answers."""

    def __init__(self, context: Context, routes: Sequence[Route]) -> None:
        self.context = context
        self._prefixes = [
            route for route in routes if route.path.endswith("/") and route.path != "/"
        ]
        self._open = all(
            route.probe for route in routes
        )  # nothing here needs a key, so what is not here needs none
        self._exact = {
            (route.method, route.path): route for route in routes if route not in self._prefixes
        }

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers one request: by its route, or with an error of the API's shape."""
        call = HttpCall(self.context, request, request_id_of(request))
        route: Route | None = None
        try:
            check_headers(request)
            cors = self.context.cors
            if cors is not None and (preflight := cors.preflight(request)) is not None:
                return preflight
            route, call.tail = self._match(request)
            if self.context.auth.has_keys and not (self._open if route is None else route.probe):
                call.caller = self.context.auth.check(request.headers)
            if route is None:
                raise self._no_route(request)
            response = await route.handler(call)
        except (ConnectionError, asyncio.CancelledError):
            self._count(route, CLIENT_GONE, call)
            raise
        except Exception as error:
            shown = as_request_error(error, call.id)
            call.error = shown.code or shown.type
            response = error_response(shown, call.id, anthropic=call.is_anthropic)
            response.headers.update(call.headers())
        self._count(route, response.status, call)
        return response

    async def answer(self, call: HttpCall) -> web.StreamResponse:
        """Answers a request that the server makes itself. Raises what the handler raises."""
        route, call.tail = self._match(call.request)
        if route is None:
            raise self._no_route(call.request)
        return await route.handler(call)

    def _match(self, request: web.BaseRequest) -> tuple[Route | None, str]:
        path = request.raw_path.partition("?")[0]
        method = "GET" if request.method == "HEAD" else request.method
        route = self._exact.get((method, path))
        if route is not None:
            return route, ""
        for route in self._prefixes:
            if (
                route.method == method
                and path.startswith(route.path)
                and path.endswith(route.suffix)
            ):
                return route, unquote(
                    path[len(route.path) : len(path) - len(route.suffix)], errors="replace"
                )
        return None, ""

    def _no_route(self, request: web.BaseRequest) -> RequestError:
        path = request.raw_path.partition("?")[0]
        methods = [method for method, known in self._exact if known == path]
        if not methods:
            fits = [
                r for r in self._prefixes if path.startswith(r.path) and path.endswith(r.suffix)
            ]
            nearest = max((len(r.path + r.suffix) for r in fits), default=0)
            methods = [r.method for r in fits if len(r.path + r.suffix) == nearest]
        if not methods:
            return NotFound(
                f"there is nothing at {shorten(path)}; GET /openapi.json lists what there is"
            )
        return HttpError(
            405, "method_not_allowed", f"this path takes {', '.join(methods)} only", methods
        )

    def _count(self, route: Route | None, status: int, call: HttpCall) -> None:
        path = (
            "other"
            if route is None
            else f"{route.path}{{id}}{route.suffix}"
            if route.suffix
            else route.path
        )
        self.context.responses[path, status] += 1
        if call.unknown:
            log.warning(
                "request %s: unknown fields ignored; its Warning header names them", call.id
            )
            log.debug("request %s: %s", call.id, shorten_line(", ".join(call.unknown)))
        if self.context.observers and (route is None or not route.probe):
            record = answered(call, path, status)
            for observer in self.context.observers:
                observer(record, call)
