"""Run a section of the check in processes of its own for a limited time, and keep all results.

A process writes its record when a case begins and when it ends. So a process that is stopped, hangs
or crashes loses one case at most, the record names that case, and earlier results are kept. After a
crash the section continues without that case.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TAIL = 2000  # characters of a log to keep
STACK = "(most recent call first)"
DYING_S = 5.0  # how long to wait for killed processes, which a driver may hold
KEEP_S = 2.0
Record = dict[str, Any]


def merge(one: Any, other: Any) -> Any:
    """Merge mappings by key and concatenate lists; of anything else take `other`."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {
            **one,
            **{
                key: merge(one[key], value) if key in one else value for key, value in other.items()
            },
        }
    return [*one, *other] if isinstance(one, list) and isinstance(other, list) else other


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a file atomically.

    NaN and infinity, which JSON lacks, become null. The path of this checkout is removed.
    """
    text = json.dumps(finite(record), indent=1).replace(f"{ROOT}/", "")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text + "\n", "utf-8")
    beside.replace(path)


def finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Record:
    """Return a file's contents; empty if it is missing or incomplete."""
    try:
        found: Record = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def last_words(log: str) -> str:
    """Return the main thread's stack if faulthandler ended the process, else the end of the log.

    faulthandler writes that stack last.
    """
    at = log.rfind(STACK)
    return log[max(0, at - 70) :][:TAIL] if at >= 0 else log[-TAIL:]


@dataclass(frozen=True, slots=True)
class Part:
    """A process that runs its share of a section's cases."""

    number: int
    process: subprocess.Popen[bytes]
    result: Path
    log: Path

    @classmethod
    def start(
        cls,
        folder: Path,
        words: Sequence[str],
        number: int,
        parts: int,
        seconds: float,
        record: Record,
    ) -> Part:
        """Start the process; cases that `record` has are skipped."""
        result, log, known = (folder / f"{number}.{end}" for end in ("json", "log", "known"))
        result.unlink(missing_ok=True)
        write_json(known, {"names": [*record.get("done", ()), *record.get("failed", ())]})
        options = [str(result), str(known), f"{seconds:.1f}", f"{number}/{parts}"]
        threads = str(max(1, (os.cpu_count() or 1) // parts))
        environment = {"OMP_NUM_THREADS": threads, **os.environ} if parts > 1 else None
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *words, *options],
                cwd=ROOT,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
            )
        return cls(number, process, result, log)

    def kill(self) -> None:
        """Kill the process and those that it started, such as engines."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def found(self) -> Record:
        return read_json(self.result)

    def ended(self, record: Record) -> tuple[Record, bool]:
        """Return the record with the process's results, and whether to restart it.

        It is restarted if it died in a case that had not failed before.
        """
        self.kill()  # the processes that it left behind
        found = self.found()
        code = self.process.returncode
        at = found.pop("running", None)
        record, failed = merge(record, found), record.get("failed", {})
        if not code:
            return record, False
        why = f"exit status {code}: {last_words(self.log.read_text(errors='replace'))}"
        return merge(record, {"failed": {at: why}} if at else {"problems": [why]}), bool(
            at
        ) and at not in failed


def run_section(
    words: Sequence[str], parts: int, seconds: float, record: Record, keep: Callable[[Record], None]
) -> None:
    """Run `python *words RESULT KNOWN SECONDS I/PARTS` for each part.

    `keep` gets the record with the new results every two seconds and at the end, however that
    comes. `stopped` lists the cases at which the time was up.
    """
    end_s = time.monotonic() + seconds
    kept_s = 0.0
    with tempfile.TemporaryDirectory(prefix="moeserve-check-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        running: list[Part] = []
        try:
            for number in range(parts):
                running.append(Part.start(folder, words, number, parts, seconds, record))
            while running and (now_s := time.monotonic()) < end_s:
                for part in [one for one in running if one.process.poll() is not None]:
                    running.remove(part)
                    record, again = part.ended(record)
                    if again:
                        running.append(
                            Part.start(folder, words, part.number, parts, end_s - now_s, record)
                        )
                if now_s - kept_s > KEEP_S:
                    keep(_with(record, running))
                    kept_s = now_s
                time.sleep(0.1)
        finally:
            for part in running:
                part.kill()
            dead_s = time.monotonic() + DYING_S
            for part in running:
                with suppress(subprocess.TimeoutExpired):
                    part.process.wait(max(0.0, dead_s - time.monotonic()))
            keep(_with(record, running))


def _with(record: Record, running: Sequence[Part]) -> Record:
    record = dict(record)
    for part in running:
        found = part.found()
        at = found.pop("running", None) or "its start or end"
        record = merge(record, found if part.process.poll() == 0 else {**found, "stopped": [at]})
    return record
