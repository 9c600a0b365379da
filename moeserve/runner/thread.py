"""Run a model runner in a thread, so that the engine's event loop never waits for a forward pass.

The thread executes plans in order. A runner with an asynchronous device (CUDA) has a second thread
that waits for results, so that the next plan can be launched while the device computes this one.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

from moeserve.engine.plan import GrammarJob, StepPlan, StepResult
from moeserve.errors import EngineDied
from moeserve.runner.base import ModelRunnerBase
from moeserve.runner.job_thread import JobThread

P = ParamSpec("P")
T = TypeVar("T")


class StepFuture(Generic[T]):
    """The future result of another thread, to be awaited on the loop that created it."""

    __slots__ = ("_future", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[T] = self._loop.create_future()

    async def result(self) -> T:
        """Wait for the result. Raises the error that was passed to `fail`."""
        return await self._future

    def resolve(self, value: T) -> None:
        """Set the result, from any thread."""
        self._from_thread(self._future.set_result, value)

    def fail(self, cause: BaseException) -> None:
        """Set an error, from any thread."""
        self._from_thread(self._future.set_exception, cause)

    def _from_thread(self, set_: Callable[[Any], None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._set, set_, value)

    def _set(self, set_: Callable[[Any], None], value: object) -> None:
        if not self._future.done():
            set_(value)
            self._future.exception()  # so that asyncio does not warn if nobody awaits the future


class ThreadedRunner:
    """The engine's `Runner`: a model runner in its own threads.

    After a step has failed, or after `close`, all later steps fail with the cause.
    """

    def __init__(self, runner: ModelRunnerBase) -> None:
        self.runner = runner
        self._end_cause: str | None = None
        self._launcher = JobThread("model runner", runner.enter_thread)
        self._collector = (
            JobThread("step results", runner.enter_thread) if runner.device_is_async else None
        )

    def start(self, plan: StepPlan) -> StepFuture[StepResult]:
        """Queue a step without waiting for it. To be called on the loop that awaits the result."""
        handle: StepFuture[StepResult] = StepFuture()
        if not self._launcher.do(lambda: self._launch(plan, handle)):
            handle.fail(self._ended_error())
        return handle

    def prepare_grammar(self, job: GrammarJob, on_done: Callable[[str], None]) -> None:
        self.runner.constraints.prepare(job, on_done)

    def drop_grammars(self, tickets: Sequence[int]) -> None:
        self.runner.constraints.drop(tickets)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the runner's thread, between two steps."""
        handle: StepFuture[T] = StepFuture()

        def job() -> None:
            try:
                handle.resolve(function(*args, **kwargs))
            except BaseException as exc:
                handle.fail(exc)

        if not self._launcher.do(job):
            raise self._ended_error()
        return await handle.result()

    def close(self) -> None:
        """Finish the running step, fail the queued ones, join the threads and release the model.

        This frees the model's memory. If a thread freed it while the interpreter ends, the process
        would abort.
        """
        self._end_cause = self._end_cause or "the model runner was closed"
        for thread in (self._launcher, self._collector):
            if thread is not None:
                thread.stop()
        self.__dict__.pop("runner", None)

    def _launch(self, plan: StepPlan, handle: StepFuture[StepResult]) -> None:
        if (refusal := self._refusal()) is not None:
            handle.fail(refusal)
            return
        try:
            collect = self._begin(plan)
        except BaseException as exc:
            self._fail(plan, handle, exc)
            return
        if self._collector is None:
            self._collect(plan, collect, handle)
        else:
            self._collector.do(lambda: self._collect(plan, collect, handle))
        try:
            if self._refusal() is None:
                self.runner.propose()
        except BaseException as exc:
            self._fail(plan, None, exc)

    def _begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Launch a step. Return a function that waits for the result."""
        return self.runner.launch(plan)

    async def _idle(self) -> None:
        """Wait until everything that was started before has ended."""
        await self.call(lambda: None)
        if self._collector is not None:
            handle: StepFuture[None] = StepFuture()
            if self._collector.do(lambda: handle.resolve(None)):
                await handle.result()

    def _collect(
        self, plan: StepPlan, collect: Callable[[], StepResult], handle: StepFuture[StepResult]
    ) -> None:
        try:
            handle.resolve(collect())
        except BaseException as exc:
            self._fail(plan, handle, exc)

    def _refusal(self) -> Exception | None:
        """Return the error with which all further steps fail; None as long as steps may run."""
        return None if self._end_cause is None else EngineDied(self._end_cause)

    def _ended_error(self) -> EngineDied:
        return EngineDied(self._end_cause or "the model runner's thread is gone")

    def _fail(
        self, plan: StepPlan, handle: StepFuture[StepResult] | None, exc: BaseException
    ) -> None:
        """Fail all later steps, and also this one unless it has its result (handle is None)."""
        if self._end_cause is None:
            self._end_cause = f"step {plan.step} failed before: {type(exc).__name__}: {exc}"
        if handle is not None:
            handle.fail(exc)
