"""Keep a process running: restart it after growing pauses, and give up after too many deaths."""

import asyncio
import logging
import math
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from moeserve.actor.process import Death, Process

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When a process is restarted.

    The pause before a restart is first_pause_s * 2^k, at most max_pause_s, where k is the number of
    earlier deaths within window_s.
    """

    first_pause_s: float = 0.25
    max_pause_s: float = 30.0
    max_deaths: int = 5  # within window_s; after more, the process is not restarted
    window_s: float = 300.0
    silence_s: float = 600.0  # a starting process without progress for this long is killed
    # A process that was ready for this long is restarted at once, and earlier deaths are forgotten.
    proven_s: float = math.inf


class Supervisor(ABC):
    """Keeps one process running, while `run` runs.

    A subclass starts the process. It calls `note_progress` while the process starts, and
    `note_ready` once the process is ready.
    """

    def __init__(self, name: str, policy: RestartPolicy | None = None) -> None:
        self.name = name
        self.policy = policy or RestartPolicy()
        self.child: Process | None = None
        self._death_times_s: deque[float] = deque()  # the last deaths, within window_s
        self._retired = asyncio.Event()
        self._starting: asyncio.Future[Process] | None = None
        self._progressed_at_s = 0.0
        self._ready_at_s: float | None = None  # when the child became ready; None: it is not ready

    @abstractmethod
    async def begin(self, incarnation: int) -> Process:
        """Start a process. May be cancelled. Raises ConfigError.

        incarnation: the number of earlier starts.
        """

    @abstractmethod
    async def is_curable(self, death: Death) -> bool:
        """Return whether a restart may help."""

    @abstractmethod
    async def on_death(self, death: Death, restart_in_s: float | None) -> None:
        """Handle a death. restart_in_s: seconds until the restart; None: there is none."""

    async def run(self) -> Death:
        """Start the process, and restart it until `stop` or too many deaths. Return the last death.

        Cancellation kills the process.
        """
        for incarnation in count():
            self.note_progress()
            self._ready_at_s = None
            self.child = None
            death = await self._run_once(incarnation)
            is_curable = await self.is_curable(death)
            restart_in_s = self._count_death(death, is_curable=is_curable)
            await self.on_death(death, restart_in_s)
            if restart_in_s is None or await self._retired_within(restart_in_s):
                break
        return death

    async def _run_once(self, incarnation: int) -> Death:
        death_before_start = Death(
            name=self.name,
            pid=0,
            exit_code=-signal.SIGKILL,
            lived_s=0.0,
            log_tail=(),
            reason="was stopped before it began",
        )
        if self._retired.is_set():
            return death_before_start
        starting = asyncio.create_task(self.begin(incarnation), name=f"start of {self.name}")
        self._starting = starting
        try:
            child = await starting
            self.child = child
        except asyncio.CancelledError:
            if not self._retired.is_set():
                raise
            return death_before_start
        if self._retired.is_set():  # while the child was started, so that `stop` did not find it
            child.kill("was stopped at its start")
        try:
            self._check_progress(child)
            return await child.death()
        finally:
            if child.alive:
                child.kill("its supervisor was cancelled")
                await child.death()

    async def stop(self, term_s: float) -> None:
        """End the process (SIGTERM, then SIGKILL after `term_s`), so that `run` returns."""
        self.retire()
        if self.child is not None:
            await self.child.stop(term_s)

    def retire(self) -> None:
        """Do not restart the process after its next death, and cancel a start without a process."""
        self._retired.set()
        if self._starting is not None:
            self._starting.cancel()

    def note_progress(self) -> None:
        """Record progress of the starting process."""
        self._progressed_at_s = time.monotonic()

    def note_ready(self) -> None:
        """Record that the process is ready."""
        self._ready_at_s = time.monotonic()

    def _check_progress(self, child: Process) -> None:
        """Kill a starting process without progress for silence_s. Otherwise check again later."""
        if child is not self.child or self._ready_at_s is not None or not child.alive:
            return
        remaining_s = self._progressed_at_s + self.policy.silence_s - time.monotonic()
        if remaining_s > 0:
            asyncio.get_running_loop().call_later(remaining_s, self._check_progress, child)
        else:
            child.kill(f"showed no progress for {self.policy.silence_s:g} s during start-up")

    def _count_death(self, death: Death, *, is_curable: bool) -> float | None:
        """Count and log a death. Return the seconds until the restart; None: there is none."""
        if self._retired.is_set():
            return None
        policy = self.policy
        now_s = time.monotonic()
        if not is_curable:
            log.log(
                logging.ERROR if death.exit_code else logging.INFO,
                "%s; not started again",
                death.summary,
            )
            return None
        if self._ready_at_s is not None and now_s - self._ready_at_s >= policy.proven_s:
            self._death_times_s.clear()
            log.error("%s; starting it again at once", death.summary)
            return 0.0
        self._death_times_s.append(now_s)
        while self._death_times_s[0] < now_s - policy.window_s:
            self._death_times_s.popleft()
        num_deaths = len(self._death_times_s)
        if num_deaths > policy.max_deaths:
            log.critical(
                "%s; giving up: %d deaths within %g s", death.summary, num_deaths, policy.window_s
            )
            return None
        restart_in_s: float = min(
            policy.first_pause_s * 2.0 ** (num_deaths - 1), policy.max_pause_s
        )
        log.error(
            "%s; starting it again in %g s (%d of %d)",
            death.summary,
            restart_in_s,
            num_deaths,
            policy.max_deaths,
        )
        return restart_in_s

    async def _retired_within(self, timeout_s: float) -> bool:
        """Wait for up to `timeout_s`, and return whether `retire` was called."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._retired.wait(), timeout_s)
        return self._retired.is_set()
