"""POST /tokenize and /detokenize, and GET /tokenizer_info, in vLLM's formats."""

import asyncio
from typing import Any

from aiohttp import web
from msgspec import Struct

from moeserve.errors import InvalidRequest
from moeserve.frontend.front_end import FrontEnd
from moeserve.protocol import Answer, Detokenized, Tokenized
from moeserve.sampling import TokenId
from moeserve.server.call import HttpCall
from moeserve.server.chat_request import Message, ReasoningEffort, ThinkingSwitch, chat_tools
from moeserve.server.conversation import render_chat
from moeserve.text.tokenizer import Tokenizer

MAX_CHARS = 1_000_000  # each takes about a microsecond and 150 bytes to tokenize


class TokenizeRequest(Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Token ids to turn into text."""

    tokens: list[TokenId]
    model: str | None = None


class TokenizerInfo(Answer, kw_only=True):
    """The fields of tokenizer_config.json, for clients that count tokens over HTTP."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    sep_token: str | None = None
    pad_token: str | None = None
    cls_token: str | None = None
    mask_token: str | None = None
    model_max_length: int
    chat_template: str | None = None


async def tokenize(call: HttpCall) -> web.StreamResponse:
    """Return the token ids of a text, or of chat messages after the chat template."""
    request = await call.read(TokenizeRequest)
    front, ready = call.context.serving(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if request.prompt is None:
        tools = chat_tools(request.tools, request.tool_choice)
        _, tokens = await render_chat(
            front,
            ready,
            messages=request.messages or [],
            tools=tools,
            options=request,
            owner=call.caller.owner,
        )
    else:
        if len(request.prompt) > MAX_CHARS:
            raise InvalidRequest(
                f"the prompt has more than {MAX_CHARS:,} characters; send it in parts",
                param="prompt",
            )
        tokens = await front.encode(request.prompt, special=request.add_special_tokens is not False)
    answer = Tokenized(count=len(tokens), max_model_len=ready.max_model_len, tokens=tokens)
    if request.return_token_strs and front.tokenizer is not None:
        answer.token_strs = [front.tokenizer.token_text(token) for token in tokens]
    return call.answer(answer)


async def detokenize(call: HttpCall) -> web.StreamResponse:
    """Return the text of token ids."""
    request = await call.read(DetokenizeRequest)
    front, ready = call.context.serving(request.model)
    tokenizer = _tokenizer(front)
    if request.tokens and not 0 <= min(request.tokens) <= max(request.tokens) < ready.vocab_size:
        raise InvalidRequest(f"tokens must be ids in 0..{ready.vocab_size - 1}", param="tokens")
    text = await asyncio.to_thread(tokenizer.decode, request.tokens, skip_special_tokens=False)
    return call.answer(Detokenized(prompt=text))


async def tokenizer_info(call: HttpCall) -> web.StreamResponse:
    """Return the tokenizer's special tokens, the context length and the chat template."""
    front, ready = call.context.serving()
    tokenizer = _tokenizer(front)
    named = dict(tokenizer.special_tokens)
    if ready.eos_token_ids:
        named.setdefault("eos_token", tokenizer.token_text(ready.eos_token_ids[0]))
    template = front.chat_template.source if front.chat_template is not None else None
    return call.answer(
        TokenizerInfo(model_max_length=ready.max_model_len, chat_template=template, **named)
    )


def _tokenizer(front: FrontEnd) -> Tokenizer:
    if front.tokenizer is None:
        raise InvalidRequest("this server runs without a tokenizer")
    return front.tokenizer
