"""The tests that use a card, as cases of the check.

A test that hangs or crashes is named, and the others run without it. The project's option for
pytest-asyncio is omitted, because that plugin need not be installed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import pytest

from tools.gpu.bench import MOST_TEXT, Bench
from tools.gpu.process import ROOT

SLOW_S = 5.0
FOLDERS = ("tests/kernels", "tests/moe", "tests/runner")
SMOKE = ("tests/kernels/test_combine.py",)
OPTIONS = (
    "-o",
    "addopts=--import-mode=importlib",
    "-o",
    "filterwarnings=default",
    "-p",
    "no:cacheprovider",
    "-q",
    "-s",
)


def run(bench: Bench) -> None:
    recorder = Recorder(bench)
    folders = [str(ROOT / folder) for folder in (SMOKE if bench.smoke else FOLDERS)]
    code = pytest.main([*OPTIONS, *folders], plugins=[recorder])
    if code not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        raise RuntimeError(f"pytest ended with {code!r}: {recorder.uncollected}")


class Recorder:
    """A pytest plugin that records tests as cases."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.problem = ""
        self.uncollected: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            item for item in self.bench.mine(list(items)) if item.nodeid not in self.bench.known
        ]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.uncollected.append(str(report.longrepr)[-MOST_TEXT:])
            self.bench.found["failed"][report.nodeid] = self.uncollected[-1]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if time.monotonic() > self.bench.deadline_s:
            item.session.shouldstop = "time is up"
            self.bench.found["left_out"].append("tests from here on")
        self.bench.begin(item.nodeid)
        self.problem = ""
        found = yield
        if self.problem:
            self.leave_a_broken_device()
        self.bench.end(self.problem)
        return found

    def leave_a_broken_device(self) -> None:
        """End the process in the current case if the device is unusable, as after a crash.

        The next tests need another process.
        """
        try:
            self.bench.synchronize()
        except Exception:
            print(self.problem, file=sys.stderr, flush=True)
            os._exit(1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.problem = str(report.longrepr)[-MOST_TEXT:]
        elif report.skipped and not hasattr(report, "wasxfail"):
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.bench.found.setdefault("skipped", []).append(why[:80])
        elif report.when == "call" and report.duration > SLOW_S:
            self.bench.found.setdefault("slow", []).append(
                [round(report.duration, 1), report.nodeid]
            )
