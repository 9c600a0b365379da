"""Stop strings, which end a text before them, and bad words, which the engine must not complete."""

from collections.abc import Iterable, Sequence

from moeserve.errors import InvalidRequest
from moeserve.text.tokenizer import Tokenizer

MAX_WORD_TOKENS = 64


class StopMatcher:
    """Finds the first stop string in text that comes in pieces, and holds back only what could
    become one.

    The result does not depend on how the text was split. The match whose end comes first wins; of
    several that end together, the one earlier in `stops`. A match counts only if it ends in text
    that was pushed with active=True (min_tokens reached).
    """

    __slots__ = ("_by_first", "_held", "_include", "_inert", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._by_first: dict[str, list[str]] = {}  # the stop strings by their first character
        for stop in self._stops:
            self._by_first.setdefault(stop[0], []).append(stop)
        self._include = include_stop
        self._held = ""  # seen, not given back: a possible beginning of a stop string
        self._inert = 0  # characters of `_held` in which no match may end

    def push(self, text: str, *, active: bool = True) -> tuple[str, str | None]:
        """Returns the text to give out and the stop string that ended it, if any. Nothing may
        follow a match.
        """
        if not self._stops:
            return text, None
        buffer = self._held + text
        if not active:
            self._inert = len(buffer)
        elif (found := self._find(buffer)) is not None:
            end, stop = found
            self._held = ""
            return buffer[: end if self._include else end - len(stop)], stop
        keep = self._undecided(buffer)
        given = buffer[:keep]
        self._held = buffer[keep:]
        self._inert = max(self._inert - keep, 0)
        return given, None

    def flush(self) -> str:
        """Returns the text that was held back. Called when the text ends without a stop string."""
        held = self._held
        self._held = ""
        return held

    def _find(self, buffer: str) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(self._inert - len(stop) + 1, 0))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), stop)
        return best

    def _undecided(self, buffer: str) -> int:
        """Return the start of the longest ending of `buffer` that is the beginning of a stop
        string.
        """
        end = len(buffer)
        for start in range(max(end - self._longest + 1, 0), end):
            for stop in self._by_first.get(buffer[start], ()):
                if len(stop) > end - start and stop.startswith(buffer[start:]):
                    return start
        return end


def bad_sequences(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the token sequences of each word, at the start of a text and after a space, without
    duplicates.

    The form after a space counts only if it is another spelling of as many tokens with another
    beginning; otherwise the space stands for itself (`" " + word`), and banning the word's own
    tokens is enough.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(" ") or word, special=False))
        if not bare:
            raise InvalidRequest("a bad word has no tokens", param="bad_words")
        if len(bare) > MAX_WORD_TOKENS:
            raise InvalidRequest(
                f"a bad word has {len(bare)} tokens; at most {MAX_WORD_TOKENS} are allowed",
                param="bad_words",
            )
        spaced = tuple(tokenizer.encode(" " + word.lstrip(" "), special=False))
        sequences[bare] = None
        if spaced[0] != bare[0] and len(spaced) == len(bare):
            sequences[spaced] = None
    return tuple(sequences)
