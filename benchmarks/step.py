"""Host time per decode step at 1, 64, 256 and 1,024 running requests.

    python -m benchmarks.step

The real core, scheduler and encoder run around a runner without a model. Phases, in microseconds
per step:

    plan                  Scheduler.plan
    tables                the runner's work on the host: tables and inputs
    encode                encoding StepOutput as msgpack
    update_from_output    Scheduler.update_from_output
    loop                  the rest: core loop, inbox, event loop

Targets: 300 us at 256 running and 1.2 ms at 1,024, p99 at most 2 x the median. On a shared machine
`--clock cpu` omits the time that other programs take, but not what they evict from the caches.

Prints and saves p50, p99 and mean of the step and of each phase.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable
from time import perf_counter_ns, thread_time_ns
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from benchmarks.common import parser, save
from moeserve.actor.actor import Inbox
from moeserve.config import Limits
from moeserve.engine.blocks import KVGroup
from moeserve.engine.core import EngineCore
from moeserve.engine.kv_rule import KVRule
from moeserve.engine.null_runner import NullHandle, NullRunner
from moeserve.engine.plan import StepPlan
from moeserve.engine.scheduler import Scheduler
from moeserve.messages import Drain, EngineIn, EngineOut, StepOutput, Submit
from moeserve.runner.tables import HostRows, Tables, host_upload, prepare_inputs
from moeserve.sampling import TokenSampling

NUM_RUNNING = [1, 64, 256, 1024]
Clock = Literal["wall", "cpu"]
TablesWork = Callable[[StepPlan], None]
_CLOCKS: dict[Clock, Callable[[], int]] = {"wall": perf_counter_ns, "cpu": thread_time_ns}
BLOCK_SIZE = 16
# A random length in this range, so that requests enter new blocks at different steps.
PROMPT_LENGTHS = (128, 384)
WARM_UP_STEPS = 200
VOCAB_SIZE = 32_000
END_ID = VOCAB_SIZE  # a stop token that never comes


def measure(
    num_running: list[int],
    *,
    steps: int = 1000,
    tables: TablesWork | None = None,
    clock: Clock = "wall",
) -> dict[str, Any]:
    """Measure host time per decode step at each num_running.

    Returns {"results": [{num_running, step_us, phases_us}]}. Each time is {"p50", "p99", "mean"}
    over `steps` steps after a warm-up. Clock "cpu" counts only this thread's CPU time.
    """
    results = [asyncio.run(_Bench(n, steps, tables, _CLOCKS[clock]).run()) for n in num_running]
    facts = {
        "block_size": BLOCK_SIZE,
        "depth": 2,
        "steps": steps,
        "tables": tables is not None,
        "clock": clock,
    }
    return {**facts, "results": results}


class _Timed:
    """Time spent per call, in nanoseconds."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.spent: list[int] = []
        self._clock = clock

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with each call timed."""

        def timed(*args: Any) -> Any:
            began = self._clock()
            result = function(*args)
            self.spent.append(self._clock() - began)
            return result

        return timed


class _BenchRunner(NullRunner):
    def __init__(self, tables: TablesWork | None) -> None:
        super().__init__(VOCAB_SIZE)
        self._tables = tables

    def start(self, plan: StepPlan) -> NullHandle:
        if self._tables is not None:
            self._tables(plan)
        return super().start(plan)


class _Bench:
    def __init__(
        self, num_running: int, steps: int, tables: TablesWork | None, clock: Callable[[], int]
    ) -> None:
        self.num_running = num_running
        self.steps = steps
        self.clock = clock
        self.phases = {
            name: _Timed(clock) for name in ("plan", "tables", "update_from_output", "encode")
        }
        max_len = PROMPT_LENGTHS[1] + 2 * (WARM_UP_STEPS + steps)
        limits = Limits(
            max_num_seqs=num_running,
            max_num_batched_tokens=8192,
            prefill_chunk=8192,
            max_model_len=max_len,
            block_size=BLOCK_SIZE,
            num_blocks=2 + num_running * -(-max_len // BLOCK_SIZE),
        )
        self.scheduler = Scheduler(
            limits, (KVGroup(KVRule(), BLOCK_SIZE, (0,)),), vocab_size=VOCAB_SIZE + 1
        )
        self.scheduler.plan = self.phases["plan"].wrap(self.scheduler.plan)  # type: ignore[method-assign]
        update = self.phases["update_from_output"].wrap(self.scheduler.update_from_output)
        self.scheduler.update_from_output = update  # type: ignore[method-assign]
        timed_tables = None if tables is None else self.phases["tables"].wrap(tables)
        self.runner = _BenchRunner(timed_tables)
        self.inbox: Inbox[EngineIn] = Inbox("bench", limit=num_running + 10)
        self.encode = self.phases["encode"].wrap(msgspec.msgpack.Encoder().encode)
        self.ends: list[int] = []

    async def run(self) -> dict[str, Any]:
        """Submit all requests, run the core until enough steps are timed; return the summary."""
        rng = random.Random(self.num_running)
        for rid in range(self.num_running):
            tokens = np.array(
                [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(*PROMPT_LENGTHS))], "<i4"
            )
            sampling = TokenSampling(
                seed=rid, max_tokens=2 * (WARM_UP_STEPS + self.steps), stop_ids=(END_ID,)
            )
            self.inbox.put(
                Submit(rid=rid, tokens=tokens.tobytes(), num_prompt=len(tokens), sampling=sampling)
            )
        gc.collect()
        gc.freeze()
        try:
            await EngineCore(self.scheduler, self.runner, self.inbox, self.emit).run()
        finally:
            gc.unfreeze()
        return self.summary()

    def emit(self, msg: EngineOut) -> None:
        """Encode a step's output and note the time; drain the core after the last step."""
        if (
            not isinstance(msg, StepOutput)
            or msg.record is None
            or len(self.ends) > WARM_UP_STEPS + self.steps
        ):
            return
        self.encode(msg)
        if not self.ends:
            if msg.record.num_tokens != self.num_running:
                return  # prompts are still being prefilled
            for phase in self.phases.values():
                phase.spent.clear()
        self.ends.append(self.clock())
        if len(self.ends) == WARM_UP_STEPS + self.steps + 1:
            self.inbox.put(Drain(0.0))

    def summary(self) -> dict[str, Any]:
        """Return the times of the steps after the warm-up, in microseconds."""
        whole = np.diff(self.ends)[WARM_UP_STEPS:] / 1e3
        spent = {
            name: np.array(phase.spent) / 1e3 for name, phase in self.phases.items() if phase.spent
        }
        spent = {
            name: times[WARM_UP_STEPS : WARM_UP_STEPS + self.steps] for name, times in spent.items()
        }
        spent["loop"] = whole - sum(spent.values())
        return {
            "num_running": self.num_running,
            "step_us": _summary(whole),
            "phases_us": {name: _summary(times) for name, times in spent.items()},
        }


