"""Grammars in an engine. Each is compiled once, and computes token bitmasks for its requests.

`GrammarChecker` has accepted a grammar before it reaches an engine. A bitmask is int32
[ceil(vocab_size / 32)]; bit i % 32 of word i // 32 is 1 if token i is allowed next. After a text
that is complete and cannot continue, only end tokens are allowed. The state of a matcher is a
function of its grammar and its tokens.

The suffix _RW: rows (one bitmask each), words of 32 bits.
"""

import threading
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from moeserve.errors import CheckpointError, InvalidRequest, RequestError, RequestFailed
from moeserve.messages import GRAMMAR_FAILED
from moeserve.sampling import GrammarSpec
from moeserve.text.grammar_sandbox import limits
from moeserve.text.grammar_source import grammar_source, special_tokens
from moeserve.text.json_schema import GrammarFault
from moeserve.text.tokenizer import Tokenizer

MAX_CACHED = 64


class Grammars:
    """Compiles the grammars of one model, and caches the most recent ones. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int], num_threads: int = 1
    ) -> None:
        """Prepare the vocabulary, which takes a second if it is large, mostly without the GIL.

        Raise CheckpointError for a tokenizer that llguidance does not support.

        Args:
            tokenizer: The model's tokenizer.
            vocab_size: The number of logits.
            end_ids: The tokens that end an answer.
            num_threads: Threads of `fill_all`.
        """
        size = tokenizer.backend.get_vocab_size()
        self.end_ids = frozenset(token_id for token_id in end_ids if 0 <= token_id < size)
        self.mask_words = -(-vocab_size // 32)
        self._num_threads = num_threads
        self._special = special_tokens(tokenizer)
        self._lock = threading.Lock()
        self._cached: dict[GrammarSpec, LLMatcher] = {}
        with CheckpointError.instead_of(ValueError, "structured output cannot use this tokenizer"):
            self._tokenizer = LLTokenizer(
                tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=sorted(self.end_ids)
            )

    def matcher(self, spec: GrammarSpec, tokens: Sequence[int] = ()) -> "Matcher":
        """Return a matcher in the state after `tokens`. It blocks while a new grammar compiles.

        Raise InvalidRequest if it does not compile, and as `Matcher.accept` does.
        """
        with self._lock:
            initial = self._cached.pop(spec, None)
        if initial is None:
            initial = self.compile(spec)  # outside the lock: other grammars need not wait
        with self._lock:
            self._cached[spec] = initial  # the latest is the last
            if len(self._cached) > MAX_CACHED:
                del self._cached[next(iter(self._cached))]
        matcher = Matcher(self, spec, initial)
        matcher.accept(tokens)
        return matcher

    def compile(self, spec: GrammarSpec) -> LLMatcher:
        """Compile a grammar to llguidance's matcher, in its initial state. Raise InvalidRequest."""
        try:
            compiled = LLMatcher(
                self._tokenizer, grammar_source(spec, self._special), limits=limits(), log_level=0
            )
        except GrammarFault as fault:
            raise fault.as_request_error("grammar") from fault
        if compiled.is_error():
            raise InvalidRequest(
                f"the grammar does not compile: {compiled.get_error()[:500]}",
                code="invalid_grammar",
            )
        return compiled

    def forget(self, spec: GrammarSpec) -> None:
        """Drop a grammar from the cache. Its matchers stay usable."""
        with self._lock:
            self._cached.pop(spec, None)

    def fill_all(
        self,
        requests: "Sequence[tuple[Matcher, int, Sequence[int]]]",
        bitmask_RW: NDArray[np.int32],
    ) -> dict[int, RequestError]:
        """Fill the bitmasks of many requests, on `num_threads` threads and without the GIL.

        requests: (matcher, first row, drafts) of each request. Row first + k is its mask after k
        drafts. After a draft that is not allowed, or an end token, rows allow every token, because
        no token there can be accepted.

        Return index in `requests` -> error, for requests that cannot continue. Their masks are
        undefined.
        """
        assert bitmask_RW.flags.c_contiguous
        assert bitmask_RW.shape[1] == self.mask_words
        for _, first, drafts in requests:
            bitmask_RW[first + 1 : first + 1 + len(drafts)] = -1
        self._fill(requests, bitmask_RW)
        errors = {}
        for i, (matcher, _, _) in enumerate(requests):
            try:
                if matcher.recover():
                    self._fill(requests[i : i + 1], bitmask_RW)
                    matcher.recover()  # raises if the new state has failed, too
            except RequestError as error:
                errors[i] = error
        return errors

    def _fill(
        self,
        requests: "Sequence[tuple[Matcher, int, Sequence[int]]]",
        bitmask_RW: NDArray[np.int32],
    ) -> None:
        num_rows, num_words = bitmask_RW.shape
        destination = (bitmask_RW.ctypes.data, num_words * bitmask_RW.itemsize, num_rows)
        with_drafts: list[tuple[LLMatcher, int, list[int]]] = []
        without_drafts: list[tuple[LLMatcher, int]] = []
        for matcher, first, drafts in requests:
            if text_drafts := self._before_end(drafts):
                with_drafts.append((matcher.state, first, text_drafts))
            else:
                without_drafts.append((matcher.state, first))
        if with_drafts:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(with_drafts, *destination)
        if without_drafts:
            self._executor.unsafe_compute_mask_ptr(without_drafts, *destination)

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens before the first end token."""
        return list(takewhile(lambda token: token not in self.end_ids, tokens))

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(self._num_threads)


class Matcher:
    """The state of one request in its grammar.

    Matchers of one grammar share computed lexer states, and a limit on their number. A matcher that
    reaches the limit starts again with its own lexer states, so that no request fails because of
    others.
    """

    __slots__ = ("_grammars", "_has_own_lexer", "_initial", "_spec", "_tokens", "state")

    def __init__(self, grammars: Grammars, spec: GrammarSpec, initial: LLMatcher) -> None:
        self._grammars = grammars
        self._spec = spec
        self._initial = initial  # in the initial state; never advanced
        self.state = initial.deep_copy()  # llguidance's matcher
        self._tokens: list[int] = []
        self._has_own_lexer = False

    @property
    def num_tokens(self) -> int:
        """The number of accepted tokens."""
        return len(self._tokens)

    @property
    def is_done(self) -> bool:
        """Whether the text is complete and only end tokens may follow."""
        return self.state.is_stopped() and not self.state.is_error()

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance the state by tokens. Tokens after the end of the text are ignored.

        Raise RequestFailed if the grammar does not allow a token, or costs too much.
        """
        if not self._consume(tokens):
            self._restart_with_own_lexer()
            if not self._consume(tokens):
                reason = (
                    self.state.get_error()
                    or f"the grammar does not allow one of the tokens {list(tokens)[:8]}"
                )
                raise RequestFailed(
                    f"{GRAMMAR_FAILED}: after {len(self._tokens)} tokens: {reason[:300]}"
                )
        self._tokens += tokens

    def rewind(self, num_tokens: int) -> None:
        """Go back to the state after `num_tokens` tokens. Raise as `accept` does."""
        tokens = self._tokens[:num_tokens]
        self.state = self._initial.deep_copy()
        self._tokens = []
        self.accept(tokens)

    def fill(self, mask_RW: NDArray[np.int32], drafts: Sequence[int] = ()) -> None:
        """Write the bitmasks after 0, 1, ... all drafts.

        Raise RequestFailed if the grammar costs too much.
        """
        for error in self._grammars.fill_all([(self, 0, drafts)], mask_RW).values():
            raise error

    def recover(self) -> bool:
        """Replace a failed state by one with its own lexer states, and return whether it did.

        Raise RequestFailed if the failed state already has its own.
        """
        if not self.state.is_error():
            return False
        if self._has_own_lexer:
            raise RequestFailed(
                f"{GRAMMAR_FAILED}: after {len(self._tokens)} tokens: "
                f"{self.state.get_error()[:300]}"
            )
        self._restart_with_own_lexer()
        return True

    def _restart_with_own_lexer(self) -> None:
        self._grammars.forget(self._spec)
        self._initial = self._grammars.compile(self._spec)
        self.state = self._initial.deep_copy()
        self._has_own_lexer = True
        self._consume(self._tokens)

    def _consume(self, tokens: Sequence[int]) -> bool:
        for token in tokens:
            if self.is_done:
                break
            if self.state.is_error() or self.state.try_consume_tokens([token]) != 1:
                return False
        return True
