"""An AsyncEngine on an event loop in a thread of its own, for callers that have no loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from moeserve.frontend.async_engine import AsyncEngine

T = TypeVar("T")


class LoopThread:
    """Opens the engine and keeps it open until `close`. Raises what opening it raises."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._opened: Future[None] = Future()
        self._loop = asyncio.new_event_loop()
        self._life = self._loop.create_task(self._live())
        self._thread = threading.Thread(target=self._run, name="moeserve loop", daemon=True)
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:  # Ctrl-C while the model loads is one
            self.close()
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for its result. Ctrl-C cancels it, there too."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        """Stops the engine and ends the thread. Whatever still runs is cancelled."""
        with suppress(RuntimeError):  # the loop has ended by itself: the engine did not open
            self._loop.call_soon_threadsafe(self._life.cancel)
        if threading.current_thread() is not self._thread:  # the garbage collector may run anywhere
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_over())

    async def _until_over(self) -> None:
        await asyncio.wait([self._life])

    async def _live(self) -> None:
        try:
            async with self._engine:
                self._opened.set_result(None)
                await self._loop.create_future()  # until cancelled
        except BaseException as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)
