"""The seam of the samplers: which tokens a step's logits become.

A row's token depends on its own logits, parameters and position, never on its neighbours. Order: allowed ids, logit
bias and min_tokens; penalties; bad sequences; temperature; min-p; top-k; top-p; argmax with Gumbel noise.
S rows that sample, V vocabulary, r some of the rows.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moeserve.engine.plan import NewRequest
from moeserve.runner.sampling.logprobs import LogprobRows, logprob_rows
from moeserve.runner.sampling.rows import Rules, SamplingRows, Trait, unknown_token
from moeserve.runner.tables import I64, Tables, Upload

logger = logging.getLogger(__name__)
Failures = dict[int, str]  # row -> message of an exception in its sampling


class Status:
    """Why a row has no token; one byte per row."""

    FINE, NOT_FINITE, NOTHING_ALLOWED = range(3)
    MESSAGES = (
        "",
        "the model's logits for this request are not finite numbers: the weights are damaged, or float16 is too "
        "narrow for this model (--dtype bfloat16 or float32)",
        "no token is left to choose: allowed_token_ids, logit_bias and the banned tokens exclude each other",
    )


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's tokens, on the device. Rows with a status other than FINE hold token 0; a failed row's is arbitrary."""

    tokens_S: Tensor  # int32
    status_S: Tensor  # uint8
    logprob_rows_P: I64  # which of the S rows have logprobs
    logprobs: LogprobRows | None
    failures: Failures


class Sampler(ABC):
    """Holds the sampling parameters and rules of the request in each slot, and chooses tokens.

    A subclass overrides `_choose` and `_penalise`, and `_logprobs` where it has a faster one.
    """

    def __init__(self, vocab_size: int, tables: Tables, upload: Upload) -> None:
        self.rows = SamplingRows(tables.slots)
        self._vocab_size = vocab_size
        self._tables = tables
        self._upload = upload
        self._device = tables.arena.device
        self._rules: dict[int, Rules] = {}

    def add(self, request: NewRequest) -> str | None:
        """Takes a request's parameters; returns why the request must fail, if it must."""
        self._rules.pop(request.slot, None)
        self.rows.refuse(request.slot)
        token = unknown_token(request.sampling, self._vocab_size)
        if token is not None:
            return f"token id {token} in its sampling parameters is outside the vocabulary of {self._vocab_size}"
        self.rows.add(request, self._vocab_size)
        if self.rows.traits[request.slot] & Trait.RULES:
            self._rules[request.slot] = Rules.of(request.sampling, self._vocab_size, self._device)
        return None

    def sample(self, logits_SV: Tensor, slots_S: I64, positions_S: I64) -> Sampled:
        """Chooses a token for each row. logits_SV: float32, left as they are. positions_S: where in its request each
        new token goes, which is the number of the request's known tokens."""
        tokens_S, status_S, failures = self._choose(logits_SV, slots_S, positions_S)
        wants_P = self.rows.having(Trait.LOGPROBS, slots_S)
        if failures:
            wants_P = np.setdiff1d(wants_P, list(failures))
        if not len(wants_P):
            return Sampled(tokens_S, status_S, wants_P, None, failures)
        (index,) = self._upload(wants_P)
        most = int(self.rows.logprobs[slots_S].max())
        logprobs = self._logprobs(logits_SV.index_select(0, index), tokens_S.index_select(0, index), most)
        return Sampled(tokens_S, status_S, wants_P, logprobs, failures)

    @abstractmethod
    def _choose(self, logits_SV: Tensor, slots_S: I64, positions_S: I64) -> tuple[Tensor, Tensor, Failures]:
        """Returns (tokens int32, `Status` uint8, failures) of all rows."""

    @abstractmethod
    def _penalise(self, x_rV: Tensor, rows: I64, slots: I64, known: I64) -> None:
        """Applies the penalties of the given rows of x_rV in place. known: tokens in the history of each."""

    def _logprobs(self, logits_PV: Tensor, tokens_P: Tensor, n: int) -> LogprobRows:
        """Returns the logprobs of the chosen tokens (int32) and the n likeliest ones."""
        return logprob_rows(logits_PV, tokens_P.long(), n)

    def _change(self, x_rV: Tensor, slots_r: I64, positions_r: I64) -> Failures:
        """Applies rules and penalties in place. An exception in one request's rules is that request's failure."""
        failures: Failures = {}
        ruled = [(i, self._rules[int(slots_r[i])]) for i in self.rows.having(Trait.RULES, slots_r).tolist()]

        tokens, num_prompt = self._tables.tokens, self.rows.num_prompt
        for i, rules in ruled:
            with _caught(failures, i):
                rules.apply(x_rV[i, : self._vocab_size], int(positions_r[i] - num_prompt[slots_r[i]]))
        punished = self.rows.having(Trait.PENALTY, slots_r)
        if len(punished):
            self._penalise(x_rV, punished, slots_r[punished], positions_r[punished])
        for i, rules in ruled:
            with _caught(failures, i):
                rules.ban_sequences(x_rV[i, : self._vocab_size], tokens[int(slots_r[i]), : int(positions_r[i])])
        return failures


@contextmanager
def _caught(failures: Failures, row: int) -> Iterator[None]:
    """Turns an exception into the row's failure; one of the device concerns all rows and is raised."""
    try:
        yield
    except torch.AcceleratorError:
        raise
    except Exception as exc:
        logger.exception("a request's sampling failed")
        failures.setdefault(row, f"sampling failed: {type(exc).__name__}: {exc}")
