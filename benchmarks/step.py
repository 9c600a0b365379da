"""Host time per decode step at 1, 64, 256 and 1,024 running requests: python benchmarks/step.py [--json FILE]."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import numpy as np

from moeserve.engine.step_bench import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-running", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="write the result there as well")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: for a machine that others use too"
    )
    args = parser.parse_args()
    result = measure(args.num_running, steps=args.steps, clock=args.clock)
    result["environment"] = {"python": platform.python_version(), "numpy": np.__version__, "cpu": _cpu()}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["results"]:
        step, phases = row["step_us"], row["phases_us"]
        parts = ", ".join(f"{name} {times['p50']:.0f}" for name, times in phases.items())
        print(f"{row['num_running']:>5} running: p50 {step['p50']:.0f} us, p99 {step['p99']:.0f} us ({parts})")


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
