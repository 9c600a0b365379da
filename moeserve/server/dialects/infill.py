"""POST /infill: llama.cpp's API with which editors complete code at the cursor."""

import asyncio
from contextlib import aclosing

from aiohttp import web

from moeserve.messages import Ready
from moeserve.server.answer import stream_answer
from moeserve.server.call import HttpCall
from moeserve.server.dialects.infill_answer import InfillWriter
from moeserve.server.dialects.infill_request import InfillRequest
from moeserve.server.requests import fields_named
from moeserve.server.terms import read_generation_request, running_request
from moeserve.text.fill_in_middle import (
    InfillPrompt,
    ending_at_markers,
    fim_tokens,
    infill_prompt,
)
from moeserve.text.tokenizer import Tokenizer

# The part of the context that is kept for an answer without n_predict, or with a large one
_ANSWER_SHARE = 4
_NAMES = {"prompt": "input_prefix", "max_tokens": "n_predict"}  # of `FrontEnd` -> of this route


async def infill(call: HttpCall) -> web.StreamResponse:
    """Write the text between a prefix and a suffix, as a whole answer or as a stream.

    What does not fit the context is left out of the prompt.
    """
    request, terms = await read_generation_request(call, InfillRequest)
    front, ready = call.context.serving(request.model)
    tokens = fim_tokens(front.tokenizer, "input_suffix")
    assert front.tokenizer is not None
    params = ending_at_markers(request.params(front.defaults), tokens)
    constraint = request.constraint()
    options = {} if constraint is None else {"grammar_param": constraint.field}
    # Admission comes first, so that a refused request costs no work.
    with fields_named(_NAMES), terms.admit(front, params.n) as reservation:
        prompt, shown = await asyncio.to_thread(_prompt, front.tokenizer, ready, request)
        async with running_request(
            terms,
            front,
            prompts=[prompt.token_ids],
            params=params,
            reservation=reservation,
            line_limits=request.line_limits(),
            **options,
        ) as running:
            writer = InfillWriter(
                running, request, params, prompt=shown, truncated=prompt.truncated
            )
            if request.stream:
                return await stream_answer(terms, running, writer)
            async with aclosing(running.deltas()) as deltas:
                async for _, delta in deltas:
                    writer.add(delta)
    return web.Response(
        body=writer.whole(), content_type="application/json", headers=call.headers()
    )


def _prompt(tokenizer: Tokenizer, ready: Ready, request: InfillRequest) -> tuple[InfillPrompt, str]:
    """Return the prompt, and its text."""
    prompt = infill_prompt(
        tokenizer,
        request.prefix,
        request.input_suffix,
        request.chunks(),
        max_tokens=_room(ready, request.token_limit),
    )
    return prompt, tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


def _room(ready: Ready, token_limit: int) -> int:
    """Return the largest number of tokens of a prompt, so that there is room for the answer."""
    share = ready.max_model_len // _ANSWER_SHARE
    num_answer = share if token_limit < 0 else min(token_limit, share)
    return ready.max_model_len - max(num_answer, 1)
