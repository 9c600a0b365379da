"""The handlers that describe the server: probes, version, models, metrics, experts."""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from typing import Annotated

import msgspec
from aiohttp import web

from moeserve.errors import ModelNotFound, NotFound
from moeserve.frontend.receipt_signer import NO_KEY
from moeserve.protocol import (
    ModelCard,
    ModelList,
    ModelMeta,
    ReceiptKey,
    StatusResponse,
    VersionResponse,
)
from moeserve.server.call import HttpCall
from moeserve.server.http import DONE, SseStream
from moeserve.version import __version__


async def livez(call: HttpCall) -> web.StreamResponse:
    """Answer 200 while the server lives."""
    return _status(call, True)


async def readyz(call: HttpCall) -> web.StreamResponse:
    """Answer 200 while requests are served; 503 while loading, draining, lost or stalled."""
    return _status(call, call.context.state == "ready")


async def startupz(call: HttpCall) -> web.StreamResponse:
    """Answer 200 once the model has been ready, even if it is not ready any more."""
    return _status(call, call.context.started)


def _status(call: HttpCall, good: bool) -> web.Response:
    phase = call.context.phase
    front = call.context.front
    body = StatusResponse(
        status=call.context.state,  # type: ignore[arg-type]  # the front end's states are these
        phase=phase.name,
        percent=phase.percent,
        elapsed_s=round(phase.elapsed_s, 3),
        notes=front.ready.notes if front is not None and front.ready is not None else (),
    )
    headers = {"Cache-Control": "no-store"} | ({} if good else {"Retry-After": "1"})
    return call.answer(body, 200 if good else 503, **headers)


async def version(call: HttpCall) -> web.StreamResponse:
    """Return the server's version."""
    return call.answer(VersionResponse(version=__version__))


async def receipt_key(call: HttpCall) -> web.StreamResponse:
    """Return the public key of receipts, and the weights and numerics in them."""
    front, ready = call.context.serving()
    signer = front.receipt_signer
    if signer is None or signer.key is None:
        raise NotFound(NO_KEY, code="no_receipts")
    weights = await signer.weights(ready)
    return call.answer(
        ReceiptKey(public_key=signer.key.public_key, weights=weights, numerics=ready.numerics)
    )


async def list_models(call: HttpCall) -> web.StreamResponse:
    """List the served model under each of its names."""
    front, _ = call.context.serving()
    return call.answer(ModelList(data=[_card(call, name) for name in front.model_names]))


async def retrieve_model(call: HttpCall) -> web.StreamResponse:
    """Describe a model; its id may contain slashes."""
    if not call.tail:
        call.context.serving()
        raise ModelNotFound("the path has no model name")
    return call.answer(_card(call, call.tail))


def _card(call: HttpCall, name: str) -> ModelCard:
    front, ready = call.context.serving(name)
    created = call.context.created
    return ModelCard(
        id=name,
        created=created,
        root=front.model_name,
        max_model_len=ready.max_model_len,
        context_length=ready.max_model_len,
        max_input_tokens=ready.max_model_len,
        meta=ModelMeta(n_ctx_train=ready.max_model_len, n_ctx=ready.max_model_len),
        display_name=name,
        created_at=f"{datetime.fromtimestamp(created, UTC):%Y-%m-%dT%H:%M:%SZ}",
    )


async def metrics(call: HttpCall) -> web.StreamResponse:
    """Return metrics in Prometheus's text format."""
    # Imported at the first scrape, in a thread, because its library would delay the start.
    module = await asyncio.to_thread(import_module, "moeserve.server.metrics")
    body, media_type = module.exposition(call.context)
    return web.Response(body=body, headers=call.headers() | {"Content-Type": media_type})


class WatchQuery(msgspec.Struct):
    """The URL's parameters of the experts' state."""

    stream: Annotated[
        bool | msgspec.UnsetType,
        msgspec.Meta(
            description="send the state every interval_s seconds, until the client disconnects or "
            "the server drains"
        ),
    ] = msgspec.UNSET
    interval_s: Annotated[float, msgspec.Meta(ge=0.1, le=60)] = 1.0


async def experts(call: HttpCall) -> web.StreamResponse:
    """Return the placement and load of experts, and the state of the engines. With `stream=true`,
    send them every `interval_s` seconds.
    """
    from moeserve.server.experts import expert_status  # imports numpy

    front, _ = call.context.serving()
    query = call.query(WatchQuery)
    experts_now = expert_status(front)
    by_header = query.stream is msgspec.UNSET and "text/event-stream" in call.request.headers.get(
        "Accept", ""
    )
    if not query.stream and not by_header:
        return call.answer(experts_now)
    stream = SseStream(call.request, call.headers())
    stopping = asyncio.ensure_future(front.stopping())
    call.context.streams.add(stream)
    try:
        await stream.start()
        while not stopping.done():
            await stream.send(b"data: " + msgspec.json.encode(expert_status(front)) + b"\n\n")
            await asyncio.wait([stopping], timeout=query.interval_s)
        await stream.send(DONE)
    finally:
        stopping.cancel()
        call.context.streams.discard(stream)
        with suppress(asyncio.CancelledError):
            await stopping
    return await stream.finish()
