"""From logits to tokens. A row's token depends on its own logits, parameters and position, never on its neighbours.

Order: allowed ids, logit bias and min_tokens; penalties; bad sequences; temperature; min-p; top-k; top-p; Gumbel
argmax. S rows that sample, V vocabulary (padded to whole vectors where it is worked on), r rows of one chunk.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.engine.plan import NewRequest
from moeserve.runner import noise
from moeserve.runner.filters import NEG_INF, can_narrow, first_max, keep_min_p, keep_top_k, keep_top_p, narrow
from moeserve.runner.logprobs import LogprobRows, join, logprob_rows
from moeserve.runner.noise import LANES
from moeserve.runner.penalties import apply_penalties
from moeserve.runner.race import winners
from moeserve.runner.rules import Rules, unknown_token
from moeserve.runner.sampling_rows import SamplingRows, Trait
from moeserve.runner.tables import I64, Tables
from moeserve.runner.upload import Upload

CHUNK_ELEMENTS = 1 << 18  # logits that are worked on at once: they and their temporaries stay in a core's cache
logger = logging.getLogger(__name__)


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
    """A step's choice, on the device. Rows with a status, or a failure, hold token 0."""

    tokens_S: Tensor  # int32
    status_S: Tensor  # uint8
    logprob_rows_P: NDArray[np.int64]  # which of the S rows have logprobs
    logprobs: LogprobRows | None = None
    failures: dict[int, str] = field(default_factory=dict)  # row -> message of an exception in its sampling


