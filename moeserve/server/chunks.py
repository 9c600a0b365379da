"""From deltas to OpenAI's shapes: token counts, logprobs, and the frames of a streamed answer.

A plain chunk costs one JSON encoding of its text and two concatenations: what stays the same in all chunks of a choice
is encoded once. Only chunks with logprobs, token ids or running usage are built as structs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moeserve.frontend.generation import Delta
from moeserve.messages import Logprobs
from moeserve.protocol import (
    CachedTokens,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatLogprobs,
    ChoiceDelta,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    OpenChatChoice,
    OpenCompletionChoice,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from moeserve.server.requests import Sampling, StreamOptions
from moeserve.text.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON has no minus infinity
_MARK = "\0"  # stands for the text of a chunk in its template

encode = msgspec.json.Encoder().encode


@dataclass
class Counts:
    """Token counts of one HTTP request, as OpenAI bills them: each prompt once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, delta: Delta) -> None:
        """Counts the tokens of a delta."""
        self.completion_tokens += len(delta.token_ids)
        if delta.cached_tokens is not None and delta.index == 0:
            self.cached_tokens += delta.cached_tokens

    def usage(self) -> Usage:
        """Returns the counts in OpenAI's shape."""
        total = self.prompt_tokens + self.completion_tokens
        return Usage(self.prompt_tokens, self.completion_tokens, total, CachedTokens(self.cached_tokens))


class LogprobFormat:
    """Logprobs in the shapes of the two OpenAI APIs and of vLLM's prompt_logprobs, with `num_top` alternatives.

    as_ids shows tokens as "token_id:7", which is exact where text is not; so does a server without a tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, num_top: int, *, as_ids: bool | None = False) -> None:
        self.num_top = num_top
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def token(self, token_id: int) -> str:
        """Returns the token as it is shown."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def chat(self, rows: Sequence[Logprobs]) -> ChatLogprobs:
        """Returns the logprobs object of a chat choice; each row has the sampled token first."""
        return ChatLogprobs([self._chat_row(row) for row in rows])

    def _chat_row(self, row: Logprobs) -> TokenLogprob:
        (sampled, *top) = [
            (self.token(token_id), max(logprob, FLOOR), self._bytes(token_id))
            for token_id, logprob in zip(row.ids, row.values, strict=True)
        ]
        return TokenLogprob(*sampled, [TopLogprob(*entry) for entry in top[: self.num_top]])

    def _bytes(self, token_id: int) -> list[int]:
        return [] if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))

    def prompt(self, rows: Sequence[Logprobs | None]) -> PromptLogprobs:
        """Returns vLLM's form: for each prompt token a map from token id to its logprob, None for the first."""
        return [None if row is None else self._prompt_row(row) for row in rows]

    def _prompt_row(self, row: Logprobs) -> dict[str, PromptLogprob]:
        found: dict[str, PromptLogprob] = {}
        for place, (token_id, logprob) in enumerate(zip(row.ids, row.values, strict=True)):
            rank = row.rank if place == 0 else place
            found.setdefault(str(token_id), PromptLogprob(max(logprob, FLOOR), rank, self.token(token_id)))
        return found


