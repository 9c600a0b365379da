"""Changes to a running server. POST /v1/admin/... needs a key of --admin-key-file.

A request is aborted; engines are added or removed, or get other experts; a machine is drained.
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

Body = TypeVar("Body", bound=Struct)


class ScaleRequest(Struct, kw_only=True):
    """The new number of engines."""

    dp: Annotated[int, Meta(ge=1, le=1024, description="number of data-parallel engines")]


class DrainRequest(Struct, kw_only=True):
    """The machine to take out of service."""

    machine: Annotated[int, Meta(ge=0, description="its --node-rank")]


async def abort_request(call: HttpCall) -> web.StreamResponse:
    """Abort a running request by its X-Request-Id, with or without the prefix chatcmpl- or cmpl-.

    The request's own client gets the answer so far, with finish_reason abort.
    """
    request_id = call.tail.removeprefix("chatcmpl-").removeprefix("cmpl-")
    all_running = call.context.running.get(request_id)
    if not all_running:
        raise NotFound(f"no request {shorten(request_id)} is running")
    own = [
        running
        for running in all_running
        if call.caller.is_admin or running.owner == call.caller.owner
    ]
    if not own:
        raise Forbidden("that request belongs to another key")
    num_aborted = 0
    for running in own:
        num_aborted += await running.abort()
    return call.answer(Aborted(id=request_id, aborted=num_aborted))


async def scale(call: HttpCall) -> web.StreamResponse:
    """Change the number of engines to `dp`. Running requests continue.

    Answers when the change is complete, or undone (409).
    """
    return await _change_engines(
        call, ScaleRequest, lambda scaling, request: scaling.scale(request.dp)
    )


async def drain(call: HttpCall) -> web.StreamResponse:
    """Take a machine out of service.

    Its experts and requests move to other machines, then its process ends. It may join again.
    """
    return await _change_engines(
        call, DrainRequest, lambda scaling, request: scaling.drain(request.machine)
    )


async def _change_engines(
    call: HttpCall, shape: type[Body], change: Callable[[Scaling, Body], Awaitable[int]]
) -> web.StreamResponse:
    """Read the body, change the number of engines, and answer.

    change: makes the change, and returns the number of engines before it.
    """
    fleet = _fleet(call)
    began_s = time.monotonic()
    before = await change(fleet.scaling, await call.read(shape))
    return call.answer(ScaleResponse(dp=fleet.dp, before=before, took_s=time.monotonic() - began_s))


async def rebalance(call: HttpCall) -> web.StreamResponse:
    """Place experts for the recent load, whether or not this pays. Takes no body."""
    fleet = _fleet(call)
    began_s = time.monotonic()
    decision = await fleet.scaling.rebalance()
    assert fleet.experts is not None
    if decision is not None and decision.error:
        raise Conflict(f"placement {decision.version} did not become active: {decision.error}")
    answer = RebalanceResponse(
        moved=decision is not None,
        version=fleet.experts.rebalancer.current.version,
        moved_bytes=decision.moved_bytes if decision is not None else 0,
        took_s=time.monotonic() - began_s,
        why=fleet.experts.rebalancer.why,
    )
    return call.answer(answer)


def check_admin(call: HttpCall) -> None:
    """Raise Forbidden without an administrator's key."""
    if not call.context.auth.has_admins:
        raise Forbidden("administrative routes are off; start the server with --admin-key-file")
    if not call.caller.is_admin:
        raise Forbidden("this needs an administrator's key")


def _fleet(call: HttpCall) -> Fleet:
    """Return the fleet. Raise Forbidden, and Conflict if the server has a fixed single engine."""
    check_admin(call)
    front, _ = call.context.serving()
    if front.fleet is None:
        what = "this server has one engine of one process; start it with --dp or --tp above 1"
        raise Conflict(what)
    return front.fleet
