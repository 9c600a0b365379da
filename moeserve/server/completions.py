"""POST /v1/completions: text or token ids, one prompt or many, with echo and logprobs."""

from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta

from moeserve.errors import InvalidRequest
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.generation import Delta
from moeserve.messages import Logprobs, Ready
from moeserve.protocol import Completion, CompletionChoice, CompletionLogprobs, OpenCompletionChoice
from moeserve.sampling import MAX_INT, NumLogprobs, SamplingParams
from moeserve.server.answer import Chunks, Counts, collect, running_request, stream_answer
from moeserve.server.app import HttpCall
from moeserve.server.logprobs import LogprobFormat
from moeserve.server.requests import Sampling, check_chars

MAX_SEQUENCES = 1024  # n times prompts of one request
DEFAULT_TOKENS = 16  # OpenAI's max_tokens for this route

Prompt = str | list[int]


class CompletionRequest(Sampling, kw_only=True):
    """One text or several, as text or token ids, to go on with. max_tokens may be 0 with echo."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    add_special_tokens: bool | None = None
    receipt: bool | None = None


async def completions(call: HttpCall) -> web.StreamResponse:
    """Continue texts or token ids, whole or as a stream of chunks."""
    request = await call.read(CompletionRequest)
    front, ready = call.context.serving(request.model)
    params = completion_params(request, front.defaults)
    asked = split_prompts(request.prompt)
    if params.n * len(asked) > MAX_SEQUENCES:
        raise InvalidRequest(
            f"{len(asked)} prompts times n = {params.n} is more than {MAX_SEQUENCES} sequences",
            param="prompt",
        )
    # first, before any work on texts that may not run
    with call.admit(front, params.n * len(asked), request.priority) as reservation:
        prompts = await _encode(front, ready, asked, request)
        call.counts = counts = Counts(sum(map(len, prompts)))
        head = call.head("cmpl", "text_completion", front, ready)
        form = None
        if request.logprobs is not None:
            form = LogprobFormat(
                front.tokenizer, request.logprobs, as_ids=request.return_tokens_as_token_ids
            )
        async with running_request(call, front, prompts, params, request, reservation) as running:
            echo = [_text(front, prompt) for prompt in asked] if request.echo else None
            if request.stream:
                if request.echo and (form is not None or request.max_tokens == 0):
                    what = "logprobs" if form is not None else "max_tokens: 0"
                    raise InvalidRequest(f"echo with {what} cannot be streamed", param="stream")
                chunks = CompletionChunks(
                    Completion(**head), request, prompts, params.n, counts, form, echo=echo
                )
                return await stream_answer(call, running, chunks)
            found = await collect(running, params.n, counts)
    if request.max_tokens == 0:  # drops the one token that was made to get at the prompt's logprobs
        counts.completion_tokens = 0
        found = [
            [Delta(s.index, finish_reason="length", prompt_logprobs=s.prompt_logprobs) for s in p]
            for p in found
        ]
    answer = Completion(**head, usage=counts.usage())
    for p, sequences in enumerate(found):
        # Only the first sequence of a prompt carries the prompt's logprobs.
        prompt_logprobs = sequences[0].prompt_logprobs
        for sequence in sequences:
            choice = _choice(request, prompts[p], prompt_logprobs, sequence, form)
            choice.index = len(answer.choices)
            choice.text = (echo[p] if echo else "") + sequence.text
            if request.prompt_logprobs is not None and prompt_logprobs is not None:
                choice.prompt_logprobs = LogprobFormat(front.tokenizer).prompt(prompt_logprobs)
            answer.choices.append(choice)
    return call.answer(answer)


def completion_params(request: CompletionRequest, defaults: dict[str, Any]) -> SamplingParams:
    """Returns the parameters. With echo max_tokens may be 0; it becomes 1, and the caller drops
    that token.
    """
    given = request.given()
    max_tokens = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
    given["max_tokens"] = min(max(max_tokens, 1) if request.echo else max_tokens, MAX_INT)
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


class CompletionChunks(Chunks):
    """Frames of /v1/completions. echo: the text of each prompt, sent before its answers."""

    last_choice = CompletionChoice

    def __init__(self, *args: Any, echo: list[str] | None = None) -> None:
        super().__init__(*args)
        self._echo = echo
        self._offsets: dict[int, int] = {}  # of the next token's text in each choice

    def opening(self) -> bytes:
        """Returns the frames with prompts and their token ids, if they were asked for."""
        out = b""
        for index in range(self.n * len(self.prompts)):
            prompt = index // self.n
            choice = self.choice(index, self._echo[prompt] if self._echo else "")
            if self.token_ids:
                choice.prompt_token_ids = self.prompts[prompt]
            if choice.text or self.token_ids:
                out += self.frame(choice)
        return out

    def choice(self, index: int, text: str) -> OpenCompletionChoice:
        """Returns a choice that goes on."""
        return OpenCompletionChoice(index=index, text=text)

    def logprobs(self, index: int, form: LogprobFormat, delta: Delta) -> CompletionLogprobs:
        """Returns the logprobs object of a choice."""
        shown, self._offsets[index] = form.columns(
            delta.token_ids, delta.logprobs, self._offsets.get(index, 0)
        )
        return shown


def split_prompts(prompt: Any) -> list[Prompt]:
    """Returns OpenAI's four forms (text, texts, ids, lists of ids) as a list of prompts, all of one
    kind.
    """
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
        if not all(prompt):
            raise InvalidRequest("a prompt must not be empty", param="prompt")
        return list(prompt)
    raise InvalidRequest("prompt mixes texts and token ids", param="prompt")


async def _encode(
    front: FrontEnd, ready: Ready, asked: list[Prompt], request: CompletionRequest
) -> list[list[int]]:
    texts = [prompt for prompt in asked if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in asked if isinstance(prompt, list)]
    if front.tokenizer is not None:
        check_chars(max(map(len, texts)), front.tokenizer, ready.max_model_len, "prompt")
    return await front.encode_all(texts, special=request.add_special_tokens is not False)


def _text(front: FrontEnd, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "" if front.tokenizer is None else front.tokenizer.decode(prompt)


def _choice(
    request: CompletionRequest,
    prompt: list[int],
    prompt_logprobs: list[Logprobs | None] | None,
    sequence: Delta,
    form: LogprobFormat | None,
) -> CompletionChoice:
    choice = CompletionChoice(
        finish_reason=sequence.finish_reason, stop_reason=sequence.stop_reason
    )
    choice.receipt = sequence.receipt
    if form is not None:
        tokens: list[int] = sequence.token_ids
        rows: list[Logprobs | None] = [*sequence.logprobs]
        if request.echo:
            tokens = [*prompt, *tokens]
            rows = [*(prompt_logprobs or [None] * len(prompt)), *rows]
        choice.logprobs, _ = form.columns(tokens, rows)
    if request.return_token_ids:
        choice.prompt_token_ids = prompt
        choice.token_ids = sequence.token_ids
    return choice
