"""Run the changes of a fleet one at a time."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from moeserve.actor.tasks import cancel, log_error, spawn
from moeserve.errors import Conflict, MoeserveError

T = TypeVar("T")


class Changes:
    """The change in progress, if there is one.

    A change is completed even if its caller is cancelled.
    """

    def __init__(self) -> None:
        self._current: asyncio.Task[Any] | None = None
        self._automatic: asyncio.Task[Any] | None = None  # the last one that nobody asked for

    @property
    def in_progress(self) -> bool:
        return self._current is not None

    async def run(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change that was asked for.

        It waits for an automatic change. Raises Conflict if another one that was asked for is in
        progress.
        """
        try:
            await self._wait_for_automatic()
            if self._current is not None:
                raise Conflict("another change is in progress")
        except BaseException:
            change.close()
            raise
        return await self._result_of(self._begin(change))

    async def run_automatic(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change that nobody asked for. No other may be in progress."""
        assert self._current is None
        self._automatic = self._begin(change)
        return await self._result_of(self._automatic)

    async def stop(self) -> None:
        """Cancel the change in progress. Raises Conflict in its caller, and in one that waits."""
        await cancel(self._current)

    async def _wait_for_automatic(self) -> None:
        while (automatic := self._automatic) is not None and self._current is automatic:
            await asyncio.wait([automatic])
            if automatic.cancelled():
                raise Conflict("the server is stopping")

    def _begin(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = spawn(change, name="change of the fleet", on_error=_log_unexpected)
        self._current = task
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, _task: asyncio.Task[Any]) -> None:
        self._current = None

    async def _result_of(self, change: asyncio.Task[T]) -> T:
        try:
            return await asyncio.shield(change)
        except asyncio.CancelledError:
            if change.cancelled():  # by `stop`; otherwise the caller was cancelled
                raise Conflict("the server is stopping") from None
            raise


def _log_unexpected(name: str, error: Exception) -> None:
    """Log an unexpected error. MoeserveErrors are raised to the caller of the change."""
    if not isinstance(error, MoeserveError):
        log_error(name, error)
