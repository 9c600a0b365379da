"""`moeserve bench step`: what the host spends on a decode step, by phase, with a runner that has no model.

The runner's host side is real: request tables are written and inputs prepared, as in front of a forward pass.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moeserve.errors import ConfigError

DEFAULT_RUNNING = "1,64,256,1024"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--running", default=DEFAULT_RUNNING, metavar="N,N", help=f"running requests of each case [{DEFAULT_RUNNING}]"
    )
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="steps that count, per case [1000]")
    parser.add_argument(
        "--tables",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with the runner's tables and inputs [yes]",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write JSON there too")


def run(args: argparse.Namespace) -> int:
    try:
        running = [int(n) for n in args.running.split(",")]
    except ValueError:
        raise ConfigError(f"--running takes numbers such as {DEFAULT_RUNNING}, got {args.running!r}") from None
    if min(running) < 1 or args.steps < 2:
        raise ConfigError("--running must be at least 1 and --steps at least 2")
    from moeserve.engine.step_bench import measure

    found = measure(running, steps=args.steps, tables=runner_tables(max(running), args.steps) if args.tables else None)
    text = json.dumps(found, indent=2)
    print(text if args.json else table(found["results"]))
    if args.output_json is not None:
        args.output_json.write_text(text + "\n", "utf-8")
    return 0


def runner_tables(num_slots: int, steps: int) -> Callable[[Any], None]:
    """What a model runner's host side does with a plan, on CPU, for up to num_slots running requests."""
    import torch

    from moeserve.engine.groups import KVGroup
    from moeserve.engine.step_bench import BLOCK_SIZE, PROMPT_LENGTHS, WARM_UP_STEPS
    from moeserve.runner.inputs import HostRows, prepare_inputs
    from moeserve.runner.tables import Tables
    from moeserve.runner.upload import HostUpload

    torch.set_num_threads(1)
    groups, upload = (KVGroup("full", BLOCK_SIZE, (0,)),), HostUpload()
    max_len = PROMPT_LENGTHS[1] + 2 * (WARM_UP_STEPS + steps)
    tables = Tables(num_slots, max_len, groups, torch.device("cpu"), upload)

    @torch.inference_mode()
    def prepare(plan: Any) -> None:
        for one in plan.new_requests:
            tables.add(one.slot, one.tokens)
        for group, diff in enumerate(plan.diffs):
            tables.update(group, diff)
        tables.apply()
        if len(plan.slots_R):
            prepare_inputs(plan, HostRows.of(plan), tables, groups, upload)

    return prepare


def table(results: list[Mapping[str, Any]]) -> str:
    """Microseconds per step: the whole, then the median of each phase."""
    phases = list(results[0]["phases_us"])
    heads = ["running", "p50 us", "p99 us", "mean us", *phases]
    lines = ["".join(f"{head:>10}" for head in heads)]
    for result in results:
        whole = result["step_us"]
        cells = [whole["p50"], whole["p99"], whole["mean"], *(result["phases_us"][p]["p50"] for p in phases)]
        lines.append(f"{result['num_running']:>10}" + "".join(f"{cell:>10.1f}" for cell in cells))
    return "\n".join(lines)
