"""POST /v1/chat/completions, and /v1/chat/completions/render, which shows the prompt that it would
run.
"""

from typing import Any

from aiohttp import web

from moeserve import protocol
from moeserve.frontend.generation import Delta
from moeserve.server.answer import MARK, Chunks, collect, encode, stream_answer
from moeserve.server.app import HttpCall
from moeserve.server.chat_request import ChatRequest
from moeserve.server.conversation import Conversation, conversation, prompt_of
from moeserve.server.logprobs import LogprobFormat
from moeserve.server.requests import fields_named
from moeserve.text.answer_format import Part


async def chat_completions(call: HttpCall) -> web.StreamResponse:
    """Answer a conversation, whole or as a stream of chunks."""
    request = await call.read(ChatRequest)
    with fields_named({"prompt": "messages"}):
        return await _answer(call, request)


async def _answer(call: HttpCall, request: ChatRequest) -> web.StreamResponse:
    async with conversation(call, request) as chat:
        front = chat.front
        ready = chat.ready
        params = chat.params
        form = None
        if request.logprobs:
            form = LogprobFormat(
                front.tokenizer, params.logprobs or 0, as_ids=request.return_tokens_as_token_ids
            )
        if request.stream:
            chunk = protocol.ChatCompletionChunk(
                **call.head("chatcmpl", "chat.completion.chunk", front, ready)
            )
            return await stream_answer(call, chat.running, ChatChunks(chat, chunk, request, form))
        (sequences,) = await collect(chat.running, params.n, chat.counts)
    answer = protocol.ChatCompletion(
        **call.head("chatcmpl", "chat.completion", front, ready), usage=chat.counts.usage()
    )
    for delta in sequences:
        message = _message(chat, delta)
        if request.include_reasoning is False:
            message.reasoning = None
        choice = protocol.ChatChoice(
            index=delta.index,
            message=message,
            logprobs=None if form is None else form.chat(delta.logprobs),
            finish_reason=_finish_reason(chat, delta),
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if request.return_token_ids else None,
            receipt=delta.receipt,
        )
        answer.choices.append(choice)
    if request.return_token_ids:
        answer.prompt_token_ids = chat.prompt
    if (rows := sequences[0].prompt_logprobs) is not None:
        answer.prompt_logprobs = LogprobFormat(front.tokenizer).prompt(rows)
    return call.answer(answer)


def _message(chat: Conversation, delta: Delta) -> protocol.ChatMessage:
    """Return the message of a whole answer. Its content is null only beside calls, as in streams."""
    message = protocol.ChatMessage()
    calls = list[dict[str, Any]]()
    for part in chat.parts(delta):
        if part.kind == "content":
            message.content = (message.content or "") + part.text
        elif part.kind == "reasoning":
            message.reasoning = (message.reasoning or "") + part.text
        elif part.kind == "call":
            calls.append(_tool_call(part))
        else:
            calls[-1]["function"]["arguments"] += part.text
    if calls:
        message.tool_calls = calls
    elif message.content is None:
        message.content = ""
    return message


def _tool_call(part: Part) -> dict[str, Any]:
    return {"id": part.id, "type": "function", "function": {"name": part.text, "arguments": ""}}


def _finish_reason(chat: Conversation, delta: Delta) -> str | None:
    """Returns the reason as OpenAI has it: who named the tool to be called gets "stop"."""
    named = chat.tools.choice == "named" and delta.finish_reason == "tool_calls"
    return "stop" if named else delta.finish_reason


def _choice_delta(part: Part) -> protocol.ChoiceDelta:
    if part.kind == "content":
        return protocol.ChoiceDelta(content=part.text)
    if part.kind == "reasoning":
        return protocol.ChoiceDelta(reasoning=part.text)
    if part.kind == "call":
        return protocol.ChoiceDelta(tool_calls=[{"index": part.number} | _tool_call(part)])
    return protocol.ChoiceDelta(
        tool_calls=[{"index": part.number, "function": {"arguments": part.text}}]
    )


class ChatChunks(Chunks):
    """Frames of /v1/chat/completions."""

    last_choice = protocol.ChatChunkChoice

    def __init__(
        self,
        chat: Conversation,
        chunk: protocol.ChatCompletionChunk,
        request: ChatRequest,
        form: LogprobFormat | None,
    ) -> None:
        super().__init__(chunk, request, [chat.prompt], chat.params.n, chat.counts, form)
        self._chat = chat
        self._hides_reasoning = request.include_reasoning is False
        self._templates: dict[tuple[int, str, int], tuple[bytes, bytes]] = {}

    def opening(self) -> bytes:
        """Returns one frame with the role for each choice."""
        out = b""
        for index in range(self.n):
            choice = protocol.OpenChatChoice(
                index=index, delta=protocol.ChoiceDelta(role="assistant", content="")
            )
            if self.token_ids and index == 0:
                choice.prompt_token_ids = self.prompts[0]
            out += self.frame(choice)
        return out

    def choice(self, index: int, text: str) -> protocol.OpenChatChoice:
        """Returns a choice that goes on."""
        return protocol.OpenChatChoice(index=index, delta=protocol.ChoiceDelta(content=text))

    def frames(self, prompt: int, delta: Delta) -> bytes:
        """Returns what to send for a delta; of a parsed answer, one frame for each part."""
        if not self._chat.parsed:
            return super().frames(prompt, delta)
        self._counts.add(delta)
        index = delta.index
        parts = self._chat.parts(delta)
        if self._hides_reasoning:
            parts = [part for part in parts if part.kind != "reasoning"]
        if self._plain:
            # One part with most deltas: nothing to join.
            out = b"" if not parts else self._part_frame(index, parts[0])
            for part in parts[1:]:
                out += self._part_frame(index, part)
        else:
            choices = [
                protocol.OpenChatChoice(index=index, delta=_choice_delta(part)) for part in parts
            ]
            if delta.token_ids:
                choices = choices or [protocol.OpenChatChoice(index=index)]
                self._add_tokens(choices[0], delta)
            out = b"".join(map(self.frame, choices))
        ends = delta.finish_reason is not None
        return out + self.ending(index, delta, _finish_reason(self._chat, delta)) if ends else out

    def _part_frame(self, index: int, part: Part) -> bytes:
        """Returns the frame of one part: all frames of a text are alike, except for the new text."""
        key = index, part.kind, part.number
        if (template := self._templates.get(key)) is None:
            choice = protocol.OpenChatChoice(
                index=index, delta=_choice_delta(part._replace(text=MARK))
            )
            before, after = encode(choice).split(encode(MARK))
            template = self._templates[key] = self._head + before, after + self._tail
        return template[0] + encode(part.text) + template[1]

    def logprobs(self, index: int, form: LogprobFormat, delta: Delta) -> protocol.ChatLogprobs:
        """Returns the logprobs object of a choice."""
        return form.chat(delta.logprobs)


async def render(call: HttpCall) -> web.StreamResponse:
    """Show the prompt that a conversation becomes, as text and as token ids."""
    request = await call.read(ChatRequest)
    text, prompt = await prompt_of(call, request)
    return call.answer(protocol.RenderedPrompt(prompt=text, prompt_token_ids=prompt))
