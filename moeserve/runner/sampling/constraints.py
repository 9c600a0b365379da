"""Structured output: the grammars of running requests, and the masks of tokens that they allow.

Each request with a grammar has a matcher on the host, which follows its tokens. It is created
before the request is planned (grammar_compiler.py). After a step, `accept` advances it by the
step's tokens. A thread fills the masks of the next step while the forward pass runs.

The state of a matcher is a function of grammar and tokens. So steps that are preempted, replayed or
repeated have the same masks, with and without drafts.

S: rows that sample. N: the positions at which they sample; each row has one, and one more for each
draft. C: the positions of requests with a grammar. W: 32-bit words of a mask.

Tickets are the scheduler's numbers of prepared grammars: see engine/preparing.py.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from moeserve.engine.plan import I32, GrammarJob, NewRequest
from moeserve.runner.job_thread import JobThread
from moeserve.runner.sampling.grammar_compiler import GrammarCompiler, failure_of
from moeserve.runner.sampling.sampler import Masks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moeserve.text.grammar import Matcher

T = TypeVar("T")
_own_tickets = itertools.count(1)  # tickets of jobs that the scheduler did not prepare


class Accepted(NamedTuple):
    """The effect of a step's tokens on grammars, by slot."""

    complete: dict[int, int]  # how many of the step's tokens complete the answer
    failed: dict[int, str]  # error messages