class CompletionColumns:
    """The logprobs object of /v1/completions, grown token by token; offsets count characters of token texts."""

    def __init__(self, form: LogprobFormat) -> None:
        self._form = form
        self._offset = 0

    def take(self, token_ids: Sequence[int], rows: Sequence[Logprobs | None]) -> CompletionLogprobs:
        """Returns the columns of the next tokens."""
        tokens = [self._form.token(token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[
                None if row is None else max(row.values[0], FLOOR) for _, row in zip(tokens, rows, strict=True)
            ],
            top_logprobs=[None if row is None else self._top(row) for row in rows],
            text_offset=offsets,
        )

    def _top(self, row: Logprobs) -> dict[str, float]:
        """Returns the most likely tokens and the sampled one, which is one entry more if it is not among them."""
        found: dict[str, float] = {}
        for token_id, logprob in zip(row.ids[: 1 + self._form.num_top], row.values, strict=False):
            found.setdefault(self._form.token(token_id), max(logprob, FLOOR))
        return found


class Chunks:
    """Frames of one streamed answer. Choice number = prompt number * n + sequence number.

    chunk: the fields that all frames begin with. The subclasses know the choices of the two routes.
    """

    def __init__(
        self,
        chunk: ChatCompletionChunk | Completion,
        request: Sampling,
        prompts: list[list[int]],
        n: int,
        counts: Counts,
        logprobs: LogprobFormat | None,
    ) -> None:
        options = request.stream_options or StreamOptions()
        self.prompts = prompts
        self.n = n
        self.token_ids = bool(request.return_token_ids)
        self._chunk = chunk
        self._counts = counts
        self._logprobs = logprobs
        self._include_usage = options.include_usage
        self._running_usage = options.continuous_usage_stats
        self._plain = logprobs is None and not self.token_ids and not self._running_usage
        self._head = b"data: " + encode(chunk).removesuffix(b"]}")
        self._tail = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"
        templates = [encode(self._choice(index, _MARK)).split(encode(_MARK)) for index in range(n * len(prompts))]
        self._before = [self._head + before for before, _ in templates]
        self._after = templates[0][1] + self._tail

    def opening(self) -> bytes:
        """Returns the frames before the first text."""
        raise NotImplementedError

    def _choice(self, index: int, text: str) -> OpenChatChoice | OpenCompletionChoice:
        """Returns a choice that goes on."""
        raise NotImplementedError

    def _end(self, index: int) -> ChatChunkChoice | CompletionChoice:
        """Returns a choice that ends."""
        raise NotImplementedError

    def _shown_logprobs(self, index: int, form: LogprobFormat, delta: Delta) -> Any:
        """Returns the logprobs object of a choice."""
        raise NotImplementedError

    def frames(self, prompt: int, delta: Delta) -> bytes:
        """Returns what to send for a delta: maybe nothing, maybe the text and the end of a choice."""
        self._counts.add(delta)
        index = prompt * self.n + delta.index
        out = b""
        if self._plain:
            if delta.text:
                out = self._before[index] + encode(delta.text) + self._after
        elif delta.text or delta.token_ids:
            choice = self._choice(index, delta.text)
            if self._logprobs is not None:
                choice.logprobs = self._shown_logprobs(index, self._logprobs, delta)
            if self.token_ids:
                choice.token_ids = delta.token_ids
            out = self._frame(choice)
        if delta.finish_reason is not None:
            end = self._end(index)
            end.finish_reason, end.stop_reason = delta.finish_reason, delta.stop_reason
            out += self._frame(end)
        return out

    def closing(self) -> bytes:
        """Returns the frame with the usage, if it was asked for."""
        if not self._include_usage:
            return b""
        self._chunk.usage = self._counts.usage()
        return b"data: " + encode(self._chunk) + b"\n\n"

    def _frame(self, choice: OpenChatChoice | OpenCompletionChoice) -> bytes:
        tail = self._tail
        if self._running_usage:
            tail = b'],"usage":' + encode(self._counts.usage()) + b"}\n\n"
        return self._head + encode(choice) + tail


class ChatChunks(Chunks):
    """Frames of /v1/chat/completions."""

    def opening(self) -> bytes:
        """Returns one frame with the role for each choice."""
        out = b""
        for index in range(self.n):
            choice = OpenChatChoice(index=index, delta=ChoiceDelta(role="assistant", content=""))
            if self.token_ids and index == 0:
                choice.prompt_token_ids = self.prompts[0]
            out += self._frame(choice)
        return out

    def _choice(self, index: int, text: str) -> OpenChatChoice:
        return OpenChatChoice(index=index, delta=ChoiceDelta(content=text), logprobs=None, finish_reason=None)

    def _end(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index=index)

    def _shown_logprobs(self, index: int, form: LogprobFormat, delta: Delta) -> ChatLogprobs:
        return form.chat(delta.logprobs)


class CompletionChunks(Chunks):
    """Frames of /v1/completions. echo: the text of each prompt, sent before its answers."""

    def __init__(self, *args: Any, echo: list[str] | None = None) -> None:
        super().__init__(*args)
        self._echo = echo
        self._columns: dict[int, CompletionColumns] = {}

    def opening(self) -> bytes:
        """Returns the frames with prompts and their token ids, if they were asked for."""
        out = b""
        for index in range(self.n * len(self.prompts)):
            prompt = index // self.n
            choice = self._choice(index, self._echo[prompt] if self._echo else "")
            if self.token_ids:
                choice.prompt_token_ids = self.prompts[prompt]
            if choice.text or self.token_ids:
                out += self._frame(choice)
        return out

    def _choice(self, index: int, text: str) -> OpenCompletionChoice:
        return OpenCompletionChoice(index=index, text=text, logprobs=None, finish_reason=None)

    def _end(self, index: int) -> CompletionChoice:
        return CompletionChoice(index=index)

    def _shown_logprobs(self, index: int, form: LogprobFormat, delta: Delta) -> CompletionLogprobs:
        return self._columns.setdefault(index, CompletionColumns(form)).take(delta.token_ids, delta.logprobs)
