"""POST /v1/messages, Anthropic's API for conversations, and /v1/messages/count_tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from aiohttp import web

from moeserve.errors import ContextLengthExceeded
from moeserve.server.answer import answer_chat
from moeserve.server.call import HttpCall
from moeserve.server.conversation import prompt_of
from moeserve.server.dialects.messages_answer import CountedContext, MessageWriter, TokenCount
from moeserve.server.dialects.messages_request import CountTokensRequest, MessagesRequest
from moeserve.server.requests import fields_named
from moeserve.server.terms import read_generation_request

# Chat field -> its name in this dialect.
_NAMES = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "stop": "stop_sequences",
    "prompt": "messages",
    "messages[]": "messages",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function": "tools[]",
}


async def create_message(call: HttpCall) -> web.StreamResponse:
    """Answer a conversation in Anthropic's shape, whole or as a stream of events."""
    request, terms = await read_generation_request(call, MessagesRequest)
    make_writer = partial(MessageWriter, request=request)
    chat = request.chat(request.max_tokens)
    return await answer_chat(terms, chat, make_writer, naming=anthropic_errors)


async def count_tokens(call: HttpCall) -> web.StreamResponse:
    """Count the tokens of a conversation."""
    request = await call.read(CountTokensRequest)
    with anthropic_errors():
        _, prompt = await prompt_of(call, request.chat())
    count = TokenCount(input_tokens=len(prompt))
    if request.context_management is not None:
        count.context_management = CountedContext(original_input_tokens=len(prompt))
    return call.answer(count)


@contextmanager
def anthropic_errors() -> Iterator[None]:
    """Convert errors about a chat that are raised inside the block to this dialect.

    Claude Code recognizes a prompt that is too long by exactly these words, and parses the numbers.
    """
    try:
        with fields_named(_NAMES):
            yield
    except ContextLengthExceeded as error:
        num = f"{'' if error.exact else 'at least '}{error.num_tokens}"
        error.message = f"prompt is too long: {num} tokens > {error.max_tokens} maximum"
        raise
