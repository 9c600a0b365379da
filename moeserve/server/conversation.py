"""A running chat, whatever the API that asked for it: from a checked request to the parts of its answers.

`async with conversation(call, request) as chat:` renders the prompt and runs it; then either `chat.pieces()` as they
come, or `await chat.whole()`. Both say the same: the texts of the pieces of a choice, joined, are those of the whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from moeserve.errors import InvalidRequest
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.generation import Delta
from moeserve.messages import Ready
from moeserve.sampling import SamplingParams
from moeserve.server.answer import Counts, RunningRequest, collect, encode, running_request
from moeserve.server.app import HttpCall
from moeserve.server.chat_request import ChatRequest, Tools, chat_messages, chat_params, chat_tools
from moeserve.server.requests import check_chars
from moeserve.text.answer_format import AnswerFormat
from moeserve.text.answer_parser import joined
from moeserve.text.structured_outputs import either, grammar_of
from moeserve.text.tokenizer import unshield

if TYPE_CHECKING:
    from moeserve.server.tokenize import TokenizeRequest


class ChatPart(NamedTuple):
    """A `Part` of an answer. number: of the tool call that it begins or belongs to, from 0; id: that call's."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    number: int = -1
    id: str = ""


class Piece(Struct, gc=False):
    """What is new of one choice. delta.finish_reason: "tool_calls" where a choice ends that called a tool."""

    index: int
    parts: list[ChatPart]
    delta: Delta


@dataclass
class Call:
    """A whole tool call. arguments: JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Whole:
    """A whole choice. content, reasoning: None if the answer has none. delta: all its tokens in one."""

    index: int
    delta: Delta
    content: str | None = None
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)


class Conversation:
    """A chat that runs. prompt: its token ids; parsed: whether answers may have parts besides content.

    tools: what the model may call. num_earlier: calls in the history. Errors come as RequestErrors, those of an
    engine's refusal before the first piece.
    """

    def __init__(self, front: FrontEnd, ready: Ready, prompt: list[int], params: SamplingParams, tools: Tools) -> None:
        self.front = front
        self.ready = ready
        self.prompt = prompt
        self.params = params
        self.tools = tools
        self.counts = Counts(len(prompt))
        self.parsed = False
        self.running: RunningRequest
        self.num_earlier = 0
        self._ids: list[list[str]] = [[] for _ in range(params.n)]  # of each choice's calls

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Yields what is new until all choices have ended, and counts it. Raises RequestError."""
        async with aclosing(self.running.deltas()) as deltas:
            async for _, delta in deltas:
                self.counts.add(delta)
                yield self.piece(delta)

    def piece(self, delta: Delta) -> Piece:
        """Returns a delta, each of which has to come here once and in order, with its parts. Counts nothing."""
        if not self.parsed:
            return Piece(delta.index, [ChatPart("content", delta.text)] if delta.text else [], delta)
        found, ids = delta.parts, self._ids[delta.index]
        if len(found) > 1:
            found = joined(found)
        parts = []
        for kind, text in found:
            if kind == "content" or kind == "reasoning":
                parts.append(ChatPart(kind, text))
                continue
            if kind == "call":
                assert self.front.answer_format is not None
                ids.append(self.front.answer_format.call_id(text, self.num_earlier + len(ids)))
            parts.append(ChatPart(kind, text, len(ids) - 1, ids[-1]))
        if ids and delta.finish_reason == "stop":
            delta.finish_reason = "tool_calls"
        return Piece(delta.index, parts, delta)

    async def whole(self) -> list[Whole]:
        """Returns the choices once all have ended. Raises RequestError."""
        (sequences,) = await collect(self.running, self.params.n, self.counts)
        return [_whole(self.piece(sequence)) for sequence in sequences]


def _whole(piece: Piece) -> Whole:
    found = Whole(piece.index, piece.delta)
    for part in piece.parts:
        if part.kind == "content":
            found.content = (found.content or "") + part.text
        elif part.kind == "reasoning":
            found.reasoning = (found.reasoning or "") + part.text
        elif part.kind == "call":
            found.calls.append(Call(part.id, part.text))
        else:
            found.calls[-1].arguments += part.text
    return found


