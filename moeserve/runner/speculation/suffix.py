"""Draft by suffix lookup: the tokens that followed a request's last tokens in recent answers of all
requests, or in the request itself.

After SuffixDecoding (arXiv 2411.04975; Arctic Inference): earlier occurrences of the last tokens
vote for the next token, longer matches with more weight. Tokens are drafted as long as the votes
and the acceptance so far make them likely.

There are no suffix trees. Recent answers are in one ring buffer of tokens, and all positions after
equal tokens are linked, latest first, as in LZ77 coders. So memory is bounded, and the oldest
answers are overwritten.
"""

from array import array
from collections.abc import Sequence

from moeserve.engine.plan import I32, NewRequest
from moeserve.runner.speculation.base import LookupProposer, ProposerFacts
from moeserve.runner.speculation.ngram import MAX_MATCH, MIN_PROBABILITY, Acceptance, RequestIndex
from moeserve.runner.tables import Upload

MIN_MATCH = 3  # tokens of a match in other answers
MAX_MATCHES = 16  # matches considered per draft, the latest first
_PORTION_TOKENS = 64  # tokens of an answer that are added to the ring at a time
_PORTION_END = -1  # the token after each portion
_HASH_FACTOR = 0x9E3779B1


class AnswerRing:
    """The last `size` tokens of all answers (a power of two), with 20 bytes per token.

    Positions count all tokens ever added. All positions after MIN_MATCH tokens with the same hash
    form a chain.
    """

    def __init__(self, size: int) -> None:
        assert size & (size - 1) == 0, size
        self._mask = size - 1
        self._tokens = array("i", [_PORTION_END]) * size
        self._previous = array("q", [-1]) * size  # the next older position in the chain
        self._latest = array("q", [-1]) * size  # the first position of the chain, by hash
        self._end = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Add consecutive tokens of an answer. They overwrite the oldest tokens."""
        ring = self._tokens
        mask = self._mask
        for i, token in enumerate(tokens):
            ring[self._end & mask] = token
            self._end += 1
            if i >= MIN_MATCH - 1:
                bucket = self._bucket(tokens[i - MIN_MATCH + 1 : i + 1])
                self._previous[self._end & mask] = self._latest[bucket]
                self._latest[bucket] = self._end
        ring[self._end & mask] = _PORTION_END
        self._end += 1

    def matches(self, tokens: Sequence[int], count: int) -> list[tuple[int, Sequence[int]]]:
        """Return the matches of the last tokens: the length of each, and up to `count` tokens after
        it.
        """
        ring = self._tokens
        mask = self._mask
        matches: list[tuple[int, Sequence[int]]] = []
        position = (
            self._latest[self._bucket(tokens[-MIN_MATCH:])] if len(tokens) >= MIN_MATCH else -1
        )
        for _ in range(MAX_MATCHES):
            is_overwritten = position + mask - MAX_MATCH <= self._end
            if position < MIN_MATCH or is_overwritten:
                break
            length = 0
            max_length = min(MAX_MATCH, len(tokens), position)
            while length < max_length and ring[position - length - 1 & mask] == tokens[-length - 1]:
                length += 1
            if length >= MIN_MATCH:
                first = position & mask
                follow = ring[first : first + count]
                if _PORTION_END in follow:
                    follow = follow[: follow.index(_PORTION_END)]
                matches.append((length, follow))
            position = self._previous[position & mask]
        return matches

    def _bucket(self, tokens: Sequence[int]) -> int:
        code = 0
        for token in tokens:
            code = (code + token + 1) * _HASH_FACTOR & 0xFFFFFFFFFFFF
        return code >> 20 & self._mask


def make(facts: ProposerFacts) -> "SuffixProposer":
    """Return the proposer."""
    return SuffixProposer(facts.slots, facts.spec.num_drafts, facts.upload)


class SuffixProposer(LookupProposer):
    """Drafts the tokens that most often followed the same tokens in recent answers and in the
    request.

    An answer is added to the ring in portions of 64 tokens, and its rest when the next request gets
    the slot. Ranks with the same calls of `add` and `collect` in the same order have the same
    drafts.
    """

    def __init__(
        self, slots: int, num_drafts: int, upload: Upload, num_recent: int = 1 << 20
    ) -> None:
        super().__init__(slots, num_drafts, upload)
        self._ring = AnswerRing(num_recent)
        self._requests: dict[int, tuple[RequestIndex, Acceptance]] = {}
        self._first_unshared = [0] * slots  # the first token of each request outside the ring
        # By slot: the length of the match and the drafts of the last `guess`.
        self._guessed: list[tuple[int, list[int]]] = [(0, [])] * slots

    def add(self, request: NewRequest) -> None:
        slot = request.slot
        if slot in self._requests:
            self._add_to_ring(slot)
        index = RequestIndex(request.tokens)
        self._requests[slot] = (index, Acceptance())
        # The answer of a preempted request is in the ring.
        self._first_unshared[slot] = len(index.tokens)
        self._guessed[slot] = (0, [])

    def guess(self, slot: int, tokens: I32) -> Sequence[int]:
        index, acceptance = self._requests[slot]
        length, guessed = self._guessed[slot]
        new_tokens = tokens.tolist()
        for depth, (guess, token) in enumerate(zip(guessed, new_tokens, strict=False)):
            acceptance.update(length + depth, guess == token)
            if guess != token:
                break
        for token in new_tokens:
            index.append(token)
        # Offset by the slot, so that the slots do not all add a portion in the same step.
        first_unshared = self._first_unshared[slot]
        if (len(index.tokens) + slot) // _PORTION_TOKENS > (
            first_unshared + slot
        ) // _PORTION_TOKENS:
            self._add_to_ring(slot)
        length, drafts, num_likely = self._vote(index, acceptance)
        self._guessed[slot] = (length, drafts)
        return drafts[:num_likely]

    def _vote(self, index: RequestIndex, acceptance: Acceptance) -> tuple[int, list[int], int]:
        """Return the longest match of the first draft, the drafts, and the number of drafts that
        are likely.
        """
        count = self.num_drafts
        matches = self._ring.matches(index.tokens[-MAX_MATCH:], count)
        position, length = index.match
        if length:
            matches.insert(0, (length, index.follow(position, count)))
        drafts: list[int] = []
        first_length = 0
        num_likely = 0
        probability = 1.0
        while matches and len(drafts) < count:
            votes: dict[int, int] = {}
            depth = len(drafts)
            for length, follow in matches:
                if depth < len(follow):
                    votes[follow[depth]] = votes.get(follow[depth], 0) + (1 << length)
            if not votes:
                break
            token = max(votes, key=votes.__getitem__)  # in case of a tie, from the latest match
            share = votes[token] / sum(votes.values())
            matches = [
                (length, follow)
                for length, follow in matches
                if depth < len(follow) and follow[depth] == token
            ]
            longest = max(length for length, _ in matches)
            first_length = first_length or longest
            probability *= share * acceptance.rate(longest + depth)
            drafts.append(token)
            if probability < MIN_PROBABILITY:
                break
            num_likely += 1
        return first_length, drafts, num_likely

    def _add_to_ring(self, slot: int) -> None:
        """Add the new tokens of a slot's answer to the ring, and the tokens before them, so that
        these can be matched.
        """
        tokens = self._requests[slot][0].tokens
        first = self._first_unshared[slot]
        if len(tokens) > first:
            self._ring.extend(tokens[max(first - MAX_MATCH, 0) :])
            self._first_unshared[slot] = len(tokens)
