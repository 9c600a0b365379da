"""Streaming input for parsers of answers. Parsers are generators that yield when they need more.

The result of a parser depends on the whole text only, never on how it is divided into pieces.
"""

import re
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import NamedTuple, TypeVar

from moeserve.text.tokenizer import CONTROL_BEGIN, CONTROL_END

_T = TypeVar("_T")
Wait = Generator[None, None, _T]
Emit = Callable[[str], object]

_MAX_CONTROL_LENGTH = 63  # characters of a control token
_CONTROL = re.compile(f"{CONTROL_BEGIN}[^{CONTROL_BEGIN}{CONTROL_END}]*{CONTROL_END}")
_MARKS = str.maketrans("", "", CONTROL_BEGIN + CONTROL_END)
_SPACE = re.compile(r"[ \t\r\n]*")
MAX_HEADER_LENGTH = 512  # of the header of a call or parameter, which has its name


class Malformed(Exception):
    """The text is not in the format."""


class Unfinished(Malformed):
    """The text ends inside a call."""


class Stops:
    """Literals to search for, such as the marks of a format.

    special: the names of control tokens. In answers, each is between CONTROL_BEGIN and CONTROL_END.
    """

    def __init__(self, literals: Iterable[str], special: Sequence[str] = ()) -> None:
        controls = re.compile(
            "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
        )
        # Literal as it occurs in answers, with marked control tokens -> literal
        self.literals = {
            controls.sub(lambda m: f"{CONTROL_BEGIN}{m[0]}{CONTROL_END}", text): text
            for text in literals
        }
        marked = sorted(self.literals, key=len, reverse=True)
        self.full_pattern = re.compile("|".join(map(re.escape, marked)) or "(?!)")
        beginnings = [
            *map(_prefix_pattern, marked),
            f"{CONTROL_BEGIN}[^{CONTROL_BEGIN}{CONTROL_END}]{{0,{_MAX_CONTROL_LENGTH}}}",
        ]
        # The beginning of a stop at the end of the text
        self.partial_pattern = re.compile(f"(?:{'|'.join(beginnings)})\\Z")
        first_chars = "".join({CONTROL_BEGIN, *(text[0] for text in marked)})
        self.first_char_pattern = re.compile(f"[{re.escape(first_chars)}]")
        self.max_length = max([_MAX_CONTROL_LENGTH + 2, *map(len, marked)])


def _prefix_pattern(text: str) -> str:
    """Return a regex that matches every beginning of a text."""
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
        return plain(_CONTROL.sub(lambda match: match[0] if plain(match[0]) in kept else "", text))
    return text


class _ReadUntil(NamedTuple):
    """The arguments of `AnswerText.read_until`."""

    stops: Stops
    emit: Emit


