"""Every example runs to its end and prints something."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS_SERVER = {"chat_client.py", "openai_client.py"}


@pytest.mark.parametrize("name", sorted(p.name for p in EXAMPLES.glob("*.py")))
def test_example_runs(name, request, monkeypatch, capsys):
    """In this process, which has done the slow imports; test_readme.py runs programs as a user
    does.
    """
    url = [request.getfixturevalue("server").url + "/v1"] if name in NEEDS_SERVER else []
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *url])
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert len(capsys.readouterr().out) > 40
