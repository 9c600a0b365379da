"""Runs a section of the check in processes of its own, for so many seconds, and keeps all that they
found.

A process writes its record when a case begins and when it ends. So one that is stopped, hangs or
crashes loses a case at most, the record names it, and what was measured before stays. After a crash
the section goes on without that case.
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
TAIL = 2000  # of a log
STACK = "(most recent call first)"
DYING_S = 5.0  # for all processes, which a driver may not let go
KEEP_S = 2.0
Record = dict[str, Any]


def merge(one: Any, other: Any) -> Any:
    """Mappings key by key, lists one after the other; of anything else the other."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {
            **one,
            **{
                key: merge(one[key], value) if key in one else value for key, value in other.items()
            },
        }
    return [*one, *other] if isinstance(one, list) and isinstance(other, list) else other


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """All of it or nothing. NaN and infinity, which JSON has not, become null; this folder's path
    is cut.
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
    """Empty if there is none, or no whole one."""
    try:
        found: Record = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def last_words(log: str) -> str:
    """The stack of the main thread, if the process was ended by faulthandler, which writes it last;
    else the end.
    """
    at = log.rfind(STACK)
    return log[max(0, at - 70) :][:TAIL] if at >= 0 else log[-TAIL:]


@dataclass(frozen=True, slots=True)
class Part:
    """A process with its share of a section's cases."""

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
        """record: what is known already, and need not be measured again."""
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
        """With the processes that it started: engines."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def found(self) -> Record:
        return read_json(self.result)

    def ended(self, record: Record) -> tuple[Record, bool]:
        """The record with what it found, and whether to go on: it died in a case that had not
        failed before.
        """
        self.kill()  # what it left running
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
    """Runs `python *words RESULT KNOWN SECONDS I/PARTS` for each part. keep: gets the record, with
    what is new, every two seconds and at the end, however that comes. `stopped`: the cases at which
    time was up."""
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
