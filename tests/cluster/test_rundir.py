"""The private directory of a server, its neighbours' and what is left of killed ones."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moeserve.cluster.rundir import RunDir
from moeserve.errors import ConfigError


@pytest.fixture(autouse=True)
def base(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(short_dir))
    return short_dir


def test_it_is_private_and_gone_after_close(base: Path) -> None:
    run_dir = RunDir()
    path = Path(run_dir.path)
    assert path.parent == base
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (path / "engine-0.sock").touch()
    run_dir.close()
    run_dir.close()
    assert list(base.iterdir()) == []


def test_the_next_server_sweeps_what_a_killed_one_left_and_nothing_else(base: Path) -> None:
    code = (
        "import os, sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from moeserve.cluster.rundir import RunDir\nRunDir(); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(base)], check=False)
    (dead,) = base.iterdir()
    living = RunDir()
    assert not dead.exists()
    foreign = base / "moeserve-notes"
    foreign.mkdir()
    other = RunDir()
    assert Path(living.path).exists()
    assert foreign.exists()
    living.close()
    other.close()


def test_a_long_tmpdir_gives_way_to_one_whose_paths_fit_a_socket(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = base / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    run_dir = RunDir()
    assert len(os.path.join(run_dir.path, "engine-1000.sock")) < 107
    run_dir.close()


def test_a_place_that_cannot_be_written_is_named_with_the_remedy(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = base / "missing"
    monkeypatch.setattr(tempfile, "tempdir", str(missing))
    with pytest.raises(ConfigError, match=r"missing.*set TMPDIR"):
        RunDir()


def test_without_any_place_for_temporary_files_the_remedy_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere() -> str:  # as on a read-only root
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(ConfigError, match=r"temporary files .*set TMPDIR to one that can be writ"):
        RunDir()
