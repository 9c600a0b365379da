"""POST /api/chat and /api/generate, Ollama's API for conversations and completions."""

import hashlib
from functools import partial

from aiohttp import web

from moeserve.errors import InvalidRequest, ModelNotFound
from moeserve.frontend.front_end import FrontEnd
from moeserve.messages import Ready
from moeserve.server.answer import answer_chat, stream_answer, write_all
from moeserve.server.call import HttpCall
from moeserve.server.chat_request import Tools
from moeserve.server.conversation import Conversation
from moeserve.server.dialects.completions import completion_params, encode_prompts
from moeserve.server.dialects.ollama_answer import (
    OllamaAnswer,
    OllamaChatAnswer,
    OllamaChatWriter,
    OllamaGenerateAnswer,
    OllamaGenerateWriter,
    now,
)
from moeserve.server.dialects.ollama_request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
)
from moeserve.server.errors import shorten
from moeserve.server.requests import fields_named
from moeserve.server.terms import Terms, read_generation_request, running_request
from moeserve.text.fill_in_middle import ending_at_markers, fim_tokens

# Chat field -> its name in this dialect.
_SHARED_NAMES = {
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "max_completion_tokens": "options.num_predict",
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
    "temperature": "options.temperature",
    "presence_penalty": "options.presence_penalty",
    "frequency_penalty": "options.frequency_penalty",
    "repetition_penalty": "options.repeat_penalty",
}
_CHAT_NAMES = _SHARED_NAMES | {
    "prompt": "messages",
    "messages[].reasoning_content": "messages[].thinking",
}
_GENERATE_NAMES = _SHARED_NAMES | {"messages": "prompt"}


async def chat(call: HttpCall) -> web.StreamResponse:
    """Answer a conversation in Ollama's shape, whole or as a stream of lines."""
    request, terms = await read_generation_request(call, OllamaChatRequest)
    front, _ = served(call, request.model)
    if not request.messages:
        return call.answer(_loaded(request, OllamaChatAnswer))
    _check_thinking(request, front)
    with fields_named(_CHAT_NAMES):
        asked = request.chat(partial(_call_id, front))
    make_writer = partial(OllamaChatWriter, request=request, began_at_s=call.began_at_s)
    return await answer_chat(terms, asked, make_writer, naming=partial(fields_named, _CHAT_NAMES))


async def generate(call: HttpCall) -> web.StreamResponse:
    """Answer a prompt in Ollama's shape, whole or as a stream of lines."""
    request, terms = await read_generation_request(call, OllamaGenerateRequest)
    front, ready = served(call, request.model)
    if not request.prompt and not request.suffix:
        return call.answer(_loaded(request, OllamaGenerateAnswer))
    if request.is_raw:
        with fields_named(_GENERATE_NAMES):
            return await _answer_raw(terms, request, front, ready)
    _check_thinking(request, front)
    return await answer_chat(
        terms,
        request.chat(),
        partial(OllamaGenerateWriter, request=request, began_at_s=call.began_at_s),
        naming=partial(fields_named, _GENERATE_NAMES),
        context=request.context or (),
    )


def served(call: HttpCall, model: str) -> tuple[FrontEnd, Ready]:
    """Return the front end and the engine's facts. Raises what `Context.serving` raises.

    Clients recognize a missing model by Ollama's words.
    """
    try:
        return call.context.serving(model)
    except ModelNotFound as error:
        front, _ = call.context.serving()
        names = ", ".join(map(repr, front.model_names))
        what = f"model {shorten(model)!r} not found; this server has {names}"
        raise ModelNotFound(what, param="model") from error


def _loaded(request: OllamaRequest, kind: type[OllamaAnswer]) -> OllamaAnswer:
    """Return the answer to a request that would only load or unload the model."""
    reason = "unload" if request.unloads else "load"
    return kind(model=request.model, created_at=now(), done=True, done_reason=reason)


def _check_thinking(request: OllamaRequest, front: FrontEnd) -> None:
    """Raise InvalidRequest if the model shall reason, but cannot."""
    if request.think and (front.answer_format is None or not front.answer_format.reasons):
        raise InvalidRequest(
            f"think: {shorten(request.model)!r} does not support thinking",
            param="think",
            code="unsupported_parameter",
        )


def _call_id(front: FrontEnd, name: str, number: int) -> str:
    """Return the id of an earlier call, in the form that the chat template expects."""
    call_format = front.answer_format or front.text_call_format
    if call_format is None:
        return f"call_{number}"
    digest = hashlib.sha256(str(number).encode()).hexdigest()[:32]
    return call_format.call_id(name, number, digest)


async def _answer_raw(
    terms: Terms, request: OllamaGenerateRequest, front: FrontEnd, ready: Ready
) -> web.StreamResponse:
    """Answer a prompt without the chat template."""
    completion = request.completion()
    params = completion_params(completion, front.defaults)
    constraint = completion.constraint()
    options = {} if constraint is None else {"grammar_param": constraint.field}
    if request.suffix:
        params = ending_at_markers(params, fim_tokens(front.tokenizer, "suffix"))
    # Admission comes first, so that a refused request costs no work.
    with terms.admit(front, params.n) as reservation:
        (ids,) = await encode_prompts(front, ready, [request.prompt or ""], completion)
        answered = Conversation(terms, front, prompt=ids, params=params, tools=Tools())
        async with running_request(
            terms, front, prompts=[ids], params=params, reservation=reservation, **options
        ) as answered.running:
            writer = OllamaGenerateWriter(
                answered, request=request, began_at_s=terms.call.began_at_s, gives_context=False
            )
            if completion.stream:
                return await stream_answer(terms, answered.running, writer)
            await write_all(answered.running, writer)
    return terms.call.answer(writer.whole())
