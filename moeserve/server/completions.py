"""POST /v1/completions: text or token ids, one prompt or many, with echo and logprobs."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from moeserve.errors import InvalidRequest
from moeserve.frontend.front_end import FrontEnd
from moeserve.messages import Ready
from moeserve.server.answer import Collected, check_unknown, collect, json_answer, run, stream_answer
from moeserve.server.body import read_json
from moeserve.server.chunks import CompletionChunks, Counts, StreamShape
from moeserve.server.context import HttpCall, check_model, fingerprint
from moeserve.server.fields import MAX_SEQUENCES, completion_params, decode
from moeserve.server.length import check_chars
from moeserve.server.logprobs import CompletionColumns, LogprobFormat
from moeserve.server.protocol import CompletionRequest

Prompt = str | list[int]


async def completions(call: HttpCall) -> web.StreamResponse:
    raw = await read_json(call.request, call.context.config.max_request_bytes)
    request, unknown = decode(raw, CompletionRequest)
    check_unknown(call, unknown)
    front, ready = call.context.serving()
    check_model(front, request.model)
    params = completion_params(request, front.defaults, ready.vocab_size)
    asked = split_prompts(request.prompt)
    if params.n * len(asked) > MAX_SEQUENCES:
        raise InvalidRequest(
            f"{len(asked)} prompts times n = {params.n} is more than {MAX_SEQUENCES} sequences", param="prompt"
        )
    front.admit(params.n * len(asked))  # before any work on texts that may not run anyway
    prompts = await _ids(front, ready, asked, request)
    call.counts = counts = Counts(sum(map(len, prompts)))
    head = _head(call, front, ready)
    form = None
    if request.logprobs is not None:
        as_ids = bool(request.return_tokens_as_token_ids)
        form = LogprobFormat(front.tokenizer, request.logprobs, as_ids=as_ids)
    echo = [_text(front, prompt) for prompt in asked] if request.echo else None
    async with run(call, front, prompts, params, request) as running:
        if request.stream:
            shape = _stream_shape(request, head, params.n, prompts, counts, form, echo)
            return await stream_answer(call, running, CompletionChunks(shape))
        found = await collect(running, params.n, counts)
    if request.max_tokens == 0:
        _drop_answers(found, counts)
    choices = [
        _choice(request, front, p * params.n + i, prompts[p], sequences[0], sequence, form, echo[p] if echo else None)
        for p, sequences in enumerate(found)
        for i, sequence in enumerate(sequences)
    ]
    return json_answer(call, {**head, "choices": choices, "usage": counts.usage()})


def split_prompts(prompt: Any) -> list[Prompt]:
    """OpenAI's four forms (text, texts, ids, lists of ids) as a list of prompts, all of one kind."""
    if isinstance(prompt, str):
        prompt = [prompt]
    if not prompt:
        raise InvalidRequest("prompt must be a text, token ids, or a list of either, and not empty", param="prompt")
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds == {str} or kinds == {list}:
        if len(prompt) > MAX_SEQUENCES:
            raise InvalidRequest(f"{len(prompt)} prompts; at most {MAX_SEQUENCES} are allowed", param="prompt")
        if not all(prompt):
            raise InvalidRequest("a prompt must not be empty", param="prompt")
        return list(prompt)
    raise InvalidRequest("prompt mixes texts and token ids", param="prompt")


async def _ids(front: FrontEnd, ready: Ready, asked: list[Prompt], request: CompletionRequest) -> list[list[int]]:
    texts = [prompt for prompt in asked if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in asked if isinstance(prompt, list)]
    if front.tokenizer is not None:
        check_chars(max(map(len, texts)), front.tokenizer, ready.max_model_len, "prompt")
    return await front.encode_all(texts, special=request.add_special_tokens is not False)


def _text(front: FrontEnd, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "" if front.tokenizer is None else front.tokenizer.decode(prompt)


def _stream_shape(
    request: CompletionRequest,
    head: dict[str, Any],
    n: int,
    prompts: list[list[int]],
    counts: Counts,
    form: LogprobFormat | None,
    echo: list[str] | None,
) -> StreamShape:
    if request.echo and (form is not None or request.max_tokens == 0):
        what = "logprobs" if form is not None else "max_tokens: 0"
        raise InvalidRequest(f"echo with {what} cannot be streamed", param="stream")
    options = request.stream_options
    return StreamShape(
        head,
        n,
        prompts,
        counts,
        include_usage=options is not None and options.include_usage,
        running_usage=options is not None and options.continuous_usage_stats,
        token_ids=bool(request.return_token_ids),
        logprobs=form,
        num_top=request.logprobs or 0,
        echo=echo,
    )


def _drop_answers(found: list[list[Collected]], counts: Counts) -> None:
    """max_tokens 0: one token was made to get at the prompt's logprobs; nobody asked for it."""
    counts.completion_tokens = 0
    for sequence in (sequence for sequences in found for sequence in sequences):
        sequence.text, sequence.token_ids, sequence.logprobs = "", [], []
        sequence.finish_reason, sequence.stop_reason = "length", None


def _choice(
    request: CompletionRequest,
    front: FrontEnd,
    index: int,
    prompt: list[int],
    first: Collected,
    sequence: Collected,
    form: LogprobFormat | None,
    echo: str | None,
) -> dict[str, Any]:
    """`first`: the prompt's first sequence, which carries the prompt's logprobs for all of them."""
    choice: dict[str, Any] = {
        "index": index,
        "text": (echo or "") + sequence.text,
        "logprobs": None,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
    }
    if form is not None:
        tokens = [*prompt, *sequence.token_ids] if request.echo else sequence.token_ids
        rows = (
            [*(first.prompt_logprobs or [None] * len(prompt)), *sequence.logprobs]
            if request.echo
            else sequence.logprobs
        )
        choice["logprobs"] = CompletionColumns(form, request.logprobs or 0).take(tokens, rows)
    if request.prompt_logprobs is not None and first.prompt_logprobs is not None:
        choice["prompt_logprobs"] = LogprobFormat(front.tokenizer, 0).prompt(first.prompt_logprobs)
    if request.return_token_ids:
        choice |= {"prompt_token_ids": prompt, "token_ids": sequence.token_ids}
    return choice


def _head(call: HttpCall, front: FrontEnd, ready: Ready) -> dict[str, Any]:
    return {
        "id": f"cmpl-{call.id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": front.model_name,
        "system_fingerprint": fingerprint(ready),
    }
