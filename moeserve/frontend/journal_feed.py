"""The feed of a journal: the front end that serves sends its changes to the one that stands by."""

import asyncio
import logging
from contextlib import suppress

from moeserve.actor.actor import Inbox
from moeserve.actor.tasks import log_error
from moeserve.actor.zmq_wire import PeerGone, ZmqWire, connect, listen
from moeserve.cluster.host import Root
from moeserve.errors import ActorStopped, Overloaded
from moeserve.frontend.journal import Change, Closed, Journal, Opened
from moeserve.frontend.slices import Slices

log = logging.getLogger(__name__)

AGAIN_S = 0.1


async def feed(journal: Journal, root: Root, slices: Slices) -> None:
    """Send all changes of the journal to one standby front end after the other; never returns."""
    while True:
        try:
            await _feed_one(journal, root, slices)
        except Exception as error:  # the next one is fed from the start
            log_error("journal feed", error)
        await asyncio.sleep(AGAIN_S)


async def _feed_one(journal: Journal, root: Root, slices: Slices) -> None:
    inbox: Inbox[Closed | PeerGone] = Inbox("journal feed")
    wire: ZmqWire[Change, Closed | PeerGone] = listen(
        root.journal_of(root.number), token=root.secret, receives=Closed, inbox=inbox
    )

    def send(change: Change) -> None:
        """Send a change; drop a reader that does not keep up: it comes again for all of them."""
        try:
            wire.send(change)
        except (
            Overloaded,
            ValueError,
        ) as error:  # ValueError: the change is too large for the wire
            log.warning("the front end that stands by is dropped: %s", error)
            wire.inbox.close("it does not keep up")

    try:
        await wire.connected(None)
        # Changes go out from here on. The reader ignores rows of streams that it does not know yet,
        # and gets them with the whole stream.
        journal.listener = send
        for id, stream in list(journal.streams.items()):
            if journal.streams.get(id) is stream:
                send(Opened(stream.entry, stream.sequences))
            await slices.pause()
        log.info("a front end stands by, with %d streams", len(journal.streams))
        await inbox.drain(wait=True)  # nothing but the reader's end comes
    except ActorStopped:
        pass
    finally:
        journal.listener = None
        wire.close()


async def follow(root: Root, ours: asyncio.Event) -> Journal:
    """Copy the journal of the front end that serves; return the copy once that one is dead.

    ours: set when it is this front end's turn to serve.
    """
    journal = Journal()
    while root.follows >= 0 and not ours.is_set():
        inbox: Inbox[Change | PeerGone] = Inbox("journal")
        wire: ZmqWire[Closed, Change | PeerGone] = connect(
            root.journal_of(root.follows), token=root.secret, receives=Change, inbox=inbox
        )
        with suppress(ActorStopped):
            await wire.connected(None)
            journal = Journal()
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
