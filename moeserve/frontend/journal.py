"""The journal: the requests and the known tokens of all resumable streams.

Text, tool calls and chunks are functions of the tokens, so only tokens are stored: an `Entry` has
the request, and a `SequenceLog` the rows of one of its sequences.

journal_feed.py sends all changes to a standby process. A journal that applies them in order is
equal to the original. Changes that are lost with a killed process are computed again, with the same
tokens.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from moeserve.messages import FinishReason, Logprobs, StepOutput
from moeserve.sampling import SamplingParams, TokenSampling

T = TypeVar("T")

# Estimates of memory.
TOKEN_BYTES = 48  # an int in a list, its entry in an unread delta, and its text
LOGPROB_BYTES = 72  # an alternative: token id and value
DIGEST_BYTES = 64
_NO_COLUMNS = StepOutput(rids=b"", tokens=b"", finish=b"")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a stream, with all that is needed to compute its answer again."""

    id: str  # random; part of the ids of the stream's events
    request_id: str
    created: int  # Unix time
    digest: bytes  # of route and body, which a client sends again to resume
    owner: str  # of the API key
    prompt: bytes  # int32
    params: SamplingParams
    samplings: list[TokenSampling]  # one for each sequence, with its seed
    rids: list[int]  # ids of the sequences in the front end that writes the journal
    priority: int = 0
    salt: str = ""
    marked: bool = False  # see `FrontEnd.generate`


class SequenceLog(msgspec.Struct, kw_only=True):
    """The rows of one sequence so far, in columns; see `StepOutput`.

    There may be rows after the one at which a stop string ends the sequence.
    """

    tokens: list[int] = []
    finish: int = FinishReason.NONE  # of the last row; an abort is a row without a token
    stop_id: int | None = None  # the stop token that ended the sequence
    cached: int | None = None  # prompt tokens that were found in the prefix cache
    logprobs: list[Logprobs] = []
    digests: list[bytes] = []
    drafts: dict[int, tuple[int, int]] = {}  # row -> (verified drafts, accepted drafts)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.tokens) + (self.finish == FinishReason.ABORT)

    @property
    def num_bytes(self) -> int:
        """The approximate memory of the log and its unread text."""
        alternatives = sum(len(row.ids) for row in self.logprobs)
        return (
            TOKEN_BYTES * len(self.tokens)
            + LOGPROB_BYTES * alternatives
            + DIGEST_BYTES * len(self.digests)
        )

    def rows(self, rid: int, start: int = 0) -> Iterator[tuple[int, int, StepOutput]]:
        """Yield (token, finish, other columns) of each row, as the engine sent them. This includes
        rows that are added during the iteration.
        """
        while start < self.num_rows:
            yield self._row(rid, start)
            start += 1

    def _row(self, rid: int, i: int) -> tuple[int, int, StepOutput]:
        columns: dict[str, Any] = {}
        if i < len(self.logprobs):
            columns["logprobs"] = {rid: [self.logprobs[i]]}
        if i in self.drafts:
            columns["drafts"] = {rid: self.drafts[i]}
        if i == 0 and self.cached is not None:
            columns["cached"] = {rid: self.cached}
        finish: int = FinishReason.NONE
        if self.finish and i == self.num_rows - 1:
            finish = self.finish
            if self.stop_id is not None:
                columns["stop_ids"] = {rid: self.stop_id}
        token = self.tokens[i] if i < len(self.tokens) else -1
        out = msgspec.structs.replace(_NO_COLUMNS, **columns) if columns else _NO_COLUMNS
        return token, finish, out


class Opened(msgspec.Struct, frozen=True, tag=True):
    """A stream was added to the journal, with its rows so far."""

    entry: Entry
    sequences: list[SequenceLog]


class Closed(msgspec.Struct, frozen=True, tag=True):
    """A stream was removed from the journal."""

    id: str


# A StepOutput may also have rows of requests that are not in the journal.
Change = Opened | StepOutput | Closed


@dataclass(eq=False)
class StreamLog:
    """A stream in the journal."""

    entry: Entry
    sequences: list[SequenceLog]
    num_charged_tokens: int = 0  # generated tokens that count against the rates of the key

    @property
    def num_bytes(self) -> int:
        """The approximate memory of the stream while it has no reader."""
        num_prompt_tokens = len(self.entry.prompt) // 4  # int32
        return TOKEN_BYTES * num_prompt_tokens + sum(log.num_bytes for log in self.sequences)


