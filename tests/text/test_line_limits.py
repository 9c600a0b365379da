"""Limits at which an answer ends at a line, whatever the pieces are in which its text comes."""

from __future__ import annotations

import pytest

from moeserve.text import line_limits
from moeserve.text.line_limits import AT_LINE_LIMIT, LineLimiter, LineLimits
from moeserve.text.stop import StopMatcher

INDENTED = "x\n    y\n\n    z"


def run(text: str, limits: LineLimits, size: int, stops: tuple[str, ...] = ()) -> tuple[str, str]:
    """Push a text in pieces of `size`. Return what was sent, and the reason of the end."""
    limiter = LineLimiter(StopMatcher(stops), limits)
    sent = ""
    for start in range(0, len(text), size):
        piece, stop = limiter.push(text[start : start + size])
        sent += piece
        if stop is not None:
            return sent, "limit" if stop == AT_LINE_LIMIT else stop
    return sent + limiter.flush(), "end"


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "indent", "sent", "why"),
    [
        ("x\n    y\n  z\n", 4, "x\n    y\n", "limit"),
        ("x\n\ty\n", 2, "x\n", "limit"),  # a tab is one character
        ("x\n\t\ty\n  z", 2, "x\n\t\ty\n  z", "end"),
        (INDENTED, 4, "x\n    y\n", "limit"),  # an empty line has no indentation
        (INDENTED, 0, INDENTED, "end"),
        ("no indentation", 8, "no indentation", "end"),  # the first line
        ("\nx", 1, "\n", "limit"),
        ("x\n  ", 4, "x\n  ", "end"),  # the line is not complete
        ("x\n    a STOP b", 4, "x\n    a ", "STOP"),
        ("x\n  STOP", 2, "x\n  ", "STOP"),
        ("x\n  y STOP", 4, "x\n", "limit"),
        ("", 4, "", "end"),
    ],
)
def test_indentation(text, indent, sent, why, size):
    assert run(text, LineLimits(min_indent=indent), size, ("STOP",)) == (sent, why)


@pytest.mark.parametrize("size", [1, 100])
def test_time_ends_an_answer_after_a_line(monkeypatch, size):
    now = iter(range(100))
    monkeypatch.setattr(line_limits.time, "monotonic", lambda: next(now))
    # The clock is read at the start and at each line break.
    text = "a\nb\nc\nd\ne"
    assert run(text, LineLimits(max_s=2.5), size) == ("a\nb\nc\n", "limit")


def test_time_alone_holds_nothing_back():
    limiter = LineLimiter(StopMatcher(()), LineLimits(max_s=1000.0))
    assert limiter.push("a\n  ") == ("a\n  ", None)
