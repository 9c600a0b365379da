"""POST /v1/chat/completions, and /v1/chat/completions/render, which shows the prompt that it would run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Literal

from aiohttp import web
from msgspec import Meta
from msgspec.structs import replace

from moeserve import protocol
from moeserve.errors import InvalidRequest
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.generation import Delta
from moeserve.messages import Ready
from moeserve.sampling import MAX_INT, NumLogprobs, SamplingParams
from moeserve.server.answer import Chunks, Counts, collect, encode, running_request, stream_answer
from moeserve.server.app import HttpCall
from moeserve.server.logprobs import LogprobFormat
from moeserve.server.requests import Message, OpenName, Sampling, chat_messages, chat_tools, check_chars
from moeserve.text import harmony
from moeserve.text.answer_format import Part
from moeserve.text.tokenizer import unshield

if TYPE_CHECKING:
    from moeserve.server.tokenize import TokenizeRequest

PositiveCount = Annotated[int, Meta(ge=1)]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high"]


class ChatRequest(Sampling, kw_only=True):
    """A conversation to go on with. reasoning_effort is a variable of the template; verbosity changes nothing."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: OpenName | None = None
    safety_identifier: OpenName | None = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    receipt: bool | None = None


async def chat_completions(call: HttpCall) -> web.StreamResponse:
    """Answer a conversation, whole or as a stream of chunks."""
    request = await call.read(ChatRequest)
    front, ready = call.context.serving(request.model)
    params = chat_params(request, front.defaults)
    front.admit(params.n)  # before any work on a prompt that may not run anyway
    _, prompt = await chat_prompt(front, ready, request)
    call.counts = counts = Counts(len(prompt))
    assert front.tokenizer is not None
    stops = front.tokenizer.harmony_stops
    if stops is not None and not params.ignore_eos:
        params = replace(params, stop_token_ids=[*params.stop_token_ids, *stops])
    form = None
    if request.logprobs:
        form = LogprobFormat(front.tokenizer, params.logprobs or 0, as_ids=request.return_tokens_as_token_ids)
    messages = None if stops is None else [AnswerMessage(call.id, i, request) for i in range(params.n)]
    async with running_request(call, front, [prompt], params, request, marked=stops is not None) as running:
        if request.stream:
            chunk = protocol.ChatCompletionChunk(**call.head("chatcmpl", "chat.completion.chunk", front, ready))
            chunks = ChatChunks(chunk, request, [prompt], params.n, counts, form)
            chunks.messages = messages
            return await stream_answer(call, running, chunks)
        (sequences,) = await collect(running, params.n, counts)
    answer = protocol.ChatCompletion(**call.head("chatcmpl", "chat.completion", front, ready), usage=counts.usage())
    for sequence in sequences:
        message = protocol.ChatMessage(content=sequence.text)
        if messages is not None:
            message = messages[sequence.index].whole(sequence)
        choice = protocol.ChatChoice(
            index=sequence.index,
            message=message,
            logprobs=None if form is None else form.chat(sequence.logprobs),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            token_ids=sequence.token_ids if request.return_token_ids else None,
            receipt=sequence.receipt,
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
    given["receipt"] = bool(request.receipt)
    given["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    return SamplingParams(**defaults | given)


class AnswerMessage:
    """The message of one choice of a model that answers in harmony: its parts as fields of OpenAI's message."""

    def __init__(self, request_id: str, index: int, request: ChatRequest) -> None:
        self._parser = harmony.HarmonyParser(in_message=bool(request.continue_final_message))
        self._id = f"call_{request_id}_{index}"
        self._num_calls = 0

    def deltas(self, delta: Delta) -> list[protocol.ChoiceDelta]:
        """Returns what is new, in order. The sequence's last delta ends with "tool_calls" if it called a tool."""
        parts = self._parser.push(delta.text, final=delta.finish_reason is not None)
        found = [self._delta(part) for part in parts]
        if self._num_calls and delta.finish_reason == "stop":
            delta.finish_reason = "tool_calls"
        return found

    def whole(self, sequence: Delta) -> protocol.ChatMessage:
        """Returns the message of a whole answer: what joining the deltas of a stream gives."""
        message = protocol.ChatMessage()
        for delta in self.deltas(sequence):
            if delta.content:
                message.content = (message.content or "") + delta.content
            if delta.reasoning_content:
                message.reasoning_content = (message.reasoning_content or "") + delta.reasoning_content
            for call in delta.tool_calls or ():
                calls = message.tool_calls = message.tool_calls or []
                if call.pop("index") == len(calls):
                    calls.append(call)
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        return message

    def _delta(self, part: Part) -> protocol.ChoiceDelta:
        if part.kind == "content":
            return protocol.ChoiceDelta(content=part.text)
        if part.kind == "reasoning":
            return protocol.ChoiceDelta(reasoning_content=part.text)
        if part.kind == "arguments":
            call: dict[str, Any] = {"index": self._num_calls - 1, "function": {"arguments": part.text}}
        else:
            function = {"name": part.text, "arguments": ""}
            call = {"index": self._num_calls, "id": f"{self._id}_{self._num_calls}", "type": "function"}
            call["function"] = function
            self._num_calls += 1
        return protocol.ChoiceDelta(tool_calls=[call])


class ChatChunks(Chunks):
    """Frames of /v1/chat/completions. messages: one for each choice, if answers are parsed."""

    last_choice = protocol.ChatChunkChoice
    messages: list[AnswerMessage] | None = None

    def opening(self) -> bytes:
        """Returns one frame with the role for each choice."""
        out = b""
        for index in range(self.n):
            choice = protocol.OpenChatChoice(index=index, delta=protocol.ChoiceDelta(role="assistant", content=""))
            if self.token_ids and index == 0:
                choice.prompt_token_ids = self.prompts[0]
            out += self.frame(choice)
        return out

    def choice(self, index: int, text: str) -> protocol.OpenChatChoice:
        """Returns a choice that goes on."""
        return protocol.OpenChatChoice(index=index, delta=protocol.ChoiceDelta(content=text))

    def frames(self, prompt: int, delta: Delta) -> bytes:
        """Returns what to send for a delta; of a parsed answer, one frame for each part."""
        if self.messages is None:
            return super().frames(prompt, delta)
        self._counts.add(delta)
        index = delta.index
        choices = [protocol.OpenChatChoice(index=index, delta=new) for new in self.messages[index].deltas(delta)]
        if not self._plain and delta.token_ids:
            choices = choices or [protocol.OpenChatChoice(index=index)]
            self._add_tokens(choices[0], delta)
        end = Delta(index, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason, receipt=delta.receipt)
        return b"".join(map(self.frame, choices)) + super().frames(prompt, end)

    def logprobs(self, index: int, form: LogprobFormat, delta: Delta) -> protocol.ChatLogprobs:
        """Returns the logprobs object of a choice."""
        return form.chat(delta.logprobs)


async def render(call: HttpCall) -> web.StreamResponse:
    """Show the prompt that a conversation becomes, as text and as token ids."""
    request = await call.read(ChatRequest)
    front, ready = call.context.serving(request.model)
    chat_params(request, front.defaults).check(ready.vocab_size)
    text, prompt = await chat_prompt(front, ready, request)
    return call.answer(protocol.RenderedPrompt(prompt=text, prompt_token_ids=prompt))


async def chat_prompt(front: FrontEnd, ready: Ready, request: ChatRequest | TokenizeRequest) -> tuple[str, list[int]]:
    """Returns the rendered prompt as people see it, and its ids; works in a thread, since both may take long."""
    template, tokenizer = front.chat_template, front.tokenizer
    if template is None or tokenizer is None:
        raise InvalidRequest(
            "this model has no chat template: use /v1/completions, or start the server with --chat-template",
            param="messages",
            code="no_chat_template",
        )
    supported = tokenizer.harmony_stops is not None
    tools = chat_tools(request.tools, request.tool_choice, supported)
    messages = chat_messages(request.messages or [], tools=supported)
    continues = bool(request.continue_final_message)
    adds = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    num_chars = sum(len(message.get("content", "")) for message in messages) + (len(encode(tools)) if tools else 0)
    check_chars(num_chars, tokenizer, ready.max_model_len, "messages")
    kwargs = request.chat_template_kwargs or {}
    if request.reasoning_effort is not None:
        kwargs = {"reasoning_effort": request.reasoning_effort} | kwargs

    def work() -> tuple[str, list[int]]:
        """Renders and encodes the conversation, in this thread."""
        text = template.render(
            tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=adds,
            continue_final_message=continues,
            kwargs=kwargs,
        )
        return unshield(text), tokenizer.encode_prompt(text)

    return await asyncio.to_thread(work)