@asynccontextmanager
async def conversation(call: HttpCall, request: ChatRequest) -> AsyncIterator[Conversation]:
    """Runs a chat inside the block, at whose end what still runs is aborted. Raises RequestError before anything runs.

    The call's counts become those of the chat.
    """
    front, ready = call.context.serving(request.model)
    params = chat_params(request, front.defaults)
    front.admit(params.n)  # before any work on a prompt that may not run anyway
    tools = chat_tools(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
    text, prompt = await chat_prompt(front, ready, request, tools)
    chat = Conversation(front, ready, prompt, params, tools)
    call.counts = chat.counts
    options: dict[str, Any] = {}
    if (form := front.answer_format) is not None:
        chat.parsed = True
        chat.num_earlier = sum(len(message.tool_calls or ()) for message in request.messages)
        if not params.ignore_eos:
            params = replace(params, stop_token_ids=[*params.stop_token_ids, *form.stop_ids])
        options = await asyncio.to_thread(_reading, form, request, tools, text)
    elif tools.shown:
        what = "tools: it is not known how this model writes calls; start the server with --tool-format"
        raise InvalidRequest(what, param="tools", code="unsupported_parameter")
    async with running_request(call, front, [prompt], params, request, **options) as chat.running:
        yield chat


def _reading(form: AnswerFormat, request: ChatRequest, tools: Tools, prompt: str) -> dict[str, Any]:
    """Returns the options of `running_request` that say how answers are read, and what they must match."""
    continues = bool(request.continue_final_message)
    parser = partial(form.parser, tools.shown, prompt=prompt, continued=continues)
    found: dict[str, Any] = {"parser": parser}
    forced, asked = tools.choice in ("required", "named"), request.constraint()
    grammar, param = None, "tools"
    if tools.shown:
        required = forced or asked is not None
        grammar = form.constraint(tools.callable, required=required, parallel=tools.parallel, prompt=prompt)
    if asked is not None and not forced:  # calls that have to come leave no content to constrain
        content, param = form.after_reasoning(grammar_of(*asked), prompt=prompt), asked[1]
        grammar = content if grammar is None else either(grammar, content)
    if grammar is not None:
        found |= {"grammar": grammar, "grammar_param": param}
    return found


async def prompt_of(call: HttpCall, request: ChatRequest) -> list[int]:
    """Returns the token ids of a chat's prompt. Raises RequestError."""
    front, ready = call.context.serving(request.model)
    tools = chat_tools(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
    return (await chat_prompt(front, ready, request, tools))[1]


async def chat_prompt(
    front: FrontEnd, ready: Ready, request: ChatRequest | TokenizeRequest, tools: Tools
) -> tuple[str, list[int]]:
    """Returns the rendered prompt as people see it, and its ids; works in a thread, since both may take long."""
    template, tokenizer = front.chat_template, front.tokenizer
    if template is None or tokenizer is None:
        raise InvalidRequest(
            "this model has no chat template: use /v1/completions, or start the server with --chat-template",
            param="messages",
            code="no_chat_template",
        )
    messages = chat_messages(request.messages or [])
    offered = tools.shown or None
    if offered and not template.takes_tools:
        what = "tools: this model's chat template does not know tools; start the server with another --chat-template"
        raise InvalidRequest(what, param="tools", code="unsupported_parameter")
    for i, message in enumerate(messages):
        if (message["role"] == "tool" or "tool_calls" in message) and not template.takes_calls:
            what = f"messages[{i}]: this model's chat template does not know tool calls; write them as text"
            raise InvalidRequest(what, param=f"messages[{i}]", code="unsupported_parameter")
    continues = bool(request.continue_final_message)
    adds = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    num_chars = sum(len(message.get("content") or "") for message in messages) + (
        len(encode(offered)) if offered else 0
    )
    check_chars(num_chars, tokenizer, ready.max_model_len, "messages")
    kwargs = request.chat_template_kwargs or {}
    if request.reasoning_effort is not None:
        thinks = request.reasoning_effort != "none"  # the two names under which templates have a switch
        effort = {"reasoning_effort": request.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
        kwargs = effort | kwargs

    def work() -> tuple[str, list[int]]:
        """Renders and encodes the conversation, in this thread."""
        text = template.render(
            tokenizer,
            messages,
            tools=offered,
            add_generation_prompt=adds,
            continue_final_message=continues,
            kwargs=kwargs,
        )
        return unshield(text), tokenizer.encode_prompt(text)

    return await asyncio.to_thread(work)
