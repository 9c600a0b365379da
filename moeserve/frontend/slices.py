"""Time slices, so that long work on the event loop does not block it."""

import asyncio
from time import monotonic

SLICE_S = 0.002  # the longest work between two iterations of the event loop


class Slices:
    """One time budget for all long work on an event loop.

    A coroutine with long work calls `await slices.pause()` between pieces of microseconds. All such
    coroutines together run for about SLICE_S per iteration of the loop, so that other tasks get
    their turn.
    """

    def __init__(self) -> None:
        self._slice_ends_at_s = 0.0
        self._turns = asyncio.Lock()

    async def pause(self) -> None:
        """Return at once during the current slice, otherwise in a later iteration of the loop."""
        if monotonic() < self._slice_ends_at_s:
            return
        async with self._turns:  # fair, so the waiting coroutines get slices in turn
            await asyncio.sleep(0)
            self._slice_ends_at_s = monotonic() + SLICE_S
