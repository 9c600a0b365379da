"""A running chat, whatever the API that asked for it: from a checked request to the parts of its
answers.

`async with conversation(call, request) as chat:` renders the prompt and runs it; `chat.parts` reads
its deltas. However these are merged, the texts of the parts of a choice, joined, are the same.
"""

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from moeserve.errors import InvalidRequest
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.generation import Delta
from moeserve.messages import Ready
from moeserve.sampling import SamplingParams
from moeserve.server.answer import Counts, RunningRequest, encode, running_request
from moeserve.server.app import HttpCall
from moeserve.server.chat_request import ChatRequest, Tools, chat_messages, chat_params, chat_tools
from moeserve.server.requests import check_chars
from moeserve.text.answer_format import AnswerFormat, Part
from moeserve.text.answer_parser import joined
from moeserve.text.structured_outputs import either, grammar_of
from moeserve.text.tokenizer import unshield

if TYPE_CHECKING:
    from moeserve.server.tokenize import TokenizeRequest


class Conversation:
    """A chat that runs. prompt: its token ids; parsed: whether answers may have parts besides
    content.

    tools: what the model may call. num_earlier: calls in the history. Errors come as RequestErrors,
    those of an engine's refusal before the first delta.
    """

    def __init__(
        self,
        call: HttpCall,
        front: FrontEnd,
        ready: Ready,
        prompt: list[int],
        params: SamplingParams,
        tools: Tools,
    ) -> None:
        self.front = front
        self.ready = ready
        self.prompt = prompt
        self.params = params
        self.tools = tools
        self.counts = Counts(len(prompt))
        self.parsed = False
        self.running: RunningRequest
        self.num_earlier = 0
        self._key = (
            uuid.uuid4().hex if call.stream is None else call.stream.id
        )  # a stream that goes on has the same ids
        self._ids: list[list[str]] = [[] for _ in range(params.n)]  # of each choice's calls

    def parts(self, delta: Delta) -> list[Part]:
        """Returns the parts of a delta, each of which has to come here once and in order. Where a
        choice ends that called a tool, its finish_reason becomes "tool_calls"."""
        if not self.parsed:
            return [Part("content", delta.text)] if delta.text else []
        parts = delta.parts
        ids = self._ids[delta.index]
        if len(parts) > 1:
            parts = joined(parts)
        for i, part in enumerate(parts):
            if part.kind == "call":
                assert self.front.answer_format is not None
                random = hashlib.sha256(
                    f"{self._key}.{delta.index}.{len(ids)}".encode()
                ).hexdigest()[:32]
                ids.append(
                    self.front.answer_format.call_id(part.text, self.num_earlier + len(ids), random)
                )
            if part.kind == "call" or part.kind == "arguments":
                parts[i] = part._replace(number=len(ids) - 1, id=ids[-1])
        if ids and delta.finish_reason == "stop":
            delta.finish_reason = "tool_calls"
        return parts


@asynccontextmanager
async def conversation(call: HttpCall, request: ChatRequest) -> AsyncIterator[Conversation]:
    """Runs a chat inside the block, at whose end what still runs is aborted. Raises RequestError
    before anything runs.

    The call's counts become those of the chat.
    """
    front, ready = call.context.serving(request.model)
    params = chat_params(request, front.defaults)
    # first, before any work that may be in vain
    with call.admit(front, params.n, request.priority) as reservation:
        tools = chat_tools(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
        text, prompt = await chat_prompt(front, ready, request, tools, call.caller.owner)
        chat = Conversation(call, front, ready, prompt, params, tools)
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
        async with running_request(
            call, front, [prompt], params, request, reservation, **options
        ) as chat.running:
            yield chat


def _reading(form: AnswerFormat, request: ChatRequest, tools: Tools, prompt: str) -> dict[str, Any]:
    """Returns the options of `running_request` that say how answers are read, and what they must
    match.
    """
    continues = bool(request.continue_final_message)
    parser = partial(form.parser, tools.shown, prompt=prompt, continued=continues)
    found: dict[str, Any] = {"parser": parser}
    forced = tools.choice in ("required", "named")
    asked = request.constraint()
    grammar = None
    param = "tools"
    if tools.shown:
        required = forced or asked is not None
        grammar = form.constraint(
            tools.callable, required=required, parallel=tools.parallel, prompt=prompt
        )
    if asked is not None and not forced:  # calls that have to come leave no content to constrain
        content = form.after_reasoning(grammar_of(*asked), prompt=prompt)
        param = asked[1]
        grammar = content if grammar is None else either(grammar, content)
    if grammar is not None:
        found |= {"grammar": grammar, "grammar_param": param}
    return found


async def prompt_of(call: HttpCall, request: ChatRequest) -> tuple[str, list[int]]:
    """Returns the prompt of a chat that is not run, as text and as token ids. Raises RequestError
    as if it were.
    """
    front, ready = call.context.serving(request.model)
    chat_params(request, front.defaults).check(ready.vocab_size)
    tools = chat_tools(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
    return await chat_prompt(front, ready, request, tools, call.caller.owner)


async def chat_prompt(
    front: FrontEnd,
    ready: Ready,
    request: "ChatRequest | TokenizeRequest",
    tools: Tools,
    owner: str,
) -> tuple[str, list[int]]:
    """Return the rendered prompt as people see it, and its ids. Neither is made on the event loop."""
    template = front.chat_template
    tokenizer = front.tokenizer
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
        thinks = (
            request.reasoning_effort != "none"
        )  # the two names under which templates have a switch
        effort = {
            "reasoning_effort": request.reasoning_effort,
            "enable_thinking": thinks,
            "thinking": thinks,
        }
        kwargs = effort | kwargs

    rendered = await template.render_async(
        tokenizer,
        messages,
        owner,
        tools=offered,
        add_generation_prompt=adds,
        continue_final_message=continues,
        kwargs=kwargs,
    )
    return await asyncio.to_thread(lambda: (unshield(rendered), tokenizer.encode_prompt(rendered)))
