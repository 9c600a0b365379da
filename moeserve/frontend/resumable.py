"""Resumable streams, which outlive their readers for a while, and may outlive the process.

A reader that resumes a stream gets a new `Generation`. A replay applies the known rows, which the
journal has, to the new generation in time slices, while the old generation keeps running. Once the
new one has caught up, it replaces the old one. The engine computes without interruption.

After a takeover by a standby process, the streams of the dead process continue at once from their
tokens, without text. The replay for the next reader creates the text. Only stop strings need the
text earlier, so `catch_up` replays streams with stop strings in the background.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic

from moeserve.errors import NotFound, Overloaded
from moeserve.frontend.admission import RunningSequences
from moeserve.frontend.generation import Delta, Generation, Sequence
from moeserve.frontend.journal import Entry, Journal, SequenceLog, StreamLog
from moeserve.frontend.slices import Slices
from moeserve.messages import StepOutput
from moeserve.receipts import Receipt
from moeserve.text.answer_format import AnswerParser
from moeserve.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_MERGED_ROWS = 256  # the most rows in a replayed delta
# The most tokens that may wait for their replay, unless a single stream has more. The replay of so
# many takes 20 to 40 s.
MAX_REPLAY_TOKENS = 2**21
RETRY_AFTER_S = 5.0

# Returns a receipt: (sequence, its last delta, whether it ended in another process or before the
# replay) -> receipt
MakeReceipt = Callable[[Sequence, Delta, bool], Receipt | None]
EndSequence = Callable[[Sequence, str], None]  # (sequence, finish reason)


class ResumedElsewhere(ConnectionError):
    """Another connection has resumed this stream."""


@dataclass(eq=False)
class _Stream:
    """A stream in the process that serves it."""

    log: StreamLog
    generation: Generation
    latest_replay: Generation | None = None  # the latest replay, until it has caught up
    close_timer: asyncio.TimerHandle | None = None  # closes a stream without a reader

    def cancel_close(self) -> None:
        if self.close_timer is not None:
            self.close_timer.cancel()
            self.close_timer = None


class ResumableStreams:
    """The resumable streams of a front end."""

    def __init__(
        self,
        window_s: float,
        *,
        running: RunningSequences,
        tokenizer: Tokenizer | None,
        abort_generation: Callable[[Generation], None],
        end_sequence: EndSequence,
        make_receipt: MakeReceipt,
    ) -> None:
        """Create the set of streams, which is empty.

        Args:
            window_s: Time for which a stream without a reader is kept.
            running: The running sequences of the front end.
            tokenizer: The tokenizer of the front end.
            abort_generation: Ends the running sequences of a generation.
            end_sequence: Ends one sequence, here and in the engine, if it is still running.
            make_receipt: Creates the receipt of a sequence.
        """
        self.window_s = window_s
        self.journal = Journal()
        self.slices = Slices()
        self._running = running
        self._tokenizer = tokenizer
        self._abort_generation = abort_generation
        self._end_sequence = end_sequence
        self._make_receipt = make_receipt
        self._streams: dict[str, _Stream] = {}
        self._replay_lock = asyncio.Lock()  # one replay runs at a time, first come, first served
        self._num_replay_tokens = 0  # of all running and waiting replays

    # ---- opening and closing

    def make_resumable(
        self, generation: Generation, *, id: str, created: int, digest: bytes, owner: str
    ) -> None:
        """Make a new generation resumable, unless the journal has no room.

        The keyword arguments are fields of `Entry`.
        """
        entry = Entry(
            id=id,
            request_id=generation.request_id,
            created=created,
            digest=digest,
            owner=owner,
            prompt=array("i", generation.prompt_token_ids).tobytes(),
            params=generation.params,
            samplings=[sequence.sampling for sequence in generation.sequences],
            rids=[sequence.rid for sequence in generation.sequences],
            priority=generation.priority,
            salt=generation.salt,
            marked=generation.marked,
        )
        logs = [SequenceLog(tokens=sequence.tokens) for sequence in generation.sequences]
        self._add_stream(entry, logs, generation)

    def _add_stream(self, entry: Entry, logs: list[SequenceLog], generation: Generation) -> bool:
        """Add a stream, and return whether the journal had room."""
        stream_log = self.journal.open(entry, logs)
        if stream_log is None:
            return False
        self._streams[entry.id] = _Stream(stream_log, generation)
        generation.stream_log = stream_log
        generation.on_reader_left = self.on_reader_left
        return True

    def on_step(self, out: StepOutput) -> None:
        """Record a step, and close streams without a reader that take too much memory."""
        self.journal.add_rows(out)
        self._close_excess()

    def generation_of(self, stream_log: StreamLog) -> Generation | None:
        """Return the current generation of a stream; None once it is closed."""
        stream = self._streams.get(stream_log.entry.id)
        return None if stream is None else stream.generation

    def on_reader_left(self, generation: Generation) -> None:
        """Close the stream after `window_s`, unless it is resumed before."""
        if (stream := self._stream_of(generation)) is None:
            return
        self.journal.mark_unread(stream.log.entry.id)
        stream.cancel_close()
        loop = asyncio.get_running_loop()
        stream.close_timer = loop.call_later(self.window_s, self._close, stream.log.entry.id)
        self._close_excess()

    def remove(self, generation: Generation) -> None:
        """Remove the stream of a generation, unless another generation has replaced it."""
        if (stream := self._stream_of(generation)) is not None:
            stream.cancel_close()
            id = stream.log.entry.id
            del self._streams[id]
            self.journal.close(id)

    def close_unread(self) -> None:
        """Close all streams without a reader."""
        for id in self.journal.unread_ids():
            self._close(id)

    def _close_excess(self) -> None:
        for id in self.journal.ids_to_close():
            self._close(id)

    def _close(self, id: str) -> None:
        """Remove a stream, and end its sequences."""
        generation = self._streams[id].generation
        generation.abort()
        self.remove(generation)

    def _stream_of(self, generation: Generation) -> _Stream | None:
        if generation.stream_log is None:
            return None
        stream = self._streams.get(generation.stream_log.entry.id)
        return stream if stream is not None and stream.generation is generation else None

    # ---- readers that resume

    async def resume(
        self,
        stream_log: StreamLog,
        parser: Callable[[], AnswerParser] | None = None,
        delta_ends: Mapping[int, Collection[int]] | None = None,
    ) -> Generation:
        """Return a generation that begins with the stream's first row. The current reader gets
        ResumedElsewhere.

        The known rows are merged into deltas of up to MAX_MERGED_ROWS rows. Later rows are separate
        deltas until the reader has caught up (`Generation.end_replay`).

        Args:
            stream_log: The log of the stream.
            parser: Returns a parser for the answer of a sequence.
            delta_ends: Index of the sequence -> numbers of tokens after which a delta must end.

        Raises NotFound if the stream is closed, ResumedElsewhere if another reader resumes it, and
        Overloaded if too many streams wait for their replay.
        """
        stream = self._streams.get(stream_log.entry.id)
        if stream is None or stream.log is not stream_log:
            raise unknown_stream()
        num_tokens = sum(sequence.num_rows for sequence in stream_log.sequences)
        if self._num_replay_tokens and self._num_replay_tokens + num_tokens > MAX_REPLAY_TOKENS:
            raise Overloaded(
                f"{self._num_replay_tokens} tokens of interrupted streams wait to be replayed",
                retry_after_s=RETRY_AFTER_S,
            )
        replayed = await self._replay(
            stream, parser=parser, delta_ends=delta_ends, num_tokens=num_tokens
        )
        stream.cancel_close()
        self.journal.mark_read(stream_log.entry.id)
        return replayed

    async def _replay(
        self,
        stream: _Stream,
        *,
        parser: Callable[[], AnswerParser] | None = None,
        delta_ends: Mapping[int, Collection[int]] | None = None,
        num_tokens: int = 0,
    ) -> Generation:
        """Replay the known rows into a new generation, and let it replace the current one.

        num_tokens: how many tokens count against MAX_REPLAY_TOKENS. The other arguments are those
        of `resume`.
        """
        entry = stream.log.entry
        old = stream.generation
        replayed = Generation(
            old.prompt_token_ids,
            entry.params,
            request_id=entry.request_id,
            submitted_at_s=old.submitted_at_s,
            abort=self._abort_generation,
            priority=entry.priority,
            salt=entry.salt,
            marked=entry.marked,
        )
        replayed.merges = False  # so that deltas end at `delta_ends`
        replayed.pause = self.slices.pause
        replayed.create_sequences(entry.samplings, iter(entry.rids), self._tokenizer, parser)
        stream.latest_replay = replayed
        delta_ends = delta_ends or {}
        replays = [
            _SequenceReplay(sequence, sequence_log, delta_ends.get(sequence.index, ()))
            for sequence, sequence_log in zip(replayed.sequences, stream.log.sequences, strict=True)
        ]
        self._num_replay_tokens += num_tokens
        try:
            async with self._replay_lock:
                self._check_wanted(stream, replayed)
                has_new_rows = True
                while has_new_rows:  # while one sequence is replayed, others get new rows
                    has_new_rows = False
                    for replay in replays:
                        has_new_rows |= await self._replay_rows(stream, replayed, replay)
        finally:
            self._num_replay_tokens -= num_tokens
            if stream.latest_replay is replayed:
                stream.latest_replay = None
        # The last pass has found no rows, and the event loop did not run since, so none is missed.
        for replay in replays:
            replay.flush()
        self._replace_current(stream, replayed)
        return replayed

    async def _replay_rows(
        self, stream: _Stream, replayed: Generation, replay: "_SequenceReplay"
    ) -> bool:
        """Replay the new rows of a sequence. If there are none, return False without a pause."""
        num_rows_before = replay.num_rows
        sequence = replay.sequence
        for row in replay.new_rows():
            delta = replay.add(*row)
            if sequence.ended:
                old = stream.generation.sequences[sequence.index]
                sequence.digests = old.digests  # which the receipt contains
                # The old sequence has no receipt if it was adopted, or if the replay has found a
                # stop string.
                delta.receipt = old.receipt or self._make_receipt(sequence, delta, old.ended)
                sequence.receipt = delta.receipt
                replayed.num_live -= 1
                break
            await self.slices.pause()
            self._check_wanted(stream, replayed)
        return replay.num_rows > num_rows_before

    def _check_wanted(self, stream: _Stream, replayed: Generation) -> None:
        """Raise NotFound if the stream was closed, ResumedElsewhere if a later replay has begun."""
        if self._streams.get(stream.log.entry.id) is not stream:
            raise unknown_stream()
        if stream.latest_replay is not replayed:
            raise ResumedElsewhere("another connection has resumed this stream in the meantime")

    def _replace_current(self, stream: _Stream, replayed: Generation) -> None:
        """Replace the current generation by one that has caught up."""
        old = stream.generation
        for old_sequence, new_sequence, sequence_log in zip(
            old.sequences, replayed.sequences, stream.log.sequences, strict=True
        ):
            new_sequence.started_at_s = old_sequence.started_at_s
            new_sequence.first_token_at_s = old_sequence.first_token_at_s
            new_sequence.last_token_at_s = old_sequence.last_token_at_s
            new_sequence.digests = old_sequence.digests
            sequence_log.tokens = new_sequence.tokens  # shared; see `Journal.add_rows`
            if new_sequence.ended and not old_sequence.ended:
                self._end_sequence(old_sequence, "stop")  # the replay has found a stop string
            else:
                self._running.replace(old_sequence, new_sequence)
        replayed.stream_log = stream.log
        replayed.on_reader_left = self.on_reader_left
        stream.generation = replayed
        old.hand_over(ResumedElsewhere("another connection has resumed this stream"))

    # ---- streams of another process

    def adopt(self, entry: Entry, logs: list[SequenceLog]) -> Generation:
        """Add a stream of another process. Return its generation, which has tokens but no text yet.

        entry: the request. Its `rids` must be ids of this process. Raises Overloaded if there is no
        room.
        """
        generation = Generation(
            array("i", entry.prompt).tolist(),
            entry.params,
            request_id=entry.request_id,
            submitted_at_s=monotonic(),
            abort=self._abort_generation,
            priority=entry.priority,
            salt=entry.salt,
            marked=entry.marked,
        )
        generation.create_sequences(entry.samplings, iter(entry.rids), tokenizer=None, parser=None)
        for sequence, sequence_log in zip(generation.sequences, logs, strict=True):
            sequence.tokens = sequence_log.tokens  # shared; see `Journal.add_rows`
            sequence.digests = sequence_log.digests.copy()
            sequence.ended = bool(sequence_log.finish)
            generation.num_live -= sequence.ended
        generation.must_replay = bool(entry.params.stop_strings)
        if not self._add_stream(entry, logs, generation):
            raise Overloaded("this server has no room for more resumable streams")
        self.on_reader_left(generation)  # it has no reader yet, so the window begins now
        return generation

    async def catch_up(self) -> None:
        """Replay the adopted streams that have stop strings, in the background."""
        for stream in list(self._streams.values()):
            if not stream.generation.must_replay or stream.latest_replay is not None:
                continue  # the stream has no stop strings, or its reader replays it
            try:
                replayed = await self._replay(stream)
            except (NotFound, ResumedElsewhere):
                continue
            except Exception:
                log.exception("a stream is lost: its replay failed")
                self._close(stream.log.entry.id)
                continue
            replayed.discard_deltas()  # it has no reader


class _SequenceReplay:
    """The replay of one sequence. delta_ends: numbers of tokens after which a delta must end."""

    def __init__(
        self, sequence: Sequence, sequence_log: SequenceLog, delta_ends: Collection[int]
    ) -> None:
        self.sequence = sequence
        self.num_rows = 0  # replayed so far
        self._log = sequence_log
        self._delta_ends = delta_ends
        self._merged: Delta | None = None
        self._num_merged_rows = 0

    def new_rows(self) -> Iterator[tuple[int, int, StepOutput]]:
        """Return the rows that are not replayed yet; none if the sequence has ended."""
        if self.sequence.ended:
            return iter(())
        return self._log.rows(self.sequence.rid, self.num_rows)

    def add(self, token: int, finish: int, other_columns: StepOutput) -> Delta:
        """Apply a row. Return the delta that contains it."""
        # A row without a token only ends the sequence, and gets its own delta.
        if token < 0 or self._num_merged_rows == MAX_MERGED_ROWS:
            self.flush()
        delta = self.sequence.advance(token, finish, other_columns)
        self.num_rows += 1
        if self._merged is None:
            self._merged = delta
        else:
            self._merged.merge(delta)
        self._num_merged_rows += 1
        merged = self._merged
        if len(self.sequence.tokens) in self._delta_ends:
            self.flush()
        return merged

    def flush(self) -> None:
        """Push the merged delta."""
        if self._merged is not None:
            self.sequence.owner.push(self._merged)
        self._merged = None
        self._num_merged_rows = 0


def unknown_stream() -> NotFound:
    """Return the error for a stream that does not exist any more, or belongs to another key."""
    return NotFound(
        "Last-Event-ID: this stream is not kept any more; send the request without it to begin "
        "again"
    )
