"""Events: results of an asynchronous operation are poison until its event was waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class EventHandle:
    def __init__(self):
        self.arrivals: list[Callable[[], None]] = []

    def current_stream_wait(self) -> None:
        arrivals = self.arrivals
        self.arrivals = []
        for arrive in arrivals:
            arrive()


class EventOverlap:
    def __init__(self, event=None, extra_tensors=None):
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], None] | None = None

    def current_stream_wait(self, release_handle=False):
        assert self.event is not None, "there is an event with asynchronous operations only"
        self.event.current_stream_wait()
        hook = self.hook_after_wait
        self.hook_after_wait = None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait):
        assert self.hook_after_wait is None, "a hook is registered already"
        self.hook_after_wait = hook_after_wait


def finish(arrivals: list[Callable[[], None]], is_async: bool) -> Any:
    """Return the raw event of an asynchronous operation.

    A synchronous one is completed, and the result is None.
    """
    event = EventHandle()
    event.arrivals = arrivals
    if is_async:
        return event
    event.current_stream_wait()
    return None
