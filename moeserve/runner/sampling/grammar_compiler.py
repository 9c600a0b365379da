"""Compile grammars in a separate thread, so that a slow one does not delay steps.

The thread also replays the known tokens of a request that was preempted, or that comes from a lost
engine.
"""

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from moeserve.engine.plan import GrammarJob
from moeserve.errors import RequestError
from moeserve.messages import GRAMMAR_FAILED

if TYPE_CHECKING:
    from moeserve.text.grammar import Grammars, Matcher

logger = logging.getLogger(__name__)

_Entry = tuple[int, int, GrammarJob | None, "Future[Matcher] | None"]
_LAST: _Entry = (2**62, 0, None, None)


class GrammarCompiler:
    """Creates the matchers of requests, in order of priority.

    The first grammar starts the thread, which then loads the tokenizer.

    end_ids: the model's end-of-text tokens.
    """

    def __init__(self, model_dir: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._grammars: Grammars | None = None
        # Entries compare by priority and ticket only, because tickets are unique.
        self._jobs: queue.PriorityQueue[_Entry] = queue.PriorityQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def grammars(self) -> "Grammars":
        """The compiled grammars, which also fill masks. A matcher must have been created."""
        assert self._grammars is not None, "no matcher was created yet"
        return self._grammars

    def start(self, job: GrammarJob) -> "Future[Matcher]":
        """Start to create a matcher. May be called from any thread. Cancel the future to drop the
        job.
        """
        future: Future[Matcher] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(RuntimeError("the grammar compiler was closed"))
                return future
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="grammar compiler", daemon=True
                )
                self._thread.start()
            self._jobs.put((job.priority, job.ticket, job, future))
        return future

    def close(self) -> None:
        """End the thread after the current job. The other jobs are cancelled."""
        with self._lock:
            self._closed = True
            with suppress(queue.Empty):
                while True:
                    _, _, _, future = self._jobs.get_nowait()
                    if future is not None:
                        future.cancel()
            self._jobs.put(_LAST)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            _, _, job, future = self._jobs.get()
            if job is None or future is None:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._matcher(job))
            except BaseException as error:
                future.set_exception(error)

    def _matcher(self, job: GrammarJob) -> "Matcher":
        if self._grammars is None:
            from moeserve.text.grammar import Grammars  # here, because few engines need it
            from moeserve.text.tokenizer import Tokenizer

            tokenizer = Tokenizer.load(self._model_dir)
            self._grammars = Grammars(tokenizer, self._vocab_size, self._end_ids)
        return self._grammars.matcher(job.grammar, job.answer)


def failure_of(error: BaseException) -> str:
    """Return the error message of a request whose grammar failed with this error."""
    if isinstance(error, RequestError):
        message = error.message
        return message if message.startswith(GRAMMAR_FAILED) else f"{GRAMMAR_FAILED}: {message}"
    logger.error("a grammar failed", exc_info=error)
    return f"internal error in structured output: {type(error).__name__}: {error}"
