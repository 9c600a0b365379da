"""A running chat, whatever its dialect: from a checked request to the parts of its answers.

`async with conversation(terms, request) as chat:` renders the prompt and runs it; `chat.parts`
splits its deltas into parts. The joined texts of a choice's parts do not depend on how deltas are
merged.
"""

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from moeserve.errors import InvalidRequest
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.generation import Delta
from moeserve.messages import Ready
from moeserve.sampling import SamplingParams
from moeserve.server.call import HttpCall
from moeserve.server.chat_request import (
    ChatRequest,
    Message,
    ReasoningEffort,
    ThinkingSwitch,
    Tools,
    chat_messages,
    chat_params,
    chat_tools,
)
from moeserve.server.requests import check_chars
from moeserve.server.running import RunningRequest
from moeserve.server.terms import Terms, running_request
from moeserve.text.answer_constraint import answer_constraint
from moeserve.text.answer_format import AnswerFormat, Part
from moeserve.text.answer_parser import joined
from moeserve.text.chat_template import ChatTemplate
from moeserve.text.tokenizer import Tokenizer, unshield


class Conversation:
    """A chat that runs. Its errors are RequestErrors."""

    def __init__(
        self,
        terms: Terms,
        front: FrontEnd,
        *,
        prompt: list[int],
        params: SamplingParams,
        tools: Tools,
    ) -> None:
        self.front = front
        self.prompt = prompt  # token ids
        self.params = params
        self.tools = tools
        self.answer_format: AnswerFormat | None = None
        self.is_parsed = False  # whether answers may have parts besides content
        self.running: RunningRequest  # set by `conversation`
        self.num_earlier_calls = 0  # calls in the messages of the request
        # A resumed stream keeps its ids.
        self._call_id_seed = uuid.uuid4().hex if terms.stream_key is None else terms.stream_key.id
        self._call_ids: list[list[str]] = [[] for _ in range(params.n)]  # by choice

    def parts(self, delta: Delta) -> list[Part]:
        """Return the parts of a delta. Call it once for each delta, in order.

        When a choice with calls ends, its finish_reason becomes "tool_calls".
        """
        if not self.is_parsed:
            return [Part("content", delta.text)] if delta.text else []
        parts = delta.parts
        ids = self._call_ids[delta.index]
        if len(parts) > 1:
            parts = joined(parts)
        for i, part in enumerate(parts):
            if part.kind == "call":
                ids.append(self._call_id(part.text, delta.index, len(ids)))
            if part.kind == "call" or part.kind == "arguments":
                parts[i] = part._replace(number=len(ids) - 1, id=ids[-1])
        if ids and delta.finish_reason == "stop":
            delta.finish_reason = "tool_calls"
        return parts

    def _call_id(self, name: str, choice: int, number: int) -> str:
        assert self.answer_format is not None
        digest = hashlib.sha256(f"{self._call_id_seed}.{choice}.{number}".encode()).hexdigest()
        return self.answer_format.call_id(name, self.num_earlier_calls + number, digest[:32])


