"""Every route of the server, in one table: who may call it, what answers it, and its shapes for /openapi.json."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from moeserve.server import (
    aborting,
    admin,
    chat,
    completions,
    experts_protocol,
    models,
    openapi,
    probes,
    protocol,
    tokenize,
    trace,
)
from moeserve.server.context import HttpCall

Handler = Callable[[HttpCall], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """A path that ends in "/" takes the rest of the URL as its argument. probe: needs no key."""

    method: str
    path: str
    handler: Handler
    takes: type[Any] | None = None
    gives: type[Any] | None = None
    probe: bool = False
    streams: bool = False
    query: tuple[tuple[str, str], ...] = ()  # parameters of the URL: name, JSON type


async def _openapi(call: HttpCall) -> web.StreamResponse:
    """This document."""
    body = openapi.document(ROUTES)
    return web.Response(body=body, content_type="application/json", headers=call.headers())


async def _experts(call: HttpCall) -> web.StreamResponse:
    """Where experts are, how busy, and how the engines fare; `stream=true`: again and again, each `interval_s`."""
    from moeserve.server.experts import experts  # here, because of numpy

    return await experts(call)


async def _metrics(call: HttpCall) -> web.StreamResponse:
    """Numbers for Prometheus."""
    from moeserve.server.metrics import metrics  # here, because its library would delay the start

    return await metrics(call)


ROUTES = (
    Route(
        "POST", "/v1/chat/completions", chat.chat_completions, protocol.ChatRequest, protocol.ChatResponse, streams=True
    ),
    Route("POST", "/v1/chat/completions/render", chat.render, protocol.ChatRequest, protocol.RenderResponse),
    Route(
        "POST",
        "/v1/completions",
        completions.completions,
        protocol.CompletionRequest,
        protocol.CompletionResponse,
        streams=True,
    ),
    Route("GET", "/v1/models", models.list_models, None, protocol.ModelList),
    Route("GET", "/v1/models/", models.retrieve_model, None, protocol.ModelCard),
    Route("DELETE", "/v1/requests/", aborting.abort_request, None, protocol.AbortResponse),
    Route("POST", "/v1/admin/scale", admin.scale, protocol.ScaleRequest, protocol.ScaleResponse),
    Route("POST", "/v1/admin/rebalance", admin.rebalance, None, protocol.RebalanceResponse),
    Route("POST", "/v1/admin/trace", trace.take_trace, None, trace.TraceFile, query=(("timeout_s", "number"),)),
    Route(
        "GET",
        "/v1/experts",
        _experts,
        None,
        experts_protocol.ExpertsResponse,
        streams=True,
        query=(("stream", "boolean"), ("interval_s", "number")),
    ),
    Route("POST", "/tokenize", tokenize.tokenize, protocol.TokenizeRequest, protocol.TokenizeResponse),
    Route("POST", "/detokenize", tokenize.detokenize, protocol.DetokenizeRequest, protocol.DetokenizeResponse),
    Route("GET", "/health", probes.readyz, None, protocol.StatusResponse, probe=True),
    Route("GET", "/livez", probes.livez, None, protocol.StatusResponse, probe=True),
    Route("GET", "/readyz", probes.readyz, None, protocol.StatusResponse, probe=True),
    Route("GET", "/startupz", probes.startupz, None, protocol.StatusResponse, probe=True),
    Route("GET", "/version", probes.version, None, protocol.VersionResponse),
    Route("GET", "/metrics", _metrics),
    Route("GET", "/openapi.json", _openapi),
)
