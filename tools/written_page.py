"""The command line of tools that write a page of docs/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path


def run(argv: Sequence[str], path: Path, text: Callable[[], str], command: str) -> int:
    """Write the page, or with --check compare it. Return the exit status."""
    if "--check" in argv:
        if path.read_text() != text():
            print(f"{path} is out of date: run {command}")
            return 1
        return 0
    path.write_text(text())
    return 0
