"""Background tasks with an owner: a task that fails is reported, never forgotten.

asyncio keeps the exception of a task until somebody awaits it. A task that runs beside its owner
may be awaited at shutdown only, so its failure would go unnoticed for hours. Start such tasks here:

    self._reader = spawn(self._read(), name="reader", on_error=self._reader_failed)
    self._pings = spawn(every(15.0, self._ping_all, name="pings"), name="pings", on_error=log_error)

A task that its creator awaits in the same function needs no owner; use `asyncio.create_task`.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
OnError = Callable[[str, Exception], None]  # gets the task's name and its exception


def spawn(coroutine: Coroutine[Any, Any, T], *, name: str, on_error: OnError) -> asyncio.Task[T]:
    """Start a background task on the running loop. Keep the returned task: the loop does not.

    If the task raises an Exception, `on_error` is called with the task's name and the exception, on
    the loop, at once. Cancellation is not an error. The exception stays in the task for whoever
    awaits it later.
    """
    task = asyncio.get_running_loop().create_task(coroutine, name=name)
    task.add_done_callback(lambda ended: _report(ended, name, on_error))
    return task


def _report(task: asyncio.Task[Any], name: str, on_error: OnError) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if isinstance(error, Exception):
        on_error(name, error)


def log_error(name: str, error: Exception) -> None:
    """Log a task's failure with its traceback. For tasks that nothing else depends on."""
    log.error(
        "background task %r failed: %s: %s", name, type(error).__name__, error, exc_info=error
    )


async def every(
    interval_s: float,
    tick: Callable[[], Awaitable[None] | None],
    *,
    name: str,
) -> None:
    """Call `tick` every `interval_s` seconds, for ever. The first call is after one interval.

    A tick that raises an Exception is logged, and the next one is tried at its time: one bad tick
    does not end a timer.
    """
    while True:
        await asyncio.sleep(interval_s)
        try:
            pending = tick()
            if pending is not None:
                await pending
        except Exception as error:
            log_error(name, error)


async def cancel(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended. Their errors were reported by `spawn`."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def in_thread(name: str, function: Callable[[], T]) -> asyncio.Future[T]:
    """Call a function in a daemon thread of its own, whose end the process does not wait for.

    Raises RuntimeError at once when the interpreter ends and starts no threads any more.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # a call cannot be undone: its result is dropped

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as exc:
            done.set_exception(exc)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(done)
