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

    __slots__ = (
        "_by_first_char",
        "_held",
        "_includes_stop",
        "_max_length",
        "_num_inactive",
        "_stops",
    )

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._max_length = max(map(len, self._stops), default=0)
        self._by_first_char: dict[str, list[str]] = {}
        for stop in self._stops:
            self._by_first_char.setdefault(stop[0], []).append(stop)
        self._includes_stop = include_stop
        self._held = ""  # held back: a possible beginning of a stop string
        self._num_inactive = 0  # leading characters of `_held` in which no match may end

    def push(self, text: str, *, active: bool = True) -> tuple[str, str | None]:
        """Return the text to send, and the stop string that ended it, if any.

        Do not push more text after a match.
        """
        if not self._stops:
            return text, None
        buffer = self._held + text
        if not active:
            self._num_inactive = len(buffer)
        elif (found := self._find_first(buffer)) is not None:
            end, stop = found
            self._held = ""
            return buffer[: end if self._includes_stop else end - len(stop)], stop
        num_decided = self._undecided_from(buffer)
        decided = buffer[:num_decided]
        self._held = buffer[num_decided:]
        self._num_inactive = max(self._num_inactive - num_decided, 0)
        return decided, None

    def flush(self) -> str:
        """Return the text that is held back, at the end of an answer without a stop string."""
        held = self._held
        self._held = ""
        return held

    def _find_first(self, buffer: str) -> tuple[int, str] | None:
        first: tuple[int, str] | None = None  # end of the match, stop string
        for stop in self._stops:
            start = buffer.find(stop, max(self._num_inactive - len(stop) + 1, 0))
            if start >= 0 and (first is None or start + len(stop) < first[0]):
                first = (start + len(stop), stop)
        return first

    def _undecided_from(self, buffer: str) -> int:
        """Return the start of the longest suffix of `buffer` that is a prefix of a stop string."""
        end = len(buffer)
        for start in range(max(end - self._max_length + 1, 0), end):
            for stop in self._by_first_char.get(buffer[start], ()):
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
        variants = []
        for context, before in contexts:
            ids = _ids(tokenizer, context + bare)
            if before and ids[: len(before)] == before:
                ids = ids[len(before) :]  # remove the tokens of the context
            variants.append(ids)
        if not variants[0]:
            raise InvalidRequest(f"the bad word {word[:64]!r} has no tokens", param="bad_words")
        if (longest := max(map(len, variants))) > MAX_WORD_TOKENS:
            raise InvalidRequest(
                f"the bad word {word[:64]!r} has {longest} tokens; at most {MAX_WORD_TOKENS} are "
                "allowed",
                param="bad_words",
            )
        # A sequence that ends with another one is never completed without it.
        for ids in sorted(filter(None, variants), key=len):
            if not any(ids[-len(other) :] == other for other in sequences):
                sequences[ids] = None
    return tuple(sequences)


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, special=False)) if text else ()
