"""`AsyncEngine`: the engine inside an asyncio program, without HTTP, and its outputs."""

import asyncio
import operator
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from os import PathLike
from types import TracebackType
from typing import Any

from moeserve.cluster.fleet import Fleet
from moeserve.config import Config, config_of
from moeserve.errors import InvalidRequest
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.generation import Delta
from moeserve.frontend.open import open_front_end
from moeserve.logits_processors import LogitsProcessorFactory, with_processors
from moeserve.messages import Logprobs
from moeserve.receipts import Receipt
from moeserve.sampling import SamplingParams

Prompt = str | Mapping[str, Any]


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n answers."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] | None = None  # one for each of token_ids, if requested
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    receipt: Receipt | None = None

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    def add(self, delta: Delta) -> None:
        """Append one delta of this sequence."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs = (self.logprobs or []) + delta.logprobs
            # The sampled token's logprob is the first of each row.
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(
                row.values[0] for row in delta.logprobs
            )
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.receipt = delta.receipt


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers. `AsyncEngine` yields what is new since the last output."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0

    def add(self, answer: CompletionOutput, delta: Delta) -> None:
        """Append one delta to `answer`."""
        answer.add(delta)
        if delta.cached_tokens is not None:
            self.num_cached_tokens = max(self.num_cached_tokens, delta.cached_tokens)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs


class AsyncEngine:
    """The engine inside an asyncio program.

    async with AsyncEngine("demo") as engine:
        async for out in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(out.outputs[0].text, end="")

    Keyword arguments are the fields of `moeserve.config` (`dtype`, `max_model_len`, `max_num_seqs`,
    `threads`, ...). Or pass a whole `Config`.

    logits_processors: factories that requests may name (docs/logits-processors.md).
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        config: Config | None = None,
        logits_processors: Mapping[str, LogitsProcessorFactory | str] | None = None,
        **settings: Any,
    ) -> None:
        self._config = config or config_of(model, **settings)
        if logits_processors:
            self._config = with_processors(self._config, logits_processors, self)
        self._stack = AsyncExitStack()
        self._front: FrontEnd | None = None

    @property
    def front(self) -> FrontEnd:
        """The front end. Raises RuntimeError outside of the `async with` block."""
        if self._front is None:
            raise RuntimeError(
                "the engine is not open: use it inside `async with AsyncEngine(...) as engine`"
            )
        return self._front

    @property
    def fleet(self) -> Fleet:
        """The fleet of engines: their state (`view`) and changes to them (`scaling`)."""
        fleet = self.front.fleet
        if fleet is None:
            raise RuntimeError("there is only one engine in one process; set dp or tp above 1")
        return fleet

    async def __aenter__(self) -> "AsyncEngine":
        async with AsyncExitStack() as stack:
            front = await stack.enter_async_context(open_front_end(self._config, child=False))
            await front.wait_ready()
            self._front = front
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._front = None
        await self._stack.aclose()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield new pieces of the answers, each with one entry in `outputs`. Leaving the loop early
        aborts the request.

        prompt: a text, or {"prompt_token_ids": [...]}.

        Raises RequestError before the first piece if the request is refused.
        """
        params = checked(params)
        text, tokens = await read_prompt(self.front, prompt)
        async with await self.front.generate(
            tokens, params, priority=priority, request_id=request_id
        ) as deltas:
            num_open = params.n  # sequences that have not ended
            async for delta in deltas:
                if delta.finish_reason is not None:
                    num_open -= 1
                answer = CompletionOutput(delta.index)
                piece = RequestOutput(request_id, text, tokens, [answer], finished=num_open == 0)
                piece.add(answer, delta)
                yield piece

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Like `generate`, with a prompt that the chat template makes from messages."""
        # In a thread, because a template runs in another process, and may take seconds.
        tokens = await asyncio.to_thread(render_chat, self.front, messages)
        async for piece in self.generate({"prompt_token_ids": tokens}, params, **kwargs):
            yield piece


def checked(params: SamplingParams | None) -> SamplingParams:
    """Return the parameters, or the defaults for None. Raises InvalidRequest for another type."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"sampling_params must be SamplingParams, not {type(params).__name__}")
    return params


async def read_prompt(front: FrontEnd, prompt: Prompt) -> tuple[str | None, list[int]]:
    """Return a prompt's text (None if only ids were given) and its token ids.

    Raises InvalidRequest.
    """
    text: Any = prompt
    if isinstance(prompt, Mapping):
        text = prompt.get("prompt")
        if (ids := prompt.get("prompt_token_ids")) is not None:
            try:
                return text, [operator.index(token) for token in ids]  # also arrays of integers
            except TypeError as error:
                raise InvalidRequest(f"prompt_token_ids: {error}", param="prompt") from error
    if not isinstance(text, str):
        raise InvalidRequest('a prompt is a text or {"prompt_token_ids": [...]}', param="prompt")
    return text, await front.encode(text)


def render_chat(front: FrontEnd, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the token ids of a conversation, up to the beginning of the assistant's answer.

    Blocks while the template runs, so call it in a thread. Raises InvalidRequest.
    """
    if front.tokenizer is None or front.chat_template is None:
        raise InvalidRequest(
            "this model has no chat template: use generate, or pass one with chat_template="
        )
    if isinstance(messages, str) or not all(
        isinstance(m, Mapping) and "role" in m for m in messages
    ):
        raise InvalidRequest(
            'messages are a list like [{"role": "user", "content": "..."}]', param="messages"
        )
    return front.chat_template.encode(
        front.tokenizer, [dict(m) for m in messages], add_generation_prompt=True
    )
