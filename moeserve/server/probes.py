"""Probes: /livez (the server answers), /readyz and /health (it takes requests now), /startupz; and /version."""

from __future__ import annotations

import msgspec
from aiohttp import web

from moeserve.server.answer import json_answer
from moeserve.server.context import HttpCall
from moeserve.server.protocol import StatusResponse, VersionResponse
from moeserve.version import __version__


async def livez(call: HttpCall) -> web.StreamResponse:
    return _status(call, True)


async def readyz(call: HttpCall) -> web.StreamResponse:
    """503 while loading (with phase and percent), draining, or while the engine is lost or makes no progress."""
    return _status(call, call.context.state == "ready")


async def startupz(call: HttpCall) -> web.StreamResponse:
    """200 from the first moment that the model was ready, whatever came later."""
    return _status(call, call.context.started)


async def version(call: HttpCall) -> web.StreamResponse:
    return json_answer(call, VersionResponse(version=__version__))


def _status(call: HttpCall, good: bool) -> web.Response:
    phase = call.context.phase
    body = StatusResponse(
        status=call.context.state,  # type: ignore[arg-type]  # the front end's words are these
        phase=phase.name,
        percent=phase.percent,
        elapsed_s=round(phase.elapsed_s, 3),
    )
    headers = call.headers() | ({} if good else {"Retry-After": "1"})
    return web.Response(
        body=msgspec.json.encode(body),
        status=200 if good else 503,
        content_type="application/json",
        headers=headers | {"Cache-Control": "no-store"},
    )
