"""Check and measure moeserve on the GPU of this machine, in three commands of up to eight minutes.

    python -m tools.gpu_check correct    # kernels against references, tests, families, two ranks
    python -m tools.gpu_check kernels    # kernel times; --peers FOLDER: beside vLLM's and SGLang's
    python -m tools.gpu_check engine     # whole engines with random weights of published shapes
    TRITON_INTERPRET=1 python -m tools.gpu_check correct --smoke    # tiny, without a GPU

Each section writes a JSON file to OUT/CARD (h100, h200) every two seconds, and the command writes a
summary, even if time is up, a kernel hangs or crashes, or SIGTERM arrives. Run again with unchanged
sources, the command resumes with the cases that have not run; failed cases count as run. It prints
each target beside what was measured. The exit status is 1 if a case failed or a result is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.gpu import targets, totals
from tools.gpu.process import Record, read_json, run_section, write_json

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results"
SOURCES = (
    "moeserve/**/*.py",
    "tools/gpu/*.py",
    "tests/kernels/*.py",
    "tests/runner/*.py",
    "tests/moe/**/*.py",
)
CLOCKS = "name,memory.total,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"
CARD = "import torch; print(torch.cuda.get_device_name())"
CARD_S = 90.0
NO_CARD = "no-card"
WORKERS = min(8, os.cpu_count() or 1)
ENDS_S = 6.0  # reserved for killing processes and writing the last files
COMPILED = ("moe", "attention", "rows")
TOTALS: Mapping[str, Callable[[Mapping[str, Any]], Record]] = {
    "ranks": totals.of_ranks,
    "tests": totals.of_tests,
}


@dataclass(frozen=True, slots=True)
class Section:
    """The time limits of a section, and its number of processes."""

    seconds: float  # the most that it may take
    least: float  # skipped if less time is left
    parts: int = 1  # processes that share its cases; 1 if anything is timed


SCRIPTS: Mapping[str, Mapping[str, Section]] = {
    "correct": {
        "checks": Section(130, 30, WORKERS),
        "ranks": Section(80, 40),
        "families": Section(150, 60, WORKERS),
        "tests": Section(400, 60, WORKERS),
    },
    "kernels": {
        "compile": Section(110, 30, WORKERS + 4),
        "environment": Section(40, 15),
        "moe": Section(220, 40),
        "attention": Section(80, 25),
        "rows": Section(120, 20),
    },
    "engine": {
        "engine_qwen3": Section(200, 90),
        "engine_gpt_oss": Section(130, 50),
        "engine_v2_lite": Section(130, 50),
        "engine_qwen3_batch": Section(100, 50),
        "engine_qwen3_fp8": Section(100, 40),
        "engine_qwen3_int4": Section(100, 40),
        "transformers": Section(200, 90),
    },
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("script", choices=SCRIPTS)
    flags.add_argument(
        "--out",
        type=Path,
        default=OUT,
        metavar="FOLDER",
        help="folder of the results [benchmarks/results]",
    )
    flags.add_argument(
        "--after", type=Path, metavar="FOLDER", help="results to resume, if not those in --out"
    )
    flags.add_argument("--minutes", type=float, default=8.0, help="time limit of the command [8]")
    flags.add_argument(
        "--only", type=lambda text: text.split(","), metavar="A,B", help="sections to run [all]"
    )
    flags.add_argument("--again", action="store_true", help="start over, finished sections too")
    flags.add_argument(
        "--peers",
        type=Path,
        metavar="FOLDER",
        help="folder with vllm/ and sglang/, see tools/gpu/peers.py",
    )
    flags.add_argument("--smoke", action="store_true", help="tiny shapes, no times; runs on a CPU")
    args = flags.parse_args(argv)
    known = SCRIPTS[args.script]
    for name in args.only or ():
        if name not in known:
            flags.error(f"{args.script} has no section {name!r}; it has {', '.join(known)}")
    if args.peers is not None and not args.peers.is_dir():
        flags.error(f"there is no folder {args.peers}")
    args.sections = [
        name
        for name in known
        if name in (args.only or known) and not (args.smoke and name == "compile")
    ]
    return args


class Check:
    """One command: its sections' records and its summary."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.source = digest()
        self.card = "cpu" if args.smoke else NO_CARD
        self.summary: Record = {
            "command": command(args.script),
            "source": self.source,
            "commit": commit(),
            "smoke": args.smoke,
            "card": self.card,
            "sections": {},
        }

    @property
    def folder(self) -> Path:
        return Path(self.args.out, self.card)

    def run(self, end_s: float) -> None:
        """Run the sections in the order of their importance.

        Sections for which too little time is left are skipped; the next command runs them.
        """
        if not self.args.smoke:
            self.card = self.summary["card"] = card_name()
            self.summary["card_before"] = card_facts()
            if self.card == NO_CARD:
                raise SystemExit("torch sees no GPU; use --smoke to run without one")
        for name in self.args.sections:
            try:
                self.section(name, SCRIPTS[self.args.script][name], end_s - time.monotonic())
            except Exception:
                self.note(name, {"problems": [traceback.format_exc()]})
            print(f"{name}: {self.summary['sections'][name]}", flush=True)
            self.save()

    def section(self, name: str, section: Section, left_s: float) -> None:
        record = self.kept(name)
        compiled = [
            one for one in COMPILED if one in self.args.sections and not self.kept(one).get("whole")
        ]
        if record.get("whole") or (name == "compile" and not compiled):
            self.note(name, record, "was done")
            return
        if left_s < section.least:
            self.note(name, record, f"skipped: needs {section.least:g} s, {left_s:.0f} s were left")
            return
        begun_s = time.monotonic()

        def keep(new: Record) -> None:
            new["seconds"] = round(record.get("seconds", 0) + time.monotonic() - begun_s, 1)
            new["whole"] = not any(new.get(key) for key in ("stopped", "left_out", "problems"))
            new |= TOTALS.get(name, dict)(new)
            self.note(name, new)
            if name != "compile":
                write_json(self.folder / f"{name}.json", new)

        options = [
            *(["--smoke"] if self.args.smoke else []),
            *(["--peers", str(self.args.peers.resolve())] if self.args.peers else []),
        ]
        asked = f"compile:{','.join(compiled)}" if name == "compile" else name
        words = ["-m", "tools.gpu.section", *options, asked]
        run_section(words, section.parts, min(left_s, section.seconds), record, keep)

    def kept(self, name: str) -> Record:
        """Return a record to resume: an earlier run's if its sources were the same."""
        found = {} if self.args.again else self.known(name)
        kept = {
            key: value
            for key, value in found.items()
            if key not in ("stopped", "left_out", "problems")
        }
        date = datetime.now(UTC).isoformat(timespec="seconds")
        return {"what": name, "date": date, "source": self.source, "smoke": self.args.smoke, **kept}

    def known(self, name: str) -> Record:
        """Return the newest record of a section if it is of these sources."""
        folders = (self.folder, Path(self.args.after or self.args.out, self.card))
        found = (read_json(folder / f"{name}.json") for folder in folders)
        return next(
            (
                one
                for one in found
                if (one.get("source"), one.get("smoke")) == (self.source, self.args.smoke)
            ),
            {},
        )

    def note(self, name: str, record: Record, how: str = "") -> None:
        self.summary["sections"][name] = {
            "how": how or ("done" if record.get("whole") else "stopped"),
            "seconds": record.get("seconds", 0),
            "cases": len(record.get("done", ())),
            **{
                key: record[key]
                for key in ("failed", "wrong", "stopped", "left_out", "problems")
                if record.get(key)
            },
        }

    @property
    def is_bad(self) -> bool:
        return any(
            one.get(key)
            for one in self.summary["sections"].values()
            for key in ("failed", "wrong", "problems")
        )

    def save(self, **more: Any) -> str:
        """Write the summary, and the targets beside all results in the folder.

        Returns the targets as text.
        """
        found = {name: self.known(name) for sections in SCRIPTS.values() for name in sections}
        table = targets.rows({} if self.args.smoke else found, self.card)
        write_json(
            self.folder / f"{self.args.script}.json",
            {**self.summary, **more, "targets": targets.as_json(table)},
        )
        return targets.as_text(table)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    begun_s = time.monotonic()
    check = Check(args)
    more = Record()
    try:
        signal.signal(signal.SIGTERM, stop)
        check.run(begun_s + 60 * args.minutes - ENDS_S)
    except (SystemExit, KeyboardInterrupt) as how:
        more["stopped"] = f"by {how!r}"
    except Exception:
        more["traceback"] = traceback.format_exc()
    print(check.save(**more, card_after=card_facts(), seconds=round(time.monotonic() - begun_s, 1)))
    print("\n".join(f"{key}: {value}" for key, value in more.items()), file=sys.stderr)
    return 1 if more or check.is_bad else 0


