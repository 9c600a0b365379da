"""The text of an answer while it comes: parsers are generators that yield where they need more of
it.

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
    """Literals to look for. special: names of control tokens, which are marked in the text of
    answers.
    """

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
    """Returns a regex of the beginnings of a text."""
    pattern = re.escape(text[-1])
    for char in reversed(text[:-1]):
        pattern = f"{re.escape(char)}(?:{pattern})?"
    return pattern


def plain(text: str) -> str:
    """Returns a text with its control tokens as text."""
    return text.translate(_MARKS)


def without_controls(text: str, kept: Collection[str] = ()) -> str:
    """Returns a text without its control tokens. kept: names of those that stay, as text."""
    if CONTROL_BEGIN in text or CONTROL_END in text:
        return plain(_CONTROL.sub(lambda found: found[0] if plain(found[0]) in kept else "", text))
    return text


class AnswerText:
    """What came of an answer and is not taken yet. Methods that are generators yield where they
    need more.

    taken: what was taken since somebody put a list there, for text that turns out to be malformed.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._passing: tuple[Stops, Emit] | None = None  # of an `until` that has emitted everything
        self.ended = False
        self.taken: list[str] | None = None

    def feed(self, text: str, *, final: bool) -> bool:
        """Appends to the text, and returns whether its reader has to look at it: not where `until`
        would emit it all.

        final: nothing follows.
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
        """Takes the text up to a position."""
        text = self._text[self._at : end]
        self._at = end
        if self.taken is not None:
            self.taken.append(text)
        return text

    def take_rest(self) -> None:
        """Takes all there is."""
        self.take(len(self._text))

    def until(self, stops: Stops, emit: Emit) -> Wait[str]:
        """Takes and emits the text before the first of the stops, takes that and returns it, "" at
        the end.
        """
        while True:
            end = len(self._text)
            begun = stops.first.search(
                self._text, self._at
            )  # most texts have nothing to look at any closer
            if begun and (found := stops.full.search(self._text, begun.start())):
                emit(self.take(found.start()))
                self.take(found.end())
                return stops.named[found[0]]
            if self.ended:
                emit(self.take(end))
                return ""
            held = begun and stops.partial.search(
                self._text, max(begun.start(), end - stops.longest)
            )
            emit(self.take(held.start() if held else end))
            if not held and self.taken is None:
                self._passing = stops, emit
            yield

    def header(self, stops: Stops, *, take: bool = True) -> Wait[str]:
        """Returns a short text before one of the stops, which it leaves. take: and takes it. Raises
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
        """Returns the stop that comes next, "" if something else does. take: and takes it."""
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
        """Takes and returns white space."""
        pieces = []
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            pieces.append(self.take(found.end()))
            if self._at < len(self._text) or self.ended:
                return "".join(pieces)
            yield

    def peek(self) -> Wait[str]:
        """Returns the next character, "" at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def match(self, pattern: re.Pattern[str], most: int = 0) -> Wait[str]:
        """Takes and returns what matches a run of characters. most: its longest length, 0 for what
        is there now.
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
        """Takes and returns so many characters. Raises Unfinished."""
        while len(self._text) - self._at < count:
            yield from self._more()
        return self.take(self._at + count)

    def _more(self) -> Wait[None]:
        if self.ended:
            raise Unfinished
        yield
