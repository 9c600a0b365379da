"""A pool of sandbox processes, shared fairly among requests."""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from moeserve.errors import Overloaded
from moeserve.text.sandbox_process import SandboxProcess

T = TypeVar("T")
MAX_WAIT_S = 10.0  # the longest wait for a free process
MAX_PROCESSES = 8


class _Job(NamedTuple):
    work: Callable[[SandboxProcess], Any]
    future: Future[Any]


class SandboxPool:
    """Sandbox processes of one module, and as many threads that communicate with them.

    They start when they are needed, and live until `close`. Waiting work is scheduled round-robin
    among owners, so an owner with much work delays each other one by one piece. Thread-safe.
    """

    def __init__(self, *module: str, purpose: str, size: int = 0, hello: bytes = b"") -> None:
        """Start nothing yet.

        Args:
            module: A module of this package and its arguments, see `SandboxProcess`.
            purpose: What the processes do, for an error message and the threads' names.
            size: The number of processes; 0 for one per core, from 2 to MAX_PROCESSES.
            hello: The line that a new process reads first.
        """
        self.purpose = purpose
        self.size = size or min(max(os.cpu_count() or 1, 2), MAX_PROCESSES)
        self._processes = [SandboxProcess(*module, hello=hello) for _ in range(self.size)]
        # Used as a stack, so that a server with little work needs only one process.
        self._idle = self._processes[::-1]
        self._waiting: dict[str, deque[_Job]] = {}  # by owner, the next owner first
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(self.size, purpose)

    def submit(self, work: Callable[[SandboxProcess], T], owner: str = "") -> Future[T]:
        """Run `work` with a free process, in a thread of the pool."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append(_Job(work, future))
        self._threads.submit(self._run_next)
        return future

    async def run(self, work: Callable[[SandboxProcess], T], owner: str = "") -> T:
        """Await `work`. Raise Overloaded if no process is free for MAX_WAIT_S seconds.

        If the caller is cancelled, waiting work is removed from the queue.
        """
        future = self.submit(work, owner)
        waiter = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait([waiter], timeout=MAX_WAIT_S)
            if not done and future.cancel():
                raise Overloaded(
                    f"the {self.size} processes for {self.purpose} were busy for {MAX_WAIT_S:g} s",
                    retry_after_s=MAX_WAIT_S,
                )
            return await waiter
        finally:
            waiter.cancel()

    def close(self) -> None:
        """End the processes and threads, and cancel waiting work. Idempotent; it blocks."""
        with self._lock:
            jobs = [job for waiting in self._waiting.values() for job in waiting]
            self._waiting.clear()
        for job in jobs:
            job.future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.stop()
        self._threads.shutdown(wait=True)
        for process in self._processes:
            process.close()

    def _run_next(self) -> None:
        with self._lock:
            if not self._waiting:  # the pool was closed
                return
            owner = next(iter(self._waiting))
            jobs = self._waiting.pop(owner)
            job = jobs.popleft()
            if jobs:
                self._waiting[owner] = jobs
            process = self._idle.pop()
        try:
            if job.future.set_running_or_notify_cancel():
                try:
                    result = job.work(process)
                except BaseException as error:
                    job.future.set_exception(error)
                else:
                    job.future.set_result(result)
        finally:
            with self._lock:
                self._idle.append(process)
