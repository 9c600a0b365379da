"""Frames of a streamed answer, from byte templates: what stays the same is encoded once per request.

A chunk costs one JSON encoding of its text and two concatenations; only chunks with logprobs, token ids or running
usage are built as objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from moeserve.frontend.delta import Delta
from moeserve.server.logprobs import CompletionColumns, LogprobFormat

encode = msgspec.json.encode


@dataclass
class Counts:
    """Token counts of one HTTP request, as OpenAI bills them: each prompt once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, delta: Delta) -> None:
        self.completion_tokens += len(delta.token_ids)
        if delta.cached_tokens is not None and delta.index == 0:
            self.cached_tokens += delta.cached_tokens

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass
class StreamShape:
    """What the chunks of one request look like. `head` holds id, object, created, model, system_fingerprint."""

    head: Mapping[str, Any]
    n: int
    prompts: list[list[int]]
    counts: Counts
    include_usage: bool = False
    running_usage: bool = False
    token_ids: bool = False
    logprobs: LogprobFormat | None = None
    num_top: int = 0
    echo: list[str] | None = field(default=None)  # /v1/completions: a prompt's text before its answers


class Chunks:
    """Common part of the two routes. Choice number = prompt number * n + sequence number."""

    def __init__(self, shape: StreamShape, open_text: bytes, close_text: bytes) -> None:
        self.shape = shape
        self.counts = shape.counts
        self._head = b"data: " + encode(shape.head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if shape.include_usage else b"]}\n\n"
        num_choices = shape.n * len(shape.prompts)
        self._open = [self._head + b'{"index":%d,' % i + open_text for i in range(num_choices)]
        self._close = close_text + self._tail
        self._plain = shape.logprobs is None and not shape.token_ids and not shape.running_usage

    def opening(self) -> bytes:
        """Frames before the first text."""
        raise NotImplementedError

    def _rich(self, choice: int, delta: Delta) -> dict[str, Any]:
        """The fields of a choice with text, logprobs and token ids."""
        raise NotImplementedError

    def _last(self, choice: int, delta: Delta) -> dict[str, Any]:
        """The fields of a choice that ends."""
        raise NotImplementedError

    def frames(self, prompt: int, delta: Delta) -> bytes:
        """What to send for a delta: maybe nothing, maybe the text and the end of a choice."""
        self.counts.add(delta)
        choice = prompt * self.shape.n + delta.index
        out = b""
        if self._plain:
            if delta.text:
                out = self._open[choice] + encode(delta.text) + self._close
        elif delta.text or delta.token_ids:
            out = self._frame(self._rich(choice, delta))
        if delta.finish_reason is not None:
            out += self._frame(self._last(choice, delta))
        return out

    def closing(self) -> bytes:
        if not self.shape.include_usage:
            return b""
        return b"data: " + encode({**self.shape.head, "choices": [], "usage": self.counts.usage()}) + b"\n\n"

    def _frame(self, choice: dict[str, Any]) -> bytes:
        tail = self._tail
        if self.shape.running_usage:
            tail = b'],"usage":' + encode(self.counts.usage()) + b"}\n\n"
        return self._head + encode(choice) + tail


class ChatChunks(Chunks):
    def __init__(self, shape: StreamShape) -> None:
        super().__init__(shape, b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null}')

    def opening(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        out = b""
        for i in range(self.shape.n):
            choice: dict[str, Any] = {"index": i, "delta": role, "logprobs": None, "finish_reason": None}
            if self.shape.token_ids and i == 0:
                choice["prompt_token_ids"] = self.shape.prompts[0]
            out += self._frame(choice)
        return out

    def _rich(self, choice: int, delta: Delta) -> dict[str, Any]:
        form = self.shape.logprobs
        fields: dict[str, Any] = {
            "index": choice,
            "delta": {"content": delta.text},
            "logprobs": form.chat(delta.logprobs) if form is not None else None,
            "finish_reason": None,
        }
        if self.shape.token_ids:
            fields["token_ids"] = delta.token_ids
        return fields

    def _last(self, choice: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": choice,
            "delta": {},
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }


class CompletionChunks(Chunks):
    def __init__(self, shape: StreamShape) -> None:
        super().__init__(shape, b'"text":', b',"logprobs":null,"finish_reason":null}')
        self._columns: dict[int, CompletionColumns] = {}

    def opening(self) -> bytes:
        n, out = self.shape.n, b""
        for prompt, ids in enumerate(self.shape.prompts):
            for choice in range(prompt * n, prompt * n + n):
                fields: dict[str, Any] = {"index": choice, "text": self.shape.echo[prompt] if self.shape.echo else ""}
                fields |= {"logprobs": None, "finish_reason": None}
                if self.shape.token_ids:
                    fields["prompt_token_ids"] = ids
                if fields["text"] or self.shape.token_ids:
                    out += self._frame(fields)
        return out

    def _rich(self, choice: int, delta: Delta) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": choice, "text": delta.text, "logprobs": None, "finish_reason": None}
        form = self.shape.logprobs
        if form is not None:
            columns = self._columns.setdefault(choice, CompletionColumns(form, self.shape.num_top))
            fields["logprobs"] = columns.take(delta.token_ids, delta.logprobs)
        if self.shape.token_ids:
            fields["token_ids"] = delta.token_ids
        return fields

    def _last(self, choice: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": choice,
            "text": "",
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
