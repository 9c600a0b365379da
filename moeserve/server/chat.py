"""POST /v1/chat/completions, and /v1/chat/completions/render, which shows the prompt that it would run."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiohttp import web

from moeserve.errors import InvalidRequest
from moeserve.frontend.front_end import FrontEnd
from moeserve.messages import Ready
from moeserve.server.answer import check_unknown, collect, json_answer, run, stream_answer
from moeserve.server.body import read_json
from moeserve.server.chunks import ChatChunks, Counts, StreamShape
from moeserve.server.context import HttpCall, check_model, fingerprint
from moeserve.server.fields import chat_messages, chat_params, decode
from moeserve.server.length import check_chars
from moeserve.server.logprobs import LogprobFormat
from moeserve.server.protocol import ChatRequest
from moeserve.text.control import unshield


async def chat_completions(call: HttpCall) -> web.StreamResponse:
    front, ready, request = await _read(call)
    params = chat_params(request, front.defaults, ready.vocab_size)
    front.admit(params.n)  # before any work on a prompt that may not run anyway
    _, prompt = await chat_prompt(front, ready, request)
    call.counts = counts = Counts(len(prompt))
    form = None
    if request.logprobs:
        as_ids = bool(request.return_tokens_as_token_ids)
        form = LogprobFormat(front.tokenizer, params.logprobs or 0, as_ids=as_ids)
    head = _head(call, front, ready, stream=bool(request.stream))
    async with run(call, front, [prompt], params, request) as running:
        if request.stream:
            options = request.stream_options
            shape = StreamShape(
                head,
                params.n,
                [prompt],
                counts,
                include_usage=options is not None and options.include_usage,
                running_usage=options is not None and options.continuous_usage_stats,
                token_ids=bool(request.return_token_ids),
                logprobs=form,
            )
            return await stream_answer(call, running, ChatChunks(shape))
        (sequences,) = await collect(running, params.n, counts)
    answer: dict[str, Any] = {**head, "choices": [], "usage": counts.usage()}
    for index, sequence in enumerate(sequences):
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": sequence.text, "refusal": None},
            "logprobs": None if form is None else form.chat(sequence.logprobs),
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }
        if request.return_token_ids:
            choice["token_ids"] = sequence.token_ids
        answer["choices"].append(choice)
    if request.return_token_ids:
        answer["prompt_token_ids"] = prompt
    if sequences[0].prompt_logprobs is not None:
        answer["prompt_logprobs"] = LogprobFormat(front.tokenizer, 0).prompt(sequences[0].prompt_logprobs)
    return json_answer(call, answer)


async def render(call: HttpCall) -> web.StreamResponse:
    front, ready, request = await _read(call)
    text, prompt = await chat_prompt(front, ready, request)
    return json_answer(call, {"prompt": text, "prompt_token_ids": prompt})


async def _read(call: HttpCall) -> tuple[FrontEnd, Ready, ChatRequest]:
    raw = await read_json(call.request, call.context.config.max_request_bytes)
    request, unknown = decode(raw, ChatRequest)
    check_unknown(call, unknown)
    front, ready = call.context.serving()
    check_model(front, request.model)
    return front, ready, request


async def chat_prompt(front: FrontEnd, ready: Ready, request: ChatRequest) -> tuple[str, list[int]]:
    """The rendered prompt as people see it, and its ids. Works in a thread: template and text are users' matter."""
    template, tokenizer = front.chat_template, front.tokenizer
    if template is None or tokenizer is None:
        raise InvalidRequest(
            "this model has no chat template: use /v1/completions, or start the server with --chat-template",
            param="messages",
            code="no_chat_template",
        )
    messages = chat_messages(request)
    continues = bool(request.continue_final_message)
    adds = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    check_chars(sum(len(message["content"]) for message in messages), tokenizer, ready.max_model_len, "messages")

    def work() -> tuple[str, list[int]]:
        text = template.render(
            tokenizer,
            messages,
            add_generation_prompt=adds,
            continue_final_message=continues,
            kwargs=request.chat_template_kwargs,
        )
        return unshield(text), tokenizer.encode_prompt(text)

    return await asyncio.to_thread(work)


def _head(call: HttpCall, front: FrontEnd, ready: Ready, *, stream: bool) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{call.id}",
        "object": "chat.completion.chunk" if stream else "chat.completion",
        "created": int(time.time()),
        "model": front.model_name,
        "system_fingerprint": fingerprint(ready),
    }
