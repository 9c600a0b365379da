"""The feed of a journal, from the active front end to the standby one."""

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

RETRY_INTERVAL_S = 0.1


async def feed(journal: Journal, root: Root, slices: Slices) -> None:
    """Send all changes of the journal to a standby front end, and to the next one if that is gone.
    Runs forever.
    """
    while True:
        try:
            await _feed_one(journal, root, slices)
        except Exception as error:  # the next standby gets the whole journal
            log_error("journal feed", error)
        await asyncio.sleep(RETRY_INTERVAL_S)


async def _feed_one(journal: Journal, root: Root, slices: Slices) -> None:
    inbox: Inbox[Closed | PeerGone] = Inbox("journal feed")
    wire: ZmqWire[Change, Closed | PeerGone] = listen(
        root.journal_of(root.number), token=root.secret, receives=Closed, inbox=inbox
    )

    def send(change: Change) -> None:
        """Send a change. Disconnect a standby that does not keep up: it will connect again, and get
        the whole journal.
        """
        try:
            wire.send(change)
        except (Overloaded, ValueError) as error:  # ValueError: the change is too large
            log.warning("disconnected the standby front end: %s", error)
            wire.inbox.close("it does not keep up")

    try:
        await wire.connected(None)
        # From now on, changes are sent. The standby ignores rows of streams that it does not have
        # yet, because it will get these rows together with the stream.
        journal.listener = send
        for id, stream in list(journal.streams.items()):
            if journal.streams.get(id) is stream:
                send(Opened(stream.entry, stream.sequences))
            await slices.pause()
        log.info("a standby front end is connected, with %d streams", len(journal.streams))
        await inbox.drain(wait=True)  # until the standby is gone; it sends nothing
    except ActorStopped:
        pass
    finally:
        journal.listener = None
        wire.close()


async def follow(root: Root, is_active: asyncio.Event) -> Journal:
    """Copy the journal of the active front end. Return the copy once that front end is dead.

    is_active: set when this front end becomes the active one.
    """
    journal = Journal()
    while root.follows >= 0 and not is_active.is_set():
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
            async with asyncio.timeout(RETRY_INTERVAL_S):
                await is_active.wait()
    return journal
