"""/v1/responses, OpenAI's newer API for chats: create, retrieve, cancel, delete, and the input of a response."""

import time
import uuid
from operator import itemgetter
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from moeserve.errors import Conflict, InvalidRequest, NotFound, RequestError
from moeserve.frontend.generation import Delta
from moeserve.protocol import CachedTokens, TokenLogprob
from moeserve.server.answer import Counts, encode, stream_answer
from moeserve.server.app import HttpCall
from moeserve.server.conversation import Conversation, conversation, prompt_of
from moeserve.server.errors import error_message
from moeserve.server.events import EventFrames
from moeserve.server.file_objects import Deleted, page
from moeserve.server.items import fields_named
from moeserve.server.logprobs import LogprobFormat
from moeserve.server.response_store import Stored
from moeserve.server.responses_events import (
    IncompleteDetails,
    InputTokens,
    ItemList,
    OutputTokensDetails,
    Response,
    ResponseEvent,
    ResponseFault,
    ResponseOutput,
    ResponseUsage,
)
from moeserve.server.responses_request import ResponsesRequest, TextConfig, TextFormat
from moeserve.text.answer_format import Part

_NAMES = {  # of a chat's fields here
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
}
_Items = list[dict[str, Any]]


async def create_response(call: HttpCall) -> web.StreamResponse:
    """Answer an input, whole or as a stream of typed events."""
    request = await call.read(ResponsesRequest)
    history = _history(call, request)
    chat_request = request.chat(history)
    key = uuid.uuid4().hex
    with fields_named(_NAMES):
        async with conversation(call, chat_request) as chat:
            running = RunningResponse(call, request, chat, key, history)
            with call.context.store.running(call.caller.owner, running):
                if request.stream:
                    return await stream_answer(call, chat.running, running)
                await running.whole()
    return call.answer(running.response)


async def count_input_tokens(call: HttpCall) -> web.StreamResponse:
    """Count the tokens of an input."""
    request = await call.read(ResponsesRequest)
    with fields_named(_NAMES):
        _, prompt = await prompt_of(call, request.chat(_history(call, request)))
    return call.answer(InputTokens(input_tokens=len(prompt)))


async def compact_response(call: HttpCall) -> web.StreamResponse:
    """Refuse to compact a conversation."""
    raise NotFound("conversations are not compacted here; shorten the input yourself")


class RetrieveQuery(Struct):
    """stream: stored responses are given whole, so only false is taken."""

    stream: Literal["false"] = "false"


async def retrieve_response(call: HttpCall) -> web.StreamResponse:
    """Return a stored response."""
    call.query(RetrieveQuery)
    stored = call.context.store.get(call.caller.owner, call.tail)
    return web.Response(body=stored.response, content_type="application/json", headers=call.headers())


async def delete_response(call: HttpCall) -> web.StreamResponse:
    """Forget a stored response."""
    call.context.store.delete(call.caller.owner, call.tail)
    return call.answer(Deleted(id=call.tail, object="response"))


async def cancel_response(call: HttpCall) -> web.StreamResponse:
    """End a response that is running; its own reader gets what came so far."""
    store, owner = call.context.store, call.caller.owner
    found = store.find_running(owner, call.tail)
    if found is None:
        store.get(owner, call.tail)
        raise Conflict("the response has ended already: only a running one can be cancelled")
    await found.abort()
    return call.answer(found.response)


