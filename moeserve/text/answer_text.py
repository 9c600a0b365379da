"""The text of an answer while it comes. Parsers are generators that yield where they need more.

Whatever a parser does depends on the text and on its end alone, never on the pieces in which the
text came.
"""

import re
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import TypeVar

from moeserve.text.tokenizer import CONTROL_BEGIN, CONTROL_END

_T = TypeVar("_T")
Wait = Generator[None, None, _T]
Emit = Callable[[str], object]

_MAX_NAME = 63  # characters of a control token
_CONTROL = re.compile(f"{CONTROL_BEGIN}[^{CONTROL_BEGIN}{CONTROL_END}]*{CONTROL_END}")
_MARKS = str.maketrans("", "", CONTROL_BEGIN + CONTROL_END)
_SPACE = re.compile(r"[ \t\r\n]*")
MAX_HEADER = 512  # characters of a name with what is around it


class Malformed(Exception):
    """The text is not in the format."""


class Unfinished(Malformed):
    """The text ends inside a call."""


class Stops:
    """Literals to look for. special: the names of control tokens, which are marked in answers."""

    def __init__(self, literals: Iterable[str], special: Sequence[str] = ()) -> None:
        controls = re.compile(
            "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
        )
        self.named = {
            controls.sub(lambda m: f"{CONTROL_BEGIN}{m[0]}{CONTROL_END}", text): text
            for text in literals
        }
        marked = sorted(self.named, key=len, reverse=True)
        self.full = re.compile("|".join(map(re.escape, marked)) or "(?!)")
        begun = [
            *map(_prefixes, marked),
            f"{CONTROL_BEGIN}[^{CONTROL_BEGIN}{CONTROL_END}]{{0,{_MAX_NAME}}}",
        ]
        self.partial = re.compile(f"(?:{'|'.join(begun)})\\Z")
        self.first = re.compile(
            f"[{re.escape(''.join({CONTROL_BEGIN, *(text[0] for text in marked)}))}]"
        )  # of any of them
        self.longest = max([_MAX_NAME + 2, *map(len, marked)])


def _prefixes(text: str) -> str:
    """Return a regex of the beginnings of a text."""
    pattern = re.escape(text[-1])
    for char in reversed(text[:-1]):
        pattern = f"{re.escape(char)}(?:{pattern})?"
    return pattern


def plain(text: str) -> str:
    """Return a text with its control tokens as text."""
    return text.translate(_MARKS)


def without_controls(text: str, kept: Collection[str] = ()) -> str:
    """Return a text without its control tokens. kept: names of tokens that stay, as text."""
    if CONTROL_BEGIN in text or CONTROL_END in text:
        return plain(_CONTROL.sub(lambda found: found[0] if plain(found[0]) in kept else "", text))
    return text


class AnswerText:
    """The part of an answer that came and is not taken yet. Methods that are generators yield where
    they need more.

    drops_begun: the beginning of a stop at the end of the text is not emitted.
    """

    def __init__(self, *, drops_begun: bool = False) -> None:
        self._drops_begun = drops_begun
        self._text = ""
        self._at = 0
        # The arguments of an `until` that has emitted everything.
        self._passing: tuple[Stops, Emit] | None = None
        self.ended = False
        # Gets what is taken, if a parser puts a list here for text that may turn out malformed.
        self.taken: list[str] | None = None

    def feed(self, text: str, *, final: bool) -> bool:
        """Append to the text. Return whether its reader has to look at it: not if `until` would
        emit it all. final: nothing follows.
        """
        if self._passing is not None and not final:
            stops, emit = self._passing
            if not stops.first.search(text):
                emit(text)
                return False
        self._text = self._text[self._at :] + text
        self._at = 0
        self.ended = final
        self._passing = None
        return True

    @property
    def is_empty(self) -> bool:
        """Whether everything was taken."""
        return self._at == len(self._text)

    def take(self, end: int) -> str:
        """Take the text up to a position."""
        text = self._text[self._at : end]
        self._at = end
        if self.taken is not None:
            self.taken.append(text)
        return text

    def take_rest(self) -> None:
        """Take all there is."""
        self.take(len(self._text))

    def ends_within(self, stops: Stops) -> bool:
        """Whether the text has ended, and its rest is the beginning of a stop."""
        return self.ended and not self.is_empty and bool(stops.partial.match(self._text, self._at))

    def until(self, stops: Stops, emit: Emit) -> Wait[str]:
        """Take and emit the text before the first of the stops. Take and return that stop; return
        "" at the end of the text.
        """
        while True:
            end = len(self._text)
            # Most texts have nothing to look at any closer.
            begun = stops.first.search(self._text, self._at)
            if begun and (found := stops.full.search(self._text, begun.start())):
                emit(self.take(found.start()))
                self.take(found.end())
                return stops.named[found[0]]
            if self.ended and not self._drops_begun:
                emit(self.take(end))
                return ""
            held = begun and stops.partial.search(
                self._text, max(begun.start(), end - stops.longest)
            )
            if self.ended:
                emit(self.take(held.start() if held else end))
                self.take(end)
                return ""
            emit(self.take(held.start() if held else end))
            if not held and self.taken is None:
                self._passing = stops, emit
            yield

    def header(self, stops: Stops, *, take: bool = True) -> Wait[str]:
        """Return a short text before one of the stops. take: take the text, not the stop. Raise
        Malformed.
        """
        while True:
            found = stops.full.search(self._text, self._at, self._at + MAX_HEADER)
            if found:
                return plain(
                    self.take(found.start()) if take else self._text[self._at : found.start()]
                )
            if len(self._text) - self._at >= MAX_HEADER:
                raise Malformed
            yield from self._more()

    def next_of(self, stops: Stops, *, take: bool = True) -> Wait[str]:
        """Return the stop that comes next, "" if something else does. take: take it."""
        while True:
            if found := stops.full.match(self._text, self._at):
                if take:
                    self.take(found.end())
                return stops.named[found[0]]
            if self.ended or (
                self._at < len(self._text) and not stops.partial.match(self._text, self._at)
            ):
                return ""
            yield

    def space(self) -> Wait[str]:
        """Take and return white space."""
        pieces = []
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            pieces.append(self.take(found.end()))
            if self._at < len(self._text) or self.ended:
                return "".join(pieces)
            yield

    def peek(self) -> Wait[str]:
        """Return the next character, "" at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def match(self, pattern: re.Pattern[str], most: int = 0) -> Wait[str]:
        """Take and return the text that matches a run of characters. most: its greatest length, 0
        for the text that is there now.
        """
        while True:
            found = pattern.match(self._text, self._at)
            end = found.end() if found else self._at
            if not most or end < len(self._text) or self.ended:
                return self.take(end)
            if end - self._at > most:
                raise Malformed
            yield

    def exactly(self, count: int) -> Wait[str]:
        """Take and return so many characters. Raise Unfinished."""
        while len(self._text) - self._at < count:
            yield from self._more()
        return self.take(self._at + count)

    def _more(self) -> Wait[None]:
        if self.ended:
            raise Unfinished
        yield
