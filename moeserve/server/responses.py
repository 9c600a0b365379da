"""/v1/responses, OpenAI's newer API for chats: create, retrieve, cancel, delete, and the input of a
response.
"""

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
from moeserve.server import responses_events as events
from moeserve.server.answer import Counts, encode, stream_answer
from moeserve.server.app import HttpCall
from moeserve.server.conversation import Conversation, conversation, prompt_of
from moeserve.server.errors import error_message
from moeserve.server.events import EventFrames
from moeserve.server.file_objects import Deleted, page
from moeserve.server.logprobs import LogprobFormat
from moeserve.server.requests import fields_named
from moeserve.server.response_store import Stored
from moeserve.server.responses_request import ResponsesRequest, TextConfig, TextFormat
from moeserve.text.answer_format import Part

# This dialect's names of a chat's fields.
_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
}
_ITEM = {
    "content": events.OutputMessage,
    "reasoning": events.OutputReasoning,
    "call": events.OutputCall,
    "arguments": events.OutputCall,
}
_TEXT = {
    events.OutputMessage: "response.output_text",
    events.OutputReasoning: "response.reasoning_text",
}
_ARGUMENTS = "response.function_call_arguments"
_AS_ASKED = (  # what a response says as its request did
    "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key", "reasoning",
    "safety_identifier", "user",
)  # fmt: skip
_IN_FORCE = (
    "frequency_penalty",
    "presence_penalty",
    "temperature",
    "top_p",
)  # of the sampling, defaults included
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
    return call.answer(events.InputTokens(input_tokens=len(prompt)))


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
    return web.Response(
        body=stored.response, content_type="application/json", headers=call.headers()
    )


async def delete_response(call: HttpCall) -> web.StreamResponse:
    """Forget a stored response."""
    call.context.store.delete(call.caller.owner, call.tail)
    return call.answer(Deleted(id=call.tail, object="response"))


async def cancel_response(call: HttpCall) -> web.StreamResponse:
    """End a response that is running; its own reader gets what came so far."""
    store = call.context.store
    owner = call.caller.owner
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
    return call.answer(events.ItemList(**page(items, query.after, query.limit, itemgetter("id"))))


