"""POST /v1/admin/...: changes to the engines behind a server that runs. They need a key of --admin-key-file."""

from __future__ import annotations

import time

from aiohttp import web

from moeserve.cluster.fleet import Fleet
from moeserve.errors import Conflict, Forbidden
from moeserve.server.answer import check_unknown, json_answer
from moeserve.server.body import convert, read_json, unknown_fields
from moeserve.server.context import HttpCall
from moeserve.server.protocol import RebalanceResponse, ScaleRequest, ScaleResponse


async def scale(call: HttpCall) -> web.StreamResponse:
    """Serve with `dp` engines from now on; running requests go on. Answers when it is done, or taken back (409)."""
    fleet = _fleet(call)
    raw = await read_json(call.request, call.context.config.max_request_bytes)
    request = convert(raw, ScaleRequest)
    check_unknown(call, unknown_fields(raw, frozenset(ScaleRequest.__struct_fields__)))
    began_s = time.monotonic()
    before = await fleet.scaling.scale(request.dp)
    return json_answer(call, ScaleResponse(dp=request.dp, before=before, took_s=time.monotonic() - began_s))


async def rebalance(call: HttpCall) -> web.StreamResponse:
    """Move experts to where the load of late asks for them, whether or not it pays. Takes no body."""
    fleet = _fleet(call)
    began_s = time.monotonic()
    decision = await fleet.scaling.rebalance()
    assert fleet.experts is not None
    if decision is not None and decision.error:
        raise Conflict(f"placement {decision.version} did not come into force: {decision.error}")
    return json_answer(
        call,
        RebalanceResponse(
            moved=decision is not None,
            version=fleet.experts.placement.version,
            moved_bytes=decision.moved_bytes if decision is not None else 0,
            took_s=time.monotonic() - began_s,
            why=fleet.experts.why,
        ),
    )


def check_admin(call: HttpCall) -> None:
    """Raises Forbidden without an administrator's key."""
    if not call.context.auth.has_admins:
        raise Forbidden("administrative routes are off; start the server with --admin-key-file")
    if not call.caller.is_admin:
        raise Forbidden("this needs an administrator's key")


def _fleet(call: HttpCall) -> Fleet:
    """Raises Conflict where there is one engine that cannot become more."""
    check_admin(call)
    front, _ = call.context.serving()
    if front.fleet is None:
        raise Conflict("this server was started with one engine of one process; start it with --dp or --tp above 1")
    return front.fleet