class Sampler:
    """Holds the sampling parameters and rules of the request in each slot."""

    def __init__(
        self,
        vocab_size: int,
        tables: Tables,
        upload: Upload,
        *,
        host_may_wait: bool,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        self.rows = SamplingRows(tables.slots)
        self._vocab_size = vocab_size
        self._width = noise.padded(vocab_size)
        self._chunk_rows = max(1, chunk_elements // self._width)
        self._tables = tables
        self._upload = upload
        self._host_may_wait = host_may_wait
        self._device = tables.arena.device
        self._gumbel = noise.Gumbel(vocab_size, self._device)
        self._rules: dict[int, Rules] = {}

    def add(self, new_requests: NewRequest) -> str | None:
        """Takes a request's parameters; returns why it must fail, if it must."""
        self._rules.pop(new_requests.slot, None)
        self.rows.refuse(new_requests.slot)
        token = unknown_token(new_requests.sampling, self._vocab_size)
        if token is not None:
            return f"token id {token} in its sampling parameters is outside the vocabulary of {self._vocab_size}"
        self.rows.add(new_requests, self._vocab_size)
        if self.rows.traits[new_requests.slot] & Trait.RULES:
            self._rules[new_requests.slot] = Rules.of(new_requests.sampling, self._width, self._device)
        return None

    def sample(self, logits_SV: Tensor, slots_S: I64, positions_S: I64) -> Sampled:
        """logits_SV: float32. positions_S: where in its request each new token goes, = its number of known tokens.

        An exception in one row's sampling is that row's failure: the step is done again row by row, which gives the
        same tokens because no row depends on another.
        """
        most = int(self.rows.logprobs[slots_S].max(initial=0))
        try:
            return self._sample(logits_SV, slots_S, positions_S, most)
        except torch.AcceleratorError:
            raise
        except Exception:
            logger.exception("sampling failed; trying each request alone")
            return self._sample_each(logits_SV, slots_S, positions_S, most)

    def _sample(self, logits_SV: Tensor, slots_S: I64, positions_S: I64, most: int) -> Sampled:
        traits_S = self.rows.traits[slots_S]
        if not (traits_S & Trait.WORK).any():
            tokens_S, status_S = _choose(logits_SV)
        else:
            tokens_S = torch.empty(len(slots_S), dtype=torch.int64, device=self._device)
            status_S = torch.empty(len(slots_S), dtype=torch.uint8, device=self._device)
            for chunk in self._chunks(traits_S):
                (index,) = self._upload(chunk)
                raw_rV = logits_SV.index_select(0, index)
                tokens, status = self._sample_chunk(raw_rV, slots_S[chunk], positions_S[chunk], traits_S[chunk])
                tokens_S[index], status_S[index] = tokens, status
        tokens_S = tokens_S.masked_fill_(status_S != Status.FINE, 0)
        wants_P = (traits_S & Trait.LOGPROBS).nonzero()[0]
        if not len(wants_P):
            return Sampled(tokens_S.int(), status_S, wants_P)
        (index,) = self._upload(wants_P)
        logprobs = logprob_rows(logits_SV.index_select(0, index), tokens_S.index_select(0, index), most)
        return Sampled(tokens_S.int(), status_S, wants_P, logprobs)

    def _chunks(self, traits_S: NDArray[np.uint8]) -> list[I64]:
        """Row numbers in chunks of like rows: untouched greedy ones, greedy ones with work, random ones cut by top-k
        or min-p, other random ones. Which way a row goes must not depend on its neighbours."""
        random_S, work_S, cut_S = ((traits_S & traits) != 0 for traits in (Trait.RANDOM, Trait.WORK, Trait.CUT))
        chunks: list[I64] = []
        cut_rows_S = random_S & cut_S
        for kind_S in (~work_S, work_S & ~random_S, cut_rows_S, random_S & ~cut_S):
            rows = kind_S.nonzero()[0]
            # Most of the work on cut rows is done on narrow ones.
            most = self._chunk_rows if kind_S is not cut_rows_S else 4 * self._chunk_rows
            chunks += [rows[i : i + most] for i in range(0, len(rows), most)]
        return chunks

    def _sample_chunk(
        self, raw_rV: Tensor, slots_r: I64, positions_r: I64, traits_r: NDArray[np.uint8]
    ) -> tuple[Tensor, Tensor]:
        if not traits_r[0] & Trait.WORK:
            return _choose(raw_rV)
        if self._width != self._vocab_size:
            raw_rV = torch.nn.functional.pad(raw_rV, (0, self._width - self._vocab_size), value=NEG_INF)
        raw_peak_r = raw_rV.amax(dim=-1)
        x_rV = raw_rV
        if (traits_r & (Trait.RULES | Trait.PENALTY)).any():
            self._change(x_rV, slots_r, positions_r, traits_r)
        if not traits_r[0] & Trait.RANDOM:
            peak_r, tokens_r = first_max(x_rV)
            return tokens_r, _status(raw_peak_r, peak_r)
        peak_r = x_rV.amax(dim=-1)
        x_rV -= peak_r.unsqueeze(1)
        (temperature,) = self._upload(self.rows.temperature[slots_r])
        x_rV /= temperature.unsqueeze(1)
        return self._draw(x_rV, slots_r, positions_r, traits_r), _status(raw_peak_r, peak_r)

    def _draw(self, x_rV: Tensor, slots_r: I64, positions_r: I64, traits_r: NDArray[np.uint8]) -> Tensor:
        """Tokens drawn from rows whose maximum is 0, after their filters."""
        low_r, high_r = self._upload(*noise.row_keys(self.rows.seed[slots_r], positions_r))
        if self._host_may_wait and can_narrow(self._width) and traits_r[0] & Trait.CUT:
            x_rW, blocks_rB, floor_r = narrow(x_rV)
            if self._is_enough(x_rW, floor_r, slots_r, traits_r):
                self._filter(x_rW, slots_r, traits_r)
                at_r1 = winners(self._gumbel, x_rW, low_r, high_r, blocks_rB).unsqueeze(1)
                return (blocks_rB.gather(1, at_r1 // LANES) * LANES + at_r1 % LANES).squeeze(1)
            if len(slots_r) > 1:  # each row alone, so that none goes the long way because of another
                rows = [slice(i, i + 1) for i in range(len(slots_r))]
                return torch.cat([self._draw(x_rV[i], slots_r[i], positions_r[i], traits_r[i]) for i in rows])
        self._filter(x_rV, slots_r, traits_r)
        return winners(self._gumbel, x_rV, low_r, high_r)

    def _is_enough(self, x_rW: Tensor, floor_r: Tensor, slots_r: I64, traits_r: NDArray[np.uint8]) -> bool:
        """Whether narrowed rows hold all that top-k or min-p would keep of the whole ones."""
        rows = self.rows
        top_k_r = np.where(traits_r & Trait.TOP_K, rows.top_k[slots_r], self._width + 1)
        has_k_r = (x_rW > NEG_INF).sum(dim=-1).cpu().numpy() >= top_k_r
        return bool((has_k_r | (floor_r.cpu().numpy() < rows.log_min_p[slots_r])).all())

    def _change(self, x_rV: Tensor, slots_r: I64, positions_r: I64, traits_r: NDArray[np.uint8]) -> None:
        tokens = self._tables.tokens
        ruled = [
            (i, self._rules[int(slots_r[i])], tokens[int(slots_r[i]), : int(positions_r[i])])
            for i in (traits_r & Trait.RULES).nonzero()[0].tolist()
        ]
        for i, rules, _ in ruled:
            rules.apply(x_rV[i], int(positions_r[i] - self.rows.num_prompt[slots_r[i]]))
        punished = (traits_r & Trait.PENALTY).nonzero()[0]
        if len(punished):
            self._punish(x_rV, slots_r, positions_r, punished)
        for i, rules, history in ruled:
            rules.ban_sequences(x_rV[i], history)

    def _punish(self, x_rV: Tensor, slots_r: I64, positions_r: I64, punished: I64) -> None:
        """Penalties of the rows that have any."""
        rows, slots, known = self.rows, slots_r[punished], positions_r[punished]
        index, slot, *lengths = self._upload(punished, slots, known, rows.num_prompt[slots])
        strengths = self._upload(rows.repetition[slots], rows.frequency[slots], rows.presence[slots])
        history_rL = self._tables.tokens[:, : int(known.max())].index_select(0, slot).long()
        x_pV = x_rV.index_select(0, index)
        apply_penalties(x_pV, history_rL, *lengths, *strengths)
        x_rV.index_copy_(0, index, x_pV)

    def _filter(self, x_rV: Tensor, slots_r: I64, traits_r: NDArray[np.uint8]) -> None:
        """Drops what may not be drawn; each row's maximum stays."""
        rows = self.rows
        log_min_p, top_k, top_p = self._upload(rows.log_min_p[slots_r], rows.top_k[slots_r], rows.top_p[slots_r])
        if (traits_r & Trait.MIN_P).any():
            keep_min_p(x_rV, log_min_p)
        limited = traits_r & Trait.TOP_K
        if limited.any():
            keep_top_k(x_rV, top_k, int(rows.top_k[slots_r[limited != 0]].max()))
        if (traits_r & Trait.TOP_P).any():
            keep_top_p(x_rV, top_p, host_may_wait=self._host_may_wait)

    def _sample_each(self, logits_SV: Tensor, slots_S: I64, positions_S: I64, most: int) -> Sampled:
        tokens_S = torch.zeros(len(slots_S), dtype=torch.int32, device=self._device)
        status_S = torch.zeros(len(slots_S), dtype=torch.uint8, device=self._device)
        failures: dict[int, str] = {}
        with_logprobs: list[tuple[int, LogprobRows]] = []
        for i in range(len(slots_S)):
            row = slice(i, i + 1)
            try:
                one = self._sample(logits_SV[row], slots_S[row], positions_S[row], most)
            except torch.AcceleratorError:
                raise
            except Exception as exc:
                failures[i] = f"sampling failed: {type(exc).__name__}: {exc}"
                continue
            tokens_S[row], status_S[row] = one.tokens_S, one.status_S
            if one.logprobs is not None:
                with_logprobs.append((i, one.logprobs))
        rows_P = np.array([i for i, _ in with_logprobs], dtype=np.int64)
        logprobs = join([rows for _, rows in with_logprobs]) if with_logprobs else None
        return Sampled(tokens_S, status_S, rows_P, logprobs, failures)


def _choose(logits_SV: Tensor) -> tuple[Tensor, Tensor]:
    """The greedy choice from untouched logits, and whether it means anything."""
    peak_S, tokens_S = first_max(logits_SV)
    return tokens_S, ((peak_S - peak_S) != 0).to(torch.uint8) * Status.NOT_FINITE  # infinity less itself is NaN


def _status(raw_peak_S: Tensor, peak_S: Tensor) -> Tensor:
    """From the rows' maxima before and after the rules. A NaN anywhere in a row is its maximum."""
    status_S = (peak_S == NEG_INF).to(torch.uint8) * Status.NOTHING_ALLOWED
    return status_S.masked_fill_(~torch.isfinite(raw_peak_S), Status.NOT_FINITE)
