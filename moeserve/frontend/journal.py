"""The journal: what is known of each resumable stream, and the feed that keeps the same journal in
another process.

Text, tool calls and chunks are functions of the tokens, so tokens are all that has to be kept: an
`Entry` says what was asked, a `Known` what came for one of its sequences. A `Journal` here and one
elsewhere that `apply`s its changes in their order hold the same: who connects to the `feed` of the
front end that serves gets what is there and then each change. If a kill takes the last ones along,
the tokens in them are computed again, and are the same.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from moeserve.actor.actor import Inbox
from moeserve.actor.zmq_wire import PeerGone, ZmqWire, connect, listen
from moeserve.cluster.host import Root
from moeserve.errors import ActorStopped, Overloaded
from moeserve.messages import FinishReason, Logprobs, StepOutput
from moeserve.sampling import SamplingParams, TokenSampling

log = logging.getLogger(__name__)

T = TypeVar("T")
AGAIN_S = 0.1
TOKEN_BYTES = 36  # of an int in a list
_NOTHING = StepOutput(rids=b"", tokens=b"", finish=b"")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream answers, enough to compute it again. Its sequences have these `rids` in the
    recording front end.

    id: hard to guess, in the ids of the stream's events. created: unix time. digest: of the route
    and the body, which have to be sent again. owner: of the key that asked. samplings: one for each
    sequence, with the seeds that were drawn. marked: see `FrontEnd.generate`.
    """

    id: str
    request_id: str
    created: int
    digest: bytes
    owner: str
    prompt: bytes  # int32
    params: SamplingParams
    samplings: list[TokenSampling]
    rids: list[int]
    priority: int = 0
    salt: str = ""
    marked: bool = False


class Known(msgspec.Struct, kw_only=True):
    """The rows of one sequence so far; see `StepOutput` for what they have. drafts: by row.

    There may be rows behind the one at which a stop string ends the sequence.
    """

    tokens: list[int] = []
    finish: int = (
        FinishReason.NONE
    )  # of the last row; an abort has a row of its own, without a token
    stop_id: int | None = None
    cached: int | None = None
    logprobs: list[Logprobs] = []
    digests: list[bytes] = []
    drafts: dict[int, tuple[int, int]] = {}

    @property
    def num_bytes(self) -> int:
        """About how much memory this takes."""
        rows = sum(len(row.ids) for row in self.logprobs)
        return TOKEN_BYTES * (len(self.tokens) + 2 * rows) + 64 * len(self.digests)

    def rows(self, rid: int) -> list[tuple[int, int, StepOutput]]:
        """Returns (token, finish, the other columns) of each row, as the engine sent them."""
        found = []
        for i, token in enumerate(self.tokens):
            columns: dict[str, Any] = {}
            if i < len(self.logprobs):
                columns["logprobs"] = {rid: [self.logprobs[i]]}
            if i in self.drafts:
                columns["drafts"] = {rid: self.drafts[i]}
            if i == 0 and self.cached is not None:
                columns["cached"] = {rid: self.cached}
            found.append((token, FinishReason.NONE, _columns(columns)))
        if self.finish:
            ends = {} if self.stop_id is None else {"stop_ids": {rid: self.stop_id}}
            token = -1
            others = _NOTHING
            if self.finish != FinishReason.ABORT:
                token, _, others = found.pop()
            found.append((token, self.finish, msgspec.structs.replace(others, **ends)))
        return found


def _columns(columns: dict[str, Any]) -> StepOutput:
    return msgspec.structs.replace(_NOTHING, **columns) if columns else _NOTHING


class Opened(msgspec.Struct, frozen=True, tag=True):
    """A stream is kept from now on. known: what has come for each sequence."""

    entry: Entry
    known: list[Known]


class Closed(msgspec.Struct, frozen=True, tag=True):
    """A stream is forgotten."""

    id: str


Change = (
    Opened | StepOutput | Closed
)  # a StepOutput may have rows of others, which are not for the journal


@dataclass(eq=False)
class Recorded:
    """A stream that is kept. running: the front end's `Generation` of it. settled: tokens that were
    charged for.
    """

    entry: Entry
    known: list[Known]
    running: Any = None
    settled: int = 0

    @property
    def num_bytes(self) -> int:
        """About how much memory this takes."""
        return len(self.entry.prompt) + sum(known.num_bytes for known in self.known)


