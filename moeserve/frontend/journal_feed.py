"""The journal of the front end that serves, kept by the one that stands by, too, which goes on with its streams.

Whoever connects gets what is there and then each change. If a kill takes the last changes along, the tokens in them are
computed again, and are the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from moeserve.actor.actor import Inbox
from moeserve.actor.zmq_wire import PeerGone, ZmqWire, connect, listen
from moeserve.cluster.host import Root
from moeserve.errors import ActorStopped, Overloaded, RequestError
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.journal import Change, Closed, Journal, Recorded

log = logging.getLogger(__name__)

AGAIN_S = 0.1
PATIENCE_S = 1e6  # for a front end that stands by: there may be none for a while


async def feed(journal: Journal, root: Root) -> None:
    """Tells all changes of our journal to one front end that stands by after the other; never returns."""
    while True:
        inbox: Inbox[Closed | PeerGone] = Inbox("journal feed")
        wire: ZmqWire[Change, Closed | PeerGone] = listen(
            root.journal_of(root.number), token=root.secret, receives=Closed, inbox=inbox
        )

        def tell(change: Change, wire: ZmqWire[Change, Closed | PeerGone] = wire) -> None:
            """Sends a change, or lets a reader go that does not keep up: it comes again for all of it."""
            try:
                wire.send(change)
            except Overloaded as error:
                log.warning("%s", error)
                wire.inbox.close("it does not keep up")

        try:
            await wire.connected(PATIENCE_S)
            for opened in journal.snapshot():
                tell(opened)
            journal.listener = tell
            log.info("a front end stands by, with %d streams", len(journal.streams))
            await inbox.drain(wait=True)  # nothing but its end comes
        except (ActorStopped, TimeoutError):
            pass
        finally:
            journal.listener = None
            wire.close()
        await asyncio.sleep(AGAIN_S)


async def follow(root: Root, window_s: float, ours: asyncio.Event) -> Journal:
    """Keeps a copy of the journal of the front end that serves; returns it once that is dead and it is our turn."""
    journal = Journal(window_s)
    while root.follows >= 0 and not ours.is_set():
        inbox: Inbox[Change | PeerGone] = Inbox("journal")
        wire: ZmqWire[Closed, Change | PeerGone] = connect(
            root.journal_of(root.follows), token=root.secret, receives=Change, inbox=inbox
        )
        with suppress(ActorStopped, TimeoutError):
            await wire.connected(PATIENCE_S)
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


@asynccontextmanager
async def succeeding(
    opened: AbstractAsyncContextManager[FrontEnd], streams: list[Recorded], root: Root
) -> AsyncIterator[FrontEnd]:
    """Yields the front end once it goes on with these streams of another one, and feeds its own journal."""
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
            log.info("%d streams of the front end before this one go on", len(front.resumable.journal.streams))
        feeding = asyncio.create_task(feed(front.resumable.journal, root), name="journal feed")
        try:
            yield front
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
