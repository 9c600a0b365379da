"""Limits at which an answer ends at a line: llama.cpp's `n_indent` and `t_max_predict_ms`."""

import time
from dataclasses import dataclass

from moeserve.text.stop import StopMatcher

AT_LINE_LIMIT = ""  # the stop reason of an answer that a limit ended; no stop string is empty


@dataclass(frozen=True, slots=True)
class LineLimits:
    """When an answer ends. The zeros: never."""

    # The first line of the answer may have any indentation. The answer ends before another line
    # with fewer spaces and tabs; an empty line has none.
    min_indent: int = 0
    max_s: float = 0.0  # the answer ends after the first line break later than this


class LineLimiter:
    """Applies limits to the text that a `StopMatcher` lets through, and has its interface.

    With `min_indent`, the spaces at the start of a line are held back until its first other
    character.
    """

    __slots__ = ("_began_at_s", "_held", "_in_indent", "_limits", "_stops")

    def __init__(self, stops: StopMatcher, limits: LineLimits) -> None:
        self._stops = stops
        self._limits = limits
        self._began_at_s: float | None = None  # when the first text came
        self._in_indent = False
        self._held = ""  # the indentation of a line that has no other characters yet

    def push(self, text: str, *, active: bool = True) -> tuple[str, str | None]:
        """Return the text to send, and the stop string or AT_LINE_LIMIT that ended it, if any."""
        if self._began_at_s is None:
            self._began_at_s = time.monotonic()
        text, stop = self._stops.push(text, active=active)
        sent, ended = self._limited(text)
        if ended:
            return sent, AT_LINE_LIMIT
        if stop is not None:
            sent += self._held
        return sent, stop

    def flush(self) -> str:
        """Return the text that is held back, at the end of the answer."""
        sent, ended = self._limited(self._stops.flush())
        return sent if ended else sent + self._held

    def _limited(self, text: str) -> tuple[str, bool]:
        """Return the text up to the end of the answer, and whether a limit ended it."""
        sent: list[str] = []
        for char in text:
            if self._in_indent and char in " \t":
                self._held += char
                continue
            if self._in_indent:
                if len(self._held) < self._limits.min_indent:
                    return "".join(sent), True
                sent.append(self._held)
                self._held = ""
            sent.append(char)
            if char == "\n" and self._is_late():
                return "".join(sent), True
            self._in_indent = char == "\n" and self._limits.min_indent > 0
        return "".join(sent), False

    def _is_late(self) -> bool:
        assert self._began_at_s is not None
        passed_s = time.monotonic() - self._began_at_s
        return 0 < self._limits.max_s < passed_s