class Journal:
    """The streams that are kept, by id. window_s: how long one is kept that nobody reads.

    Those that are read are bounded by their number, and cost little that the front end does not
    have anyway; those that nobody reads also by max_bytes. listener: gets each change, and has to
    encode it before it returns.
    """

    def __init__(
        self, window_s: float, max_count: int = 4096, max_bytes: int = 256 * 2**20
    ) -> None:
        self.window_s = window_s
        self.listener: Callable[[Change], None] | None = None
        self.streams: dict[str, Recorded] = {}
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._unread: dict[
            str, int
        ] = {}  # bytes of those that nobody reads, by id, the oldest first
        self._known: dict[int, Known] = {}  # by rid

    def open(self, entry: Entry, known: list[Known]) -> Recorded | None:
        """Keeps a stream; None if there is no room. One with the same id is replaced."""
        self.close(entry.id, tell=False)
        if len(self.streams) >= self._max_count:
            return None
        recorded = self.streams[entry.id] = Recorded(entry, known)
        self._known |= zip(entry.rids, known, strict=True)
        self._tell(Opened(entry, known))
        return recorded

    def step(self, out: StepOutput) -> None:
        """Notes what a step made, but for its tokens: in a front end these are added as it applies
        the rows.
        """
        if not self.streams:
            return
        if self.listener is not None:
            self.listener(msgspec.structs.replace(out, record=None, prompt_logprobs={}))
        for known, rows in self._of(out.logprobs):
            known.logprobs += rows
        for known, digests in self._of(out.digests):
            known.digests += digests
        for known, verified in self._of(out.drafts):
            known.drafts[len(known.tokens)] = verified
        for known, cached in self._of(out.cached):
            known.cached = (
                known.cached if known.tokens else cached
            )  # later hits are on our own earlier work
        for known, stop_id in self._of(out.stop_ids):
            known.stop_id = stop_id
        if out.finish.count(0) < len(out.finish):
            for known, finish in self._of(
                dict(zip(memoryview(out.rids).cast("q"), out.finish, strict=True))
            ):
                known.finish = finish

    def _of(self, column: Mapping[int, T]) -> list[tuple[Known, T]]:
        known = self._known
        return (
            [(known[rid], value) for rid, value in column.items() if rid in known] if column else []
        )

    def leave(self, recorded: Recorded) -> list[Recorded]:
        """Notes that nobody reads a stream any more; returns those that have to be closed for want
        of room.
        """
        self._unread[recorded.entry.id] = recorded.num_bytes
        total = sum(self._unread.values())
        full = list[Recorded]()
        for id, num_bytes in self._unread.items():
            if total <= self._max_bytes and len(self.streams) - len(full) < self._max_count:
                break
            full.append(self.streams[id])
            total -= num_bytes
        return full

    def unread(self) -> list[Recorded]:
        """Returns the streams that nobody reads."""
        return [self.streams[id] for id in self._unread]

    def resume(self, id: str) -> None:
        """Notes that a stream is read again."""
        self._unread.pop(id, None)

    def close(self, id: str, *, tell: bool = True) -> None:
        """Forgets a stream. Unknown ids are ignored."""
        self._unread.pop(id, None)
        if (recorded := self.streams.pop(id, None)) is not None:
            for rid in recorded.entry.rids:
                del self._known[rid]
            if tell:
                self._tell(Closed(id))

    def apply(self, change: Change) -> None:
        """Does what another journal did."""
        match change:
            case Opened(entry, known):
                self.open(entry, known)
            case Closed(id):
                self.close(id)
            case StepOutput(rids=rids, tokens=tokens):
                self.step(change)
                for rid, token in zip(
                    memoryview(rids).cast("q"), memoryview(tokens).cast("i"), strict=True
                ):
                    if token >= 0 and rid in self._known:
                        self._known[rid].tokens.append(token)

    def snapshot(self) -> list[Opened]:
        """Returns the changes that make an empty journal like this one."""
        return [Opened(recorded.entry, recorded.known) for recorded in self.streams.values()]

    def _tell(self, change: Change) -> None:
        if self.listener is not None:
            self.listener(change)


async def feed(journal: Journal, root: Root) -> None:
    """Tells all changes of our journal to one front end that stands by after the other; never
    returns.
    """
    while True:
        inbox: Inbox[Closed | PeerGone] = Inbox("journal feed")
        wire: ZmqWire[Change, Closed | PeerGone] = listen(
            root.journal_of(root.number), token=root.secret, receives=Closed, inbox=inbox
        )

        def tell(change: Change, wire: ZmqWire[Change, Closed | PeerGone] = wire) -> None:
            """Sends a change, or lets a reader go that does not keep up: it comes again for all of
            it.
            """
            try:
                wire.send(change)
            except Overloaded as error:
                log.warning("%s", error)
                wire.inbox.close("it does not keep up")

        try:
            await wire.connected(None)
            for opened in journal.snapshot():
                tell(opened)
            journal.listener = tell
            log.info("a front end stands by, with %d streams", len(journal.streams))
            await inbox.drain(wait=True)  # nothing but its end comes
        except ActorStopped:
            pass
        finally:
            journal.listener = None
            wire.close()
        await asyncio.sleep(AGAIN_S)


async def follow(root: Root, window_s: float, ours: asyncio.Event) -> Journal:
    """Keeps a copy of the journal of the front end that serves; returns it once that is dead and it
    is our turn.
    """
    journal = Journal(window_s)
    while root.follows >= 0 and not ours.is_set():
        inbox: Inbox[Change | PeerGone] = Inbox("journal")
        wire: ZmqWire[Closed, Change | PeerGone] = connect(
            root.journal_of(root.follows), token=root.secret, receives=Change, inbox=inbox
        )
        with suppress(ActorStopped):
            await wire.connected(None)
            journal = Journal(window_s)
            while True:
                for change in await inbox.drain(wait=True):
                    if isinstance(change, PeerGone):
                        inbox.close(change.cause)
                    else:
                        journal.apply(change)
        wire.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_S):
                await ours.wait()
    return journal
