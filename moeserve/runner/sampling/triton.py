"""The sampler for GPUs: a few Triton kernels for all rows of a step, whatever their parameters.

Rules (allowed ids, biases, bad sequences) are applied with torch, because few requests have any.
"""

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels.logprobs import logprobs
from moeserve.kernels.penalties import PenaltyRows, new_counts, penalise
from moeserve.kernels.sampling import SamplingTensors, apply_bitmask, sample
from moeserve.runner.sampling.logprobs import LogprobRows
from moeserve.runner.sampling.rows import Trait, row_keys
from moeserve.runner.sampling.sampler import Failures, Masks, Sampler
from moeserve.runner.tables import I64, Tables, Upload

COUNTED_ROWS = 16  # rows whose histories are counted at a time


class TritonSampler(Sampler):
    """Chooses the same tokens as `ReferenceSampler`, except for rounding."""

    def __init__(self, vocab_size: int, tables: Tables, upload: Upload) -> None:
        super().__init__(vocab_size, tables, upload)
        nothing = torch.zeros(tables.slots, device=self._device)
        self._greedy = SamplingTensors(
            nothing, nothing, nothing.int(), nothing, nothing.int(), nothing.int()
        )
        self._counts_WV: Tensor | None = None

    def _choose(
        self, logits_SV: Tensor, slots_S: I64, positions_S: I64, masks: Masks | None
    ) -> tuple[Tensor, Tensor, Failures]:
        params = self.rows
        raw_peaks_S = None
        failures = Failures()
        if len(params.having(Trait.CHANGED, slots_S)):
            raw_peaks_S = logits_SV.amax(dim=1)
            logits_SV = logits_SV.clone()
            failures = self._modify_logits(logits_SV, slots_S, positions_S, masks)
        draws, cuts = (
            len(params.having(traits, slots_S)) > 0
            for traits in (Trait.RANDOM, Trait.TOP_K | Trait.TOP_P)
        )
        rows = self._greedy
        if draws:
            is_random_S = (params.traits[slots_S] & Trait.RANDOM) != 0
            rows = SamplingTensors(
                *self._upload(
                    np.where(is_random_S, params.temperature[slots_S], np.float32(0)),
                    params.log_min_p[slots_S],
                    params.top_k[slots_S].astype(np.int32),
                    params.top_p[slots_S],
                    *row_keys(params.seed[slots_S], positions_S),
                )
            )
        return *sample(logits_SV, rows, raw_peaks_S, draws=draws, cuts=cuts), failures

    def _logprobs(self, logits_PV: Tensor, tokens_P: Tensor, n: int) -> LogprobRows:
        return LogprobRows(*logprobs(logits_PV, tokens_P, n))

    def _mask(self, x_rV: Tensor, rows_C: Tensor, bits_CW: Tensor) -> None:
        apply_bitmask(x_rV, rows_C, bits_CW)

    def _penalise(self, x_rV: Tensor, rows: I64, slots: I64, known: I64) -> None:
        params = self.rows
        if self._counts_WV is None:  # few requests have penalties
            self._counts_WV = new_counts(COUNTED_ROWS, self._vocab_size, self._device)
        integers = (
            column.astype(np.int32) for column in (rows, slots, known, params.num_prompt[slots])
        )
        strengths = params.repetition[slots], params.frequency[slots], params.presence[slots]
        on_device = PenaltyRows(*self._upload(*integers, *strengths))
        penalise(x_rV, self._tables.tokens, on_device, int(known.max()), self._counts_WV)
