"""Keeps one child process running: ready or dead, restart with growing pauses, give up loudly."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from moeserve.actor.process import Death, Process

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Pauses of first_pause_s * 2^k, at most max_pause_s; k counts the deaths within window_s.

    More than max_deaths within window_s means giving up. proven_s: a child that was ready for so long is started
    again at once, and its earlier deaths no longer count. silence_s: how long a starting child may show no progress
    before it counts as hung.
    """

    first_pause_s: float = 0.25
    max_pause_s: float = 30.0
    max_deaths: int = 5
    window_s: float = 300.0
    silence_s: float = 600.0
    proven_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Life:
    """One child. `serving` is called once and returns when the child is ready; cancelled if it dies first."""

    child: Process
    serving: Callable[[], Awaitable[object]]


class Owner(Protocol):
    """What a supervisor works for."""

    def life(self, generation: int) -> AbstractAsyncContextManager[Life]:
        """Enters by starting a child (generation 0 is the first), leaves after its death. Raises ConfigError."""
        ...

    def curable(self, death: Death) -> bool:
        """Whether another start may end differently."""
        ...

    def buried(self, death: Death, again_in_s: float | None) -> None:
        """The child is dead and nothing of it is left. None: there will be no other."""
        ...


class Supervisor:
    """Looks after one child at a time. `run` is its whole life and belongs into a TaskGroup."""

    def __init__(self, owner: Owner, policy: RestartPolicy | None = None) -> None:
        self.policy = policy or RestartPolicy()
        self.child: Process | None = None
        self._owner = owner
        self._deaths: deque[float] = deque()
        self._retired = asyncio.Event()
        self._progress_s = 0.0
        self._ready_s: float | None = None  # since when the child is ready

    async def run(self) -> Death:
        """Starts the child again and again; returns its last death after `stop` or after giving up.

        Cancelling it kills the child.
        """
        for generation in count():
            self.progress()
            self._ready_s = None
            async with self._owner.life(generation) as life:
                self.child = life.child
                try:
                    await self._until_ready(life)
                    death = await life.child.death()
                finally:
                    if life.child.alive:
                        life.child.kill("its supervisor was cancelled")
                        await life.child.death()
            pause_s = self._pause_after(death)
            self._owner.buried(death, pause_s)
            if pause_s is None or await self._retired_within(pause_s):
                break
        return death

    async def stop(self, term_s: float) -> None:
        """Ends the child (SIGTERM, SIGKILL after `term_s`) and makes `run` return. There is no restart."""
        self.retire()
        if self.child is not None:
            await self.child.stop(term_s)

    def retire(self) -> None:
        """From now on a death is final. For an owner that asks the child itself to end."""
        self._retired.set()

    def progress(self) -> None:
        """The starting child gave a sign of life."""
        self._progress_s = time.monotonic()

    async def _until_ready(self, life: Life) -> None:
        """Waits for ready or dead, whichever comes first; a child that does neither is killed."""
        child = life.child
        ready = asyncio.ensure_future(life.serving())
        died = asyncio.ensure_future(child.death())
        try:
            while not ready.done() and not died.done():
                left_s = self._progress_s + self.policy.silence_s - time.monotonic()
                if left_s <= 0:
                    child.kill(f"showed no progress for {self.policy.silence_s:g} s during start-up")
                    await died
                    break
                await asyncio.wait({ready, died}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()  # an error of the owner's own
                self._ready_s = time.monotonic()
        finally:
            ready.cancel()
            died.cancel()

    def _pause_after(self, death: Death) -> float | None:
        """Seconds until the next start, or None for never."""
        if self._retired.is_set():
            return None
        policy, now = self.policy, time.monotonic()
        if not self._owner.curable(death):
            log.log(logging.ERROR if death.exit_code else logging.INFO, "%s; not started again", death.summary)
            return None
        if self._ready_s is not None and now - self._ready_s >= policy.proven_s:
            self._deaths.clear()
            log.error("%s; starting it again at once", death.summary)
            return 0.0
        self._deaths.append(now)
        while self._deaths[0] < now - policy.window_s:
            self._deaths.popleft()
        number = len(self._deaths)
        if number > policy.max_deaths:
            log.critical("%s; giving up: %d deaths within %g s", death.summary, number, policy.window_s)
            return None
        pause_s: float = min(policy.first_pause_s * 2.0 ** (number - 1), policy.max_pause_s)
        log.error("%s; starting it again in %g s (%d of %d)", death.summary, pause_s, number, policy.max_deaths)
        return pause_s

    async def _retired_within(self, pause_s: float) -> bool:
        try:
            async with asyncio.timeout(pause_s):
                await self._retired.wait()
        except TimeoutError:
            return self._retired.is_set()  # in the same turn of the loop
        return True
