"""How far a download is: bytes, rate and time left, for terminals, logs, probes and pages."""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from moeserve.hub.units import duration_text, size_text

log = logging.getLogger(__name__)

WINDOW_S = 10.0  # over which the rate is averaged
SAMPLE_S = 0.25  # between two samples of the rate
LINE_INTERVAL_S = 10.0
FIRST_RATE_S = 1.0  # no rate is told before


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a download."""

    model: str
    num_bytes: int = 0  # that are here, including those of earlier attempts
    total_bytes: int = 0  # 0 while the files are being listed
    rate: float = 0.0  # bytes per second; 0 if unknown
    note: str = ""  # what is downloaded and why, or what the download waits for

    @property
    def title(self) -> str:
        """The progress without figures, which change all the time."""
        return f"downloading {self.model}"

    @property
    def percent(self) -> int:
        """Percent of the bytes."""
        return 100 * self.num_bytes // self.total_bytes if self.total_bytes else 0

    def __str__(self) -> str:
        if self.note:
            return f"{self.title}: {self.note}"
        if not self.total_bytes:
            return f"{self.title}: asking for its files"
        text = f"{self.title}: {size_text(self.num_bytes)} of {size_text(self.total_bytes)}"
        if self.rate:
            left = duration_text((self.total_bytes - self.num_bytes) / self.rate)
            text += f", {size_text(self.rate)}/s, {left} left"
        return text


Report = Callable[[Progress], None]


@dataclass
class DownloadMeter:
    """Counts the bytes of a download, measures the rate, and reports both."""

    model: str
    report: Report
    total_bytes: int = 0
    _num_bytes: int = 0
    _samples: deque[tuple[float, int]] = field(default_factory=deque)  # (time, bytes received)
    _received: int = 0  # bytes that came over the network

    def note(self, text: str) -> None:
        """Report something else than figures."""
        self.report(Progress(self.model, self._num_bytes, self.total_bytes, note=text))

    def add(self, count: int) -> None:
        """Count bytes that have been received, or, negative, that were discarded."""
        self._num_bytes += count
        self._received += count
        now_s = time.monotonic()
        if not self._samples or now_s - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now_s, self._received))
            while now_s - self._samples[0][0] > WINDOW_S:
                self._samples.popleft()
            self.show()

    def found(self, count: int) -> None:
        """Count bytes that an earlier attempt has downloaded."""
        self._num_bytes += count

    def show(self) -> None:
        """Report the progress."""
        self.report(Progress(self.model, self._num_bytes, self.total_bytes, self._rate()))

    def _rate(self) -> float:
        if not self._samples:
            return 0.0
        first_s, first = self._samples[0]
        last_s, last = self._samples[-1]
        if last_s - first_s < FIRST_RATE_S:
            return 0.0
        return max(0.0, (last - first) / (last_s - first_s))


class TerminalProgress:
    """Shows progress as a bar on a terminal, and otherwise as lines. Use it in a `with` statement.

    Args:
        show_line: Prints a line.
        as_bar: Whether there is a terminal. None: if standard error is one.
    """

    def __init__(
        self,
        show_line: Callable[[str], None] = log.info,
        *,
        as_bar: bool | None = None,
    ) -> None:
        if as_bar is None:
            with suppress(AttributeError, ValueError):  # closed
                as_bar = sys.stderr.isatty()
        self._as_bar = bool(as_bar)
        self._show_line = show_line
        self._bar: Any = None
        self._shown_at_s = -LINE_INTERVAL_S
        self._last: Progress | None = None  # that was not shown
        self._note = ""

    def __call__(self, progress: Progress) -> None:
        """Show a state: a new note at once, and other lines at intervals."""
        if self._as_bar and progress.total_bytes and not progress.note:
            self._draw(progress)
            return
        now_s = time.monotonic()
        self._last = progress
        has_new_note = progress.note not in ("", self._note)
        self._note = progress.note
        if has_new_note or (not progress.note and now_s - self._shown_at_s >= LINE_INTERVAL_S):
            self._shown_at_s = now_s
            self._show_last()

    def _show_last(self) -> None:
        if self._last is not None:
            self._show_line(str(self._last))
            self._last = None

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=progress.total_bytes,
                initial=progress.num_bytes,
                desc=progress.model,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                dynamic_ncols=True,
            )
        self._bar.total = progress.total_bytes
        self._bar.update(progress.num_bytes - self._bar.n)

    def __enter__(self) -> "TerminalProgress":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        else:
            self._show_last()
