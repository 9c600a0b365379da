"""Time slices: long work on the event loop that never holds it for long."""

import asyncio
from time import monotonic

SLICE_S = 0.002  # longest work between two iterations of the event loop


class Slices:
    """One budget of time for all long work of an event loop.

    A coroutine that works for long calls `await slices.pause()` between its pieces, each of which
    takes microseconds. However many coroutines do so, all of them together work for about SLICE_S
    between two iterations of the loop, in which every other task gets its turn.
    """

    def __init__(self) -> None:
        self._end_s = 0.0  # end of the running slice
        self._next = asyncio.Lock()

    async def pause(self) -> None:
        """Return at once while the slice lasts, otherwise in a later iteration of the loop."""
        if monotonic() < self._end_s:
            return
        async with self._next:  # which is fair: those who wait get slices in turn
            await asyncio.sleep(0)
            self._end_s = monotonic() + SLICE_S
