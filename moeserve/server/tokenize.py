"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio

from aiohttp import web

from moeserve.errors import InvalidRequest
from moeserve.server.answer import check_unknown, json_answer
from moeserve.server.body import convert, read_json, unknown_fields
from moeserve.server.chat import chat_prompt
from moeserve.server.context import HttpCall, check_model
from moeserve.server.protocol import (
    ChatRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

MAX_CHARS = 1_000_000  # tokenizing takes a microsecond and some 150 bytes for each


async def tokenize(call: HttpCall) -> web.StreamResponse:
    raw = await read_json(call.request, call.context.config.max_request_bytes)
    request = convert(raw, TokenizeRequest)
    check_unknown(call, unknown_fields(raw, frozenset(TokenizeRequest.__struct_fields__)))
    front, ready = call.context.serving()
    check_model(front, request.model)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if request.messages is not None:
        chat = ChatRequest(
            messages=request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        _, tokens = await chat_prompt(front, ready, chat)
    else:
        if len(request.prompt or "") > MAX_CHARS:
            raise InvalidRequest(f"the prompt has more than {MAX_CHARS:,} characters; send it in parts", param="prompt")
        tokens = await front.encode(request.prompt or "", special=request.add_special_tokens is not False)
    answer = TokenizeResponse(count=len(tokens), max_model_len=ready.max_model_len, tokens=tokens)
    if request.return_token_strs and front.tokenizer is not None:
        answer.token_strs = [front.tokenizer.token_text(token) for token in tokens]
    return json_answer(call, answer)


async def detokenize(call: HttpCall) -> web.StreamResponse:
    raw = await read_json(call.request, call.context.config.max_request_bytes)
    request = convert(raw, DetokenizeRequest)
    check_unknown(call, unknown_fields(raw, frozenset(DetokenizeRequest.__struct_fields__)))
    front, ready = call.context.serving()
    check_model(front, request.model)
    tokenizer = front.tokenizer
    if tokenizer is None:
        raise InvalidRequest("this server runs without a tokenizer")
    if request.tokens and not 0 <= min(request.tokens) <= max(request.tokens) < ready.vocab_size:
        raise InvalidRequest(f"tokens must be ids in 0..{ready.vocab_size - 1}", param="tokens")
    text = await asyncio.to_thread(tokenizer.decode, request.tokens, skip_special_tokens=False)
    return json_answer(call, DetokenizeResponse(prompt=text))
