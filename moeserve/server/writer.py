"""Writers convert the deltas of an answer to a dialect: events of a stream, or one whole answer.

`ChunkWriter` is for OpenAI's older dialects, whose streams are chunks of several choices.
`EventWriter` is for the newer ones, whose streams are named events about the blocks of one answer.
A plain chunk costs one JSON encoding of its text and two concatenations, because the constant parts
of a choice's chunks are encoded once.
"""

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from moeserve import protocol
from moeserve.errors import RequestError
from moeserve.frontend.generation import Delta
from moeserve.server.conversation import Conversation
from moeserve.server.errors import error_body
from moeserve.server.http import DONE, EVENT_STREAM, PING
from moeserve.server.logprobs import LogprobFormat
from moeserve.server.requests import Sampling, StreamOptions
from moeserve.server.running import RunningRequest
from moeserve.text.answer_format import Part

TEXT_MARK = "\0"  # placeholder for the text of a chunk in its template

OpenChoice = protocol.OpenChatChoice | protocol.OpenCompletionChoice
encode = msgspec.json.Encoder().encode


class StreamWriter(ABC):
    """Writes an answer as a stream: `opening`, `frames` for each delta, `closing` or `failure`.

    Each of them may return b"".
    """

    media_type = EVENT_STREAM

    @abstractmethod
    def opening(self) -> bytes:
        """Return the events before the first delta."""

    @abstractmethod
    def frames(self, prompt: int, delta: Delta) -> bytes:
        """Return the events of a delta, and count its tokens."""

    @abstractmethod
    def closing(self) -> bytes:
        """Return the events after the last delta."""

    @abstractmethod
    def failure(self, error: RequestError, request_id: str) -> bytes:
        """Return the events that end a stream which failed after it began."""

    def ping(self) -> bytes:
        """Return a sign of life for a silent stream: a comment, which clients skip."""
        return PING


class Writer(StreamWriter):
    """Writes an answer as a stream, or as a whole: `add` for each delta, then `whole`."""

    @abstractmethod
    def add(self, prompt: int, delta: Delta) -> None:
        """Add a delta to the whole answer, and count its tokens."""

    @abstractmethod
    def whole(self) -> msgspec.Struct:
        """Return the whole answer."""


class ChunkWriter(Writer):
    """Writes choices. The index of a choice is prompt number * n + sequence number."""

    # The struct of a choice in its last chunk.
    last_choice: type[protocol.ChatChunkChoice] | type[protocol.CompletionChoice]

    def __init__(
        self,
        running: RunningRequest,
        request: Sampling,
        chunk: protocol.ChatCompletionChunk | protocol.Completion,
        logprob_format: LogprobFormat | None,
    ) -> None:
        """Write the answer of `running` to `request`.

        chunk: the fields that all chunks have in common.
        logprob_format: None without logprobs.
        """
        options = request.stream_options or StreamOptions()
        self.running = running
        self.counts = running.counts
        self.n = running.n
        self.logprob_format = logprob_format
        self.shows_token_ids = bool(request.return_token_ids)
        self._chunk = chunk
        self._usage_at_end = options.include_usage
        self._usage_in_chunks = options.continuous_usage_stats
        # Whether chunks have nothing but text, so that they are made from templates.
        self._text_only = not (logprob_format or self.shows_token_ids or self._usage_in_chunks)
        # The bytes of a chunk before and after its choice.
        self._chunk_head = b"data: " + encode(chunk).removesuffix(b"]}")
        self._chunk_tail = b'],"usage":null}\n\n' if self._usage_at_end else b"]}\n\n"
        num_prompts = len(running.generations)
        templates = [
            encode(self.choice(index, TEXT_MARK)).split(encode(TEXT_MARK))
            for index in range(self.n * num_prompts)
        ]
        # The bytes of a chunk before its text, by choice, and after it.
        self._before_text = [self._chunk_head + before for before, _ in templates]
        self._after_text = templates[0][1] + self._chunk_tail
        # For a whole answer: the sequences as [prompt][sequence], and the texts of each choice.
        self._sequences = [[Delta(index) for index in range(self.n)] for _ in range(num_prompts)]
        self._texts: list[list[str]] = [[] for _ in templates]

    @abstractmethod
    def choice(self, index: int, text: str) -> OpenChoice:
        """Return a choice of a chunk that is not its last."""

    @abstractmethod
    def format_logprobs(self, index: int, logprob_format: LogprobFormat, delta: Delta) -> Any:
        """Return the logprobs object of a choice."""

    def frames(self, prompt: int, delta: Delta) -> bytes:
        self.counts.add(delta)
        index = prompt * self.n + delta.index
        frames = b""
        if self._text_only:
            if delta.text:
                frames = self._before_text[index] + encode(delta.text) + self._after_text
        elif delta.text or delta.token_ids:
            choice = self.choice(index, delta.text)
            self._add_token_fields(choice, delta)
            frames = self.frame(choice)
        if delta.finish_reason is None:
            return frames
        return frames + self.last_frame(index, delta, delta.finish_reason)

    def last_frame(self, index: int, delta: Delta, reason: str | None) -> bytes:
        """Return the chunk that ends a choice."""
        return self.frame(
            self.last_choice(
                index=index,
                finish_reason=reason,
                stop_reason=delta.stop_reason,
                receipt=delta.receipt,
            )
        )

    def _add_token_fields(self, choice: OpenChoice, delta: Delta) -> None:
        """Add a delta's logprobs and token ids to its choice, if requested."""
        if self.logprob_format is not None:
            choice.logprobs = self.format_logprobs(choice.index, self.logprob_format, delta)
        if self.shows_token_ids:
            choice.token_ids = delta.token_ids

    def closing(self) -> bytes:
        if not self._usage_at_end:
            return DONE
        self._chunk.usage = self.counts.usage()
        return b"data: " + encode(self._chunk) + b"\n\n" + DONE

    def failure(self, error: RequestError, request_id: str) -> bytes:
        return b"data: " + error_body(error, request_id) + b"\n\n" + DONE

    def frame(self, choice: OpenChoice) -> bytes:
        """Return the chunk of one choice."""
        tail = self._chunk_tail
        if self._usage_in_chunks:
            tail = b'],"usage":' + encode(self.counts.usage()) + b"}\n\n"
        return self._chunk_head + encode(choice) + tail

    def add(self, prompt: int, delta: Delta) -> None:
        self.counts.add(delta)
        self._texts[prompt * self.n + delta.index].append(delta.text)
        self._sequences[prompt][delta.index].append_tokens(delta)

    def sequences(self) -> list[list[Delta]]:
        """Return the added sequences as [prompt][sequence], each merged into one delta."""
        texts = iter(self._texts)
        for sequences in self._sequences:
            for sequence in sequences:
                sequence.text = "".join(next(texts))
        return self._sequences