@asynccontextmanager
async def conversation(
    terms: Terms, request: ChatRequest, context: Sequence[int] = ()
) -> AsyncIterator[Conversation]:
    """Run a chat inside the block, and end it as `running_request` does.

    context: token ids of earlier turns, before those of the request's messages.

    Raises RequestError before anything runs.
    """
    call = terms.call
    front, ready = call.context.serving(request.model)
    params = chat_params(request, front.defaults)
    # Admission comes first, so that a refused request costs no work.
    with terms.admit(front, params.n) as reservation:
        tools = chat_tools(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
        text, prompt = await render_chat(
            front,
            ready,
            messages=request.messages,
            tools=tools,
            options=request,
            owner=call.caller.owner,
        )
        if context:
            prompt = [*context, *_without_bos(front, prompt)]
        chat = Conversation(terms, front, prompt=prompt, params=params, tools=tools)
        options: dict[str, Any] = {}
        answer_format = front.answer_format
        if answer_format is None and tools.shown:
            answer_format = front.text_call_format
        if answer_format is not None:
            chat.answer_format = answer_format
            chat.is_parsed = True
            chat.num_earlier_calls = sum(
                len(message.tool_calls or ()) for message in request.messages
            )
            if not params.ignore_eos:
                params = replace(
                    params, stop_token_ids=[*params.stop_token_ids, *answer_format.stop_ids]
                )
            options = await asyncio.to_thread(
                _generate_options, answer_format, request, tools, text
            )
        elif tools.shown:
            raise InvalidRequest(
                "tools: this model's format of tool calls is unknown; start the server with "
                "--tool-format",
                param="tools",
                code="unsupported_parameter",
            )
        elif (constraint := request.constraint()) is not None:
            options["grammar_param"] = constraint.field
        async with running_request(
            terms, front, prompts=[prompt], params=params, reservation=reservation, **options
        ) as chat.running:
            yield chat


def _without_bos(front: FrontEnd, prompt: list[int]) -> list[int]:
    """Return a rendered prompt without the tokens with which every text begins, such as BOS."""
    assert front.tokenizer is not None
    start = front.tokenizer.leading_ids
    return prompt[len(start) :] if prompt[: len(start)] == start else prompt


def _generate_options(
    answer_format: AnswerFormat, request: ChatRequest, tools: Tools, prompt: str
) -> dict[str, Any]:
    """Return the options of `FrontEnd.generate` about how answers are read and constrained."""
    continues = bool(request.continue_final_message)
    constraint = answer_constraint(
        answer_format,
        tools.callable,
        [tool["function"]["name"] for tool in request.tools or ()],
        forced=tools.forced,
        parallel=tools.parallel,
        content=request.constraint(),
        prompt=prompt,
    )
    options: dict[str, Any] = {
        "parser": partial(
            answer_format.parser,
            tools.shown,
            prompt=prompt,
            continued=continues,
            required=tools.forced,
            calls=bool(tools.shown),
        )
    }
    if constraint is not None:
        options["grammar"] = constraint.grammar
        options["grammar_param"] = constraint.param
        options["grammar_parts"] = constraint.parts
    return options


async def prompt_of(call: HttpCall, request: ChatRequest) -> tuple[str, list[int]]:
    """Return the prompt of a chat as text and as token ids, without running it.

    Raises the same RequestErrors as running it.
    """
    front, ready = call.context.serving(request.model)
    chat_params(request, front.defaults).check(ready.vocab_size)
    tools = chat_tools(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
    return await render_chat(
        front,
        ready,
        messages=request.messages,
        tools=tools,
        options=request,
        owner=call.caller.owner,
    )


class TemplateOptions(Protocol):
    """The fields of a request that a chat template reads besides messages and tools."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    reasoning_effort: ReasoningEffort | None
    enable_thinking: bool | None
    thinking: bool | ThinkingSwitch | None


async def render_chat(
    front: FrontEnd,
    ready: Ready,
    *,
    messages: list[Message],
    tools: Tools,
    options: TemplateOptions,
    owner: str,
) -> tuple[str, list[int]]:
    """Return the rendered prompt as readable text and as token ids, without blocking the loop.

    Args:
        front: The front end.
        ready: The engine's Ready message.
        messages: The conversation.
        tools: The tools of the request.
        options: The request's other fields for the template.
        owner: The request's owner. Owners take turns in the template sandboxes.

    Raises RequestError.
    """
    template = front.chat_template
    tokenizer = front.tokenizer
    if template is None or tokenizer is None:
        raise InvalidRequest(
            "this model has no chat template: use /v1/completions, or start the server with "
            "--chat-template",
            param="messages",
            code="no_chat_template",
        )
    rendered = await rendered_chat(
        template,
        tokenizer,
        messages=messages,
        tools=tools,
        options=options,
        max_model_len=ready.max_model_len,
        owner=owner,
    )
    return await asyncio.to_thread(lambda: (unshield(rendered), tokenizer.encode_prompt(rendered)))


async def rendered_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    messages: list[Message],
    tools: Tools,
    options: TemplateOptions,
    max_model_len: int,
    owner: str = "",
) -> str:
    """Return the prompt of a chat, for `Tokenizer.encode_prompt`. Raises RequestError."""
    checked_messages = chat_messages(messages)
    shown_tools = tools.shown or None
    num_chars = sum(len(message.get("content") or "") for message in checked_messages)
    if shown_tools:
        num_chars += len(msgspec.json.encode(shown_tools))
    check_chars(num_chars, tokenizer, max_model_len, "messages")
    continues = bool(options.continue_final_message)
    adds_prompt = options.add_generation_prompt
    return await template.render_async(
        tokenizer,
        checked_messages,
        owner,
        tools=shown_tools,
        add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
        continue_final_message=continues,
        kwargs=_template_variables(options),
    )


def _template_variables(options: TemplateOptions) -> dict[str, Any]:
    """Return the template's variables that a request sets, by whichever field."""
    variables: dict[str, Any] = {}
    if options.reasoning_effort is not None:
        variables["reasoning_effort"] = options.reasoning_effort
    thinks = _thinks(options)
    if thinks is not None:
        # A template's switch for thinking has one of these names.
        variables |= {"enable_thinking": thinks, "thinking": thinks}
    return variables | (options.chat_template_kwargs or {})


def _thinks(options: TemplateOptions) -> bool | None:
    """Return whether the model shall reason first; None: the template decides."""
    if options.enable_thinking is not None:
        return options.enable_thinking
    switch = options.thinking
    if isinstance(switch, bool):
        return switch
    if switch is not None and switch.type != "auto":
        return switch.type == "enabled"
    return None if options.reasoning_effort is None else options.reasoning_effort != "none"
