"""POST /v1/chat/completions, and /v1/chat/completions/render, which shows the prompt that it would run."""

from __future__ import annotations

import asyncio

from aiohttp import web

from moeserve.errors import InvalidRequest
from moeserve.frontend.front_end import FrontEnd
from moeserve.messages import Ready
from moeserve.protocol import ChatChoice, ChatCompletion, ChatCompletionChunk, ChatMessage, RenderedPrompt
from moeserve.server.answer import collect, running_request, stream_answer
from moeserve.server.chunks import ChatChunks, Counts, LogprobFormat
from moeserve.server.context import HttpCall
from moeserve.server.requests import ChatRequest, TokenizeRequest, chat_messages, chat_params, check_chars
from moeserve.text.tokenizer import unshield


async def chat_completions(call: HttpCall) -> web.StreamResponse:
    """Answer a conversation, whole or as a stream of chunks."""
    request = await call.read(ChatRequest)
    front, ready = call.context.serving(request.model)
    params = chat_params(request, front.defaults, ready.vocab_size)
    front.admit(params.n)  # before any work on a prompt that may not run anyway
    _, prompt = await chat_prompt(front, ready, request)
    call.counts = counts = Counts(len(prompt))
    form = None
    if request.logprobs:
        form = LogprobFormat(front.tokenizer, params.logprobs or 0, as_ids=request.return_tokens_as_token_ids)
    async with running_request(call, front, [prompt], params, request) as running:
        if request.stream:
            head = call.head("chatcmpl", "chat.completion.chunk", front, ready)
            chunks = ChatChunks(ChatCompletionChunk(**head), request, [prompt], params.n, counts, form)
            return await stream_answer(call, running, chunks)
        (sequences,) = await collect(running, params.n, counts)
    answer = ChatCompletion(**call.head("chatcmpl", "chat.completion", front, ready), usage=counts.usage())
    for index, sequence in enumerate(sequences):
        choice = ChatChoice(
            index=index,
            message=ChatMessage(content=sequence.text),
            logprobs=None if form is None else form.chat(sequence.logprobs),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
        if request.return_token_ids:
            choice.token_ids = sequence.token_ids
        answer.choices.append(choice)
    if request.return_token_ids:
        answer.prompt_token_ids = prompt
    if sequences[0].prompt_logprobs is not None:
        answer.prompt_logprobs = LogprobFormat(front.tokenizer, 0).prompt(sequences[0].prompt_logprobs)
    return call.answer(answer)


async def render(call: HttpCall) -> web.StreamResponse:
    """Show the prompt that a conversation becomes, as text and as token ids."""
    request = await call.read(ChatRequest)
    front, ready = call.context.serving(request.model)
    text, prompt = await chat_prompt(front, ready, request)
    return call.answer(RenderedPrompt(prompt=text, prompt_token_ids=prompt))


async def chat_prompt(front: FrontEnd, ready: Ready, request: ChatRequest | TokenizeRequest) -> tuple[str, list[int]]:
    """Returns the rendered prompt as people see it, and its ids.

    Works in a thread: template and text come from users and may take long.
    """
    template, tokenizer = front.chat_template, front.tokenizer
    if template is None or tokenizer is None:
        raise InvalidRequest(
            "this model has no chat template: use /v1/completions, or start the server with --chat-template",
            param="messages",
            code="no_chat_template",
        )
    messages = chat_messages(request.messages or [])
    continues = bool(request.continue_final_message)
    adds = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    check_chars(sum(len(message["content"]) for message in messages), tokenizer, ready.max_model_len, "messages")

    def work() -> tuple[str, list[int]]:
        """Renders and encodes the conversation, in this thread."""
        text = template.render(
            tokenizer,
            messages,
            add_generation_prompt=adds,
            continue_final_message=continues,
            kwargs=request.chat_template_kwargs,
        )
        return unshield(text), tokenizer.encode_prompt(text)

    return await asyncio.to_thread(work)
