"""Grammars of the requests in an engine's slots: the tokens that each may sample next, and how far
each has come.

A matcher follows its request's tokens on the host. It is made before a plan has the request
(grammar_compiler.py). `accept` gives it the tokens of a step, and a thread fills the masks of the
next step while its forward pass runs. Its state is a function of grammar and tokens, so a
preempted, replayed or repeated step finds the same masks, with and without drafts.

S rows that sample, each at 1 + its drafts positions: N in all. C of them belong to requests with a
grammar.
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
_numbers = itertools.count(1)  # of jobs that no scheduler gave a ticket


class Accepted(NamedTuple):
    """What a step's tokens mean to the grammars. complete: slot -> how many of the step's tokens
    belong to its answer, which ends with them. failed: slot -> message."""

    complete: dict[int, int]
    failed: dict[int, str]


@dataclass(slots=True, eq=False)
class Constrained:
    """The request in a slot."""

    slot: int
    ticket: int
    num_prompt: int
    matcher: "Future[Matcher]"  # not done yet where nobody prepared it (see `Constraints.add`)
    failure: str = ""  # why the request must fail
    ended: bool = False  # failed elsewhere: no tokens come for the steps in flight

    @contextmanager
    def caught(self) -> "Iterator[None]":
        """Turn an error into this request's failure."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or failure_of(error)


