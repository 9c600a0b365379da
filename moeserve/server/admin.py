"""Changes to a server that runs: a request is aborted; engines are added, removed, or given other
experts; a machine is drained.

POST /v1/admin/... needs a key of --admin-key-file.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from aiohttp import web
from msgspec import Meta, Struct

from moeserve.cluster.fleet import Fleet
from moeserve.cluster.scaling import Scaling
from moeserve.errors import Conflict, Forbidden, NotFound
from moeserve.protocol import Aborted, RebalanceResponse, ScaleResponse
from moeserve.server.call import HttpCall
from moeserve.server.errors import shorten

Asked = TypeVar("Asked", bound=Struct)


class ScaleRequest(Struct, kw_only=True):
    """dp: engines that share the requests."""

    dp: Annotated[int, Meta(ge=1, le=1024)]


class DrainRequest(Struct, kw_only=True):
    """machine: the --node-rank of the machine to take out of service."""

    machine: Annotated[int, Meta(ge=0)]


async def abort_request(call: HttpCall) -> web.StreamResponse:
    """End a running request by its X-Request-Id, with or without chatcmpl- or cmpl- before it.

    The request's own reader gets what came so far and finish_reason abort.
    """
    request_id = call.tail.removeprefix("chatcmpl-").removeprefix("cmpl-")
    found = call.context.running.get(request_id)
    if not found:
        raise NotFound(f"no request {shorten(request_id)} is running")
    mine = [
        running for running in found if call.caller.is_admin or running.owner == call.caller.owner
    ]
    if not mine:
        raise Forbidden("that request belongs to another key")
    aborted = 0
    for running in mine:
        aborted += await running.abort()
    return call.answer(Aborted(id=request_id, aborted=aborted))


async def scale(call: HttpCall) -> web.StreamResponse:
    """Serve with `dp` engines from now on; running requests go on. Answers when it is done, or
    taken back (409).
    """
    return await _changed(call, ScaleRequest, lambda scaling, asked: scaling.scale(asked.dp))


async def drain(call: HttpCall) -> web.StreamResponse:
    """Take a machine out of service: its experts and requests move, then its agent ends. It may
    join again.
    """
    return await _changed(call, DrainRequest, lambda scaling, asked: scaling.drain(asked.machine))


async def _changed(
    call: HttpCall, shape: type[Asked], change: Callable[[Scaling, Asked], Awaitable[int]]
) -> web.StreamResponse:
    fleet = _fleet(call)
    began_s = time.monotonic()
    before = await change(fleet.scaling, await call.read(shape))
    return call.answer(ScaleResponse(dp=fleet.dp, before=before, took_s=time.monotonic() - began_s))


async def rebalance(call: HttpCall) -> web.StreamResponse:
    """Move experts to where the recent load asks for them, whether or not it pays. Takes no body."""
    fleet = _fleet(call)
    began_s = time.monotonic()
    decision = await fleet.scaling.rebalance()
    assert fleet.experts is not None
    if decision is not None and decision.error:
        raise Conflict(f"placement {decision.version} did not come into force: {decision.error}")
    answer = RebalanceResponse(
        moved=decision is not None,
        version=fleet.experts.rebalancer.current.version,
        moved_bytes=decision.moved_bytes if decision is not None else 0,
        took_s=time.monotonic() - began_s,
        why=fleet.experts.rebalancer.why,
    )
    return call.answer(answer)


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
        raise Conflict(
            "this server was started with one engine of one process; start it with --dp or --tp above 1"
        )
    return front.fleet
