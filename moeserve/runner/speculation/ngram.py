"""Draft by n-gram lookup: if a request's last tokens occurred before, draft what followed then.

As in vLLM's ngram proposer, after prompt lookup decoding
(github.com/apoorvumang/prompt-lookup-decoding), the match is the longest n-gram at the end of the
known tokens that occurred earlier, at its latest occurrence.

The value of a match depends on its length and on the text: two equal tokens mean little in prose
and much in code. So each request tracks, by the length of the match, how often the token after the
match was the next token. It does so for every token, even if there were no drafts ("shadow"
acceptance).

Each accepted draft makes the match longer by one. So draft j after a match of length m is accepted
with probability p[m] p[m+1] .. p[m+j], and tokens are drafted as long as that is at least one half.
In text that does not repeat, the acceptance of short matches soon becomes low and long matches do
not occur, so there are no drafts and nothing is lost.

The drafts are a function of the request's tokens, however these are divided into steps.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.plan import I32, NewRequest
from moeserve.runner.speculation.base import LookupProposer, ProposerFacts
from moeserve.runner.tables import Upload

# Lengths of n-grams: vLLM's prompt_lookup_min and prompt_lookup_max.
MIN_NGRAM = 2
MAX_NGRAM = 4
MAX_MATCH = 8  # tokens; longer matches count as matches of this length
MIN_PROBABILITY = 0.5  # least probability that all drafts are accepted
# Initial acceptance by length of the match (0 to 8), measured on prose and code.
_INITIAL_ACCEPTANCE = (0.0, 0.1, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.8)
_AVERAGE_RATE = 0.1  # rate of the exponential average
_HASH_FACTOR = 0x9E3779B97F
_HASH_BITS = 40
_POSITION_BITS = 24
_HASH_MASK = (1 << _HASH_BITS) - 1
_POSITION_MASK = (1 << _POSITION_BITS) - 1
# The most n-grams in the dictionary before they are merged into the sorted array, which takes a
# tenth of the memory.
_MAX_RECENT = 1 << 14


class Acceptance:
    """How often the token after a match was the next token of a request, by the length of the
    match, as an exponential average.
    """

    def __init__(self) -> None:
        self._acceptance = list(_INITIAL_ACCEPTANCE)

    def update(self, length: int, is_right: bool) -> None:
        """Count whether the token after a match of this length was right."""
        length = min(length, MAX_MATCH)
        self._acceptance[length] += _AVERAGE_RATE * (is_right - self._acceptance[length])

    def rate(self, length: int) -> float:
        """Return the probability that the token after a match of this length is right."""
        return self._acceptance[min(length, MAX_MATCH)]

    def num_drafts(self, length: int, max_drafts: int) -> int:
        """Return how many tokens after a match to draft."""
        count = 0
        probability = 1.0
        while count < max_drafts and length:
            probability *= self.rate(length + count)
            if probability < MIN_PROBABILITY:
                break
            count += 1
        return count


class RequestIndex:
    """The tokens of one request, and an index of the last occurrence of each n-gram.

    The n-grams of the initial tokens are in an array sorted by hash (24 bytes per token). Those of
    later tokens are in a dictionary.
    """

    def __init__(self, tokens: I32) -> None:
        self.tokens = array("i", tokens[:-1].astype(np.int32).tobytes())
        # The match of the last tokens: position after it, length up to MAX_MATCH. Length 0: none.
        self.match = (0, 0)
        self._num_sorted = 0  # tokens whose n-grams are in the array
        # hash << 24 | position after the n-gram
        self._sorted: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._recent: dict[int, int] = {}  # position after the n-gram, by hash
        self._sort()
        for token in tokens[-1:].tolist():
            self.append(token)

    def append(self, token: int) -> None:
        """Append a token and find the new match. Takes constant time, except for a sort every few
        thousand tokens.
        """
        tokens = self.tokens
        tokens.append(token)
        end = len(tokens)
        code = token + 1
        position = 0
        length = MIN_NGRAM - 1
        for n in range(MIN_NGRAM, min(MAX_NGRAM, end) + 1):
            code = (code * _HASH_FACTOR + tokens[-n] + 1) & _HASH_MASK
            if length == n - 1:  # an n-gram can only match if the shorter one did
                candidate = self._recent.get(code) or self._find(code)
                # Compare the tokens, too, because different n-grams may have the same hash.
                if candidate and tokens[candidate - n : candidate] == tokens[-n:]:
                    position = candidate
                    length = n
            self._recent[code] = end
        if length == MAX_NGRAM:
            while (
                length < min(MAX_MATCH, position)
                and tokens[position - length - 1] == tokens[-length - 1]
            ):
                length += 1
        self.match = (position, length) if position else (0, 0)
        if len(self._recent) > _MAX_RECENT:
            self._sort()

    def follow(self, position: int, count: int) -> Sequence[int]:
        """Return `count` tokens from a position on.

        After the last known token, the tokens repeat, as they would if all of them were right.
        """
        tokens = self.tokens[position : position + count]
        while len(tokens) < count:
            tokens.extend(tokens[: count - len(tokens)])
        return tokens

    def _find(self, code: int) -> int:
        """Return the position after the last n-gram with this hash in the array; 0: none."""
        i = bisect_right(self._view, code << _POSITION_BITS | _POSITION_MASK) - 1
        return (
            self._view[i] & _POSITION_MASK
            if i >= 0 and self._view[i] >> _POSITION_BITS == code
            else 0
        )

    def _sort(self) -> None:
        """Move the n-grams in the dictionary to the sorted array."""
        first = max(self._num_sorted - MAX_NGRAM + 1, 0)  # the first token that hashes need
        tokens = np.frombuffer(self.tokens, np.int32)[first:].astype(np.uint64) + np.uint64(1)
        codes = tokens  # hashes of all n-grams, at first with n = 1
        entries = [self._sorted]
        for n in range(MIN_NGRAM, MAX_NGRAM + 1):
            codes = codes[1:] * np.uint64(_HASH_FACTOR) + tokens[
                : max(len(tokens) - n + 1, 0)
            ] & np.uint64(_HASH_MASK)
            ends = np.arange(first + n, first + n + len(codes), dtype=np.uint64)
            entries.append((codes << np.uint64(_POSITION_BITS) | ends)[ends > self._num_sorted])
        self._sorted = np.sort(np.concatenate(entries))
        self._view = self._sorted.data
        self._num_sorted = len(self.tokens)
        self._recent = {}


def make(facts: ProposerFacts) -> "NgramProposer":
    """Return the proposer."""
    return NgramProposer(facts.slots, facts.spec.num_drafts, facts.upload)


class NgramProposer(LookupProposer):
    """Drafts the tokens after the latest occurrence of the longest n-gram at the end."""

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
