"""Fixtures shared by tests of several folders, and the choice of full tests."""

from __future__ import annotations

import tests.worker_exit  # noqa: F401  isort: skip

import logging
import os
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import Checkpoint, write_checkpoint
from tests.full import left_out
from tests.plugin_packages import Install, installer

# SIGINT is ignored if pytest was started in the background, but tests send it to children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:  # one core each
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", default="", help="groups of full tests to run as well, comma separated, or 'all'"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect full tests of groups that `--full` does not name."""
    out = left_out(items, set(config.getoption("--full").split(",")))
    if out:
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package with entry points for the duration of a test."""
    return installer(tmp_path, monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        from tests.kernels.interpreted import interpret_quickly

        interpret_quickly()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Restore the root logger after each test.

    A server in the tests' process configures logging, which would hide records from later tests.
    """
    root = logging.getLogger()
    level = root.level
    handlers = root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = [handler for handler in root.handlers if handler in handlers]


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Run torch on one thread.

    With many small products, or ranks as threads, the time would go into waiting for torch's pool.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """Return make_checkpoint(family, **config overrides).

    Each combination is written once per session.
    """
    made: dict[str, Checkpoint] = {}

    def make(name: str, **overrides: Any) -> Checkpoint:
        key = f"{name}-{sorted(overrides.items())}"
        if key not in made:
            made[key] = write_checkpoint(name, tmp_path_factory.mktemp(name), **overrides)
        return made[key]

    return make
