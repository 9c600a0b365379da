"""POST /v1/completions: text or token ids, one prompt or many, with echo and logprobs.

With `suffix` the model fills in the middle between each prompt and the suffix.

This is not a dialect of conversations: a completion is plain text, without parts.
"""

import asyncio
from typing import Any

from aiohttp import web

from moeserve.errors import InvalidRequest
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.generation import Delta
from moeserve.messages import Ready
from moeserve.protocol import Completion, CompletionChoice, CompletionLogprobs, OpenCompletionChoice
from moeserve.sampling import NumLogprobs, SamplingParams
from moeserve.server.answer import stream_answer, write_all
from moeserve.server.call import HttpCall
from moeserve.server.chat_request import TokenLimit, token_limit
from moeserve.server.logprobs import LogprobFormat
from moeserve.server.requests import Sampling, check_chars
from moeserve.server.running import RunningRequest
from moeserve.server.terms import read_generation_request, running_request
from moeserve.server.writer import ChunkWriter
from moeserve.text.fill_in_middle import ending_at_markers, fill_in_middle_prompt, fim_tokens
from moeserve.text.tokenizer import Tokenizer

MAX_SEQUENCES = 1024  # n times prompts of one request
DEFAULT_MAX_TOKENS = 16  # OpenAI's max_tokens for this route

Prompt = str | list[int]


class CompletionRequest(Sampling, kw_only=True):
    """One or several prompts to complete, as text or token ids.

    max_tokens: may be 0 with echo; -1: up to the end of the context.
    """

    prompt: str | list[str | int | list[int]] | None = None
    suffix: str | None = None  # the text after the answer; "" is none
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    max_tokens: TokenLimit | None = None
    add_special_tokens: bool | None = None
    receipt: bool | None = None


async def completions(call: HttpCall) -> web.StreamResponse:
    """Complete prompts, as a whole answer or as a stream of chunks."""
    request, terms = await read_generation_request(call, CompletionRequest)
    if request.stream:
        _check_stream(request)
    front, ready = call.context.serving(request.model)
    params = completion_params(request, front.defaults)
    inputs = split_prompts(request.prompt, allows_empty=bool(request.suffix))
    if request.suffix:
        params = _gap_params(request, params, front)
    if params.n * len(inputs) > MAX_SEQUENCES:
        raise InvalidRequest(
            f"{len(inputs)} prompts times n = {params.n} is more than {MAX_SEQUENCES} sequences",
            param="prompt",
        )
    constraint = request.constraint()
    options = {} if constraint is None else {"grammar_param": constraint.field}
    # Admission comes first, so that a refused request costs no work.
    with terms.admit(front, params.n * len(inputs)) as reservation:
        prompts = await encode_prompts(front, ready, inputs, request)
        async with running_request(
            terms, front, prompts=prompts, params=params, reservation=reservation, **options
        ) as running:
            echo = [_text(front, prompt) for prompt in inputs] if request.echo else None
            writer = CompletionWriter(running, request, front.tokenizer, echo=echo)
            if request.stream:
                return await stream_answer(terms, running, writer)
            await write_all(running, writer)
    return call.answer(writer.whole())


def completion_params(request: CompletionRequest, defaults: dict[str, Any]) -> SamplingParams:
    """Return the sampling parameters.

    With echo max_tokens may be 0. It becomes 1, and `CompletionWriter` drops that token.
    """
    given = request.given()
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and request.echo:
        given["max_tokens"] = 1
    else:
        given["max_tokens"] = token_limit(max_tokens, "max_tokens")
    if request.receipt and max_tokens == 0:
        raise InvalidRequest(
            "an answer without tokens (max_tokens: 0) has no receipt", param="receipt"
        )
    given["receipt"] = bool(request.receipt)
    if request.logprobs is not None:
        given["logprobs"] = request.logprobs
        if request.echo:
            given["prompt_logprobs"] = request.logprobs
    return SamplingParams(**defaults | given)


def _gap_params(
    request: CompletionRequest, params: SamplingParams, front: FrontEnd
) -> SamplingParams:
    """Return the parameters of an answer between a prompt and a suffix."""
    if request.echo:
        raise InvalidRequest(
            "echo: with suffix the prompt is not all that the model reads before its answer; put "
            "prompt, answer and suffix together yourself",
            param="echo",
            code="unsupported_parameter",
        )
    return ending_at_markers(params, fim_tokens(front.tokenizer, "suffix"))


def split_prompts(prompt: Any, *, allows_empty: bool = False) -> list[Prompt]:
    """Convert OpenAI's four forms (text, texts, ids, lists of ids) to a list of prompts."""
    if isinstance(prompt, str):
        prompt = [prompt]
    if not prompt:
        raise InvalidRequest(
            "prompt must be a text, token ids, or a list of either, and not empty", param="prompt"
        )
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds == {str} or kinds == {list}:
        if len(prompt) > MAX_SEQUENCES:
            raise InvalidRequest(
                f"{len(prompt)} prompts; at most {MAX_SEQUENCES} are allowed", param="prompt"
            )
        if not (allows_empty or all(prompt)):
            raise InvalidRequest("a prompt must not be empty", param="prompt")
        return list(prompt)
    raise InvalidRequest("prompt mixes texts and token ids", param="prompt")


