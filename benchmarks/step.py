"""Host time per decode step at 1, 64, 256 and 1,024 running requests, runner tables and inputs included.

    python -m benchmarks.step

Target: <= 300 us at 256 running and <= 1.2 ms at 1,024, p99 <= 2 x median. On a machine that others use too,
`--clock cpu` leaves out what they take from it, though not what their traffic costs its caches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.common import parser, save
from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import StepPlan
from moeserve.engine.step_bench import BLOCK_SIZE, PROMPT_LENGTHS, WARM_UP_STEPS, measure
from moeserve.runner.tables import HostRows, Tables, host_upload, prepare_inputs

NUM_RUNNING = [1, 64, 256, 1024]


def runner_tables(num_slots: int, steps: int) -> Callable[[StepPlan], None]:
    """Returns what a model runner's host side does with a step plan, on CPU, for up to num_slots running requests."""
    torch.set_num_threads(1)
    groups, upload = (KVGroup("full", BLOCK_SIZE, (0,)),), host_upload
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
    args = parser(__doc__)
    args.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    args.add_argument("--steps", type=int, default=1000)
    given = args.parse_args()
    tables = runner_tables(max(NUM_RUNNING), given.steps)
    save("step", given, measure(NUM_RUNNING, steps=given.steps, tables=tables, clock=given.clock))


if __name__ == "__main__":
    main()
