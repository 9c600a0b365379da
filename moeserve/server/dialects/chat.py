"""POST /v1/chat/completions, and /v1/chat/completions/render, which shows the prompt."""

from functools import partial

from aiohttp import web

from moeserve import protocol
from moeserve.server.answer import answer_chat
from moeserve.server.call import HttpCall
from moeserve.server.chat_request import ChatRequest
from moeserve.server.conversation import prompt_of
from moeserve.server.dialects.chat_answer import ChatWriter
from moeserve.server.requests import fields_named
from moeserve.server.terms import read_generation_request

NAMES = {"prompt": "messages"}


async def chat_completions(call: HttpCall) -> web.StreamResponse:
    """Answer a conversation, whole or as a stream of chunks."""
    request, terms = await read_generation_request(call, ChatRequest)
    make_writer = partial(ChatWriter, request=request)
    return await answer_chat(terms, request, make_writer, naming=partial(fields_named, NAMES))


async def render(call: HttpCall) -> web.StreamResponse:
    """Return the rendered prompt of a conversation, as text and as token ids."""
    request = await call.read(ChatRequest)
    with fields_named(NAMES):
        text, prompt = await prompt_of(call, request)
    return call.answer(protocol.RenderedPrompt(prompt=text, prompt_token_ids=prompt))
