"""The interface of samplers, which choose the tokens of a step from its logits.

The token of a row depends on the row's own logits, parameters and position only, never on other
rows. The order of operations:

1. logits processors
2. grammar
3. allowed ids, logit bias and min_tokens
4. penalties
5. bad sequences
6. temperature
7. min-p, top-k, top-p
8. argmax with Gumbel noise

rows.py stores the parameters of the request in each slot, rules.py its rules.

S: rows that sample. V: vocabulary. r: some of the rows. P: rows with logprobs. Q: rows with a
digest. C: rows with a grammar. W: 32-bit words of a mask.
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
Failures = dict[int, str]  # error messages by row
_NONE = np.zeros(0, np.int64)


class Status:
    """Whether a row has a token, and if not, the reason. One byte per row."""

    FINE, NOT_FINITE, NOTHING_ALLOWED = range(3)
    MESSAGES = (
        "",
        "the model's logits for this request are not finite numbers: the weights are damaged, or "
        "float16 is too narrow for this model (--dtype bfloat16 or float32)",
        f"{NO_TOKEN_LEFT}: logits processors, grammar, allowed_token_ids, logit_bias and the "
        "banned tokens exclude each other",
    )


class Masks(NamedTuple):
    """The tokens that grammars allow in C of a step's rows. Arrays on the host."""

    rows_C: I64
    bits_CW: NDArray[np.int32]  # bit v % 32 of word v // 32: whether token v is allowed

    def among(self, rows: I64) -> "Masks | None":
        """Return the masks of some of the step's rows, numbered by their index in `rows`."""
        _, new_rows, own_indices = np.intersect1d(
            rows, self.rows_C, assume_unique=True, return_indices=True
        )
        if not len(new_rows):
            return None
        return Masks(new_rows.astype(np.int64), self.bits_CW[own_indices])


class Sampled(NamedTuple):
    """The tokens of a step, on the device."""

    tokens_S: Tensor  # int32; 0 if the status is not FINE, arbitrary in `failures`
    status_S: Tensor  # uint8, `Status`
    failures: Failures
    logprobs: LogprobRows | None = None
    logprob_rows_P: I64 = _NONE  # the rows (of S) with logprobs
    logprob_counts: Sequence[int] = ()  # number of alternatives of each of them
    logits_to_digest: Sequence[Tensor] = ()  # raw logits of each row with a digest
    digest_rows_Q: I64 = _NONE  # the rows (of S) with a digest


