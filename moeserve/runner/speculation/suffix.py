"""Suffix lookup: what followed a request's last tokens in recent answers of all requests, and in
the request itself.

After SuffixDecoding (arXiv 2411.04975; Arctic Inference): suffixes of the known tokens that
occurred before vote for what comes next, longer ones with more weight, and as many tokens are
drafted as the votes and the past make likely. Instead of suffix trees, recent answers lie in one
ring of tokens, and all places with equal last tokens are linked, latest first, as LZ77 coders find
matches: memory is bounded, and the oldest answers are simply overwritten.
"""

from array import array
from collections.abc import Sequence

from moeserve.engine.plan import I32, NewRequest
from moeserve.runner.speculation.base import LookupProposer, ProposerFacts
from moeserve.runner.speculation.ngram import LIKELY, MAX_LENGTH, Acceptance, RequestIndex
from moeserve.runner.tables import Upload

MIN_LENGTH = 3  # of a match in other answers
MAX_PLACES = 16  # looked at per guess, the latest first
_PORTION = 64  # tokens of an answer that join the ring at a time
_END = -1  # behind each portion: no token
_FACTOR = 0x9E3779B1


class AnswerRing:
    """The last `size` tokens of all answers (a power of two), 20 bytes a token.

    A position counts all tokens ever added. Places whose last MIN_LENGTH tokens have the same hash
    form a chain.
    """

    def __init__(self, size: int) -> None:
        assert size & (size - 1) == 0, size
        self._mask = size - 1
        self._tokens = array("i", [_END]) * size
        self._previous = (
            array("q", [-1]) * size
        )  # the place before this one in its chain; both are behind their tokens
        self._latest = array("q", [-1]) * size  # by hash
        self._end = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Add a run of an answer's tokens; the oldest tokens go."""
        ring = self._tokens
        mask = self._mask
        for i, token in enumerate(tokens):
            ring[self._end & mask] = token
            self._end += 1
            if i >= MIN_LENGTH - 1:
                bucket = self._bucket(tokens[i - MIN_LENGTH + 1 : i + 1])
                self._previous[self._end & mask], self._latest[bucket] = (
                    self._latest[bucket],
                    self._end,
                )
        ring[self._end & mask] = _END
        self._end += 1

    def matches(self, tokens: Sequence[int], count: int) -> list[tuple[int, Sequence[int]]]:
        """Return (length of the match, up to `count` tokens behind it) of places where the last
        tokens occurred.
        """
        ring = self._tokens
        mask = self._mask
        found: list[tuple[int, Sequence[int]]] = []
        place = (
            self._latest[self._bucket(tokens[-MIN_LENGTH:])] if len(tokens) >= MIN_LENGTH else -1
        )
        for _ in range(MAX_PLACES):
            if place < MIN_LENGTH or place + mask - MAX_LENGTH <= self._end:  # overwritten
                break
            length = 0
            most = min(MAX_LENGTH, len(tokens), place)
            while length < most and ring[place - length - 1 & mask] == tokens[-length - 1]:
                length += 1
            if length >= MIN_LENGTH:
                first = place & mask
                follow = ring[first : first + count]
                found.append((length, follow[: follow.index(_END)] if _END in follow else follow))
            place = self._previous[place & mask]
        return found

    def _bucket(self, tokens: Sequence[int]) -> int:
        code = 0
        for token in tokens:
            code = (code + token + 1) * _FACTOR & 0xFFFFFFFFFFFF
        return code >> 20 & self._mask


def make(facts: ProposerFacts) -> "SuffixProposer":
    """Return the proposer."""
    return SuffixProposer(facts.slots, facts.spec.num_drafts, facts.upload)


class SuffixProposer(LookupProposer):
    """Guesses what most often followed the same tokens in recent answers and in the request.

    An answer is found by others in portions of 64 tokens; its last ones when a new request takes
    its slot. All ranks guess the same if they get the same calls of `add` and `collect` in the same
    order.
    """

    def __init__(
        self, slots: int, num_drafts: int, upload: Upload, num_recent: int = 1 << 20
    ) -> None:
        super().__init__(slots, num_drafts, upload)
        self._recent = AnswerRing(num_recent)
        self._requests: dict[int, tuple[RequestIndex, Acceptance]] = {}
        self._first = [0] * slots  # of each request's tokens that are not in the ring
        self._guessed: list[tuple[int, list[int]]] = [(0, [])] * slots  # what `_vote` said last

    def add(self, request: NewRequest) -> None:
        slot = request.slot
        if slot in self._requests:
            self._share(slot)
        index = RequestIndex(request.tokens)
        self._requests[slot] = (index, Acceptance())
        self._first[slot] = len(index.tokens)  # a preempted request's answer is known already
        self._guessed[slot] = (0, [])

    def guess(self, slot: int, tokens: I32) -> Sequence[int]:
        index, acceptance = self._requests[slot]
        length, guessed = self._guessed[slot]
        new = tokens.tolist()
        for depth, (guess, token) in enumerate(zip(guessed, new, strict=False)):
            acceptance.update(length + depth, guess == token)
            if guess != token:
                break
        for token in new:
            index.append(token)
        if (len(index.tokens) + slot) // _PORTION > (
            self._first[slot] + slot
        ) // _PORTION:  # not all slots at once
            self._share(slot)
        length, drafts, likely = self._vote(index, acceptance)
        self._guessed[slot] = (length, drafts)
        return drafts[:likely]

    def _vote(self, index: RequestIndex, acceptance: Acceptance) -> tuple[int, list[int], int]:
        """Return the length of the first draft's longest match, the drafts, and how many of them
        are likely.
        """
        count = self.num_drafts
        found = self._recent.matches(index.tokens[-MAX_LENGTH:], count)
        position, length = index.match
        if length:
            found.insert(0, (length, index.follow(position, count)))
        drafts: list[int] = []
        first = 0
        likely = 0
        probability = 1.0
        while found and len(drafts) < count:
            votes: dict[int, int] = {}
            depth = len(drafts)
            for length, follow in found:
                if depth < len(follow):
                    votes[follow[depth]] = votes.get(follow[depth], 0) + (1 << length)
            if not votes:
                break
            token = max(votes, key=votes.__getitem__)  # of equals the latest
            share = votes[token] / sum(votes.values())
            found = [
                (length, follow)
                for length, follow in found
                if depth < len(follow) and follow[depth] == token
            ]
            longest = max(length for length, _ in found)
            first = first or longest
            probability *= share * acceptance.rate(longest + depth)
            drafts.append(token)
            if probability < LIKELY:
                break
            likely += 1
        return first, drafts, likely

    def _share(self, slot: int) -> None:
        """Add what is new of a slot's answer to the ring, with the tokens before it that a match
        needs.
        """
        tokens = self._requests[slot][0].tokens
        first = self._first[slot]
        if len(tokens) > first:
            self._recent.extend(tokens[max(first - MAX_LENGTH, 0) :])
            self._first[slot] = len(tokens)