class EventWriter(Writer):
    """Writes an answer as a sequence of blocks: text, reasoning or a call.

    `add` splits the deltas into blocks and calls the methods `on_block_...` of subclasses. They
    hold the answer, whose last block is the open one, and emit an event for each change. Without a
    stream, events are not encoded.
    """

    def __init__(self, chat: Conversation, *, stream: bool) -> None:
        self.chat = chat
        self.counts = chat.running.counts
        self.last_delta = Delta(0)
        self._is_stream = stream
        self._frames = bytearray()  # emitted and not returned yet
        # Kind of the open block: "content", "reasoning", "arguments" (a call), or "" for none.
        self.open_kind = ""
        self._open_texts: list[str] = []  # of the open block

    @abstractmethod
    def on_block_opened(self, part: Part) -> None:
        """Append a block of the part's kind. A call has its name; the text follows later."""

    @abstractmethod
    def on_block_text(self, text: str) -> None:
        """Emit the event for more text of the open block."""

    @abstractmethod
    def on_block_closed(self, text: str, *, complete: bool) -> None:
        """Set the whole text of the open block. complete: False if it was cut off."""

    @abstractmethod
    def finish(self) -> None:
        """Set the fields that are known only at the end of the answer."""

    def add(self, prompt: int, delta: Delta) -> None:
        self.counts.add(delta)
        for part in self.chat.parts(delta):
            if part.kind != self.open_kind:
                self.close_block()
                self.open_block(part)
            if part.kind != "call":
                self._open_texts.append(part.text)
                self.on_block_text(part.text)
        self.last_delta = delta
        if delta.finish_reason == "abort":
            self.on_aborted()

    def on_aborted(self) -> None:
        """Handle the end of an aborted request."""

    def open_block(self, part: Part) -> None:
        """Open a block. A call and its arguments are one block."""
        self.open_kind = "arguments" if part.kind == "call" else part.kind
        self.on_block_opened(part)

    def close_block(self, *, complete: bool = True) -> None:
        """Close the open block, if there is one."""
        if self.open_kind:
            self.on_block_closed("".join(self._open_texts), complete=complete)
            self.open_kind = ""
            self._open_texts = []

    def frames(self, prompt: int, delta: Delta) -> bytes:
        self.add(prompt, delta)
        return self.emitted()

    def emit(self, event: Any) -> None:
        """Emit an event, a struct with a `type`. Encode it at once, since it may change later."""
        if self._is_stream:
            self._frames += b"event: " + event.type.encode() + b"\ndata: " + encode(event) + b"\n\n"

    def emitted(self) -> bytes:
        """Return the events that were emitted since the last call."""
        frames = bytes(self._frames)
        self._frames = bytearray()
        return frames
