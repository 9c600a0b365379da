"""The route table, and one request from its head to its answer: id, route, key, handler, and one shape of errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec
from aiohttp import web

from moeserve import protocol
from moeserve.errors import RequestError
from moeserve.server import admin, chat, completions, openapi, requests, status, tokenize, trace
from moeserve.server.context import OPEN, Context, HttpCall
from moeserve.server.errors import MethodNotAllowed, as_request_error, error_response, no_such_path, shorten_line
from moeserve.server.http import check_headers, request_id_of

log = logging.getLogger(__name__)

CLIENT_GONE = 499  # in the log and in the metrics only, because the reader has left


@dataclass(frozen=True, slots=True)
class Route:
    """One operation. A path that ends in "/" takes the rest of the URL as its argument.

    takes, gives: the structs of the body and of the answer; event: the struct of a streamed answer's events. probe:
    needs no key. query: parameters of the URL as (name, JSON type).
    """

    method: str
    path: str
    handler: Callable[[HttpCall], Awaitable[web.StreamResponse]]
    takes: type[msgspec.Struct] | None = None
    gives: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    probe: bool = False
    query: tuple[tuple[str, str], ...] = ()


async def _openapi(call: HttpCall) -> web.StreamResponse:
    """Return this document."""
    return web.Response(body=openapi.document(ROUTES), content_type="application/json", headers=call.headers())


async def _experts(call: HttpCall) -> web.StreamResponse:
    """Show where experts are, how busy, and how the engines fare; `stream=true`: again each `interval_s`."""
    from moeserve.server.experts import experts  # here, because of numpy

    return await experts(call)


async def _metrics(call: HttpCall) -> web.StreamResponse:
    """Return numbers for Prometheus."""
    from moeserve.server.metrics import metrics  # here, because its library would delay the start

    return await metrics(call)


_CHAT = "/v1/chat/completions"
_WATCH = (("stream", "boolean"), ("interval_s", "number"))
_TRACE = (("timeout_s", "number"),)
_TOKENIZE = tokenize.tokenize, requests.TokenizeRequest, protocol.Tokenized
_DETOKENIZE = tokenize.detokenize, requests.DetokenizeRequest, protocol.Detokenized
ROUTES = (
    Route(
        "POST",
        _CHAT,
        chat.chat_completions,
        requests.ChatRequest,
        protocol.ChatCompletion,
        event=protocol.ChatCompletionChunk,
    ),
    Route("POST", f"{_CHAT}/render", chat.render, requests.ChatRequest, protocol.RenderedPrompt),
    Route(
        "POST",
        "/v1/completions",
        completions.completions,
        requests.CompletionRequest,
        protocol.Completion,
        event=protocol.Completion,
    ),
    Route("GET", "/v1/models", status.list_models, None, protocol.ModelList),
    Route("GET", "/v1/models/", status.retrieve_model, None, protocol.ModelCard),
    Route("DELETE", "/v1/requests/", admin.abort_request, None, protocol.Aborted),
    Route("POST", "/v1/admin/scale", admin.scale, requests.ScaleRequest, protocol.ScaleResponse),
    Route("POST", "/v1/admin/rebalance", admin.rebalance, None, protocol.RebalanceResponse),
    Route("POST", "/v1/admin/trace", trace.take_trace, None, trace.TraceFile, query=_TRACE),
    Route("GET", "/v1/experts", _experts, None, protocol.ExpertStatus, event=protocol.ExpertStatus, query=_WATCH),
    Route("POST", "/tokenize", *_TOKENIZE),
    Route("POST", "/v1/tokenize", *_TOKENIZE),
    Route("POST", "/detokenize", *_DETOKENIZE),
    Route("POST", "/v1/detokenize", *_DETOKENIZE),
    Route("GET", "/livez", status.livez, None, protocol.StatusResponse, probe=True),
    Route("GET", "/ping", status.livez, None, protocol.StatusResponse, probe=True),
    Route("GET", "/readyz", status.readyz, None, protocol.StatusResponse, probe=True),
    Route("GET", "/health", status.readyz, None, protocol.StatusResponse, probe=True),
    Route("GET", "/startupz", status.startupz, None, protocol.StatusResponse, probe=True),
    Route("GET", "/version", status.version, None, protocol.VersionResponse),
    Route("GET", "/metrics", _metrics),
    Route("GET", "/openapi.json", _openapi),
)


class App:
    """The handler of all HTTP requests. It always answers."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._exact = {(route.method, route.path): route for route in ROUTES if not route.path.endswith("/")}
        self._prefixes = [route for route in ROUTES if route.path.endswith("/")]

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers one request: by its route, or with an error of the API's shape."""
        began = time.monotonic()
        call = HttpCall(self.context, request, request_id_of(request), OPEN)
        route: Route | None = None
        try:
            check_headers(request)
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
