"""The seam of the samplers: which tokens a step's logits become.

A row's token depends on its own logits, parameters and position, never on its neighbours. Order:
logits processors; grammar; allowed ids, logit bias and min_tokens; penalties; bad sequences;
temperature; min-p; top-k; top-p; argmax with Gumbel noise. S rows that sample, V vocabulary, r some
of the rows.

The parameters of the request in each slot are NumPy columns and 16 bits of traits on the host.
Rules say which tokens a request may produce (allowed ids, biases, min_tokens, bad sequences); few
requests have any, so they are applied row by row.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.engine.plan import NewRequest
from moeserve.logits_processors import LogitsProcessor, ProcessorFactories
from moeserve.messages import NO_TOKEN_LEFT
from moeserve.runner.sampling.logprobs import LogprobRows, logprob_rows
from moeserve.runner.tables import I64, Tables, Upload
from moeserve.sampling import GREEDY_BELOW, TokenSampling

logger = logging.getLogger(__name__)
Failures = dict[int, str]  # row -> message of an exception in its sampling
NEG_INF = float("-inf")
_NONE = np.zeros(0, np.int64)


class Trait:
    """The needs of a request beyond an argmax over its logits, as bits of 16."""

    RANDOM = 1
    MIN_P = 2
    TOP_K = 4
    TOP_P = 8
    PENALTY = 16
    RULES = 32
    LOGPROBS = 64
    PROMPT_LOGPROBS = 128
    DIGESTS = 256
    GRAMMAR = 512

    CHANGED = (
        PENALTY | RULES | GRAMMAR
    )  # the logits are changed before the likeliest token is chosen
    CUT = MIN_P | TOP_K  # only tokens close to the likeliest one stay; RANDOM rows only


class SamplingRows:
    """One column per parameter, indexed by slot; a row is written when a request takes the slot."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.traits = np.zeros(slots, np.uint16)
        self.seed = np.zeros(slots, np.uint64)
        self.temperature, self.log_min_p, self.top_p = np.zeros((3, slots), np.float32)
        self.repetition, self.frequency, self.presence = np.zeros((3, slots), np.float32)
        self.top_k, self.num_prompt, self.logprobs, self.prompt_logprobs = np.zeros(
            (4, slots), np.int64
        )

    def add(self, request: NewRequest) -> None:
        """Writes the row of the request's slot. A top-k that is off becomes the vocabulary's size."""
        slot = request.slot
        sampling = request.sampling
        vocab_size = self.vocab_size
        has_top_k = 0 < sampling.top_k < vocab_size
        self.traits[slot] = _traits(request, has_top_k)
        self.seed[slot] = np.uint64(sampling.seed & (2**64 - 1))
        self.temperature[slot] = sampling.temperature
        self.log_min_p[slot] = np.log(sampling.min_p) if sampling.min_p > 0 else -np.inf
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k if has_top_k else vocab_size
        self.repetition[slot] = sampling.repetition_penalty
        self.frequency[slot] = sampling.frequency_penalty
        self.presence[slot] = sampling.presence_penalty
        self.num_prompt[slot] = request.num_prompt
        self.logprobs[slot] = sampling.logprobs or 0
        self.prompt_logprobs[slot] = sampling.prompt_logprobs or 0

    def refuse(self, slot: int) -> None:
        """Clears the traits of a request that will fail, so that none of its parameters reach a
        kernel.
        """
        self.traits[slot] = 0

    def having(self, traits: int, slots_S: NDArray[np.integer]) -> I64:
        """Returns the positions in slots_S of the requests that have any of `traits`."""
        return np.flatnonzero(self.traits[slots_S] & traits)


def row_keys(seeds_S: NDArray[np.uint64], positions_S: NDArray[np.integer]) -> NDArray[np.int32]:
    """Returns the key of each row's noise, from its request's seed and the position that it samples
    for: 64 bits, as int32 [2, S]."""
    with np.errstate(over="ignore"):
        key_S = seeds_S + positions_S.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
            key_S = (key_S ^ (key_S >> np.uint64(shift))) * np.uint64(factor)
        key_S ^= key_S >> np.uint64(31)
    return np.ascontiguousarray(key_S.view(np.int32).reshape(-1, 2).T)


