"""The state of the engine behind a front end: whether requests are accepted, and if not, why."""

import asyncio
from collections.abc import Callable
from typing import Literal

from moeserve.errors import EngineLost, MoeserveError, Overloaded, RequestError
from moeserve.messages import Phase, Ready

State = Literal["loading", "ready", "lost", "draining"]


class ServingState:
    """The state of the engine, and waits for changes of it."""

    def __init__(self) -> None:
        # "lost": after the end of an engine, until the next one is ready. "draining" is final.
        self.state: State = "loading"
        self.phase = Phase("starting", 0, 0.0)  # the last progress of a start
        self.ready: Ready | None = None  # the engine's facts, kept when the engine is lost
        self.failure: MoeserveError | None = None  # why the engine is gone for good
        self._changed = asyncio.Event()

    def enter(self, state: State) -> None:
        """Change the state, unless it is "draining", and wake all waiting tasks."""
        if self.state != "draining":
            self.state = state
        self._changed.set()

    def refusal(self) -> RequestError:
        """Return the error for a request while the state is not "ready"."""
        if self.state == "draining":
            return Overloaded(
                "the server is shutting down", code="server_draining", retry_after_s=5
            )
        if self.failure is not None:
            error = EngineLost("the engine has ended")
            error.__cause__ = self.failure
            return error
        what = (
            "the engine is being restarted"
            if self.state == "lost"
            else f"loading: {self.phase.name}"
        )
        return Overloaded(what, code="model_loading", retry_after_s=2)

    async def wait_ready(self) -> Ready:
        """Wait until the engine is ready. Raises ConfigError or EngineDied if it never will be."""
        await self._until(lambda: self.state == "ready" or self.failure is not None)
        if self.failure is not None:
            raise self.failure
        assert self.ready is not None
        return self.ready

    async def died(self) -> MoeserveError:
        """Wait until the engine is gone for good, and return the cause."""
        await self._until(lambda: self.failure is not None)
        assert self.failure is not None
        return self.failure

    async def stopping(self) -> None:
        """Wait until the front end is draining, or the engine is gone for good."""
        await self._until(lambda: self.state == "draining" or self.failure is not None)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()