def _summary(times: np.ndarray) -> dict[str, float]:
    p50, p99 = np.percentile(times, [50, 99])
    return {
        "p50": round(float(p50), 1),
        "p99": round(float(p99), 1),
        "mean": round(float(times.mean()), 1),
    }


def runner_tables(num_slots: int, steps: int) -> TablesWork:
    """Return a model runner's host work for a step plan of up to num_slots requests."""
    torch.set_num_threads(1)
    groups = (KVGroup(KVRule(), BLOCK_SIZE, (0,)),)
    upload = host_upload
    max_len = PROMPT_LENGTHS[1] + 2 * (WARM_UP_STEPS + steps)
    tables = Tables(num_slots, max_len, groups, torch.device("cpu"), upload)

    @torch.inference_mode()
    def prepare(plan: StepPlan) -> None:
        for request in plan.new_requests:
            tables.add(request.slot, request.tokens)
        for group, diff in enumerate(plan.diffs):
            tables.update(group, diff)
        tables.apply()
        if len(plan.slots_R):
            prepare_inputs(plan, HostRows.of(plan), tables, groups, upload)

    return prepare


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    flags.add_argument("--steps", type=int, default=1000)
    args = flags.parse_args()
    tables = runner_tables(max(NUM_RUNNING), args.steps)
    save("step", args, measure(NUM_RUNNING, steps=args.steps, tables=tables, clock=args.clock))


if __name__ == "__main__":
    main()