def _traits(request: NewRequest, has_top_k: bool) -> int:
    sampling = request.sampling
    is_random = sampling.temperature >= GREEDY_BELOW
    changes = sampling.min_tokens, sampling.logit_bias, sampling.bad_seqs, sampling.processors
    asked = {
        Trait.RANDOM: is_random,
        Trait.MIN_P: is_random and sampling.min_p > 0,
        Trait.TOP_K: is_random and has_top_k,
        Trait.TOP_P: is_random and sampling.top_p < 1,
        Trait.PENALTY: any(
            (
                sampling.presence_penalty,
                sampling.frequency_penalty,
                sampling.repetition_penalty != 1.0,
            )
        ),
        Trait.RULES: sampling.allowed_ids is not None or any(changes),
        Trait.GRAMMAR: sampling.grammar is not None,
        Trait.LOGPROBS: sampling.logprobs is not None,
        Trait.DIGESTS: sampling.receipt,
        # A request that comes back with part of its answer has had its prompt's logprobs.
        Trait.PROMPT_LOGPROBS: sampling.prompt_logprobs is not None
        and len(request.tokens) == request.num_prompt,
    }
    return sum(trait for trait, wanted in asked.items() if wanted)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one request as tensors on the device. V vocabulary; ids are int64."""

    not_allowed: Tensor | None  # bool [V]
    bias_ids: Tensor
    bias_values: Tensor  # float32
    min_tokens: int
    stop_ids: Tensor  # banned until min_tokens were produced
    bad: tuple[
        tuple[Tensor, Tensor], ...
    ]  # for each length 1 + L: [M, L] beginnings, [M] tokens that must not follow

    @classmethod
    def of(cls, sampling: TokenSampling, vocab_size: int, device: torch.device) -> "Rules":
        """Builds the rules of a request whose token ids have been checked with `unknown_token`."""
        not_allowed = None
        if sampling.allowed_ids is not None:
            not_allowed = torch.ones(vocab_size, dtype=torch.bool)
            not_allowed[_ids(sampling.allowed_ids)] = False
            not_allowed = not_allowed.to(device)
        bias = sampling.logit_bias or {}
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for sequence in filter(None, sampling.bad_seqs):
            by_length.setdefault(len(sequence), []).append(sequence)
        return cls(
            not_allowed=not_allowed,
            bias_ids=_ids(bias).to(device),
            bias_values=torch.tensor(list(bias.values()), dtype=torch.float32, device=device),
            min_tokens=sampling.min_tokens,
            stop_ids=_ids(sampling.stop_ids).to(device),
            bad=tuple(
                (_ids(s[:-1] for s in same).to(device), _ids(s[-1] for s in same).to(device))
                for same in by_length.values()
            ),
        )

    def apply(self, x_V: Tensor, num_answer: int) -> None:
        """Applies the rules that come before the penalties. num_answer: tokens that the request has
        produced.
        """
        if self.not_allowed is not None:
            x_V.masked_fill_(self.not_allowed, NEG_INF)
        if len(self.bias_ids):
            x_V.index_put_((self.bias_ids,), x_V[self.bias_ids] + self.bias_values)
        if num_answer < self.min_tokens:
            x_V.index_fill_(0, self.stop_ids, NEG_INF)

    def ban_sequences(self, x_V: Tensor, history: Tensor) -> None:
        """Applies the bad sequences, after the penalties. history: all known tokens of the request;
        a bad sequence may begin in the prompt."""
        for starts_ML, last_M in self.bad:
            length = starts_ML.shape[1]
            if length <= len(history):
                hit_M = (starts_ML == history[len(history) - length :]).all(dim=1)
                limit_M = torch.where(hit_M, NEG_INF, float("inf"))
                x_V.scatter_reduce_(0, last_M, limit_M, reduce="amin")


def unknown_token(sampling: TokenSampling, vocab_size: int) -> int | None:
    """Returns a token id in `sampling` that the model does not have, or None."""
    ids: list[int] = [
        *sampling.stop_ids,
        *(sampling.logit_bias or ()),
        *(sampling.allowed_ids or ()),
    ]
    for sequence in sampling.bad_seqs:
        ids.extend(sequence)
    return next((token for token in ids if not 0 <= token < vocab_size), None)


def _ids(tokens: Iterable[int | tuple[int, ...]]) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64)


class Status:
    """Why a row has no token; one byte per row."""

    FINE, NOT_FINITE, NOTHING_ALLOWED = range(3)
    MESSAGES = (
        "",
        "the model's logits for this request are not finite numbers: the weights are damaged, or float16 is too "
        "narrow for this model (--dtype bfloat16 or float32)",
        f"{NO_TOKEN_LEFT}: logits processors, grammar, allowed_token_ids, logit_bias and the banned tokens "
        "exclude each other",
    )


class Masks(NamedTuple):
    """What the grammars of C of a step's rows allow: bit v % 32 of word v // 32 is token v. Arrays
    on the host.
    """

    rows_C: I64
    bits_CW: NDArray[np.int32]

    def among(self, rows: I64) -> "Masks | None":
        """Returns the masks of some of the step's rows, which are numbered by their places in
        `rows`.
        """
        _, places, which = np.intersect1d(
            rows, self.rows_C, assume_unique=True, return_indices=True
        )
        return Masks(places.astype(np.int64), self.bits_CW[which]) if len(places) else None


class Sampled(NamedTuple):
    """A step's tokens, on the device. Rows with a status other than FINE hold token 0; a failed
    row's is arbitrary.
    """

    tokens_S: Tensor  # int32
    status_S: Tensor  # uint8
    failures: Failures
    logprobs: LogprobRows | None = None
    logprob_rows_P: I64 = _NONE  # which of the S rows have logprobs
    logprob_counts: Sequence[int] = ()  # alternatives that each of them wants
    raw: Sequence[Tensor] = ()  # raw logits of each row that wants a digest
    raw_rows_Q: I64 = _NONE  # which of the S rows those are


class Sampler(ABC):
    """Holds the sampling parameters and rules of the request in each slot, and chooses tokens.

    A subclass overrides `_choose` and `_penalise`, and `_logprobs` where it has a faster one.
    """

    def __init__(self, vocab_size: int, tables: Tables, upload: Upload) -> None:
        self.rows = SamplingRows(tables.slots, vocab_size)
        self._vocab_size = vocab_size
        self._tables = tables
        self._upload = upload
        self._device = tables.arena.device
        self._rules: dict[int, Rules] = {}
        self._processors: dict[int, list[tuple[str, LogitsProcessor]]] = {}
        self.factories = ProcessorFactories()
        self.digests = True  # whether this rank's are read

    def add(self, request: NewRequest) -> str | None:
        """Takes a request's parameters; returns why the request must fail, if it must."""
        self._rules.pop(request.slot, None)
        self._processors.pop(request.slot, None)
        self.rows.refuse(request.slot)
        token = unknown_token(request.sampling, self._vocab_size)
        if token is not None:
            return f"token id {token} in its sampling parameters is outside the vocabulary of {self._vocab_size}"
        self.rows.add(request)
        if not self.digests:
            self.rows.traits[request.slot] &= 0xFFFF ^ Trait.DIGESTS
        if self.rows.traits[request.slot] & Trait.RULES:
            self._rules[request.slot] = Rules.of(request.sampling, self._vocab_size, self._device)
        failures: Failures = {}
        for name, args in request.sampling.processors:
            with _caught(failures, 0, f"logits processor {name!r}"):
                self._processors.setdefault(request.slot, []).append(
                    (name, self.factories.make(name, args))
                )
        return failures.get(0)

    def sample(
        self, logits_SV: Tensor, slots_S: I64, positions_S: I64, masks: Masks | None = None
    ) -> Sampled:
        """Chooses a token for each row. logits_SV: float32, left as they are. positions_S: where in
        its request each new token goes, which is the number of the request's known tokens. masks:
        of requests with a grammar."""
        tokens_S, status_S, failures = self._choose(logits_SV, slots_S, positions_S, masks)
        asking = self.rows.having(Trait.LOGPROBS | Trait.DIGESTS, slots_S)
        if failures:
            asking = np.setdiff1d(asking, list(failures))
        if not len(asking):
            return Sampled(tokens_S, status_S, failures)
        raw_Q = asking[self.rows.having(Trait.DIGESTS, slots_S[asking])]
        raw = [logits_SV[row] for row in raw_Q.tolist()]
        wants_P = asking[self.rows.having(Trait.LOGPROBS, slots_S[asking])]
        if not len(wants_P):
            return Sampled(tokens_S, status_S, failures, raw=raw, raw_rows_Q=raw_Q)
        (index,) = self._upload(wants_P)
        counts_P = self.rows.logprobs[slots_S[wants_P]]
        most = int(counts_P.max())
        logprobs = self._logprobs(
            logits_SV.index_select(0, index), tokens_S.index_select(0, index), most
        )
        return Sampled(
            tokens_S, status_S, failures, logprobs, wants_P, counts_P.tolist(), raw, raw_Q
        )

    def draft(self, logits_SV: Tensor, slots_S: I64, positions_S: I64) -> Tensor:
        """Returns the token, int32, that `sample` would choose for each row; any token where it
        would fail.
        """
        return self._choose(logits_SV, slots_S, positions_S, None)[0]

    @abstractmethod
    def _choose(
        self, logits_SV: Tensor, slots_S: I64, positions_S: I64, masks: Masks | None
    ) -> tuple[Tensor, Tensor, Failures]:
        """Returns (tokens int32, `Status` uint8, failures) of all rows."""

    @abstractmethod
    def _mask(self, x_rV: Tensor, rows_C: Tensor, bits_CW: Tensor) -> None:
        """Sets what masks do not allow to -inf in place. rows_C: rows of x_rV."""

    @abstractmethod
    def _penalise(self, x_rV: Tensor, rows: I64, slots: I64, known: I64) -> None:
        """Applies the penalties of the given rows of x_rV in place. known: tokens in the history of
        each.
        """

    def _logprobs(self, logits_PV: Tensor, tokens_P: Tensor, n: int) -> LogprobRows:
        """Returns the logprobs of the chosen tokens (int32) and the n likeliest ones."""
        return logprob_rows(logits_PV, tokens_P.long(), n)

    def _change(
        self, x_rV: Tensor, slots_r: I64, positions_r: I64, masks: Masks | None
    ) -> Failures:
        """Applies processors, masks, rules and penalties in place. An exception in a request's is
        its own failure.
        """
        failures: Failures = {}
        ruled = [
            (i, self._rules[int(slots_r[i])])
            for i in self.rows.having(Trait.RULES, slots_r).tolist()
        ]
        tokens = self._tables.tokens
        num_prompt = self.rows.num_prompt
        for i, _ in ruled if self._processors else ():
            for name, processor in self._processors.get(slot := int(slots_r[i]), ()):
                with _caught(failures, i, f"logits processor {name!r}"):
                    ids = tokens[slot, : int(positions_r[i])].tolist()
                    process(processor, x_rV[i, : self._vocab_size], ids, int(num_prompt[slot]))
        if masks is not None:
            self._mask(x_rV[:, : self._vocab_size], *self._upload(*masks))
        for i, rules in ruled:
            with _caught(failures, i):
                rules.apply(
                    x_rV[i, : self._vocab_size], int(positions_r[i] - num_prompt[slots_r[i]])
                )
        punished = self.rows.having(Trait.PENALTY, slots_r)
        if len(punished):
            self._penalise(x_rV, punished, slots_r[punished], positions_r[punished])
        for i, rules in ruled:
            with _caught(failures, i):
                rules.ban_sequences(
                    x_rV[i, : self._vocab_size], tokens[int(slots_r[i]), : int(positions_r[i])]
                )
        return failures


def process(processor: LogitsProcessor, x_V: Tensor, ids: list[int], num_prompt: int) -> None:
    """Changes logits in place by a request's own function. Raises what that raises, ValueError if
    it returns no logits. Waits for the device."""
    if not x_V.amax().isfinite():
        return  # `Status` says so
    y_V: Any = processor(ids[:num_prompt], ids[num_prompt:], x_V.clone())
    is_like_x = isinstance(y_V, Tensor) and (y_V.shape, y_V.dtype, y_V.device) == (
        x_V.shape,
        x_V.dtype,
        x_V.device,
    )
    if not is_like_x or not (y_V < torch.inf).all():
        like = f"{x_V.dtype} {list(x_V.shape)} on {x_V.device}"
        raise ValueError(f"expected {like} below infinity, got {y_V!r:.200}")
    x_V.copy_(y_V)


@contextmanager
def _caught(failures: Failures, row: int, what: str = "sampling") -> Iterator[None]:
    """Turns an exception into the row's failure; one of the device concerns all rows and is raised."""
    try:
        yield
    except torch.AcceleratorError:
        raise
    except Exception as exc:
        logger.exception("a request's sampling failed")
        failures.setdefault(row, f"{what} failed: {type(exc).__name__}: {exc}")
