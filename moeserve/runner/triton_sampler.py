"""The sampler by the Triton kernels: all rows of a step in a few launches, whatever each of them asks for.

The meaning is runner/sampler.py's. Rules (allowed ids, biases, bad sequences) stay torch's: few requests have any.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.kernels.logprobs import logprobs
from moeserve.kernels.penalties import PenaltyRows, new_counts, penalise
from moeserve.kernels.sampling import SamplingTensors as DeviceRows
from moeserve.kernels.sampling import sample
from moeserve.runner import noise
from moeserve.runner.logprobs import LogprobRows
from moeserve.runner.sampler import Sampled, Sampler
from moeserve.runner.sampling_rows import Trait
from moeserve.runner.tables import I64, Tables
from moeserve.runner.upload import Upload

COUNTED_ROWS = 16  # rows whose histories are counted at a time


class TritonSampler(Sampler):
    """Takes fp32 logits [S, V] as they are, without padding."""

    def __init__(self, vocab_size: int, tables: Tables, upload: Upload) -> None:
        super().__init__(vocab_size, tables, upload, host_may_wait=False)
        self._width = vocab_size
        nothing = torch.zeros(tables.slots, device=self._device)
        self._greedy = DeviceRows(nothing, nothing, nothing.int(), nothing, nothing.int(), nothing.int())
        self._counts_WV: Tensor | None = None

    def _sample(self, logits_SV: Tensor, slots_S: I64, positions_S: I64, most: int) -> Sampled:
        traits_S = self.rows.traits[slots_S]
        wants_P = (traits_S & Trait.LOGPROBS).nonzero()[0]
        x_SV, raw_peaks_S = logits_SV, None
        if (traits_S & (Trait.RULES | Trait.PENALTY)).any():
            raw_peaks_S = logits_SV.amax(dim=1)
            x_SV = logits_SV.clone()  # logprobs are of the raw ones, and so is a second try, row by row
            self._change(x_SV, slots_S, positions_S, traits_S)
        draws, cuts = ((traits_S & traits).any() for traits in (Trait.RANDOM, Trait.TOP_K | Trait.TOP_P))
        rows = self._rows_of(slots_S, positions_S, traits_S) if draws else self._greedy
        tokens_S, status_S = sample(x_SV, rows, raw_peaks_S, draws=bool(draws), cuts=bool(cuts))
        if not len(wants_P):
            return Sampled(tokens_S, status_S, wants_P)
        (index,) = self._upload(wants_P)
        chosen_P = tokens_S.index_select(0, index)
        found = LogprobRows(*logprobs(logits_SV.index_select(0, index), chosen_P, most))
        return Sampled(tokens_S, status_S, wants_P, found)

    def _rows_of(self, slots_S: I64, positions_S: I64, traits_S: NDArray[np.uint8]) -> DeviceRows:
        known = self.rows
        low_S, high_S = noise.row_keys(known.seed[slots_S], positions_S)
        is_random_S = (traits_S & Trait.RANDOM) != 0
        return DeviceRows(
            *self._upload(
                np.where(is_random_S, known.temperature[slots_S], np.float32(0)),
                known.log_min_p[slots_S],
                known.top_k[slots_S].astype(np.int32),
                known.top_p[slots_S],
                low_S,
                high_S,
            )
        )

    def _punish(self, x_rV: Tensor, slots_r: I64, positions_r: I64, punished: I64) -> None:
        rows, slots, known = self.rows, slots_r[punished], positions_r[punished]
        if self._counts_WV is None:  # few requests have penalties
            self._counts_WV = new_counts(COUNTED_ROWS, self._vocab_size, self._device)
        integers = (column.astype(np.int32) for column in (punished, slots, known, rows.num_prompt[slots]))
        strengths = rows.repetition[slots], rows.frequency[slots], rows.presence[slots]
        on_device = PenaltyRows(*self._upload(*integers, *strengths))
        penalise(x_rV, self._tables.tokens, on_device, int(known.max()), self._counts_WV)
