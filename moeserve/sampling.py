"""Sampling parameters: the user's (`SamplingParams`) and the engine's (`TokenSampling`).

The engine sees only integers: the front end turns bad words into token ids and finds stop strings itself.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from moeserve.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_N = 128
MAX_BAD_WORDS = 128
GREEDY_BELOW = 1e-5  # a temperature below this means argmax
_INT64 = 2**63


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of one request, with vLLM's names and defaults.

    temperature in [0, 2] (below 1e-5: greedy), top_p in (0, 1], top_k >= 1 (0 or -1: off), min_p in [0, 1],
    presence/frequency_penalty in [-2, 2], repetition_penalty in (0, 2], n in 1..128. `seed` None: one is drawn.
    `logprobs`/`prompt_logprobs`: how many alternatives besides the token itself, 0..20. `max_tokens` None: up to
    the end of the context. `stop` strings are cut from the text unless `include_stop_str_in_output`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < GREEDY_BELOW

    def check(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first field that is out of its range."""
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 2.0, open_low=True)
        _integer("n", self.n, 1, MAX_N)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})",
                    param="min_tokens",
                )
        if self.seed is not None:
            _integer("seed", self.seed, -_INT64, _INT64 - 1)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)
        self._check_stops()
        self._check_token_ids(vocab_size)

    def _check_stops(self) -> None:
        if not isinstance(self.stop, str | tuple | list):
            raise InvalidRequest("stop must be a string or a list of strings", param="stop")
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed", param="stop")
        for text in stops:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidRequest(f"each stop string must have 1 to {MAX_STOP_CHARS} characters", param="stop")
        words = self.bad_words
        if not isinstance(words, tuple | list) or not all(isinstance(word, str) for word in words):
            raise InvalidRequest("bad_words must be a list of strings", param="bad_words")
        if len(words) > MAX_BAD_WORDS or not all(words):
            raise InvalidRequest(f"bad_words takes at most {MAX_BAD_WORDS} non-empty strings", param="bad_words")

    def _check_token_ids(self, vocab_size: int) -> None:
        if not isinstance(self.logit_bias or {}, dict):
            raise InvalidRequest("logit_bias must map token ids to numbers", param="logit_bias")
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", self.logit_bias or ()),
        ):
            if not isinstance(ids, tuple | list | dict):
                raise InvalidRequest(f"{name} must be a list of token ids", param=name)
            if len(ids) > vocab_size:
                raise InvalidRequest(f"{name} has {len(ids)} entries; the vocabulary has {vocab_size}", param=name)
            for token in ids:
                _integer(name, token, 0, vocab_size - 1, what="a token id")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")
        for value in (self.logit_bias or {}).values():
            _number("logit_bias", value, -100.0, 100.0)


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and low <= value <= high and not (open_low and value == low):
        return
    bracket = "(" if open_low else "["
    raise InvalidRequest(f"{name} must be a number in {bracket}{low:g}, {high:g}]", param=name)


def _integer(name: str, value: Any, low: int, high: int, *, what: str = "an integer") -> None:
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return
    raise InvalidRequest(f"{name}: expected {what} in {low}..{high}", param=name)


class TokenSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`SamplingParams` of one sequence, resolved by the front end to integers and floats.

    stop_ids: the model's end tokens unless ignore_eos, and the user's. bad_seqs: token sequences that must not be
    completed.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_ids: tuple[int, ...] | None = None
    bad_seqs: tuple[tuple[int, ...], ...] = ()

    @property
    def plain(self) -> bool:
        """Whether only temperature, top-k, top-p and min-p act on the logits."""
        return not (
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.min_tokens
            or self.logit_bias
            or self.allowed_ids is not None
            or self.bad_seqs
        )