class ItemsQuery(Struct):
    """A page: `limit` items in this order, of those after the item `after`."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


async def list_input_items(call: HttpCall) -> web.StreamResponse:
    """List what a stored response answers, the latest item first."""
    query = call.query(ItemsQuery)
    stored = call.context.store.get(call.caller.owner, call.tail)
    items: _Items = msgspec.json.decode(stored.items)
    if query.order == "desc":
        items.reverse()
    return call.answer(ItemList(**page(items, query.after, query.limit, itemgetter("id"))))


class RunningResponse(EventFrames):
    """A response that comes into being."""

    def __init__(
        self, call: HttpCall, request: ResponsesRequest, chat: Conversation, key: str, history: _Items
    ) -> None:
        super().__init__(chat, streams=bool(request.stream))
        self._call = call
        self._input = [*history, *(_stored_item(item, f"{key}{i}") for i, item in enumerate(request.items()))]
        self._form = LogprobFormat(chat.front.tokenizer, request.top_logprobs or 0) if request.logprobs else None
        self._next_number = 0
        self._finish_reason: str | None = None
        self.response = _response(call, request, chat, key)
        self._output = ResponseOutput(self.response.output, key, self._emit)

    def add(self, parts: list[Part], delta: Delta) -> None:
        """Adds what is new of the answer."""
        rows: list[TokenLogprob] = []
        if self._form is not None:
            rows = self._form.chat(delta.logprobs).content or []
        self._output.add(parts, rows)
        self._finish_reason = delta.finish_reason

    def finish(self) -> None:
        """Ends the response, and stores it if it has to be."""
        response = self.response
        match self._finish_reason:
            case "length":
                response.status, response.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
            case "abort":
                response.status = "cancelled"
            case _:
                response.status, response.completed_at = "completed", int(time.time())
        self._output.end("completed" if response.status == "completed" else "incomplete")
        response.usage = _usage(self._chat.counts)
        self._keep()

    async def abort(self) -> None:
        """Ends the response; whoever reads it gets what came so far."""
        self.response.status = "cancelled"
        await self._chat.running.abort()

    def opening(self) -> bytes:
        """Returns the events before the first text."""
        self._emit(ResponseEvent(type="response.created", response=self.response))
        self._emit(ResponseEvent(type="response.in_progress", response=self.response))
        return self._taken()

    def closing(self) -> bytes:
        """Returns the events that end items and response."""
        self.finish()
        ends = "completed" if self.response.status == "completed" else "incomplete"
        self._emit(ResponseEvent(type=f"response.{ends}", response=self.response))
        return self._taken()

    def failure(self, error: RequestError, request_id: str) -> bytes:
        """Returns the event that ends a response that failed."""
        self._output.close("incomplete")
        self.response.status = "failed"
        self.response.error = ResponseFault("server_error", error_message(error, request_id))
        self.response.usage = _usage(self._chat.counts)
        self._keep()
        self._emit(ResponseEvent(type="response.failed", response=self.response))
        return self._taken()

    def _keep(self) -> None:
        if self.response.store:
            stored = Stored(encode(self.response), encode(self._input))
            self._call.context.store.put(self._call.caller.owner, self.response.id, stored)

    def _emit(self, event: ResponseEvent) -> None:
        event.sequence_number = self._next_number
        self._next_number += 1
        super()._emit(event)


def _response(call: HttpCall, request: ResponsesRequest, chat: Conversation, key: str) -> Response:
    """Returns a response that has just begun, with the parameters that are in force."""
    text = request.text or TextConfig()
    params = chat.params
    return Response(
        id=f"resp_{key}",
        created_at=int(time.time()),
        model=chat.front.model_name,
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        tools=request.function_tools(),
        tool_choice=request.tool_choice or "auto",
        parallel_tool_calls=request.parallel_tool_calls is not False,
        text=TextConfig(format=text.format or TextFormat(type="text"), verbosity=text.verbosity),
        reasoning=request.reasoning,
        temperature=params.temperature,
        top_p=params.top_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        top_logprobs=request.top_logprobs or 0,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        store=request.store is not False and call.context.store.max_count > 0,
        metadata=request.metadata or {},
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
    )


def _usage(counts: Counts) -> ResponseUsage:
    used = counts.prompt_tokens, counts.completion_tokens
    cached, reasoning = CachedTokens(counts.cached_tokens), OutputTokensDetails(counts.num_reasoning)
    return ResponseUsage(used[0], cached, used[1], reasoning, sum(used))


def _history(call: HttpCall, request: ResponsesRequest) -> _Items:
    """Returns the items of the responses before this one. Raises InvalidRequest if they are not stored."""
    previous = request.previous_response_id
    if previous is None:
        return []
    try:
        stored = call.context.store.get(call.caller.owner, previous)
    except NotFound as error:
        what = f"previous_response_id: {error.message}"
        raise InvalidRequest(what, param="previous_response_id", code="previous_response_not_found") from error
    output: _Items = msgspec.json.decode(stored.response)["output"]
    items: _Items = msgspec.json.decode(stored.items)
    return items + output


def _stored_item(item: dict[str, Any], key: str) -> dict[str, Any]:
    """Returns an item of the input as it is listed later: with an id, and texts as parts."""
    item = {"type": "message", "id": f"item_{key}"} | item
    if item["type"] == "message":
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        content = item["content"]
        item["content"] = [{"type": kind, "text": content}] if isinstance(content, str) else content
    return {"status": "completed"} | item
