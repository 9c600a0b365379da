"""Prompt lookup: a request's last tokens occurred in it before, so what followed then may follow
again.

As in vLLM's ngram proposer, after prompt lookup decoding
(github.com/apoorvumang/prompt-lookup-decoding): of the n-grams at the end of the known tokens, the
longest that occurred earlier counts, and its latest occurrence.

What a match is worth depends on its length, and on the text: two equal tokens mean nothing in prose
and much in code. So each request keeps, by the length of the match, how often the token that it
pointed to was the next one, and it counts every token, whether or not there were drafts ("shadow"
acceptance). A draft that comes true makes the match one longer, thus draft j of a match of length m
is right with probability p[m] p[m+1] .. p[m+j], and drafts are made while that is more likely than
not. In text that does not repeat, short matches soon count as worthless and long ones do not occur,
so its rows have no drafts and lose nothing. Everything is a function of the request's tokens, in
whatever portions they come.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.plan import I32, NewRequest
from moeserve.runner.speculation.base import LookupProposer, ProposerFacts
from moeserve.runner.tables import Upload

# of an n-gram: vLLM's prompt_lookup_min and prompt_lookup_max
MIN_TOKENS = 2
MAX_TOKENS = 4
MAX_LENGTH = 8  # longer matches are worth the same
LIKELY = 0.5  # drafts are made as long as all of them are right with this probability
_PRIOR = (
    0.0,
    0.1,
    0.3,
    0.4,
    0.5,
    0.6,
    0.65,
    0.7,
    0.8,
)  # by length of the match: measured on prose and code
_RATE = 0.1
_FACTOR = 0x9E3779B97F
_HASH_BITS = 40
_POSITION_BITS = 24
_HASH_MASK = (1 << _HASH_BITS) - 1
_POSITION_MASK = (1 << _POSITION_BITS) - 1
_MOST_RECENT = (
    1 << 14
)  # n-grams kept in a dictionary before they are sorted in: it takes ten times the memory


class Acceptance:
    """How often a match of each length pointed to the next token of one request: an exponential
    average.
    """

    def __init__(self) -> None:
        self._right = list(_PRIOR)

    def update(self, length: int, right: bool) -> None:
        """Count what a match of this length pointed to."""
        length = min(length, MAX_LENGTH)
        self._right[length] += _RATE * (right - self._right[length])

    def rate(self, length: int) -> float:
        """Return the probability that a match of this length points to the next token."""
        return self._right[min(length, MAX_LENGTH)]

    def num_drafts(self, length: int, most: int) -> int:
        """Return how many tokens behind a match are likely all right."""
        count = 0
        likely = 1.0
        while count < most and length:
            likely *= self.rate(length + count)
            if likely < LIKELY:
                break
            count += 1
        return count


class RequestIndex:
    """The tokens of one request, and where each of its n-grams occurred last.

    tokens: array of int. match: where the longest n-gram at the end went on when it occurred
    before, and its length, at most MAX_LENGTH; length 0: it did not. The tokens given at once are
    sorted by hash (24 bytes a token); those behind them are in a dictionary.
    """

    def __init__(self, tokens: I32) -> None:
        self.tokens = array("i", tokens[:-1].astype(np.int32).tobytes())
        self.match = (0, 0)
        self._num_sorted = 0
        self._sorted: NDArray[np.uint64] = np.empty(
            0, np.uint64
        )  # hash << 24 | position behind the n-gram
        self._recent: dict[int, int] = {}
        self._sort()
        for token in tokens[-1:].tolist():
            self.append(token)

    def append(self, token: int) -> None:
        """Append a token and finds the match behind it. Constant time but for one sort in
        thousands of tokens.
        """
        tokens = self.tokens
        tokens.append(token)
        end = len(tokens)
        code = token + 1
        position = 0
        length = MIN_TOKENS - 1
        for n in range(MIN_TOKENS, min(MAX_TOKENS, end) + 1):
            code = (code * _FACTOR + tokens[-n] + 1) & _HASH_MASK
            if length == n - 1:  # what occurred did so without its first token
                found = self._recent.get(code) or self._find(code)
                if found and tokens[found - n : found] == tokens[-n:]:
                    position = found
                    length = n
            self._recent[code] = end
        if length == MAX_TOKENS:
            while (
                length < min(MAX_LENGTH, position)
                and tokens[position - length - 1] == tokens[-length - 1]
            ):
                length += 1
        self.match = (position, length) if position else (0, 0)
        if len(self._recent) > _MOST_RECENT:
            self._sort()

    def follow(self, position: int, count: int) -> Sequence[int]:
        """Return the `count` tokens from a position on. Behind the last known one they repeat, as
        if right so far.
        """
        tokens = self.tokens[position : position + count]
        while len(tokens) < count:
            tokens.extend(tokens[: count - len(tokens)])
        return tokens

    def _find(self, code: int) -> int:
        i = bisect_right(self._view, code << _POSITION_BITS | _POSITION_MASK) - 1
        return (
            self._view[i] & _POSITION_MASK
            if i >= 0 and self._view[i] >> _POSITION_BITS == code
            else 0
        )

    def _sort(self) -> None:
        """Move the n-grams behind the sorted ones there."""
        first = max(self._num_sorted - MAX_TOKENS + 1, 0)  # of the tokens that the hashes need
        tokens = np.frombuffer(self.tokens, np.int32)[first:].astype(np.uint64) + np.uint64(1)
        codes = tokens
        parts = [self._sorted]
        for n in range(MIN_TOKENS, MAX_TOKENS + 1):
            codes = codes[1:] * np.uint64(_FACTOR) + tokens[
                : max(len(tokens) - n + 1, 0)
            ] & np.uint64(_HASH_MASK)
            ends = np.arange(first + n, first + n + len(codes), dtype=np.uint64)
            parts.append((codes << np.uint64(_POSITION_BITS) | ends)[ends > self._num_sorted])
        self._sorted = np.sort(np.concatenate(parts))
        self._view = self._sorted.data
        self._num_sorted = len(self.tokens)
        self._recent = {}


def make(facts: ProposerFacts) -> "NgramProposer":
    """Return the proposer."""
    return NgramProposer(facts.slots, facts.spec.num_drafts, facts.upload)


class NgramProposer(LookupProposer):
    """Guesses what followed the latest occurrence of the longest n-gram at the end of the request's
    tokens.
    """

    def __init__(self, slots: int, num_drafts: int, upload: Upload) -> None:
        super().__init__(slots, num_drafts, upload)
        self._requests: dict[int, tuple[RequestIndex, Acceptance]] = {}

    def add(self, request: NewRequest) -> None:
        self._requests[request.slot] = (RequestIndex(request.tokens), Acceptance())

    def guess(self, slot: int, tokens: I32) -> Sequence[int]:
        index, acceptance = self._requests[slot]
        for token in tokens.tolist():
            position, length = index.match
            if length:
                acceptance.update(length, index.tokens[position] == token)
            index.append(token)
        position, length = index.match
        count = acceptance.num_drafts(length, self.num_drafts)
        return index.follow(position, count) if count else ()