class Sampler(ABC):
    """Stores the sampling parameters and rules of the request in each slot, and chooses tokens.

    A subclass overrides `_choose`, `_mask` and `_penalise`, and may override `_logprobs`.
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
        self.digests = True  # whether to compute digests; False on ranks whose digests are not used

    def add(self, request: NewRequest) -> str | None:
        """Store a request's parameters. Return an error message if the request must fail."""
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
            with _as_failure(failures, 0, f"logits processor {name!r}"):
                self._processors.setdefault(request.slot, []).append(
                    (name, self.factories.make(name, args))
                )
        return failures.get(0)

    def sample(
        self, logits_SV: Tensor, slots_S: I64, positions_S: I64, masks: Masks | None = None
    ) -> Sampled:
        """Choose a token for each row.

        logits_SV: float32. They are not changed.
        positions_S: the position of each new token: the number of known tokens of its request.
        masks: the masks of the requests with a grammar.
        """
        tokens_S, status_S, failures = self._choose(logits_SV, slots_S, positions_S, masks)
        rows = self.rows.having(Trait.LOGPROBS | Trait.DIGESTS, slots_S)
        if failures:
            rows = np.setdiff1d(rows, list(failures))
        if not len(rows):
            return Sampled(tokens_S, status_S, failures)
        digest_rows_Q = rows[self.rows.having(Trait.DIGESTS, slots_S[rows])]
        logits_to_digest = [logits_SV[row] for row in digest_rows_Q.tolist()]
        logprob_rows_P = rows[self.rows.having(Trait.LOGPROBS, slots_S[rows])]
        if not len(logprob_rows_P):
            return Sampled(
                tokens_S=tokens_S,
                status_S=status_S,
                failures=failures,
                logits_to_digest=logits_to_digest,
                digest_rows_Q=digest_rows_Q,
            )
        (index,) = self._upload(logprob_rows_P)
        counts_P = self.rows.logprobs[slots_S[logprob_rows_P]]
        max_alternatives = int(counts_P.max())
        logprobs = self._logprobs(
            logits_SV.index_select(0, index), tokens_S.index_select(0, index), max_alternatives
        )
        return Sampled(
            tokens_S=tokens_S,
            status_S=status_S,
            failures=failures,
            logprobs=logprobs,
            logprob_rows_P=logprob_rows_P,
            logprob_counts=counts_P.tolist(),
            logits_to_digest=logits_to_digest,
            digest_rows_Q=digest_rows_Q,
        )

    def draft(self, logits_SV: Tensor, slots_S: I64, positions_S: I64) -> Tensor:
        """Return the tokens, int32, that `sample` would choose without masks.

        If `sample` would fail for a row, its token is arbitrary.
        """
        return self._choose(logits_SV, slots_S, positions_S, None)[0]

    @abstractmethod
    def _choose(
        self, logits_SV: Tensor, slots_S: I64, positions_S: I64, masks: Masks | None
    ) -> tuple[Tensor, Tensor, Failures]:
        """Return (tokens int32, `Status` uint8, failures) of all rows."""

    @abstractmethod
    def _mask(self, x_rV: Tensor, rows_C: Tensor, bits_CW: Tensor) -> None:
        """Set tokens that masks do not allow to -inf, in place. rows_C: rows of x_rV."""

    @abstractmethod
    def _penalise(self, x_rV: Tensor, rows: I64, slots: I64, known: I64) -> None:
        """Apply penalties to the given rows of x_rV, in place.

        known: the number of known tokens of each of these rows.
        """

    def _logprobs(self, logits_PV: Tensor, tokens_P: Tensor, n: int) -> LogprobRows:
        """Return the logprobs of the chosen tokens (int32) and of the n likeliest ones."""
        return logprob_rows(logits_PV, tokens_P.long(), n)

    def _modify_logits(
        self, x_rV: Tensor, slots_r: I64, positions_r: I64, masks: Masks | None
    ) -> Failures:
        """Apply processors, masks, rules and penalties, in place.

        An exception fails only the request that caused it.
        """
        failures: Failures = {}
        # Logits processors count as rules, too, but only some rows with rules have any.
        ruled = [
            (i, self._rules[int(slots_r[i])])
            for i in self.rows.having(Trait.RULES, slots_r).tolist()
        ]
        tokens = self._tables.tokens
        num_prompt = self.rows.num_prompt
        for i, _ in ruled if self._processors else ():
            for name, processor in self._processors.get(slot := int(slots_r[i]), ()):
                with _as_failure(failures, i, f"logits processor {name!r}"):
                    ids = tokens[slot, : int(positions_r[i])].tolist()
                    process(processor, x_rV[i, : self._vocab_size], ids, int(num_prompt[slot]))
        if masks is not None:
            self._mask(x_rV[:, : self._vocab_size], *self._upload(*masks))
        for i, rules in ruled:
            with _as_failure(failures, i):
                rules.apply(
                    x_rV[i, : self._vocab_size], int(positions_r[i] - num_prompt[slots_r[i]])
                )
        penalized = self.rows.having(Trait.PENALTY, slots_r)
        if len(penalized):
            self._penalise(x_rV, penalized, slots_r[penalized], positions_r[penalized])
        for i, rules in ruled:
            with _as_failure(failures, i):
                rules.ban_sequences(
                    x_rV[i, : self._vocab_size], tokens[int(slots_r[i]), : int(positions_r[i])]
                )
        return failures


def process(processor: LogitsProcessor, x_V: Tensor, ids: list[int], num_prompt: int) -> None:
    """Change logits in place by a request's logits processor. Waits for the device.

    Raises the processor's errors, and ValueError if it does not return logits.
    """
    if not x_V.amax().isfinite():
        return  # the row gets Status.NOT_FINITE
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
def _as_failure(failures: Failures, row: int, what: str = "sampling") -> Iterator[None]:
    """Convert an exception into a failure of the row.

    Errors of the device are raised, because they affect all rows. Any other exception is caught,
    because processors are code of users.
    """
    try:
        yield
    except torch.AcceleratorError:
        raise
    except Exception as exc:
        logger.exception("a request's sampling failed")
        failures.setdefault(row, f"{what} failed: {type(exc).__name__}: {exc}")
