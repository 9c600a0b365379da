"""One request from its head to its answer: id, route, key, handler, and one shape for whatever goes wrong."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from urllib.parse import unquote

from aiohttp import web

from moeserve.errors import RequestError
from moeserve.server.auth import OPEN
from moeserve.server.context import Context, HttpCall
from moeserve.server.errors import (
    HeadersTooLarge,
    MethodNotAllowed,
    as_request_error,
    error_response,
    no_such_path,
    shorten_line,
)
from moeserve.server.routes import ROUTES, Route

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16 * 1024
CLIENT_GONE = 499  # in the log and in the metrics only: nobody is there to read it
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class App:
    """Called by the HTTP server with each request; always answers."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._exact = {(route.method, route.path): route for route in ROUTES if not route.path.endswith("/")}
        self._prefixes = [route for route in ROUTES if route.path.endswith("/")]

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        began = time.monotonic()
        call = HttpCall(self.context, request, request_id_of(request), OPEN)
        route: Route | None = None
        try:
            _check_headers(request)
            route, call.tail = self._match(request)
            if route is None or not route.probe:
                call.caller = self.context.auth.check(request.headers)
            if route is None:
                raise self._no_route(request)
            response = await route.handler(call)
        except (ConnectionError, asyncio.CancelledError):
            self._count(route, CLIENT_GONE, call, began)
            raise
        except Exception as error:
            response = error_response(as_request_error(error, call.id), call.id)
        self._count(route, response.status, call, began)
        return response

    def _match(self, request: web.BaseRequest) -> tuple[Route | None, str]:
        path = request.raw_path.partition("?")[0]
        method = "GET" if request.method == "HEAD" else request.method
        route = self._exact.get((method, path))
        if route is not None:
            return route, ""
        for route in self._prefixes:
            if path.startswith(route.path) and route.method == method:
                return route, unquote(path[len(route.path) :], errors="replace")
        return None, ""

    def _no_route(self, request: web.BaseRequest) -> RequestError:
        path = request.raw_path.partition("?")[0]
        methods = [method for method, known in self._exact if known == path]
        methods += [route.method for route in self._prefixes if path.startswith(route.path)]
        if not methods:
            return no_such_path(path)
        return MethodNotAllowed(f"this path takes {', '.join(methods)} only", methods)

    def _count(self, route: Route | None, status: int, call: HttpCall, began: float) -> None:
        path = route.path if route else "other"
        self.context.responses[path, status] += 1
        if call.unknown:
            log.warning("request %s: unknown fields ignored: %s", call.id, shorten_line(", ".join(call.unknown)))
        if self.context.config.log_requests and (route is None or not route.probe):
            tokens = (
                "" if call.counts is None else f", {call.counts.prompt_tokens}+{call.counts.completion_tokens} tokens"
            )
            log.info("request %s %s %d, %.1f ms%s", call.id, path, status, 1e3 * (time.monotonic() - began), tokens)


def request_id_of(request: web.BaseRequest) -> str:
    """The client's own id if it is a harmless one, otherwise a new one."""
    given = request.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _check_headers(request: web.BaseRequest) -> None:
    size = sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
    if size > MAX_HEADER_BYTES:
        raise HeadersTooLarge(f"the headers have {size} bytes; at most {MAX_HEADER_BYTES} are allowed")