async def encode_prompts(
    front: FrontEnd, ready: Ready, inputs: list[Prompt], request: CompletionRequest
) -> list[list[int]]:
    """Return the token ids of the prompts, each with the suffix, if there is one."""
    texts = [prompt for prompt in inputs if isinstance(prompt, str)]
    suffix = request.suffix or ""
    special = request.add_special_tokens is not False
    tokenizer = front.tokenizer
    if tokenizer is not None and (texts or suffix):
        num_chars = max(map(len, texts), default=0) + len(suffix)
        check_chars(num_chars, tokenizer, ready.max_model_len, "prompt")
    if suffix and tokenizer is not None:
        return await asyncio.to_thread(_gap_prompts, tokenizer, inputs, suffix, special=special)
    if not texts:
        return [prompt for prompt in inputs if isinstance(prompt, list)]
    return await front.encode_all(texts, special=special)


def _gap_prompts(
    tokenizer: Tokenizer, inputs: list[Prompt], suffix: str, *, special: bool
) -> list[list[int]]:
    after = tokenizer.encode_plain(suffix)  # once: a thousand prompts may share a long suffix
    return [fill_in_middle_prompt(tokenizer, prompt, after, special=special) for prompt in inputs]


def _text(front: FrontEnd, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "" if front.tokenizer is None else front.tokenizer.decode(prompt)


def _check_stream(request: CompletionRequest) -> None:
    if request.echo and (request.logprobs is not None or request.max_tokens == 0):
        what = "max_tokens: 0" if request.logprobs is None else "logprobs"
        raise InvalidRequest(f"echo with {what} cannot be streamed", param="stream")


class CompletionWriter(ChunkWriter):
    """Writes the completions of each prompt."""

    last_choice = CompletionChoice

    def __init__(
        self,
        running: RunningRequest,
        request: CompletionRequest,
        tokenizer: Tokenizer | None,
        *,
        echo: list[str] | None,
    ) -> None:
        """echo: the text of each prompt, which is put before its completions."""
        logprob_format = None
        if request.logprobs is not None:
            logprob_format = LogprobFormat(
                tokenizer, num_top=request.logprobs, as_ids=request.return_tokens_as_token_ids
            )
        head = running.head.fields("cmpl", "text_completion")
        super().__init__(running, request, Completion(**head), logprob_format)
        self._request = request
        self._tokenizer = tokenizer
        self._echo = echo
        self._text_offsets: dict[int, int] = {}  # of the next token's text in each choice

    def opening(self) -> bytes:
        """Return the chunks with prompts and their token ids, if requested."""
        frames = b""
        for index in range(self.n * len(self.running.generations)):
            prompt = index // self.n
            choice = self.choice(index, self._echo[prompt] if self._echo else "")
            if self.shows_token_ids:
                choice.prompt_token_ids = self.running.generations[prompt].prompt_token_ids
            if choice.text or self.shows_token_ids:
                frames += self.frame(choice)
        return frames

    def choice(self, index: int, text: str) -> OpenCompletionChoice:
        return OpenCompletionChoice(index=index, text=text)

    def format_logprobs(
        self, index: int, logprob_format: LogprobFormat, delta: Delta
    ) -> CompletionLogprobs:
        offset = self._text_offsets.get(index, 0)
        shown, self._text_offsets[index] = logprob_format.completion_logprobs(
            delta.token_ids, delta.logprobs, offset
        )
        return shown

    def whole(self) -> Completion:
        by_prompt = self.sequences()
        if self._request.max_tokens == 0:
            # One token was generated to get the prompt's logprobs.
            self.counts.completion_tokens = 0
            for sequences in by_prompt:
                for i, sequence in enumerate(sequences):
                    sequences[i] = Delta(
                        sequence.index,
                        finish_reason="length",
                        prompt_logprobs=sequence.prompt_logprobs,
                    )
        head = self.running.head.fields("cmpl", "text_completion")
        answer = Completion(**head, usage=self.counts.usage())
        for prompt, sequences in enumerate(by_prompt):
            for sequence in sequences:
                choice = self._whole_choice(prompt, sequences[0], sequence)
                choice.index = len(answer.choices)
                answer.choices.append(choice)
        return answer

    def _whole_choice(self, prompt: int, first: Delta, sequence: Delta) -> CompletionChoice:
        """Return a choice of a whole answer, without its index.

        first: the prompt's first sequence, the only one with the prompt's logprobs.
        """
        echo = self._echo[prompt] if self._echo else ""
        prompt_ids = self.running.generations[prompt].prompt_token_ids
        prompt_logprobs = first.prompt_logprobs
        choice = CompletionChoice(
            text=echo + sequence.text,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            receipt=sequence.receipt,
        )
        if self.logprob_format is not None:
            echoed_ids = prompt_ids if self._request.echo else []
            echoed_rows = (prompt_logprobs or [None] * len(echoed_ids)) if echoed_ids else []
            choice.logprobs, _ = self.logprob_format.completion_logprobs(
                [*echoed_ids, *sequence.token_ids], [*echoed_rows, *sequence.logprobs]
            )
        if self._request.prompt_logprobs is not None and prompt_logprobs is not None:
            choice.prompt_logprobs = LogprobFormat(self._tokenizer).prompt_logprobs(prompt_logprobs)
        if self.shows_token_ids:
            choice.prompt_token_ids = prompt_ids
            choice.token_ids = sequence.token_ids
        return choice
