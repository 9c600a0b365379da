"""DELETE /v1/requests/{id}: ends a running request; its own reader gets what came so far and finish_reason abort."""

from __future__ import annotations

from aiohttp import web

from moeserve.errors import Forbidden, NotFound
from moeserve.server.answer import json_answer
from moeserve.server.context import HttpCall
from moeserve.server.errors import shorten
from moeserve.server.protocol import AbortResponse


async def abort_request(call: HttpCall) -> web.StreamResponse:
    """The id is the one in X-Request-Id, with or without chatcmpl- or cmpl- before it."""
    request_id = call.tail.removeprefix("chatcmpl-").removeprefix("cmpl-")
    found = call.context.running.get(request_id)
    if not found:
        raise NotFound(f"no request {shorten(request_id)} is running")
    mine = [r for r in found if call.caller.is_admin or r.owner == call.caller.owner]
    if not mine:
        raise Forbidden("that request belongs to another key")
    aborted = 0
    for running in mine:
        aborted += await running.abort()
    return json_answer(call, AbortResponse(id=request_id, aborted=aborted))
