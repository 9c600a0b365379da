"""Background tasks whose failures are reported at once.

asyncio keeps the exception of a task until the task is awaited. A background task may be awaited
only at shutdown, so its failure would go unnoticed for hours. Start such tasks with `spawn`:

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

    If the task raises an Exception, `on_error` is called at once, on the loop, with the task's name
    and the exception. Cancellation is not an error. Awaiting the task later raises the exception,
    too.
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
    """Log a task's failure with its traceback. An `on_error` for tasks that nothing depends on."""
    log.error(
        "background task %r failed: %s: %s", name, type(error).__name__, error, exc_info=error
    )


async def every(
    interval_s: float,
    tick: Callable[[], Awaitable[None] | None],
    *,
    name: str,
) -> None:
    """Call `tick` every `interval_s` seconds, forever. The first call is after one interval.

    An Exception of a tick does not end the timer. It is only logged: `on_error` of `spawn` does not
    hear of it. If something depends on the tick, catch the error in the tick.
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
    """Call a function in a new daemon thread. The process does not wait for it when it ends.

    Raises RuntimeError if the interpreter is ending, so that no thread can be started.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # so that it cannot be cancelled; a result may be dropped

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as exc:
            done.set_exception(exc)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(done)
