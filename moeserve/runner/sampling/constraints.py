"""Grammars of the requests in an engine's slots: the tokens that each may sample next, and how far
each has come.

A matcher follows its request's tokens on the host: `accept` takes those of a step, and the masks of
the next step are filled in a thread while its forward pass runs. Its state is a function of grammar
and tokens, so a preempted, replayed or repeated step finds the same masks, with and without drafts.

S rows that sample, each at 1 + its drafts positions: N in all. C of them belong to requests with a
grammar.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from moeserve.engine.plan import I32, NewRequest
from moeserve.errors import MoeserveError
from moeserve.runner.sampling.sampler import Masks
from moeserve.runner.thread import JobThread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moeserve.text.grammar import Grammars, Matcher

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Accepted(NamedTuple):
    """What a step's tokens mean to the grammars. complete: slot -> how many of the step's tokens
    belong to its answer, which ends with them. failed: slot -> message."""

    complete: dict[int, int]
    failed: dict[int, str]


@dataclass(slots=True, eq=False)
class Constrained:
    """The request in a slot. matcher: in the making until its grammar is compiled. failure: why it
    must fail. ended: it failed elsewhere, so that steps in flight for it wait in vain."""

    slot: int
    num_prompt: int
    matcher: "Future[Matcher]"
    failure: str = ""
    ended: bool = False

    @contextmanager
    def caught(self) -> "Iterator[None]":
        """Turns an error into this request's failure."""
        try:
            yield
        except MoeserveError as error:
            self.failure = self.failure or str(error)
        except Exception as error:
            logger.exception("the grammar of the request in slot %d failed", self.slot)
            self.failure = self.failure or f"structured output: {type(error).__name__}: {error}"


class Constraints:
    """The grammars of an engine's requests. `add` and `begin` belong to the thread that launches
    steps.

    Its thread reads the tokenizer for the first request that has a grammar. end_ids: the tokens
    that end answers.
    """

    def __init__(self, model_dir: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._model = model_dir, vocab_size, end_ids
        self._grammars: Grammars | None = None
        self._requests: dict[int, Constrained] = {}
        self._thread: JobThread | None = None  # starts with the first grammar
        self._moved = threading.Condition()  # a matcher went on, or a fill became superfluous
        self._latest: StepMasks | None = None

    @property
    def active(self) -> bool:
        """Whether any request in a slot has a grammar."""
        return bool(self._requests)

    def add(self, request: NewRequest) -> None:
        """Takes the request of a slot: its grammar, if it has one, begins to compile and go through
        its answer so far. What is wrong with it comes from the next `accept`."""
        self._requests.pop(request.slot, None)
        if request.sampling.grammar is not None:
            matcher = self._submit(lambda: self._matcher(request))
            self._requests[request.slot] = Constrained(request.slot, request.num_prompt, matcher)

    def begin(
        self,
        slots_S: Iterable[int],
        positions_S: Iterable[int],
        drafts_S: Sequence[I32] | None = None,
    ) -> "StepMasks | None":
        """Starts to fill the masks of a step's rows; None if no row has a grammar. May be called
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
        """Ends the thread."""
        with self._moved:
            self._latest = None
            self._moved.notify_all()
        if self._thread is not None:
            self._thread.stop()

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Queues work for the thread, which lets the process end whatever it waits for."""
        future: Future[T] = Future()

        def job() -> None:
            """Works, and passes on the result or the error."""
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._thread = self._thread or JobThread("grammars")
        if not self._thread.do(job):
            future.set_exception(RuntimeError("the grammars were closed"))
        return future

    def _matcher(self, request: NewRequest) -> "Matcher":
        if self._grammars is None:
            from moeserve.text.grammar import Grammars  # here, since few engines need it
            from moeserve.text.tokenizer import Tokenizer

            model_dir, vocab_size, end_ids = self._model
            self._grammars = Grammars(Tokenizer.load(model_dir), vocab_size, end_ids)
        assert request.sampling.grammar is not None
        return self._grammars.matcher(
            request.sampling.grammar, request.tokens[request.num_prompt :].tolist()
        )

    def _fill(self, step: "StepMasks") -> Masks:
        rows_C = np.concatenate([row.first + np.arange(1 + len(row.drafts)) for row in step.rows])
        bits_CW = np.full(
            (len(rows_C), -(-self._model[1] // 32)), -1, np.int32
        )  # what a request that fails gets
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
                assert self._grammars is not None
                asked = [(matcher, first, row.drafts) for row, matcher, first in filled]
                for i, error in self._grammars.fill_all(asked, bits_CW).items():
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
        """Takes back what the matcher has had of this step, which runs again."""
        matcher = self.request.matcher.result()
        assert matcher.num_tokens >= self.known, (matcher.num_tokens, self.known)
        if matcher.num_tokens > self.known:
            matcher.rewind(self.known)

    def accept(self, tokens: list[int]) -> int:
        """Gives the matcher new tokens up to the one that completes the text; returns how many
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
        """Waits for the masks, and so for `accept` of the step before."""
        return self.masks.result()

    def accept(self, tokens_S: Sequence[Sequence[int] | I32]) -> Accepted:
        """Takes the tokens that were kept, of each of `begin`'s rows; none of a row that failed,
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
