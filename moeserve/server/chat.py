"""POST /v1/chat/completions, and /v1/chat/completions/render, which shows the prompt that it would run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Literal

from aiohttp import web
from msgspec import Meta

from moeserve.errors import InvalidRequest
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.generation import Delta
from moeserve.messages import Ready
from moeserve.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    ChoiceDelta,
    OpenChatChoice,
    RenderedPrompt,
)
from moeserve.sampling import MAX_INT, NumLogprobs, SamplingParams
from moeserve.server.answer import Chunks, Counts, collect, running_request, stream_answer
from moeserve.server.app import HttpCall
from moeserve.server.logprobs import LogprobFormat
from moeserve.server.requests import Message, OpenName, Sampling, chat_messages, check_chars
from moeserve.text.tokenizer import unshield

if TYPE_CHECKING:
    from moeserve.server.tokenize import TokenizeRequest

PositiveCount = Annotated[int, Meta(ge=1)]


class ChatRequest(Sampling, kw_only=True):
    """A conversation to go on with. reasoning_effort and verbosity are accepted and change nothing."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: OpenName | None = None
    safety_identifier: OpenName | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


async def chat_completions(call: HttpCall) -> web.StreamResponse:
    """Answer a conversation, whole or as a stream of chunks."""
    request = await call.read(ChatRequest)
    front, ready = call.context.serving(request.model)
    params = chat_params(request, front.defaults)
    front.admit(params.n)  # before any work on a prompt that may not run anyway
    _, prompt = await chat_prompt(front, ready, request)
    call.counts = counts = Counts(len(prompt))
    form = None
    if request.logprobs:
        form = LogprobFormat(front.tokenizer, params.logprobs or 0, as_ids=request.return_tokens_as_token_ids)
    async with running_request(call, front, [prompt], params, request) as running:
        if request.stream:
            chunk = ChatCompletionChunk(**call.head("chatcmpl", "chat.completion.chunk", front, ready))
            return await stream_answer(call, running, ChatChunks(chunk, request, [prompt], params.n, counts, form))
        (sequences,) = await collect(running, params.n, counts)
    answer = ChatCompletion(**call.head("chatcmpl", "chat.completion", front, ready), usage=counts.usage())
    for sequence in sequences:
        choice = ChatChoice(
            index=sequence.index,
            message=ChatMessage(content=sequence.text),
            logprobs=None if form is None else form.chat(sequence.logprobs),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            token_ids=sequence.token_ids if request.return_token_ids else None,
        )
        answer.choices.append(choice)
    if request.return_token_ids:
        answer.prompt_token_ids = prompt
    if sequences[0].prompt_logprobs is not None:
        answer.prompt_logprobs = LogprobFormat(front.tokenizer).prompt(sequences[0].prompt_logprobs)
    return call.answer(answer)


def chat_params(request: ChatRequest, defaults: dict[str, Any]) -> SamplingParams:
    """Returns the parameters; max_tokens None means the rest of the context. Raises InvalidRequest."""
    given = request.given()
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    given["max_tokens"] = asked if asked is None else min(asked, MAX_INT)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    given["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    return SamplingParams(**defaults | given)


class ChatChunks(Chunks):
    """Frames of /v1/chat/completions."""

    def opening(self) -> bytes:
        """Returns one frame with the role for each choice."""
        out = b""
        for index in range(self.n):
            choice = OpenChatChoice(index=index, delta=ChoiceDelta(role="assistant", content=""))
            if self.token_ids and index == 0:
                choice.prompt_token_ids = self.prompts[0]
            out += self.frame(choice)
        return out

    def choice(self, index: int, text: str) -> OpenChatChoice:
        """Returns a choice that goes on."""
        return OpenChatChoice(index=index, delta=ChoiceDelta(content=text))

    def last_choice(self, index: int) -> ChatChunkChoice:
        """Returns a choice that ends."""
        return ChatChunkChoice(index=index)

    def logprobs(self, index: int, form: LogprobFormat, delta: Delta) -> ChatLogprobs:
        """Returns the logprobs object of a choice."""
        return form.chat(delta.logprobs)


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