@dataclass(slots=True, eq=False)
class ConstrainedRequest:
    """The request with a grammar in a slot."""

    slot: int
    ticket: int
    num_prompt: int
    matcher: "Future[Matcher]"  # may not be done if it was not prepared (see `Constraints.add`)
    failure: str = ""  # why the request must fail
    # Whether the request failed for another reason. Steps in flight then have no tokens for it.
    ended: bool = False

    @contextmanager
    def caught(self) -> "Iterator[None]":
        """Convert an error into a failure of this request."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or failure_of(error)


class Constraints:
    """The grammars of an engine's requests.

    `add` and `begin` are called in the thread that launches steps. `prepare` and `drop` may be
    called from any thread.

    end_ids: the model's end-of-text tokens.
    """

    def __init__(self, model_dir: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._mask_words = -(-vocab_size // 32)
        self._compiler = GrammarCompiler(model_dir, vocab_size, end_ids)
        self._prepared: dict[int, Future[Matcher]] = {}  # by ticket, until `add` or `drop`
        self._requests: dict[int, ConstrainedRequest] = {}
        self._thread: JobThread | None = None  # fills masks; started with the first grammar
        # Notified when a matcher has advanced, or when masks are not needed any more.
        self._condition = threading.Condition()
        self._latest_step: StepMasks | None = None

    @property
    def active(self) -> bool:
        """Whether any request in a slot has a grammar."""
        return bool(self._requests)

    def prepare(self, job: GrammarJob, on_done: Callable[[str], None]) -> None:
        """Compile a grammar and replay an answer, for the request with this ticket (see `add`).

        `on_done` is called with an error message, or with "". It is not called if the job is
        dropped.
        """
        future = self._prepared[job.ticket] = self._compiler.start(job)

        def report(done: "Future[Matcher]") -> None:
            if not done.cancelled():
                error = done.exception()
                on_done("" if error is None else failure_of(error))

        future.add_done_callback(report)

    def drop(self, tickets: Iterable[int]) -> None:
        """Drop grammars that were prepared for requests which will not get a slot."""
        for ticket in tickets:
            if (future := self._prepared.pop(ticket, None)) is not None:
                future.cancel()

    def add(self, request: NewRequest) -> None:
        """Set the request of a slot. Errors of its grammar are reported by the next `accept`.

        If a step runs again, its requests are added again. If the grammar was not prepared, as in a
        test without a scheduler, the masks of the first step wait for it.
        """
        previous = self._requests.pop(request.slot, None)
        grammar = request.sampling.grammar
        if grammar is None:
            return
        ticket = request.grammar_ticket
        matcher = self._prepared.pop(ticket, None)
        if matcher is None and previous is not None and ticket and previous.ticket == ticket:
            matcher = previous.matcher
        if matcher is None:
            answer = request.tokens[request.num_prompt :].tolist()
            matcher = self._compiler.start(
                GrammarJob(-next(_own_tickets), grammar, answer, -(2**31))
            )
        self._requests[request.slot] = ConstrainedRequest(
            request.slot, ticket, request.num_prompt, matcher
        )

    def begin(
        self,
        slots_S: Iterable[int],
        positions_S: Iterable[int],
        drafts_S: Sequence[I32] | None = None,
    ) -> "StepMasks | None":
        """Start to fill the masks of a step's rows. Return None if no row has a grammar.

        The masks wait until `accept` was called with all known tokens. If a step runs again,
        `begin` is called again.

        positions_S: the number of known tokens of each row, without drafts.
        """
        rows = []
        first = 0
        for i, (slot, position) in enumerate(
            zip(map(int, slots_S), map(int, positions_S), strict=True)
        ):
            drafts = drafts_S[i].tolist() if drafts_S is not None else []
            if (request := self._requests.get(slot)) is not None:
                rows.append(MaskedRow(i, request, position - request.num_prompt, first, drafts))
            first += 1 + len(drafts)
        if not rows:
            return None
        with self._condition:
            self._latest_step = step = StepMasks(rows, self._condition, self._latest_step)
            self._condition.notify_all()
        step.masks = self._submit(lambda: self._fill(step))
        return step

    def close(self) -> None:
        """End the threads."""
        self._compiler.close()
        with self._condition:
            self._latest_step = None
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.stop()

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue work for the thread. It is a daemon thread, so the process can always end."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._thread = self._thread or JobThread("grammar masks")
        if not self._thread.do(job):
            future.set_exception(RuntimeError("the grammars were closed"))
        return future

    def _fill(self, step: "StepMasks") -> Masks:
        rows_C = np.concatenate([row.first + np.arange(1 + len(row.drafts)) for row in step.rows])
        # All tokens are allowed at first, which is also right for requests that fail.
        bits_CW = np.full((len(rows_C), self._mask_words), -1, np.int32)
        # Rows to fill, with their matcher and the index (of C) of their first mask.
        to_fill: list[tuple[MaskedRow, Matcher, int]] = []
        first = 0
        previous = step.previous
        step.previous = None
        previous_error: BaseException | None = None
        with self._condition:
            for row in step.rows:
                with row.request.caught():
                    matcher = row.request.matcher.result()
                    while self._latest_step is step and not row.is_due:
                        if previous is not None and previous.error is not None:
                            previous_error = previous.error
                            break
                        self._condition.wait()
                    if (
                        self._latest_step is step
                        and not row.request.failure
                        and matcher.num_tokens >= row.num_known
                    ):
                        row.rewind()
                        to_fill.append((row, matcher, first))
                first += 1 + len(row.drafts)
            if previous_error is not None:
                raise previous_error
            if to_fill:
                jobs = [(matcher, first, row.drafts) for row, matcher, first in to_fill]
                for i, error in self._compiler.grammars.fill_all(jobs, bits_CW).items():
                    failed_row = to_fill[i][0]
                    failed_row.request.failure = error.message
        return Masks(rows_C, bits_CW)


@dataclass(slots=True, eq=False)
class MaskedRow:
    """A row whose request has a grammar."""

    index: int  # among the rows that sample
    request: ConstrainedRequest
    num_known: int  # known tokens of its answer
    first: int  # index (of N) of its first position
    drafts: list[int]

    @property
    def is_due(self) -> bool:
        """Whether the matcher has accepted all known tokens, or never will."""
        return (
            bool(self.request.failure)
            or self.request.ended
            or self.request.matcher.result().num_tokens >= self.num_known
        )

    def rewind(self) -> None:
        """Undo the tokens that the matcher has accepted in an earlier run of this step."""
        matcher = self.request.matcher.result()
        assert matcher.num_tokens >= self.num_known, (matcher.num_tokens, self.num_known)
        if matcher.num_tokens > self.num_known:
            matcher.rewind(self.num_known)

    def accept(self, tokens: list[int]) -> int:
        """Advance the matcher by new tokens, up to the token that completes the text.

        Return the number of these tokens if the text is complete, otherwise 0.
        """
        self.rewind()
        matcher = self.request.matcher.result()
        for i, token in enumerate(tokens):
            matcher.accept([token])
            if matcher.is_done:
                return i + 1
        return 0


class StepMasks:
    """The masks of one step, while they are filled. A step that runs again has new ones."""

    def __init__(
        self, rows: list[MaskedRow], condition: threading.Condition, previous: "StepMasks | None"
    ) -> None:
        self.rows = rows
        self.masks: Future[Masks]
        self.previous = previous  # the masks of the step before, until they are not needed
        self.error: BaseException | None = None  # why this step has no result
        self._condition = condition

    def result(self) -> Masks:
        """Wait for the masks, which includes waiting for `accept` of the step before."""
        return self.masks.result()

    def accept(self, tokens_S: Sequence[Sequence[int] | I32]) -> Accepted:
        """Advance the grammars by the tokens that were kept. Called in the order of steps, from any
        thread.

        tokens_S: the tokens of each row that was passed to `begin`; empty for a row that failed.
        """
        self.result()
        accepted = Accepted({}, {})
        with self._condition:
            for row in self.rows:
                request = row.request
                request.ended = request.ended or not len(tokens_S[row.index])
                with request.caught():
                    if not (request.failure or request.ended):
                        num_kept = row.accept(list(map(int, tokens_S[row.index])))
                        if num_kept:
                            accepted.complete[request.slot] = num_kept
                if request.failure:
                    accepted.failed[request.slot] = request.failure
            self._condition.notify_all()
        return accepted

    @contextmanager
    def lost_by_errors(self) -> "Iterator[None]":
        """A context in which the runner waits for the step's tokens.

        After an error, the step has no tokens. Then the masks of the next step raise the error
        instead of waiting for the tokens.
        """
        try:
            yield
        except BaseException as error:
            with self._condition:
                self.error = error
                self._condition.notify_all()
            raise
