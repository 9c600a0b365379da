"""Requests that the server makes itself, such as the lines of batches: through the handlers,
without a connection.
"""

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

LOW_PRIORITY = 1_000_000  # behind all others: smaller ones go first


class InsideCall(HttpCall):
    """A request that the server makes itself; the batch that it belongs to has a deadline."""

    has_deadline = False


async def ask(
    app: App, connection: RequestHandler, path: str, body: bytes, owner: str
) -> web.Response:
    """Returns the answer to POST `path`, good or bad, which the key that is `owner` in the file
    store pays for.

    connection: any one, which is not used.
    """
    caller = Caller(
        owner, rates=app.context.auth.owner(owner, owner_key).rates, priority=LOW_PRIORITY
    )
    call = InsideCall(app.context, _request(connection, path, body), uuid.uuid4().hex, caller)
    try:
        response = await app.answer(call)
        assert isinstance(response, web.Response)
        return response
    except Exception as error:
        return error_response(as_request_error(error, call.id), call.id)


def _request(connection: RequestHandler, path: str, body: bytes) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    headers = CIMultiDictProxy(
        CIMultiDict({"Content-Type": "application/json", "Content-Length": str(len(body))})
    )
    message = RawRequestMessage(
        "POST", path, HttpVersion11, headers, (), False, None, False, False, URL(path)
    )
    payload = StreamReader(connection, limit=2**16, loop=loop)
    payload.feed_data(body)
    payload.feed_eof()
    task = asyncio.current_task()
    assert task is not None
    return web.BaseRequest(message, payload, connection, StreamWriter(connection, loop), task, loop)
