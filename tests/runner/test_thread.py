"""The runner's thread: order, overlap, propagated exceptions, and answers to all at the end."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from moeserve.engine.plan import StepPlan, StepResult
from moeserve.errors import EngineDied
from moeserve.runner.thread import ThreadedRunner

NOTHING = np.zeros(0, dtype=np.int32)


def plan(step: int) -> StepPlan:
    return StepPlan(step, NOTHING, NOTHING, NOTHING, NOTHING.astype(bool), ())


class Scripted:
    """Launches and collects only when the test has opened the gate of that step."""

    def __init__(self, *, device_is_async: bool = False) -> None:
        self.device_is_async = device_is_async
        self.launched: list[int] = []
        self.threads: set[str] = set()
        self.entered: list[str] = []
        self.launch_gate: dict[int, threading.Event] = {}
        self.collect_gate: dict[int, threading.Event] = {}
        self.fails: set[int] = set()
        self.proposes = threading.Event()
        self.proposes.set()
        self.propose_fails = False
        self.began = threading.Event()

    def enter_thread(self) -> None:
        self.entered.append(threading.current_thread().name)

    def propose(self) -> None:
        self.proposes.wait(10)
        if self.propose_fails:
            raise ValueError("no guess")

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.threads.add(threading.current_thread().name)
        self.began.set()
        if plan.step in self.launch_gate:
            assert self.launch_gate[plan.step].wait(10)
        if plan.step in self.fails:
            raise ValueError(f"step {plan.step} is broken")
        self.launched.append(plan.step)

        def collect() -> StepResult:
            if plan.step in self.collect_gate:
                assert self.collect_gate[plan.step].wait(10)
            return StepResult(plan.step, NOTHING)

        return collect


@pytest.mark.parametrize("device_is_async", [False, True])
async def test_plans_run_in_order_in_one_thread(device_is_async: bool) -> None:
    scripted = Scripted(device_is_async=device_is_async)
    runner = ThreadedRunner(scripted)
    handles = [runner.start(plan(step)) for step in range(50)]
    assert [(await handle.result()).step for handle in handles] == list(range(50))
    assert scripted.launched == list(range(50))
    assert len(scripted.threads) == 1
    runner.close()
    # The one that waits for the device enters, too: else it would wait for this step on the
    # process's first device.
    assert {*scripted.entered} == scripted.threads | (
        {"step results"} if device_is_async else set()
    )


async def test_start_returns_while_a_step_runs() -> None:
    scripted = Scripted()
    gate = scripted.launch_gate[0] = threading.Event()
    runner = ThreadedRunner(scripted)
    first = runner.start(plan(0))
    second = runner.start(plan(1))
    waits = asyncio.create_task(second.result())
    await asyncio.sleep(0)
    assert not waits.done()
    gate.set()
    assert (await first.result()).step == 0
    assert (await waits).step == 1
    runner.close()


async def test_an_asynchronous_device_gets_its_next_step_before_the_last_is_collected() -> None:
    scripted = Scripted(device_is_async=True)
    gate = scripted.collect_gate[0] = threading.Event()
    runner = ThreadedRunner(scripted)
    first = runner.start(plan(0))
    second = runner.start(plan(1))
    await runner.call(lambda: None)  # behind both launches
    assert scripted.launched == [0, 1]
    gate.set()
    assert [(await handle.result()).step for handle in (first, second)] == [0, 1]
    runner.close()


async def test_a_failed_step_fails_all_behind_it_with_its_cause() -> None:
    scripted = Scripted()
    scripted.fails = {1}
    runner = ThreadedRunner(scripted)
    handles = [runner.start(plan(step)) for step in range(3)]
    assert (await handles[0].result()).step == 0
    with pytest.raises(ValueError, match="step 1 is broken"):
        await handles[1].result()
    with pytest.raises(EngineDied, match="step 1 failed before: ValueError: step 1 is broken"):
        await handles[2].result()
    with pytest.raises(EngineDied, match="step 1"):
        await runner.start(plan(4)).result()
    runner.close()
    assert scripted.launched == [0]


@pytest.mark.parametrize("device_is_async", [False, True])
async def test_a_result_does_not_wait_for_guesses_whose_failure_is_the_next_steps(
    device_is_async: bool,
) -> None:
    scripted = Scripted(device_is_async=device_is_async)
    scripted.proposes.clear()
    scripted.propose_fails = True
    runner = ThreadedRunner(scripted)
    first = runner.start(plan(0))
    second = runner.start(plan(1))
    assert (await first.result()).step == 0
    scripted.proposes.set()
    with pytest.raises(EngineDied, match="step 0 failed before: ValueError: no guess"):
        await second.result()
    runner.close()
    assert scripted.launched == [0]


async def test_call_runs_in_the_runners_thread_and_carries_exceptions() -> None:
    runner = ThreadedRunner(Scripted())
    assert await runner.call(lambda: threading.current_thread().name) == "model runner"
    with pytest.raises(ZeroDivisionError):
        await runner.call(lambda: 1 // 0)
    assert (await runner.start(plan(0)).result()).step == 0
    runner.close()


@pytest.mark.parametrize("device_is_async", [False, True])
async def test_close_answers_everybody_and_joins(device_is_async: bool) -> None:
    scripted = Scripted(device_is_async=device_is_async)
    gate = scripted.launch_gate[0] = threading.Event()
    runner = ThreadedRunner(scripted)
    handles = [runner.start(plan(step)) for step in range(3)]
    assert await asyncio.to_thread(scripted.began.wait, 10)
    stop = runner._launcher.stop
    # Step 0 goes on only after `close` has begun.
    runner._launcher.stop = lambda: (gate.set(), stop())  # type: ignore[method-assign,assignment,func-returns-value]
    await asyncio.to_thread(runner.close)
    assert (await handles[0].result()).step == 0
    for handle in handles[1:]:
        with pytest.raises(EngineDied, match="closed"):
            await handle.result()
    with pytest.raises(EngineDied, match="closed"):
        await runner.start(plan(9)).result()
    with pytest.raises(EngineDied, match="closed"):
        await runner.call(lambda: None)
    runner.close()
    assert not {"model runner", "step results"} & {thread.name for thread in threading.enumerate()}


def test_a_loop_that_went_away_does_not_hurt_the_thread() -> None:
    scripted = Scripted()
    gate = scripted.launch_gate[0] = threading.Event()
    runner = ThreadedRunner(scripted)

    async def abandon() -> None:
        runner.start(plan(0))

    asyncio.run(abandon())
    gate.set()

    async def again() -> StepResult:
        return await runner.start(plan(1)).result()

    assert asyncio.run(again()).step == 1
    runner.close()


@pytest.mark.parametrize("device_is_async", [False, True])
async def test_a_closed_runner_lets_go_of_the_model(device_is_async: bool) -> None:
    scripted = Scripted(device_is_async=device_is_async)
    runner = ThreadedRunner(scripted)
    await runner.start(plan(0)).result()
    alive = weakref.ref(scripted)
    del scripted
    runner.close()
    assert alive() is None
    runner.close()


async def test_a_step_that_comes_while_the_runner_closes_fails() -> None:
    scripted = Scripted()
    gate = scripted.launch_gate[0] = threading.Event()
    runner = ThreadedRunner(scripted)
    running = runner.start(plan(0))
    await asyncio.to_thread(scripted.began.wait, 10)
    closing = asyncio.create_task(asyncio.to_thread(runner.close))
    while True:  # until the order to stop was given
        late = runner.start(plan(1))
        if runner._launcher._stopped:
            break
        await asyncio.sleep(0)
    late = runner.start(plan(2))
    gate.set()
    assert (await running.result()).step == 0
    with pytest.raises(EngineDied, match="closed"):
        await asyncio.wait_for(late.result(), 10)
    await closing
