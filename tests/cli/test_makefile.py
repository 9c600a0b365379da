"""`make serve` reports its progress; at a terminal, with pip's progress bar."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_first_start_shows_what_it_installs(terminal: bool, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    ours, theirs = os.openpty()
    stderr = theirs if terminal else subprocess.DEVNULL
    command = ["make", f"VENV={tmp_path}", f"{tmp_path}/.serve"]
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }  # `make test` runs this
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True
    )
    os.close(ours)
    os.close(theirs)
    compiling, tools, build, installing, install = done.stdout.splitlines()
    assert compiling.startswith("compiling the native kernels")
    assert build == "setup.py -q build_ext --inplace"
    assert installing.startswith("installing moeserve and its dependencies")
    for pip in (tools, install):
        assert pip.startswith("-m pip install")
        assert ("-q" in pip.split()) is not terminal


def test_tests_compile_nothing_again() -> None:
    """The module is compiled by one rule, which the rules for serving and testing depend on."""
    rules = (ROOT / "Makefile").read_text()
    assert rules.count("build_ext") == 1
    assert "$(VENV)/.serve: $(VENV)/.native" in rules
    assert "$(VENV)/.dev: $(VENV)/.native" in rules
