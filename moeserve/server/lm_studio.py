"""GET /api/v0/models and POST /api/v0/chat/completions, LM Studio's forms of OpenAI's API.

/api/v0/completions is the same as /v1/completions.
"""

import asyncio
from functools import partial

from aiohttp import web

from moeserve.errors import ModelNotFound
from moeserve.protocol import Answer
from moeserve.server.answer import answer_chat
from moeserve.server.call import HttpCall
from moeserve.server.chat_request import ChatRequest
from moeserve.server.dialects.chat import NAMES
from moeserve.server.dialects.chat_answer import ChatWriter
from moeserve.server.model_facts import capabilities, facts_of
from moeserve.server.requests import fields_named
from moeserve.server.terms import read_generation_request

# LM Studio's name for the engine that takes files of this format. Its clients know no other names.
_ENGINES = {"gguf": "gguf", "safetensors": "mlx"}


class StudioModel(Answer, kw_only=True):
    """The model that is served."""

    id: str
    object: str = "model"
    type: str = "llm"
    publisher: str
    arch: str
    compatibility_type: str  # gguf, or mlx for safetensors
    quantization: str
    state: str = "loaded"
    max_context_length: int
    loaded_context_length: int
    capabilities: list[str]  # tool_use, or nothing


class StudioModels(Answer, kw_only=True):
    """The served model, under each of its names."""

    object: str = "list"
    data: list[StudioModel]


class StudioChatWriter(ChatWriter):
    """Writes the answer of a chat, with LM Studio's name of reasoning."""

    reasoning_field = "reasoning_content"


async def studio_chat_completions(call: HttpCall) -> web.StreamResponse:
    """Answer a conversation as /v1/chat/completions does, with LM Studio's name of reasoning."""
    request, terms = await read_generation_request(call, ChatRequest)
    make_writer = partial(StudioChatWriter, request=request)
    return await answer_chat(terms, request, make_writer, naming=partial(fields_named, NAMES))


async def list_studio_models(call: HttpCall) -> web.StreamResponse:
    """List the served model under each of its names, in LM Studio's shape."""
    front, _ = call.context.serving()
    return call.answer(StudioModels(data=[await _card(call, name) for name in front.model_names]))


async def retrieve_studio_model(call: HttpCall) -> web.StreamResponse:
    """Describe a model in LM Studio's shape; its id may contain slashes."""
    if not call.tail:
        call.context.serving()
        raise ModelNotFound("the path has no model name")
    return call.answer(await _card(call, call.tail))


async def _card(call: HttpCall, name: str) -> StudioModel:
    front, ready = call.context.serving(name)
    facts = await asyncio.to_thread(facts_of, front)
    return StudioModel(
        id=name,
        publisher=facts.publisher or name.rpartition("/")[0],
        arch=facts.architecture,
        compatibility_type=_ENGINES[facts.format],
        quantization=facts.quantization,
        max_context_length=ready.max_model_len,
        loaded_context_length=ready.max_model_len,
        capabilities=["tool_use"] if "tools" in capabilities(front) else [],
    )
