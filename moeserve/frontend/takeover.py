"""Take over the resumable streams of a front end that has died."""

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from moeserve.actor.tasks import cancel, log_error, spawn
from moeserve.cluster.host import Root
from moeserve.errors import RequestError
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.journal import StreamLog
from moeserve.frontend.journal_feed import feed

log = logging.getLogger(__name__)


@asynccontextmanager
async def succeeding(
    opened: AbstractAsyncContextManager[FrontEnd], streams: list[StreamLog], root: Root
) -> AsyncIterator[FrontEnd]:
    """Yield the front end once it has resumed these streams. Feed its journal to a standby."""
    async with opened as front:
        assert front.resumable is not None
        resumable = front.resumable
        with_receipts: list[StreamLog] = []
        if streams:
            await front.wait_ready()
            with_receipts = await _adopt(front, streams)
        tasks = [
            spawn(
                feed(resumable.journal, root, resumable.slices),
                name="journal feed",
                on_error=log_error,
            ),
            spawn(_finish(front, with_receipts), name="takeover", on_error=log_error),
        ]
        try:
            yield front
        finally:
            await cancel(*tasks)


async def _adopt(front: FrontEnd, streams: list[StreamLog]) -> list[StreamLog]:
    """Adopt the streams, and restart those without receipts, in time slices.

    Return the adopted streams with receipts. They need the digest of the weights, which takes
    minutes for a large model.
    """
    assert front.resumable is not None
    pause = front.resumable.slices.pause
    adopted: list[StreamLog] = []
    for stream in streams:
        try:
            adopted.append(front.adopt(stream))
        except RequestError as error:
            log.warning("a stream is lost: %s", error)
        await pause()
    for stream in adopted:
        if not stream.entry.params.receipt:
            await _restart(front, stream)
            await pause()
    log.info("resuming %d streams of the previous front end", len(adopted))
    return [stream for stream in adopted if stream.entry.params.receipt]


async def _finish(front: FrontEnd, with_receipts: list[StreamLog]) -> None:
    """Replay streams with stop strings, and restart the streams with receipts."""
    assert front.resumable is not None
    await front.resumable.catch_up()
    for stream in with_receipts:
        await _restart(front, stream)


async def _restart(front: FrontEnd, stream: StreamLog) -> None:
    try:
        await front.restart(stream)
    except RequestError as error:
        log.warning("a stream is lost: %s", error)
