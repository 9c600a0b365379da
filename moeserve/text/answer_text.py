"""Streaming input for parsers of answers. Parsers are generators that yield when they need more.

The result of a parser depends on the whole text only, never on how it is divided into pieces.
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
MAX_HEADER = 512  # characters of the header of a call or parameter, which has its name


class Malformed(Exception):
    """The text is not in the format."""


class Unfinished(Malformed):
    """The text ends inside a call."""


class Stops:
    """Literals to search for. special: the names of control tokens, which are marked in answers."""

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
    """Return a text with control tokens as ordinary text."""
    return text.translate(_MARKS)


def without_controls(text: str, kept: Collection[str] = ()) -> str:
    """Return a text without control tokens. kept: names of tokens to keep as ordinary text."""
    if CONTROL_BEGIN in text or CONTROL_END in text:
        return plain(_CONTROL.sub(lambda found: found[0] if plain(found[0]) in kept else "", text))
    return text


class AnswerText:
    """The part of an answer that has arrived and is not consumed yet.

    Methods that are generators yield when they need more text. drops_begun: do not emit an
    incomplete stop at the end of the answer.
    """

    def __init__(self, *, drops_begun: bool = False) -> None:
        self._drops_begun = drops_begun
        self._text = ""
        self._at = 0
        # The arguments of an `until` that has emitted everything: the fast path of `feed`
        self._passing: tuple[Stops, Emit] | None = None
        self.ended = False
        # If a parser sets a list, consumed text is appended to it, in case it is malformed.
        self.taken: list[str] | None = None

    def feed(self, text: str, *, final: bool) -> bool:
        """Append text, and return whether the parser must run.

        It need not run if `until` would emit all of the text; then this emits it. final: it is the
        end of the answer.
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
        """Whether everything is consumed."""
        return self._at == len(self._text)

    def take(self, end: int) -> str:
        """Consume and return the text up to a position."""
        text = self._text[self._at : end]
        self._at = end
        if self.taken is not None:
            self.taken.append(text)
        return text

    def take_rest(self) -> None:
        """Consume everything."""
        self.take(len(self._text))

    def ends_within(self, stops: Stops) -> bool:
        """Return whether the answer has ended with an incomplete stop."""
        return self.ended and not self.is_empty and bool(stops.partial.match(self._text, self._at))

    def until(self, stops: Stops, emit: Emit) -> Wait[str]:
        """Emit the text before the first stop, and return the stop; "" at the end of the answer."""
        while True:
            end = len(self._text)
            # Most texts have no beginning of a stop.
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
        """Return a short text before one of the stops, which is not consumed.

        take: consume the text. Raise Malformed if it is longer than MAX_HEADER.
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
        """Return the stop that comes next, "" if there is other text. take: consume the stop."""
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
        """Consume and return white space."""
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
        """Consume and return the text that matches a run of characters.

        most: its maximum length, beyond which Malformed is raised; 0: match only available text.
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
        """Consume and return `count` characters. Raise Unfinished if the answer ends before."""
        while len(self._text) - self._at < count:
            yield from self._more()
        return self.take(self._at + count)

    def _more(self) -> Wait[None]:
        if self.ended:
            raise Unfinished
        yield
