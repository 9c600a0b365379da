"""Host time per decode step at 1, 64, 256 and 1,024 running requests, runner tables and inputs included.

    python -m benchmarks.step

Target: <= 300 us at 256 running and <= 1.2 ms at 1,024, p99 <= 2 x median. On a machine that others use too,
`--clock cpu` leaves out what they take from it, though not what their traffic costs its caches.
"""

from __future__ import annotations

from benchmarks.common import parser, save
from moeserve.cli.bench.step import runner_tables
from moeserve.engine.step_bench import measure

NUM_RUNNING = [1, 64, 256, 1024]


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    args.add_argument("--steps", type=int, default=1000)
    asked = args.parse_args()
    tables = runner_tables(max(NUM_RUNNING), asked.steps)
    save("step", asked, measure(NUM_RUNNING, steps=asked.steps, tables=tables, clock=asked.clock))


if __name__ == "__main__":
    main()
