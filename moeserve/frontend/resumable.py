"""Resumable streams of a front end: they outlive their readers for a while, and may outlive the
process.

A reader that comes back gets a new `Generation`, to which every row that is known is given as if it
came now; it takes the place of the one before, whose sequences the engine goes on with. A new
process does the same, and submits the rest.
"""

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from moeserve.cluster.host import Root
from moeserve.errors import Overloaded, RequestError
from moeserve.frontend.generation import Delta, Generation, Sequence, submission
from moeserve.frontend.journal import Entry, Journal, Known, Recorded, feed
from moeserve.receipts import Receipt
from moeserve.text.answer_format import AnswerParser

if TYPE_CHECKING:
    from moeserve.frontend.front_end import FrontEnd

log = logging.getLogger(__name__)


class TakenOver(ConnectionError):
    """Another connection reads this stream now."""


class Resumable:
    """Keeps streams in a journal. window_s: how long one is kept, and computed on, that nobody
    reads.
    """

    def __init__(self, front: "FrontEnd", window_s: float) -> None:
        self.journal = Journal(window_s)
        self._front = front

    def record(
        self, generation: Generation, *, id: str, created: int, digest: bytes, owner: str
    ) -> None:
        """Keeps a generation that has just begun, if there is room. The arguments are fields of
        `Entry`.
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
        self._keep(
            entry, [Known(tokens=sequence.tokens) for sequence in generation.sequences], generation
        )

    def resume(
        self, recorded: Recorded, parser: Callable[[], AnswerParser] | None = None
    ) -> Generation:
        """Returns a stream from its first row on, each row in a delta of its own until `merges` is
        set; its reader so far gets TakenOver. parser: see `FrontEnd.generate`."""
        old: Generation = recorded.running
        fresh = self._replayed(
            recorded.entry, recorded.known, parser, lambda now, _: old.sequences[now.index].receipt
        )
        running = self._front.running.sequences
        for known, before, now in zip(recorded.known, old.sequences, fresh.sequences, strict=True):
            now.started_at = before.started_at
            now.first_at = before.first_at
            now.last_at = before.last_at
            now.digests = before.digests
            known.tokens = now.tokens
            if before.rid in running:
                running[before.rid] = now
        fresh.submitted_at = old.submitted_at
        fresh.recorded = recorded
        recorded.running = fresh
        fresh.leave = self.leave
        self.journal.resume(recorded.entry.id)
        old.replace(TakenOver("another connection reads this stream now"))
        return fresh

    async def revive(self, entry: Entry, known: list[Known]) -> None:
        """Goes on with a stream of another process. To be called when the engine is ready, before
        clients come.

        Raises RequestError if that cannot be; the stream is unknown here then.
        """
        front = self._front
        if front.ready is None or front.state != "ready":
            raise front.refusal()
        if entry.params.receipt and front.notary is not None:
            await front.notary.weights(front.ready)
        entry = msgspec.structs.replace(entry, rids=[next(front.rids) for _ in known])
        generation = self._replayed(entry, known, None, front.receipt)
        for sequence, its in zip(generation.sequences, known, strict=True):
            its.tokens, sequence.digests = sequence.tokens, its.digests.copy()
        if not self._keep(entry, known, generation):
            raise Overloaded("more streams are kept than this server has room for")
        live = [sequence for sequence in generation.sequences if not sequence.ended]
        front.running.add(live)
        try:
            for sequence in live:
                front.link.send(submission(sequence))
        except Overloaded:
            self.close(generation)
            raise
        self.leave(generation)

    def leave(self, generation: Generation) -> None:
        """Notes that nobody reads a generation any more: in a while it is closed, unless it is
        resumed.
        """
        if (recorded := self._of(generation)) is not None:
            for other in self.journal.leave(recorded):
                self.close(other.running)
            asyncio.get_running_loop().call_later(self.journal.window_s, self.close, generation)

    def forget(self, generation: Generation) -> None:
        """Forgets the stream of a generation, unless it goes on in another one."""
        if (recorded := self._of(generation)) is not None:
            self.journal.close(recorded.entry.id)

    def close(self, generation: Generation) -> None:
        """Forgets the stream of a generation, unless it goes on in another one, and ends what runs
        of it.
        """
        generation.abort()
        self.forget(generation)

    def close_unread(self) -> None:
        """Closes all streams that nobody reads."""
        for recorded in self.journal.unread():
            self.close(recorded.running)

    def _of(self, generation: Generation) -> Recorded | None:
        recorded = generation.recorded
        if recorded is None or recorded.running is not generation:
            return None
        return recorded if self.journal.streams.get(recorded.entry.id) is recorded else None

    def _keep(self, entry: Entry, known: list[Known], generation: Generation) -> bool:
        generation.recorded = recorded = self.journal.open(entry, known)
        if recorded is not None:
            recorded.running = generation
            generation.leave = self.leave
        return recorded is not None

    def _replayed(
        self,
        entry: Entry,
        known: list[Known],
        parser: Callable[[], AnswerParser] | None,
        receipt: Callable[[Sequence, Delta], Receipt | None],
    ) -> Generation:
        """Returns a generation to which all that is known was given. receipt: returns that of a
        sequence that ends.
        """
        front = self._front
        prompt = array("i", entry.prompt).tolist()
        generation = Generation(
            prompt,
            entry.params,
            entry.request_id,
            monotonic(),
            front.drop,
            entry.priority,
            entry.salt,
            entry.marked,
        )
        generation.merges = False
        generation.begin(entry.samplings, iter(entry.rids), front.tokenizer, parser)
        for sequence, its in zip(generation.sequences, known, strict=True):
            sequence.digests = its.digests
            for token, finish, columns in its.rows(sequence.rid):
                delta = sequence.advance(token, finish, columns)
                if sequence.ended:
                    delta.receipt = sequence.receipt = receipt(sequence, delta)
                    generation.num_live -= 1
                generation.push(delta)
                if sequence.ended:
                    break
        return generation


@asynccontextmanager
async def succeeding(
    opened: "AbstractAsyncContextManager[FrontEnd]", streams: list[Recorded], root: Root
) -> "AsyncIterator[FrontEnd]":
    """Yields the front end once it goes on with these streams of another one, and feeds its own
    journal.
    """
    async with opened as front:
        assert front.resumable is not None
        if streams:
            await front.wait_ready()
        for recorded in streams:
            try:
                await front.resumable.revive(recorded.entry, recorded.known)
            except RequestError as error:
                log.warning("a stream is lost: %s", error)
        if streams:
            log.info(
                "%d streams of the front end before this one go on",
                len(front.resumable.journal.streams),
            )
        feeding = asyncio.create_task(feed(front.resumable.journal, root), name="journal feed")
        try:
            yield front
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
