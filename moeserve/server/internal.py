"""Internal requests, such as the lines of batches. They use the handlers without a connection."""

import asyncio
import uuid

from aiohttp import StreamReader, web
from aiohttp.http import HttpVersion11, RawRequestMessage, StreamWriter
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from moeserve.server.app import App
from moeserve.server.auth import Caller
from moeserve.server.call import HttpCall
from moeserve.server.errors import as_request_error, error_response
from moeserve.server.file_store import owner_key

LOW_PRIORITY = 1_000_000  # after all others: smaller numbers go first


class InternalCall(HttpCall):
    """A request that the server makes itself. Its batch has a deadline for all lines."""

    has_deadline = False


async def ask(
    app: App, connection: RequestHandler, path: str, body: bytes, owner: str
) -> web.Response:
    """Send POST `path` to the app, and return the answer, also if it is an error.

    Args:
        app: The app.
        connection: A connection without a socket, which aiohttp's objects refer to.
        path: The route.
        body: The JSON body.
        owner: The owner in the file store. The request belongs to the owner's API key: it counts
            against the key's rate limits, and shares its prefix cache.
    """
    call = InternalCall(
        app.context, _request(connection, path, body), uuid.uuid4().hex, _caller(app, owner)
    )
    try:
        response = await app.answer(call)
        assert isinstance(response, web.Response)
        return response
    except Exception as error:
        return error_response(as_request_error(error, call.id), call.id)


def _caller(app: App, owner: str) -> Caller:
    known = app.context.auth.find_caller(owner, owner_key)
    if known is None:  # the key was removed: its batches share prefixes with nobody
        return Caller(owner, priority=LOW_PRIORITY)
    return Caller(
        known.owner, name=known.name, rate_limits=known.rate_limits, priority=LOW_PRIORITY
    )


def _request(connection: RequestHandler, path: str, body: bytes) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    headers = CIMultiDictProxy(
        CIMultiDict({"Content-Type": "application/json", "Content-Length": str(len(body))})
    )
    message = RawRequestMessage(
        method="POST",
        path=path,
        version=HttpVersion11,
        headers=headers,
        raw_headers=(),
        should_close=False,
        compression=None,
        upgrade=False,
        chunked=False,
        url=URL(path),
    )
    payload = StreamReader(connection, limit=2**16, loop=loop)
    payload.feed_data(body)
    payload.feed_eof()
    task = asyncio.current_task()
    assert task is not None
    writer = StreamWriter(connection, loop)
    return web.BaseRequest(message, payload, connection, writer, task=task, loop=loop)
