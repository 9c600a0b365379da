"""Constructs that the package must not contain: code that executes its input."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "moeserve"
FORBIDDEN = re.compile(
    r"\b(import pickle|from pickle|cloudpickle|torch\.load\("
    r"|recv_pyobj|send_pyobj|trust_remote_code=True)"
    r"|(?<![\w.])(eval|exec)\("
)


def test_nothing_unpickles_or_evaluates():
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert found == []
