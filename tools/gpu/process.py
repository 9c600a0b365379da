"""Runs a part of the check in a process of its own, which is given so many seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_module(module: str, seconds: float, *options: str) -> dict[str, Any]:
    """What `python -m module RESULT options` wrote to RESULT, and why it ended early if it did."""
    with tempfile.TemporaryDirectory(prefix="moeserve-check-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        command = [sys.executable, "-m", module, str(result), *options]
        with log.open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
        try:
            code: int | None = process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: its engine processes, too
                process.wait()
        found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        if code is None:
            found["left_out"] = f"stopped after {seconds:.0f} s"
        elif code:
            found["problem"] = f"exit status {code}: {log.read_text(errors='replace')[-3000:]}"
        return found
