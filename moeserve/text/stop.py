"""Stop strings, which end an answer, and bad words, which an answer must not contain."""

from collections.abc import Iterable, Sequence

from moeserve.errors import InvalidRequest
from moeserve.text.tokenizer import Tokenizer

MAX_WORD_TOKENS = 64
_BEFORE_WORDS = ("", " ", "\n")  # contexts of a word that may change its tokens


class StopMatcher:
    """Finds the first stop string in a stream of text.

    It holds back only text that could become a stop string, and the result does not depend on how
    the text is divided. The match that ends first wins; of several that end together, the one
    earlier in `stops`. A match must end in text that was pushed with active=True (after
    min_tokens).
    """

    __slots__ = ("_by_first", "_held", "_include", "_inert", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._by_first: dict[str, list[str]] = {}  # the stop strings by their first character
        for stop in self._stops:
            self._by_first.setdefault(stop[0], []).append(stop)
        self._include = include_stop
        self._held = ""  # held back: a possible beginning of a stop string
        self._inert = 0  # leading characters of `_held` in which no match may end

    def push(self, text: str, *, active: bool = True) -> tuple[str, str | None]:
        """Return the text to send, and the stop string that ended it, if any.

        Do not push more text after a match.
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
        """Return the text that is held back, at the end of an answer without a stop string."""
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
        """Return the start of the longest suffix of `buffer` that is a prefix of a stop string."""
        end = len(buffer)
        for start in range(max(end - self._longest + 1, 0), end):
            for stop in self._by_first.get(buffer[start], ()):
                if len(stop) > end - start and stop.startswith(buffer[start:]):
                    return start
        return end


def bad_sequences(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that must not be completed, so that no bad word occurs.

    They are those of each word at the start of a text, after a space, and after a newline, because
    these differ: byte-level BPE may have one token for " described" but two for "described", and
    SentencePiece marks the space before a word, also at the start of a text.
    """
    contexts = [(context, _ids(tokenizer, context)) for context in _BEFORE_WORDS]
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ") or word
        found = []
        for context, before in contexts:
            ids = _ids(tokenizer, context + bare)
            if before and ids[: len(before)] == before:
                ids = ids[len(before) :]  # remove the tokens of the context
            found.append(ids)
        if not found[0]:
            raise InvalidRequest(f"the bad word {word[:64]!r} has no tokens", param="bad_words")
        if (longest := max(map(len, found))) > MAX_WORD_TOKENS:
            raise InvalidRequest(
                f"the bad word {word[:64]!r} has {longest} tokens; at most {MAX_WORD_TOKENS} are "
                "allowed",
                param="bad_words",
            )
        # A sequence that ends with another one is never completed without it.
        for ids in sorted(filter(None, found), key=len):
            if not any(ids[-len(other) :] == other for other in sequences):
                sequences[ids] = None
    return tuple(sequences)


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, special=False)) if text else ()