def stop(number: int, frame: Any) -> None:
    """End the running processes and write the summary, ignoring further signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


def commit() -> str:
    """Return the commit, or an empty string without git."""
    with suppress(OSError):
        words = ["git", "rev-parse", "HEAD"]
        return subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    return ""


def digest() -> str:
    """Return a digest of the sources that decide the results; needs no git."""
    files = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]


def card_name() -> str:
    """Return the card's short name, such as h100; NO_CARD if torch sees none."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", CARD], capture_output=True, text=True, timeout=CARD_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return NO_CARD
    return short_name(done.stdout.strip())


def short_name(name: str) -> str:
    """Shorten a card's name.

    NVIDIA A100-SXM4-80GB -> a100, NVIDIA GeForce RTX 4090 -> geforce-rtx-4090.
    """
    name = name.removeprefix("NVIDIA ")
    found = re.match(r"[A-Z]+\d+[A-Z]*\b", name)
    return (found[0] if found else re.sub(r"\W+", "-", name).strip("-")).lower()


def card_facts() -> dict[str, str]:
    """Return what nvidia-smi reads now; empty without it."""
    words = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(
        zip(CLOCKS.split(","), map(str.strip, done.stdout.splitlines()[0].split(",")), strict=False)
    )


def command(script: str) -> str:
    """Return the command as a reader would type it: absolute paths are cut to their last part."""
    rest = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return " ".join(["python", "-m", "tools.gpu_check", *(rest or [script])])


if __name__ == "__main__":
    sys.exit(main())
