"""What is told of a download."""

from __future__ import annotations

import io
import sys

import pytest

from moeserve.hub import progress as module
from moeserve.hub.progress import DownloadMeter, Progress, TerminalProgress
from moeserve.hub.units import duration_text, size_text

GIB = 2**30


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress("o/n"), "downloading o/n: asking for its files"),
        (Progress("o/n", note="waiting"), "downloading o/n: waiting"),
        (Progress("o/n", GIB, 4 * GIB), "downloading o/n: 1.0 GiB of 4.0 GiB"),
        (
            Progress("o/n", GIB, 4 * GIB, rate=2**25),
            "downloading o/n: 1.0 GiB of 4.0 GiB, 32.0 MiB/s, 1 min left",
        ),
    ],
)
def test_text(progress: Progress, text: str) -> None:
    assert str(progress) == text


def test_units() -> None:
    assert [size_text(size) for size in (0, 1023, 1024, 1.5 * GIB, 2**42)] == [
        "0 bytes", "1023 bytes", "1.0 KiB", "1.5 GiB", "4.0 TiB"
    ]  # fmt: skip
    assert [duration_text(time_s) for time_s in (0.4, 59, 60, 3660, 90_000)] == [
        "0 s", "59 s", "1 min", "1 h 1 min", "25 h 0 min"
    ]  # fmt: skip


def test_the_rate_is_that_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    reports: list[Progress] = []
    meter = DownloadMeter("o/n", reports.append, total_bytes=10_000)
    meter.found(5_000)  # of an earlier attempt
    for _ in range(10):
        now[0] += 0.5
        meter.add(100)
    assert reports[0].rate == 0
    assert reports[-1].rate == pytest.approx(200)
    assert reports[-1].percent == 60
    for _ in range(40):  # it slows down
        now[0] += 0.5
        meter.add(10)
    assert reports[-1].rate == pytest.approx(20)


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    lines: list[str] = []
    with TerminalProgress(lines.append, as_bar=False) as show:
        for percent in range(0, 100, 2):
            show(Progress("o/n", percent, 100))
            now[0] += 1
        show(Progress("o/n", 98, 100, note="another process downloads it"))
        show(Progress("o/n", 98, 100, note="another process downloads it"))
        show(Progress("o/n", 100, 100))
    assert lines == [
        *(f"downloading o/n: {size} bytes of 100 bytes" for size in range(0, 100, 20)),
        "downloading o/n: another process downloads it",
        "downloading o/n: 100 bytes of 100 bytes",
    ]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", screen)
    lines: list[str] = []
    with TerminalProgress(lines.append) as show:
        show(Progress("o/n", note="Q8_0: why"))
        show(Progress("o/n", 0, GIB))
        show(Progress("o/n", GIB, GIB))
    assert lines == ["downloading o/n: Q8_0: why"]
    assert "100%" in screen.getvalue()
    assert "1.00G/1.00G" in screen.getvalue()