class AnswerText:
    """The part of an answer that has arrived and is not consumed yet.

    `peek` and the methods `read_...` are generators, which yield when they need more text.
    drops_partial_stop: do not emit an incomplete stop at the end of the answer.
    """

    def __init__(self, *, drops_partial_stop: bool = False) -> None:
        self._drops_partial_stop = drops_partial_stop
        self._text = ""
        self._position = 0  # in `_text`; everything before it is consumed
        # The fast path of `feed`: a `read_until` that has emitted everything
        self._suspended: _ReadUntil | None = None
        self.ended = False
        # If a parser sets a list, consumed text is appended to it, so that a malformed call can
        # become content.
        self.consumed: list[str] | None = None

    def feed(self, text: str, *, final: bool) -> bool:
        """Append text, and return whether the parser must run.

        If `read_until` would emit all of the text, this emits the text, and the parser need not
        run.

        final: the text is the end of the answer.
        """
        if self._suspended is not None and not final:
            stops, emit = self._suspended
            if not stops.first_char_pattern.search(text):
                emit(text)
                return False
        self._text = self._text[self._position :] + text
        self._position = 0
        self.ended = final
        self._suspended = None
        return True

    @property
    def is_empty(self) -> bool:
        """Whether everything is consumed."""
        return self._position == len(self._text)

    def _consume(self, end: int) -> str:
        """Consume and return the text up to a position."""
        text = self._text[self._position : end]
        self._position = end
        if self.consumed is not None:
            self.consumed.append(text)
        return text

    def consume_rest(self) -> None:
        """Consume everything."""
        self._consume(len(self._text))

    def ends_within(self, stops: Stops) -> bool:
        """Return whether the answer has ended with an incomplete stop."""
        return (
            self.ended
            and not self.is_empty
            and bool(stops.partial_pattern.match(self._text, self._position))
        )

    def read_until(self, stops: Stops, emit: Emit) -> Wait[str]:
        """Emit the text before the first stop, and return the stop; "" at the end of the answer."""
        while True:
            end = len(self._text)
            # Most texts have no beginning of a stop.
            first_char = stops.first_char_pattern.search(self._text, self._position)
            if first_char and (match := stops.full_pattern.search(self._text, first_char.start())):
                emit(self._consume(match.start()))
                self._consume(match.end())
                return stops.literals[match[0]]
            if self.ended and not self._drops_partial_stop:
                emit(self._consume(end))
                return ""
            partial = first_char and stops.partial_pattern.search(
                self._text, max(first_char.start(), end - stops.max_length)
            )
            if self.ended:
                emit(self._consume(partial.start() if partial else end))
                self._consume(end)
                return ""
            emit(self._consume(partial.start() if partial else end))
            if not partial and self.consumed is None:
                self._suspended = _ReadUntil(stops, emit)
            yield

    def read_header(self, stops: Stops, *, consume: bool = True) -> Wait[str]:
        """Return the text before the next stop. The stop is not consumed.

        consume: consume the text. Raise Malformed if the text is longer than MAX_HEADER_LENGTH.
        """
        while True:
            begin = self._position
            match = stops.full_pattern.search(self._text, begin, begin + MAX_HEADER_LENGTH)
            if match:
                end = match.start()
                return plain(self._consume(end) if consume else self._text[begin:end])
            if len(self._text) - begin >= MAX_HEADER_LENGTH:
                raise Malformed
            yield from self._wait()

    def read_stop(self, stops: Stops, *, consume: bool = True) -> Wait[str]:
        """Return the stop that comes next, "" if there is other text. consume: consume the stop."""
        while True:
            if match := stops.full_pattern.match(self._text, self._position):
                if consume:
                    self._consume(match.end())
                return stops.literals[match[0]]
            if self.ended or (
                self._position < len(self._text)
                and not stops.partial_pattern.match(self._text, self._position)
            ):
                return ""
            yield

    def read_space(self) -> Wait[str]:
        """Consume and return white space."""
        pieces = []
        while True:
            match = _SPACE.match(self._text, self._position)
            assert match is not None
            pieces.append(self._consume(match.end()))
            if self._position < len(self._text) or self.ended:
                return "".join(pieces)
            yield

    def peek(self) -> Wait[str]:
        """Return the next character, "" at the end."""
        while self._position == len(self._text) and not self.ended:
            yield
        return self._text[self._position : self._position + 1]

    def read_match(self, pattern: re.Pattern[str], max_length: int = 0) -> Wait[str]:
        """Consume and return the text that matches a run of characters.

        max_length: Raise Malformed if the text is longer. 0: do not wait for more text.
        """
        while True:
            match = pattern.match(self._text, self._position)
            end = match.end() if match else self._position
            if not max_length or end < len(self._text) or self.ended:
                return self._consume(end)
            if end - self._position > max_length:
                raise Malformed
            yield

    def read_exactly(self, count: int) -> Wait[str]:
        """Consume and return `count` characters. Raise Unfinished if the answer ends before."""
        while len(self._text) - self._position < count:
            yield from self._wait()
        return self._consume(self._position + count)

    def _wait(self) -> Wait[None]:
        """Wait for more text. Raise Unfinished at the end of the answer."""
        if self.ended:
            raise Unfinished
        yield
