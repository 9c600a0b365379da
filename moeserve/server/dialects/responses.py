"""/v1/responses, OpenAI's newer API for chats: create, retrieve, cancel and delete responses, and
list their input.
"""

import re
import uuid
from contextlib import AbstractContextManager
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from moeserve.errors import Conflict, InvalidRequest, NotFound
from moeserve.server.answer import answer_chat
from moeserve.server.call import HttpCall
from moeserve.server.conversation import Conversation, prompt_of
from moeserve.server.dialects.responses_answer import (
    InputTokens,
    ItemList,
    Response,
    ResponseWriter,
)
from moeserve.server.dialects.responses_request import ResponsesRequest
from moeserve.server.dialects.responses_tools import ResponseTools
from moeserve.server.errors import shorten
from moeserve.server.file_objects import Deleted, page
from moeserve.server.requests import fields_named
from moeserve.server.response_store import Stored
from moeserve.server.terms import read_generation_request

# Chat field -> its name in this dialect.
_NAMES = {
    "messages[]": "input",
    "messages": "input",
    "prompt": "input",
    "tools[].function": "tools[]",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
}
_naming = partial(fields_named, _NAMES)

Items = list[dict[str, Any]]
# The id of an output item, which contains the key of its response.
_OUTPUT_ID = re.compile(r"(?:msg|rs|fc|ctc)_([0-9a-f]{32})\d+")


async def create_response(call: HttpCall) -> web.StreamResponse:
    """Answer an input, whole or as a stream of typed events."""
    request, terms = await read_generation_request(call, ResponsesRequest)
    _resolve_references(call, request)
    history = _history(call, request)
    tools = ResponseTools(request.tools or ())
    chat_request = request.chat(history, tools)
    key = uuid.uuid4().hex
    store = call.context.store
    owner = call.caller.owner

    def store_response(response: Response) -> None:
        if response.store:
            items = [*history, *stored_items(request, key)]
            store.put(owner, response.id, Stored(_encode(response), _encode(items)))

    def make_writer(chat: Conversation) -> ResponseWriter:
        return ResponseWriter(
            chat,
            request=request,
            tools=tools,
            key=key,
            stores=store.max_count > 0,
            on_end=store_response,
        )

    def registered(running: ResponseWriter) -> AbstractContextManager[None]:
        return store.running(owner, running.response.id, running)

    return await answer_chat(
        terms, chat_request, make_writer, naming=_naming, while_running=registered
    )


_encode = msgspec.json.Encoder().encode


async def count_input_tokens(call: HttpCall) -> web.StreamResponse:
    """Count the tokens of an input."""
    request = await call.read(ResponsesRequest)
    with _naming():
        _resolve_references(call, request)
        chat = request.chat(_history(call, request), ResponseTools(request.tools or ()))
        _, prompt = await prompt_of(call, chat)
    return call.answer(InputTokens(input_tokens=len(prompt)))


async def compact_response(call: HttpCall) -> web.StreamResponse:
    """Refuse to compact a conversation."""
    raise NotFound("compacting conversations is not supported; shorten the input yourself")


class RetrieveQuery(Struct):
    """stream: only false is supported, since stored responses are returned as a whole."""

    stream: Literal["false"] = "false"


async def retrieve_response(call: HttpCall) -> web.StreamResponse:
    """Return a stored response."""
    call.query(RetrieveQuery)
    stored = call.context.store.get(call.caller.owner, call.tail)
    return web.Response(
        body=stored.response, content_type="application/json", headers=call.headers()
    )


async def delete_response(call: HttpCall) -> web.StreamResponse:
    """Delete a stored response."""
    call.context.store.delete(call.caller.owner, call.tail)
    return call.answer(Deleted(id=call.tail, object="response"))


async def cancel_response(call: HttpCall) -> web.StreamResponse:
    """Cancel a running response. Its own client gets the output so far."""
    store = call.context.store
    owner = call.caller.owner
    running = store.find_running(owner, call.tail)
    if running is None:
        store.get(owner, call.tail)
        raise Conflict("the response has already ended: only running responses can be cancelled")
    return call.answer(await running.cancel())


class ItemsQuery(Struct):
    """A page: up to `limit` items in this order, after the item `after`."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


async def list_input_items(call: HttpCall) -> web.StreamResponse:
    """List the input items of a stored response, the latest first."""
    query = call.query(ItemsQuery)
    stored = call.context.store.get(call.caller.owner, call.tail)
    items: Items = msgspec.json.decode(stored.items)
    if query.order == "desc":
        items.reverse()
    return call.answer(ItemList(**page(items, query.after, query.limit, itemgetter("id"))))


def _history(call: HttpCall, request: ResponsesRequest) -> Items:
    """Return the items of the previous responses.

    Raises InvalidRequest if they are not stored.
    """
    previous = request.previous_response_id
    if previous is None:
        return []
    try:
        stored = call.context.store.get(call.caller.owner, previous)
    except NotFound as error:
        raise InvalidRequest(
            f"previous_response_id: {error.message}",
            param="previous_response_id",
            code="previous_response_not_found",
        ) from error
    output: Items = msgspec.json.decode(stored.response)["output"]
    items: Items = msgspec.json.decode(stored.items)
    return items + output


def _resolve_references(call: HttpCall, request: ResponsesRequest) -> None:
    """Replace references in the input by the output items of stored responses.

    Raises InvalidRequest if one is not stored.
    """
    if isinstance(request.input, str):
        return
    outputs: dict[str, Items] = {}  # by response, so that each is decoded once
    for i, item in enumerate(request.input):
        if item.get("type") == "item_reference":
            request.input[i] = _output_item(call, str(item.get("id")), outputs, f"input[{i}]")


def _output_item(
    call: HttpCall, item_id: str, outputs: dict[str, Items], where: str
) -> dict[str, Any]:
    why = "only items of responses' output can be referred to"
    if (match := _OUTPUT_ID.fullmatch(item_id)) is not None:
        response_id = f"resp_{match[1]}"
        try:
            if response_id not in outputs:
                outputs[response_id] = _stored_output(call, response_id)
        except NotFound as error:
            why = error.message
        else:
            for item in outputs[response_id]:
                if item["id"] == item_id:
                    return item
    raise InvalidRequest(
        f"{where}: there is no item {shorten(item_id)!r}: {why}. Send whole items in place of "
        "references (most clients do with store: false)",
        param=where,
        code="item_not_found",
    )


def _stored_output(call: HttpCall, response_id: str) -> Items:
    """Return the output items of a stored response. Raises NotFound."""
    stored = call.context.store.get(call.caller.owner, response_id)
    output: Items = msgspec.json.decode(stored.response)["output"]
    return output


def stored_items(request: ResponsesRequest, key: str) -> Items:
    """Return the input items in the form in which they are listed: with ids, and texts as parts."""
    listed = []
    for i, given in enumerate(request.items()):
        item = {"type": "message", "id": f"item_{key}{i}"} | given
        if item["type"] == "message" and isinstance(item["content"], str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
        listed.append({"status": "completed"} | item)
    return listed