class Constraints:
    """The grammars of an engine's requests. `add` and `begin` belong to the thread that launches
    steps; `prepare` and `drop` may be called from any thread.

    end_ids: the tokens that end answers.
    """

    def __init__(self, model_dir: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._mask_words = -(-vocab_size // 32)
        self._compiler = GrammarCompiler(model_dir, vocab_size, end_ids)
        self._prepared: dict[int, Future[Matcher]] = {}  # by ticket, until `add` or `drop`
        self._requests: dict[int, Constrained] = {}
        self._thread: JobThread | None = None  # fills masks; starts with the first grammar
        self._moved = threading.Condition()  # a matcher went on, or a fill became superfluous
        self._latest: StepMasks | None = None

    @property
    def active(self) -> bool:
        """Whether any request in a slot has a grammar."""
        return bool(self._requests)

    def prepare(self, job: GrammarJob, on_done: Callable[[str], None]) -> None:
        """Compile a grammar and replay an answer, for the request that `add` gets with this ticket.

        `on_done` is called with the reason why the request must fail, or "". It is not called if
        the job is dropped first.
        """
        future = self._prepared[job.ticket] = self._compiler.start(job)

        def report(done: "Future[Matcher]") -> None:
            if not done.cancelled():
                error = done.exception()
                on_done("" if error is None else failure_of(error))

        future.add_done_callback(report)

    def drop(self, tickets: Iterable[int]) -> None:
        """Forget what was prepared for requests that never get a slot."""
        for ticket in tickets:
            if (future := self._prepared.pop(ticket, None)) is not None:
                future.cancel()

    def add(self, request: NewRequest) -> None:
        """Note the request of a slot. What is wrong with its grammar comes from the next `accept`.

        A step that runs again adds its requests again. A request that nobody prepared, as in a test
        without a scheduler, makes the masks of its first step wait for its grammar.
        """
        before = self._requests.pop(request.slot, None)
        grammar = request.sampling.grammar
        if grammar is None:
            return
        ticket = request.grammar_ticket
        matcher = self._prepared.pop(ticket, None)
        if matcher is None and before is not None and ticket and before.ticket == ticket:
            matcher = before.matcher
        if matcher is None:
            answer = request.tokens[request.num_prompt :].tolist()
            matcher = self._compiler.start(GrammarJob(-next(_numbers), grammar, answer, -(2**31)))
        self._requests[request.slot] = Constrained(
            request.slot, ticket, request.num_prompt, matcher
        )

    def begin(
        self,
        slots_S: Iterable[int],
        positions_S: Iterable[int],
        drafts_S: Sequence[I32] | None = None,
    ) -> "StepMasks | None":
        """Start to fill the masks of a step's rows; None if no row has a grammar. May be called
        again for a step.

        positions_S: the known tokens of each row, drafts not counted. The masks wait until `accept`
        has had them.
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
        with self._moved:
            self._latest = step = StepMasks(rows, self._moved, self._latest)
            self._moved.notify_all()
        step.masks = self._submit(lambda: self._fill(step))
        return step

    def close(self) -> None:
        """End the threads."""
        self._compiler.close()
        with self._moved:
            self._latest = None
            self._moved.notify_all()
        if self._thread is not None:
            self._thread.stop()

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue work for the thread, which lets the process end whatever it waits for."""
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
        # A request that fails may sample any token.
        bits_CW = np.full((len(rows_C), self._mask_words), -1, np.int32)
        filled: list[tuple[MaskedRow, Matcher, int]] = []
        first = 0
        before = step.before
        step.before = None
        lost: BaseException | None = None
        with self._moved:
            for row in step.rows:
                with row.request.caught():
                    matcher = row.request.matcher.result()
                    while self._latest is step and not row.is_due:
                        if before is not None and (lost := before.lost) is not None:
                            break
                        self._moved.wait()
                    if (
                        self._latest is step
                        and not row.request.failure
                        and matcher.num_tokens >= row.known
                    ):
                        row.rewind()
                        filled.append((row, matcher, first))
                first += 1 + len(row.drafts)
            if lost is not None:
                raise lost
            if filled:
                asked = [(matcher, first, row.drafts) for row, matcher, first in filled]
                for i, error in self._compiler.grammars.fill_all(asked, bits_CW).items():
                    filled[i][0].request.failure = error.message
        return Masks(rows_C, bits_CW)


@dataclass(slots=True, eq=False)
class MaskedRow:
    """A row whose request has a grammar: the index-th of the step's rows, sampling from position
    `first` of N on, when `known` tokens of its answer are."""

    index: int
    request: Constrained
    known: int
    first: int
    drafts: list[int]

    @property
    def is_due(self) -> bool:
        """Whether the matcher has had all known tokens, or never will."""
        return (
            bool(self.request.failure)
            or self.request.ended
            or self.request.matcher.result().num_tokens >= self.known
        )

    def rewind(self) -> None:
        """Take back what the matcher has had of this step, which runs again."""
        matcher = self.request.matcher.result()
        assert matcher.num_tokens >= self.known, (matcher.num_tokens, self.known)
        if matcher.num_tokens > self.known:
            matcher.rewind(self.known)

    def accept(self, tokens: list[int]) -> int:
        """Give the matcher new tokens up to the one that completes the text; returns how many
        those are, else 0.
        """
        self.rewind()
        matcher = self.request.matcher.result()
        for i, token in enumerate(tokens):
            matcher.accept([token])
            if matcher.is_done:
                return i + 1
        return 0


class StepMasks:
    """The masks of one step, in the making. A step that runs again has new ones; the old ones are
    forgotten.

    before: those of the step before, until they are of no use. lost: why that step has no result.
    """

    def __init__(
        self, rows: list[MaskedRow], moved: threading.Condition, before: "StepMasks | None"
    ) -> None:
        self.rows = rows
        self.masks: Future[Masks]
        self.before = before
        self.lost: BaseException | None = None
        self._moved = moved

    def result(self) -> Masks:
        """Wait for the masks, and so for `accept` of the step before."""
        return self.masks.result()

    def accept(self, tokens_S: Sequence[Sequence[int] | I32]) -> Accepted:
        """Take the tokens that were kept, of each of `begin`'s rows; none of a row that failed,
        whose request ends. From any thread, in the order of steps."""
        self.result()
        accepted = Accepted({}, {})
        with self._moved:
            for row in self.rows:
                request = row.request
                request.ended = request.ended or not len(tokens_S[row.index])
                with request.caught():
                    over = request.failure or request.ended
                    if not over and (kept := row.accept(list(map(int, tokens_S[row.index])))):
                        accepted.complete[request.slot] = kept
                if request.failure:
                    accepted.failed[request.slot] = request.failure
            self._moved.notify_all()
        return accepted

    @contextmanager
    def lost_by_errors(self) -> "Iterator[None]":
        """Around what gets the step's tokens. After an error there are none, and the masks of the
        step behind it, which wait for them, raise the error as well."""
        try:
            yield
        except BaseException as error:
            with self._moved:
                self.lost = error
                self._moved.notify_all()
            raise
