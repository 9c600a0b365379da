"""Checks and measures the GPU kernels on the present card, in one command of a few minutes.

    python -m tools.gpu_check                                  # every kernel: correct, invariant, how fast
    python -m tools.gpu_check --peers FOLDER --engine          # beside vLLM's and SGLang's kernels; whole engines
    TRITON_INTERPRET=1 python -m tools.gpu_check --smoke       # tiny and interpreted, without a GPU or any times

Writes a JSON file per section to --out and prints what the figures must be beside what they are. A section that does
not fit into --minutes is left out, and its file says so; one that fails leaves the others alone. Exit status 1 if one
failed or a kernel is wrong. Processes compile the kernels of the later sections while the first one checks them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import common
from tools.gpu import attention, correct, engine, moe, ranks, rows, targets, transformers_peer
from tools.gpu.bench import Bench, ceilings

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "h200"
COMPILERS = 12  # processes
COMPILE_S = 150.0  # what they have not compiled by then is compiled where it is measured
CLOCKS = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"


@dataclass(frozen=True, slots=True)
class Section:
    """seconds: most that it may take; least: with less left it is not begun."""

    seconds: float
    least: float
    run: Callable[[Bench, argparse.Namespace], dict[str, Any]]


def environment(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Versions, the card, and what it gives at best."""
    versions = {**common.environment(), "triton": triton.__version__, "commit": common.git("rev-parse", "HEAD")}
    return {"versions": versions, "card": card(), "ceilings": ceilings(bench)}


def card() -> dict[str, str]:
    """As nvidia-smi reads it now; empty without one."""
    command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(CLOCKS.split(","), map(str.strip, done.stdout.splitlines()[0].split(",")), strict=False))


SECTIONS: Mapping[str, Section] = {
    "correct": Section(110, 30, lambda bench, args: correct.run(bench)),
    "environment": Section(20, 5, environment),
    "moe": Section(150, 30, lambda bench, args: moe.run(bench, args.peers)),
    "attention": Section(50, 15, lambda bench, args: attention.run(bench)),
    "rows": Section(60, 15, lambda bench, args: rows.run(bench)),
    "ranks": Section(90, 40, lambda bench, args: ranks.run(bench.deadline_s - time.monotonic(), bench.smoke)),
    "engine": Section(330, 60, lambda bench, args: engine.run(bench.deadline_s - time.monotonic(), bench.smoke)),
    "transformers": Section(
        200, 90, lambda bench, args: transformers_peer.run(bench.deadline_s - time.monotonic(), bench.smoke)
    ),
}
WHOLE = ("ranks", "engine", "transformers")  # need all that moeserve needs
COMPILED = ("moe", "attention", "rows")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument(
        "--out", type=Path, default=OUT, metavar="FOLDER", help="of the results [benchmarks/results/h200]"
    )
    flags.add_argument("--minutes", type=float, default=8.0, help="for all of it [8]")
    flags.add_argument("--only", type=lambda text: text.split(","), metavar="A,B", help=f"of {', '.join(SECTIONS)}")
    flags.add_argument(
        "--peers", type=Path, metavar="FOLDER", help="has vllm/ and sglang/ with their files, see gpu/peers.py"
    )
    flags.add_argument("--engine", action="store_true", help="whole engines, too, if time is left")
    flags.add_argument("--smoke", action="store_true", help="tiny shapes, no times; runs on a CPU")
    flags.add_argument("--part", help=argparse.SUPPRESS)  # i/n: a process that compiles every n-th case
    args = flags.parse_args(argv)
    for name in args.only or ():
        if name not in SECTIONS:
            flags.error(f"there is no section {name!r}; there are {', '.join(SECTIONS)}")
    if args.peers is not None and not args.peers.is_dir():
        flags.error(f"there is no folder {args.peers}")
    if not args.smoke and not torch.cuda.is_available():
        flags.error("torch sees no GPU; --smoke runs without one")
    kernels = [name for name in SECTIONS if args.engine or name not in WHOLE]
    args.sections = [name for name in SECTIONS if name in (args.only or kernels)]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device("cpu" if args.smoke else "cuda")
    if args.part:
        number, count = map(int, args.part.split("/"))
        compile_part(Bench(device, args.smoke, (number, count)), args)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    begun_s = time.monotonic()
    end_s = begun_s + 60 * args.minutes
    compilers = [] if args.smoke else start_compilers(args)
    results, failed = {}, []
    try:
        for name in args.sections:
            if name != "correct":
                wait_for(compilers, begun_s + COMPILE_S)
            later = args.sections[args.sections.index(name) + 1 :]
            record = run_section(name, Bench(device, args.smoke), args, end_s - sum(SECTIONS[n].least for n in later))
            results[name] = record
            if "traceback" in record or "problem" in record or record.get("wrong"):
                failed.append(name)
            save(args.out, name, record)
            print(f"{name}: {summary(record)}", flush=True)
    finally:
        wait_for(compilers, 0.0)
    table = targets.rows({} if args.smoke else results)
    save(args.out, "targets", {"rows": targets.as_json(table), "failed": failed, "card_after": card()})
    print(targets.as_text(table))
    return 1 if failed else 0


def run_section(name: str, bench: Bench, args: argparse.Namespace, end_s: float) -> dict[str, Any]:
    """Its results; or why there are none. end_s: when it must have ended."""
    section, begun_s = SECTIONS[name], time.monotonic()
    if end_s - begun_s < section.least:
        return {"skipped": f"needs {section.least:g} s at least, {end_s - begun_s:.0f} s were left"}
    bench.deadline_s = min(end_s, begun_s + section.seconds)
    try:
        record = section.run(bench, args)
    except Exception:
        record = {"traceback": traceback.format_exc()}
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    return {"seconds": time.monotonic() - begun_s, "left_out": bench.left_out, **record}


def summary(record: Mapping[str, Any]) -> str:
    if "skipped" in record:
        return f"skipped: {record['skipped']}"
    if "traceback" in record:
        return f"FAILED\n{record['traceback']}"
    words = f"{record['seconds']:.1f} s"
    for key in ("left_out", "wrong", "problem"):
        words += f", {key}: {record[key]}" if record.get(key) else ""
    return words


def save(folder: Path, name: str, record: Mapping[str, Any]) -> None:
    """NaN and infinity, which JSON has not, become null."""
    whole = {
        "what": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", "tools.gpu_check", *(Path(word).name for word in sys.argv[1:])]),
        **record,
    }
    text = json.dumps(finite(whole), indent=1).replace(f"{ROOT}/", "")
    (folder / f"{name}.json").write_text(text + "\n", "utf-8")


def finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compile_part(bench: Bench, args: argparse.Namespace) -> None:
    """Calls this process's share of all cases once; what fails here fails again, and is told, where it is measured."""
    for name in (name for name in COMPILED if name in args.sections):
        try:
            SECTIONS[name].run(replace(bench), args)
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr)


def start_compilers(args: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """Processes that fill Triton's cache on disk."""
    words = [sys.executable, "-m", "tools.gpu_check", "--only", ",".join(args.sections)]
    if args.peers is not None:
        words += ["--peers", str(args.peers.resolve())]
    count = min(COMPILERS, os.cpu_count() or 1)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True, "cwd": ROOT}
    return [subprocess.Popen([*words, "--part", f"{i}/{count}"], **quiet) for i in range(count)]  # type: ignore[call-overload]


def wait_for(compilers: list[subprocess.Popen[bytes]], until_s: float) -> None:
    """Nothing is timed beside them; those that are not ready by then are stopped."""
    while compilers:
        process = compilers.pop()
        try:
            process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