class Journal:
    """The resumable streams, by id.

    A stream with a reader needs little memory beyond what the front end has anyway. Streams without
    a reader continue to be computed. The owner of the journal closes those in `ids_to_close`.

    max_count: the most streams.
    max_bytes: the most memory of all streams without a reader.
    """

    def __init__(self, max_count: int = 4096, max_bytes: int = 256 * 2**20) -> None:
        self.streams: dict[str, StreamLog] = {}
        # Called with each change, which it must encode before it returns.
        self.listener: Callable[[Change], None] | None = None
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._logs: dict[int, SequenceLog] = {}  # by id of the sequence
        # For streams without a reader, the oldest first: the memory of each
        self._unread_bytes_by_id: dict[str, int] = {}
        self._unread_id_of_rid: dict[int, str] = {}  # id of the sequence -> id of the stream
        self.unread_bytes = 0  # memory of all streams without a reader

    def open(self, entry: Entry, sequences: list[SequenceLog]) -> StreamLog | None:
        """Add a stream, or replace the one with the same id. Return None if there is no room."""
        self._remove(entry.id)
        if len(self.streams) >= self._max_count:
            return None
        stream = StreamLog(entry, sequences)
        self.streams[entry.id] = stream
        self._logs |= zip(entry.rids, sequences, strict=True)
        self._notify(Opened(entry, sequences))
        return stream

    def add_rows(self, out: StepOutput) -> None:
        """Add the rows of a step, without their tokens.

        The front end shares the lists of tokens, and appends to them when it applies the rows. Call
        this before, because the number of known tokens is the number of the new row.
        """
        if not self.streams:
            return
        if self.listener is not None:
            self.listener(msgspec.structs.replace(out, record=None, prompt_logprobs={}))
        self._add_columns(out)
        if self._unread_bytes_by_id:
            self._count_unread(out)

    def _add_columns(self, out: StepOutput) -> None:
        for log, rows in self._with_logs(out.logprobs):
            log.logprobs += rows
        for log, digests in self._with_logs(out.digests):
            log.digests += digests
        for log, verified in self._with_logs(out.drafts):
            log.drafts[len(log.tokens)] = verified
        for log, cached in self._with_logs(out.cached):
            if not log.tokens:  # later hits are on the sequence's own blocks, submitted again
                log.cached = cached
        for log, stop_id in self._with_logs(out.stop_ids):
            log.stop_id = stop_id
        if out.finish.count(0) < len(out.finish):  # if a sequence ends; 0 is FinishReason.NONE
            rids = memoryview(out.rids).cast("q")
            for log, finish in self._with_logs(dict(zip(rids, out.finish, strict=True))):
                log.finish = finish

    def _with_logs(self, column: Mapping[int, T]) -> list[tuple[SequenceLog, T]]:
        """Return (log, value) for the values of sequences that are in the journal."""
        if not column:
            return []
        logs = self._logs
        return [(logs[rid], value) for rid, value in column.items() if rid in logs]

    def _count_unread(self, out: StepOutput) -> None:
        for rid in memoryview(out.rids).cast("q"):
            self._count_bytes(rid, TOKEN_BYTES)
        for rid, rows in out.logprobs.items():
            self._count_bytes(rid, LOGPROB_BYTES * sum(len(row.ids) for row in rows))
        for rid, digests in out.digests.items():
            self._count_bytes(rid, DIGEST_BYTES * len(digests))

    def _count_bytes(self, rid: int, num_bytes: int) -> None:
        if (id := self._unread_id_of_rid.get(rid)) is not None:
            self._unread_bytes_by_id[id] += num_bytes
            self.unread_bytes += num_bytes

    def mark_unread(self, id: str) -> None:
        """Mark a stream as having no reader, and as the latest of these streams."""
        self.mark_read(id)
        stream = self.streams[id]
        self._unread_bytes_by_id[id] = stream.num_bytes
        self.unread_bytes += stream.num_bytes
        self._unread_id_of_rid |= dict.fromkeys(stream.entry.rids, id)

    def mark_read(self, id: str) -> None:
        """Mark a stream as having a reader. Idempotent."""
        self.unread_bytes -= self._unread_bytes_by_id.pop(id, 0)
        for rid in self.streams[id].entry.rids:
            self._unread_id_of_rid.pop(rid, None)

    def ids_to_close(self) -> list[str]:
        """Return the oldest streams without a reader, as many as exceed the limits."""
        if self.unread_bytes <= self._max_bytes and len(self.streams) < self._max_count:
            return []
        excess = list[str]()
        num_bytes = self.unread_bytes
        for id, stream_bytes in self._unread_bytes_by_id.items():
            if num_bytes <= self._max_bytes and len(self.streams) - len(excess) < self._max_count:
                break
            excess.append(id)
            num_bytes -= stream_bytes
        return excess

    def unread_ids(self) -> list[str]:
        """Return the ids of the streams without a reader."""
        return list(self._unread_bytes_by_id)

    def close(self, id: str) -> None:
        """Remove a stream. Unknown ids are ignored."""
        if self._remove(id):
            self._notify(Closed(id))

    def _remove(self, id: str) -> bool:
        if id not in self.streams:
            return False
        self.mark_read(id)
        for rid in self.streams.pop(id).entry.rids:
            del self._logs[rid]
        return True

    def apply(self, change: Change) -> None:
        """Apply a change of another journal."""
        match change:
            case Opened(entry, sequences):
                self.open(entry, sequences)  # has room, because both journals have the same limits
            case Closed(id):
                self.close(id)
            case StepOutput():
                self.add_rows(change)
                rids = memoryview(change.rids).cast("q")
                tokens = memoryview(change.tokens).cast("i")
                for rid, token in zip(rids, tokens, strict=True):
                    if token >= 0 and rid in self._logs:
                        self._logs[rid].tokens.append(token)

    def _notify(self, change: Change) -> None:
        if self.listener is not None:
            self.listener(change)
