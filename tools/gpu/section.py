"""The process that runs a part of a section for tools/gpu_check.py.

    python -m tools.gpu.section [--smoke] [--peers FOLDER] NAME RESULT KNOWN SECONDS I/PARTS

With compile:NAME,NAME as its name it calls each case of those sections once, which fills Triton's
cache.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import sys
import time
from pathlib import Path

import torch

from tools.gpu.bench import Bench
from tools.gpu.process import read_json

# Section -> its module, if not of the same name, and the seconds after which a case hangs.
MODULES = {
    "checks": ("correct", 90),
    "environment": ("ceilings", 60),
    "tests": ("pytest_cases", 90),
    "transformers": ("transformers_peer", 150),
    "families": ("families", 120),
    "ranks": ("ranks", 70),
}
ENGINES_S = 180


def run(name: str, bench: Bench, peers: Path | None) -> None:
    module, bench.case_s = MODULES.get(name, (name, 90))
    if name.startswith("engine_"):
        from tools.gpu import engine

        bench.case_s = ENGINES_S
        engine.run(bench, name.removeprefix("engine_"))
    elif name == "moe":
        from tools.gpu import moe

        moe.run(bench, peers)
    else:
        importlib.import_module(f"tools.gpu.{module}").run(bench)


def main() -> None:
    faulthandler.enable()
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--smoke", action="store_true")
    flags.add_argument("--peers", type=Path)
    for name in ("name", "result", "known", "seconds", "part"):
        flags.add_argument(name)
    args = flags.parse_args()
    number, parts = map(int, args.part.split("/"))
    bench = Bench(
        torch.device("cpu" if args.smoke else "cuda"),
        args.smoke,
        (number, parts),
        args.name.startswith("compile:"),
        deadline_s=time.monotonic() + float(args.seconds),
        result=Path(args.result),
        known=frozenset(read_json(Path(args.known))["names"]),
    )
    for name in args.name.removeprefix("compile:").split(","):
        try:
            run(name, bench, args.peers)
        except Exception as error:
            if not bench.compiles:
                raise
            # It fails again when it is measured, and is reported then.
            print(f"{name}: {error}", file=sys.stderr)
    if bench.compiles:
        bench.found = {}
    bench.save()


if __name__ == "__main__":
    main()
