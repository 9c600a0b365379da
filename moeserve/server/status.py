"""The handlers that describe the server: probes, version and models."""

from __future__ import annotations

from aiohttp import web

from moeserve.errors import ModelNotFound
from moeserve.protocol import ModelCard, ModelList, StatusResponse, VersionResponse
from moeserve.server.context import HttpCall
from moeserve.version import __version__


async def livez(call: HttpCall) -> web.StreamResponse:
    """Answer 200 while the server lives."""
    return _status(call, True)


async def readyz(call: HttpCall) -> web.StreamResponse:
    """Answer 200 while requests are taken; 503 while loading, draining, lost or stalled."""
    return _status(call, call.context.state == "ready")


async def startupz(call: HttpCall) -> web.StreamResponse:
    """Answer 200 from the first moment that the model was ready, whatever came later."""
    return _status(call, call.context.started)


def _status(call: HttpCall, good: bool) -> web.Response:
    phase = call.context.phase
    body = StatusResponse(
        status=call.context.state,  # type: ignore[arg-type]  # the front end's states are these
        phase=phase.name,
        percent=phase.percent,
        elapsed_s=round(phase.elapsed_s, 3),
    )
    headers = {"Cache-Control": "no-store"} | ({} if good else {"Retry-After": "1"})
    return call.answer(body, 200 if good else 503, **headers)


async def version(call: HttpCall) -> web.StreamResponse:
    """Return the server's version."""
    return call.answer(VersionResponse(version=__version__))


async def list_models(call: HttpCall) -> web.StreamResponse:
    """List the one model that is served."""
    return call.answer(ModelList(data=[_card(call)]))


async def retrieve_model(call: HttpCall) -> web.StreamResponse:
    """Describe a model; its id may contain slashes."""
    if not call.tail:
        call.context.serving()
        raise ModelNotFound("no model is named in the path")
    return call.answer(_card(call, call.tail))


def _card(call: HttpCall, model: str | None = None) -> ModelCard:
    front, ready = call.context.serving(model)
    name = front.model_name
    return ModelCard(id=name, created=call.context.created, root=name, max_model_len=ready.max_model_len)
