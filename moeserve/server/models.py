"""GET /v1/models and /v1/models/{id}; an id may contain slashes."""

from __future__ import annotations

from aiohttp import web

from moeserve.errors import ModelNotFound
from moeserve.server.answer import json_answer
from moeserve.server.context import HttpCall, check_model
from moeserve.server.protocol import ModelCard, ModelList


async def list_models(call: HttpCall) -> web.StreamResponse:
    return json_answer(call, ModelList(data=[_card(call)]))


async def retrieve_model(call: HttpCall) -> web.StreamResponse:
    card = _card(call)
    if not call.tail:
        raise ModelNotFound("no model is named in the path")
    if call.context.front is not None:
        check_model(call.context.front, call.tail)
    return json_answer(call, card)


def _card(call: HttpCall) -> ModelCard:
    front, ready = call.context.serving()
    return ModelCard(
        id=front.model_name, created=call.context.created, root=front.model_name, max_model_len=ready.max_model_len
    )
