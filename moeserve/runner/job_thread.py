"""A thread with a queue of jobs."""

import queue
import threading
from collections.abc import Callable


class JobThread:
    """A thread that runs jobs in order until `stop`. It first calls `enter`."""

    def __init__(self, name: str, enter: Callable[[], None] = lambda: None) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # so that nothing is queued after the end marker of `stop`
        self._stopped = False
        self.thread = threading.Thread(target=self._run, args=(enter,), name=name, daemon=True)
        self.thread.start()

    def do(self, job: Callable[[], None]) -> bool:
        """Queue a job. Return False if the thread has stopped and will not run it."""
        with self._lock:
            if self._stopped or not self.thread.is_alive():
                return False
            self._jobs.put(job)
            return True

    def stop(self) -> None:
        """Wait until all jobs are done and the thread has ended."""
        with self._lock:
            self._stopped = True
            self._jobs.put(None)
        self.thread.join()

    def _run(self, enter: Callable[[], None]) -> None:
        enter()
        while (job := self._jobs.get()) is not None:
            job()
            del job  # so that an idle thread does not keep a step's tensors alive
