"""The seam of the samplers: which tokens a step's logits become.

A row's token depends on its own logits, parameters and position, never on its neighbours. Order:
logits processors; grammar; allowed ids, logit bias and min_tokens; penalties; bad sequences;
temperature; min-p; top-k; top-p; argmax with Gumbel noise. S rows that sample, V vocabulary, r some
of the rows.

The parameters of the request in each slot are in rows.py, its rules in rules.py.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.engine.plan import NewRequest
from moeserve.logits_processors import LogitsProcessor, ProcessorFactories
from moeserve.messages import NO_TOKEN_LEFT
from moeserve.runner.sampling.logprobs import LogprobRows, logprob_rows
from moeserve.runner.sampling.rows import SamplingRows, Trait
from moeserve.runner.sampling.rules import Rules, unknown_token
from moeserve.runner.tables import I64, Tables, Upload

logger = logging.getLogger(__name__)
Failures = dict[int, str]  # row -> message of an exception in its sampling
_NONE = np.zeros(0, np.int64)


class Status:
    """Why a row has no token; one byte per row."""

    FINE, NOT_FINITE, NOTHING_ALLOWED = range(3)
    MESSAGES = (
        "",
        "the model's logits for this request are not finite numbers: the weights "
        "are damaged, or float16 is too "
        "narrow for this model (--dtype bfloat16 or float32)",
        f"{NO_TOKEN_LEFT}: logits processors, grammar, allowed_token_ids, "
        "logit_bias and the banned tokens "
        "exclude each other",
    )


class Masks(NamedTuple):
    """What the grammars of C of a step's rows allow: bit v % 32 of word v // 32 is token v. Arrays
    on the host.
    """

    rows_C: I64
    bits_CW: NDArray[np.int32]

    def among(self, rows: I64) -> "Masks | None":
        """Return the masks of some of the step's rows, which are numbered by their places in
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
        """Take a request's parameters; returns why the request must fail, if it must."""
        self._rules.pop(request.slot, None)
        self._processors.pop(request.slot, None)
        self.rows.refuse(request.slot)
        token = unknown_token(request.sampling, self._vocab_size)
        if token is not None:
            return (
                f"token id {token} in its sampling parameters is outside the vocabulary "
                f"of {self._vocab_size}"
            )
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
        """Choose a token for each row. logits_SV: float32, left as they are. positions_S: where in
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
        """Return the token, int32, that `sample` would choose for each row; any token where it
        would fail.
        """
        return self._choose(logits_SV, slots_S, positions_S, None)[0]

    @abstractmethod
    def _choose(
        self, logits_SV: Tensor, slots_S: I64, positions_S: I64, masks: Masks | None
    ) -> tuple[Tensor, Tensor, Failures]:
        """Return (tokens int32, `Status` uint8, failures) of all rows."""

    @abstractmethod
    def _mask(self, x_rV: Tensor, rows_C: Tensor, bits_CW: Tensor) -> None:
        """Set what masks do not allow to -inf in place. rows_C: rows of x_rV."""

    @abstractmethod
    def _penalise(self, x_rV: Tensor, rows: I64, slots: I64, known: I64) -> None:
        """Apply the penalties of the given rows of x_rV in place. known: tokens in the history of
        each.
        """

    def _logprobs(self, logits_PV: Tensor, tokens_P: Tensor, n: int) -> LogprobRows:
        """Return the logprobs of the chosen tokens (int32) and the n likeliest ones."""
        return logprob_rows(logits_PV, tokens_P.long(), n)

    def _change(
        self, x_rV: Tensor, slots_r: I64, positions_r: I64, masks: Masks | None
    ) -> Failures:
        """Apply processors, masks, rules and penalties in place. An exception in a request's is
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
    """Change logits in place by a request's own function. Raises what that raises, ValueError if
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
    """Turn an exception into the row's failure. One of the device ends all rows: it is raised."""
    try:
        yield
    except torch.AcceleratorError:
        raise
    except Exception as exc:
        logger.exception("a request's sampling failed")
        failures.setdefault(row, f"{what} failed: {type(exc).__name__}: {exc}")
