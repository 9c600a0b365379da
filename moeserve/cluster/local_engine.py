"""An engine inside this process, for `LLM` and `AsyncEngine`. The model runs in a thread."""

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from moeserve.actor.actor import Inbox
from moeserve.actor.tasks import in_thread, log_error, spawn
from moeserve.cluster.assemble import assemble
from moeserve.cluster.link import EngineGone, FromEngine
from moeserve.cluster.order import BUILDER, Role
from moeserve.config import Config
from moeserve.errors import ConfigError
from moeserve.messages import Drain, EngineIn, EngineOut, Ready

if TYPE_CHECKING:
    from moeserve.engine.plan import Runner

log = logging.getLogger(__name__)

# Messages in each direction that may wait. More than for processes (link.py), because both readers
# share this loop.
INBOX_LIMIT = 100_000
ABORT_S = 1.0  # timeout for an engine to stop after its deadline


class LocalEngine:
    """`EngineLink` to an engine on this loop; see link.py. Nothing restarts the engine."""

    def __init__(self, config: Config, *, builder: str = BUILDER) -> None:
        self.outbox: Inbox[FromEngine] = Inbox("front end", INBOX_LIMIT)
        self.ready: Ready | None = None
        self._config = config
        self._builder = builder
        self._engine_inbox: Inbox[EngineIn] = Inbox("engine", INBOX_LIMIT)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine as a task of this loop."""
        assert self._task is None, "a link is started once"
        self._task = spawn(self._run(), name="engine", on_error=log_error)

    @property
    def healthy(self) -> bool:
        """Whether the engine serves."""
        return self.ready is not None

    def send(self, msg: EngineIn, *, force: bool = False) -> None:
        """Send the engine a message, or drop it once the engine has ended.

        Raises Overloaded unless `force`.
        """
        if not self._engine_inbox.closed:
            self._engine_inbox.put(msg, force=force)

    async def close(self, timeout_s: float) -> None:
        """Let running requests finish for up to `timeout_s`, then end the engine."""
        if self._task is None:
            return
        if self.ready is None:
            self._task.cancel()
        else:
            self.send(Drain(timeout_s), force=True)
        await asyncio.wait([self._task], timeout=timeout_s + ABORT_S)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        exit_code = 1
        cause = "cancelled"
        try:
            core, ready = await assemble(
                self._config,
                self._builder,
                Role(),
                self._engine_inbox,
                self._emit,
                born_s=time.monotonic(),
            )
            self.ready = ready
            self._emit(ready)
            try:
                await core.run()
            finally:
                await _close(core.runner)
            exit_code = 0
            cause = "stopped"
        except ConfigError as exc:
            exit_code = exc.exit_code
            cause = str(exc)
        except Exception as exc:
            log.exception("the engine failed")
            cause = f"{type(exc).__name__}: {exc}"
        finally:
            self.ready = None
            self._engine_inbox.close()  # the front end submits dropped requests again
            if not self.outbox.closed:
                self.outbox.put(EngineGone(exit_code=exit_code, cause=cause), force=True)

    def _emit(self, msg: EngineOut) -> None:
        if not self.outbox.closed:
            self.outbox.put(msg)


async def _close(runner: "Runner") -> None:
    """Close the runner, which waits for its step.

    This happens in a thread, unless the interpreter is shutting down and starts no threads.
    """
    try:
        closing = in_thread("engine stop", runner.close)
    except RuntimeError:
        runner.close()
    else:
        await closing
