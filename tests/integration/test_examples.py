"""Every example is run as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS_SERVER = {"chat_client.py", "openai_client.py"}


@pytest.mark.parametrize("name", sorted(p.name for p in EXAMPLES.glob("*.py")))
def test_example_runs(name, request):
    command = [sys.executable, str(EXAMPLES / name)]
    if name in NEEDS_SERVER:
        command.append(request.getfixturevalue("server").url + "/v1")
    run = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout) > 40
