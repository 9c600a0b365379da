"""The app: finds the route and the key of a request, and answers every error in the API's shape."""

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from urllib.parse import unquote

from aiohttp import web

from moeserve.errors import NotFound, RequestError
from moeserve.server.absent import ABSENT
from moeserve.server.access_log import Answered
from moeserve.server.call import HttpCall
from moeserve.server.context import Context
from moeserve.server.errors import (
    HttpError,
    as_request_error,
    error_response,
    shorten,
    shorten_line,
)
from moeserve.server.hosts import Hosts
from moeserve.server.http import check_headers, path_of, request_id_of
from moeserve.server.route import Route

log = logging.getLogger(__name__)

METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
CLIENT_GONE = 499  # status in the log and in the metrics; the client has disconnected

_BASES = "/v1 (OpenAI's API) or in the port (Anthropic's and Ollama's)"


class App:
    """The handler of all HTTP requests. It always answers."""

    def __init__(self, context: Context, routes: Sequence[Route]) -> None:
        self.context = context
        self._hosts = Hosts(context.config)
        self._prefix_routes = [
            route for route in routes if route.path.endswith("/") and route.path != "/"
        ]
        # If no route needs a key, unknown paths need none either.
        self._is_keyless = all(route.probe for route in routes)
        self._exact_routes = {
            (route.method, route.path): route
            for route in routes
            if route not in self._prefix_routes
        }

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request: by its route, or with an error in the API's shape."""
        call = HttpCall(self.context, request, request_id_of(request))
        route: Route | None = None
        try:
            check_headers(request)
            is_keyless = self._is_keyless or not self.context.auth.required
            self._hosts.check(request, keyless=is_keyless)
            if request.method == "OPTIONS" and request.raw_path == "*":  # about the whole server
                return web.Response(status=204, headers=call.headers() | {"Allow": METHODS})
            cors = self.context.cors
            if cors is not None and (preflight := cors.preflight(request)) is not None:
                return preflight
            route, call.tail = self._match(request)
            if self.context.auth.has_keys and not (
                self._is_keyless if route is None else route.probe
            ):
                call.caller = self.context.auth.check(request.headers)
            if route is None:
                raise self._no_route(request)
            response = await route.handler(call)
        except (ConnectionError, asyncio.CancelledError):
            self._record_answer(route, CLIENT_GONE, call)
            raise
        except Exception as error:
            shown = as_request_error(error, call.id)
            call.error = shown.code or shown.type
            response = error_response(shown, call.id, shape=call.error_shape)
            response.headers.update(call.headers())
        self._record_answer(route, response.status, call)
        return response

    async def answer(self, call: HttpCall) -> web.StreamResponse:
        """Answer an internal request. Raises what the handler raises."""
        route, call.tail = self._match(call.request)
        if route is None:
            raise self._no_route(call.request)
        return await route.handler(call)

    def _match(self, request: web.BaseRequest) -> tuple[Route | None, str]:
        path = path_of(request)
        method = "GET" if request.method == "HEAD" else request.method
        route = self._exact_routes.get((method, path))
        if route is not None:
            return route, ""
        for route in self._prefix_routes:
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
        path = path_of(request)
        methods = [method for method, known in self._exact_routes if known == path]
        if not methods:
            matching = [
                r
                for r in self._prefix_routes
                if path.startswith(r.path) and path.endswith(r.suffix)
            ]
            nearest = max((len(r.path + r.suffix) for r in matching), default=0)
            methods = [r.method for r in matching if len(r.path + r.suffix) == nearest]
        if path in ABSENT:
            return NotFound(f"{path}: {ABSENT[path]}")
        if not methods:
            remedy = "GET /openapi.json lists the routes"
            if (known := self._similar_path(path)) is not None:
                remedy = f"did you mean {known}? Clients want a base URL that ends in {_BASES}"
            return NotFound(f"unknown path {shorten(path)}; {remedy}")
        return HttpError(
            405, "method_not_allowed", f"this path supports only {', '.join(methods)}", methods
        )

    def _similar_path(self, path: str) -> str | None:
        """Return the path that a client with another base URL has meant; None if there is none."""
        segments = [segment for segment in path.split("/") if segment]
        rest = [segment for segment in segments if segment != "v1"]
        possible = [["v1", *rest], rest]
        if rest[:1] == ["api"]:  # the base of other servers
            possible += [["v1", *rest[1:]], rest[1:]]
        for known in ("/" + "/".join(segments) for segments in possible):
            if known != path and any(known == exact for _, exact in self._exact_routes):
                return known
        return None

    def _record_answer(self, route: Route | None, status: int, call: HttpCall) -> None:
        if route is None:
            path = "other"
        elif route.suffix:
            path = f"{route.path}{{id}}{route.suffix}"
        else:
            path = route.path
        self.context.responses[path, status] += 1
        if call.unknown:
            log.warning(
                "request %s: unknown fields ignored; its Warning header names them", call.id
            )
            log.debug("request %s: %s", call.id, shorten_line(", ".join(call.unknown)))
        if self.context.observers and (route is None or not route.probe):
            record = _make_record(call, path, status)
            for observer in self.context.observers:
                observer(record, call.request)


def _make_record(call: HttpCall, route: str, status: int) -> Answered:
    """Return the record of a request that has just ended."""
    took_s = time.monotonic() - call.began_at_s
    record = Answered(
        time=datetime.fromtimestamp(time.time() - took_s, UTC),
        request_id=call.id,
        method=call.request.method,
        route=route,
        status=status,
        duration_ms=round(1e3 * took_s, 2),
        key=call.caller.name,
        remote=call.request.remote or "",
        error=call.error,
    )
    if (counts := call.counts) is not None:
        record.prompt_tokens = counts.prompt_tokens
        record.completion_tokens = counts.completion_tokens
        record.cached_tokens = counts.cached_tokens
    if call.first_token_at_s is not None:
        record.ttft_ms = round(1e3 * (call.first_token_at_s - call.began_at_s), 2)
    return record