class RunningResponse(EventFrames):
    """A response that comes into being. Its items change after the events that tell of them."""

    def __init__(
        self,
        call: HttpCall,
        request: ResponsesRequest,
        chat: Conversation,
        key: str,
        history: _Items,
    ) -> None:
        super().__init__(chat, streams=bool(request.stream))
        self._call = call
        self._key = key
        self._input = [
            *history,
            *(_stored_item(item, f"{key}{i}") for i, item in enumerate(request.items())),
        ]
        self._form = (
            LogprobFormat(chat.front.tokenizer, request.top_logprobs or 0)
            if request.logprobs
            else None
        )
        self._next_number = 0
        self._finish_reason: str | None = None
        self.response = _response(call, request, chat, key)
        self._open: events.OutputItem | None = None
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[TokenLogprob] = []  # not yet told

    def add(self, parts: list[Part], delta: Delta) -> None:
        """Adds what is new of the answer."""
        if self._form is not None:
            self._logprobs += self._form.chat(delta.logprobs).content or []
        for part in parts:
            if part.kind == "call" or type(self._open) is not _ITEM[part.kind]:
                self._close()
                self._begin(part)
            if part.kind != "call":
                self._extend(part.text)
        self._finish_reason = delta.finish_reason

    def finish(self) -> None:
        """Ends the response, and stores it if it has to be. One without parts has an empty message,
        so that clients find a text."""
        response = self.response
        match self._finish_reason:
            case "length":
                response.status = "incomplete"
                response.incomplete_details = events.IncompleteDetails("max_output_tokens")
            case "abort":
                response.status = "cancelled"
            case _:
                response.status = "completed"
                response.completed_at = int(time.time())
        if not response.output:
            self._begin(Part("content", ""))
        self._close("completed" if response.status == "completed" else "incomplete")
        self._keep()

    async def abort(self) -> None:
        """Ends the response; whoever reads it gets what came so far."""
        self.response.status = "cancelled"
        await self._chat.running.abort()

    def opening(self) -> bytes:
        """Returns the events before the first text."""
        self._tell("response.created", response=self.response)
        self._tell("response.in_progress", response=self.response)
        return self._taken()

    def closing(self) -> bytes:
        """Returns the events that end items and response."""
        self.finish()
        ends = "completed" if self.response.status == "completed" else "incomplete"
        self._tell(f"response.{ends}", response=self.response)
        return self._taken()

    def failure(self, error: RequestError, request_id: str) -> bytes:
        """Returns the event that ends a response that failed."""
        self._close("incomplete")
        self.response.status = "failed"
        self.response.error = events.ResponseFault("server_error", error_message(error, request_id))
        self._keep()
        self._tell("response.failed", response=self.response)
        return self._taken()

    def _keep(self) -> None:
        self.response.usage = _usage(self._chat.counts)
        if self.response.store:
            stored = Stored(encode(self.response), encode(self._input))
            self._call.context.store.put(self._call.caller.owner, self.response.id, stored)

    def _begin(self, part: Part) -> None:
        number = len(self.response.output)
        item: events.OutputItem
        if part.kind == "call" or part.kind == "arguments":
            item = events.OutputCall(id=f"fc_{self._key}{number}", call_id=part.id, name=part.text)
        elif part.kind == "reasoning":
            item = events.OutputReasoning(id=f"rs_{self._key}{number}")
        else:
            item = events.OutputMessage(id=f"msg_{self._key}{number}")
        self.response.output.append(item)
        self._open = item
        self._tell("response.output_item.added", output_index=number, item=item)
        if isinstance(item, events.OutputMessage):
            item.content = [events.OutputText()]
        elif isinstance(item, events.OutputReasoning):
            item.content = [events.ReasoningText()]
        else:
            return
        self._tell_of_item("response.content_part.added", content_index=0, part=item.content[0])

    def _extend(self, text: str) -> None:
        item = self._open
        self._texts.append(text)
        if isinstance(item, events.OutputMessage):
            told = self._logprobs
            self._logprobs = []
            item.content[0].logprobs += told
            self._tell_of_item(
                "response.output_text.delta", content_index=0, delta=text, logprobs=told
            )
        elif isinstance(item, events.OutputReasoning):
            self._tell_of_item("response.reasoning_text.delta", content_index=0, delta=text)
        else:
            self._tell_of_item(f"{_ARGUMENTS}.delta", delta=text)

    def _close(self, status: str = "completed") -> None:
        """Ends the last item. A status other than completed ends the answer, too."""
        item = self._open
        match item:
            case None:
                return
            case events.OutputCall():
                item.arguments = "".join(self._texts)
                self._tell_of_item(f"{_ARGUMENTS}.done", arguments=item.arguments)
            case events.OutputMessage() | events.OutputReasoning():
                (part,) = item.content
                part.text = "".join(self._texts)
                logprobs = None
                if isinstance(part, events.OutputText):
                    part.logprobs += self._logprobs  # of tokens without text
                    self._logprobs = []
                    logprobs = part.logprobs
                self._tell_of_item(
                    f"{_TEXT[type(item)]}.done", content_index=0, text=part.text, logprobs=logprobs
                )
                self._tell_of_item("response.content_part.done", content_index=0, part=part)
        item.status = status
        self._tell(
            "response.output_item.done", output_index=len(self.response.output) - 1, item=item
        )
        self._open = None
        self._texts = []

    def _tell_of_item(self, name: str, **fields: Any) -> None:
        assert self._open is not None
        self._tell(
            name, item_id=self._open.id, output_index=len(self.response.output) - 1, **fields
        )

    def _tell(self, name: str, **fields: Any) -> None:
        self._emit(events.ResponseEvent(type=name, sequence_number=self._next_number, **fields))
        self._next_number += 1


def _response(
    call: HttpCall, request: ResponsesRequest, chat: Conversation, key: str
) -> events.Response:
    """Returns a response that has just begun, with the parameters that are in force."""
    text = request.text or TextConfig()
    return events.Response(
        id=f"resp_{key}",
        created_at=int(time.time()),
        model=chat.front.model_name,
        tools=request.function_tools(),
        tool_choice=request.tool_choice or "auto",
        parallel_tool_calls=request.parallel_tool_calls is not False,
        text=TextConfig(format=text.format or TextFormat(type="text"), verbosity=text.verbosity),
        top_logprobs=request.top_logprobs or 0,
        store=request.store is not False and call.context.store.max_count > 0,
        metadata=request.metadata or {},
        **{name: getattr(request, name) for name in _AS_ASKED},
        **{name: getattr(chat.params, name) for name in _IN_FORCE},
    )


def _usage(counts: Counts) -> events.ResponseUsage:
    used = counts.prompt_tokens, counts.completion_tokens
    cached = CachedTokens(counts.cached_tokens)
    reasoning = events.OutputTokensDetails(counts.num_reasoning)
    return events.ResponseUsage(used[0], cached, used[1], reasoning, sum(used))


def _history(call: HttpCall, request: ResponsesRequest) -> _Items:
    """Returns the items of the responses before this one. Raises InvalidRequest if they are not
    stored.
    """
    previous = request.previous_response_id
    if previous is None:
        return []
    try:
        stored = call.context.store.get(call.caller.owner, previous)
    except NotFound as error:
        what = f"previous_response_id: {error.message}"
        raise InvalidRequest(
            what, param="previous_response_id", code="previous_response_not_found"
        ) from error
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
