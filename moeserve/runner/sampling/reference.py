"""The sampler in plain torch, which defines the results of the others. It never waits for the
device.

Ties at a cutoff are kept, so that no result depends on the order of equal logits.

r: rows. V: vocabulary, padded to a multiple of LANES.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import moeserve.runner.sampling.noise as noise
from moeserve.runner.sampling.noise import LANES
from moeserve.runner.sampling.rows import Trait, row_keys
from moeserve.runner.sampling.rules import NEG_INF
from moeserve.runner.sampling.sampler import Failures, Masks, Sampler, Status
from moeserve.runner.tables import I64, Tables, Upload

# Logits per chunk, so that they and their temporaries stay in a core's cache.
CHUNK_ELEMENTS = 1 << 18


class ReferenceSampler(Sampler):
    """Samples in chunks of similar rows, which are copied."""

    def __init__(self, vocab_size: int, tables: Tables, upload: Upload) -> None:
        super().__init__(vocab_size, tables, upload)
        self._chunk_rows = max(1, CHUNK_ELEMENTS // noise.padded(vocab_size))
        self.gumbel = noise.Gumbel(vocab_size, self._device)

    def _choose(
        self, logits_SV: Tensor, slots_S: I64, positions_S: I64, masks: Masks | None
    ) -> tuple[Tensor, Tensor, Failures]:
        tokens_S, peak_S, status_S, rows_left = self._choose_simple_rows(
            logits_SV, slots_S, positions_S, masks
        )
        failures: Failures = {}
        for chunk in self._chunks(rows_left, slots_S):
            (index,) = self._upload(chunk)
            slots_r = slots_S[chunk]
            positions_r = positions_S[chunk]
            x_rV = logits_SV.index_select(0, index)
            peak_r = peak_S.index_select(0, index)
            if x_rV.shape[1] % LANES:
                x_rV = torch.nn.functional.pad(x_rV, (0, -x_rV.shape[1] % LANES), value=NEG_INF)
            if len(self.rows.having(Trait.CHANGED, slots_r)):
                chunk_failures = self._modify_logits(
                    x_rV, slots_r, positions_r, None if masks is None else masks.among(chunk)
                )
                failures |= {int(chunk[i]): why for i, why in chunk_failures.items()}
                peak_r, tokens_S[index] = self._argmax(x_rV)
                status_r = status_S.index_select(0, index)
                nothing_r = (peak_r == NEG_INF) & (status_r == Status.FINE)
                status_S[index] = status_r.masked_fill_(nothing_r, Status.NOTHING_ALLOWED)
            if self.rows.traits[slots_r[0]] & Trait.RANDOM:
                (temperature,) = self._upload(self.rows.temperature[slots_r])
                x_rV.sub_(peak_r.unsqueeze(1)).div_(temperature.unsqueeze(1))
                tokens_S[index] = self._draw(x_rV, slots_r, positions_r)
        return tokens_S.masked_fill_(status_S != Status.FINE, 0).int(), status_S, failures

    def _choose_simple_rows(
        self, logits_SV: Tensor, slots_S: I64, positions_S: I64, masks: Masks | None
    ) -> tuple[Tensor, Tensor, Tensor, I64]:
        """Choose the tokens of rows that need no work besides.

        Return (tokens int64, maximum logits, `Status`) of all rows, and the rows, in order, whose
        tokens `_choose` still has to choose.
        """
        # The maximum of a row with a NaN is NaN. NaN - NaN and infinity - infinity are NaN.
        peak_S, tokens_S = self._argmax(logits_SV)
        status_S = ((peak_S - peak_S) != 0).to(torch.uint8).mul_(Status.NOT_FINITE)
        return tokens_S, peak_S, status_S, self.rows.having(Trait.RANDOM | Trait.CHANGED, slots_S)

    def _chunks(self, rows: I64, slots_S: I64) -> Iterator[I64]:
        """Yield chunks of rows: greedy rows with changed logits, then random rows, then random rows
        with a cutoff.
        """
        if not len(rows):
            return
        traits_r = self.rows.traits[slots_S[rows]]
        is_random_r, is_cut_r = ((traits_r & trait) != 0 for trait in (Trait.RANDOM, Trait.CUT))
        for is_of_kind_r in (~is_random_r, is_random_r & ~is_cut_r, is_cut_r):
            rows_of_kind = rows[is_of_kind_r]
            # Larger chunks with a cutoff, because the native sampler first narrows these rows.
            max_rows = 4 * self._chunk_rows if is_of_kind_r is is_cut_r else self._chunk_rows
            for start in range(0, len(rows_of_kind), max_rows):
                yield rows_of_kind[start : start + max_rows]

    def _draw(self, x_rV: Tensor, slots_r: I64, positions_r: I64) -> Tensor:
        """Filter rows, whose maximum is 0, and return the drawn tokens. May write to x_rV."""
        self._filter(x_rV, slots_r)
        low_r, high_r = self._upload(*row_keys(self.rows.seed[slots_r], positions_r))
        return self._argmax(x_rV.add_(self.gumbel(low_r, high_r)))[1]

    def _filter(self, x_rV: Tensor, slots_r: I64) -> None:
        """Set tokens that may not be drawn to -inf. The maximum of each row stays."""
        rows = self.rows
        log_min_p, top_k, top_p = self._upload(
            rows.log_min_p[slots_r], rows.top_k[slots_r], rows.top_p[slots_r]
        )
        if len(rows.having(Trait.MIN_P, slots_r)):
            keep_min_p(x_rV, log_min_p)
        limited = rows.having(Trait.TOP_K, slots_r)
        if len(limited):
            keep_top_k(x_rV, top_k, int(rows.top_k[slots_r[limited]].max()))
        if len(rows.having(Trait.TOP_P, slots_r)):
            keep_top_p(x_rV, top_p, self._top_p_cutoff)

    def _mask(self, x_rV: Tensor, rows_C: Tensor, bits_CW: Tensor) -> None:
        apply_bitmask(x_rV, rows_C, bits_CW)

    def _penalise(self, x_rV: Tensor, rows: I64, slots: I64, known: I64) -> None:
        params = self.rows
        index, slot, *lengths = self._upload(rows, slots, known, params.num_prompt[slots])
        strengths = self._upload(
            params.repetition[slots], params.frequency[slots], params.presence[slots]
        )
        history_pL = self._tables.tokens[:, : int(known.max())].index_select(0, slot).long()
        x_pV = x_rV.index_select(0, index)
        apply_penalties(x_pV, history_pL, *lengths, *strengths)
        x_rV.index_copy_(0, index, x_pV)

    @staticmethod
    def _argmax(x_rV: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maximum of each row and its lowest index. NaN counts as the largest."""
        peak_r, index_r = x_rV.max(dim=-1)
        return peak_r, index_r

    @staticmethod
    def _top_p_cutoff(probs_rV: Tensor, top_p_r: Tensor) -> Tensor:
        return top_p_cutoff(probs_rV, top_p_r)


def apply_bitmask(x_rV: Tensor, rows_C: Tensor, bits_CW: Tensor) -> None:
    """Set tokens whose bit is 0 to -inf in the given rows (int64), in place.

    bits_CW: int32; bit v % 32 of word v // 32 is token v. W * 32 is at least V.

    x [[1, 2, 3]], rows [0], bits [[0b101]] -> [[1, -inf, 3]]
    """
    allowed_CWb = (
        bits_CW.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=x_rV.device)
    ) & 1
    banned_CV = allowed_CWb.view(len(bits_CW), -1)[:, : x_rV.shape[1]] == 0
    x_rV.index_copy_(0, rows_C, x_rV.index_select(0, rows_C).masked_fill_(banned_CV, NEG_INF))


def keep_min_p(x_rV: Tensor, log_min_p_r: Tensor) -> None:
    """Drop tokens that are less likely than min_p times the likeliest.

    log_min_p_r: -inf turns the filter off.
    """
    x_rV.masked_fill_(x_rV < log_min_p_r.unsqueeze(1), NEG_INF)


def keep_top_k(x_rV: Tensor, k_r: Tensor, largest_k: int) -> None:
    """Drop tokens below the k-th largest logit of their row. Equal ones stay.

    k_r: int64 >= 1. V turns the filter off.
    largest_k: the largest k of rows that use top-k.
    """
    largest_k = min(largest_k, x_rV.shape[1])
    top_rK = x_rV.topk(largest_k, dim=-1).values
    kth_r = top_rK.gather(1, (k_r - 1).clamp_(max=largest_k - 1).unsqueeze(1))
    kth_r = kth_r.masked_fill(k_r.unsqueeze(1) > largest_k, NEG_INF)
    x_rV.masked_fill_(x_rV < kth_r, NEG_INF)


def keep_top_p(x_rV: Tensor, top_p_r: Tensor, cutoff: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Drop the least likely tokens of each row that are not needed to reach top_p. Ties stay.

    top_p_r: 1 turns the filter off.
    cutoff: `top_p_cutoff`, or a faster function with the same results.
    """
    probs_rV = torch.softmax(x_rV, dim=-1)
    # top_p = 1 is handled separately, because rounded sums may or may not reach 1.
    cutoff_r = torch.where(top_p_r < 1, cutoff(probs_rV, top_p_r.where(top_p_r < 1, 0.0)), -1.0)
    x_rV.masked_fill_(probs_rV < cutoff_r.unsqueeze(1), NEG_INF)


def top_p_cutoff(probs_rV: Tensor, top_p_r: Tensor) -> Tensor:
    """Return the smallest probability that top-p keeps in each row. It keeps the likeliest tokens
    until their sum reaches top_p.

    probs [[0.2, 0.5, 0.3]], top_p [0.6] -> [0.3]
    """
    sorted_rV = probs_rV.sort(dim=-1, descending=True).values
    num_short_r = (sorted_rV.cumsum(dim=-1) < top_p_r.unsqueeze(1)).sum(dim=-1)
    return sorted_rV.gather(1, num_short_r.clamp_(max=probs_rV.shape[1] - 1).unsqueeze(1)).squeeze(
        1
    )


def apply_penalties(
    x_rV: Tensor,
    history_rL: Tensor,
    known_r: Tensor,
    num_prompt_r: Tensor,
    repetition_r: Tensor,
    frequency_r: Tensor,
    presence_r: Tensor,
) -> None:
    """Apply penalties to logits, in place.

    - Repetition: positive logits of all tokens in the history are divided, negative ones
      multiplied.
    - Frequency: subtracted once for each occurrence in the answer.
    - Presence: subtracted once if the token occurs in the answer.

    The history is the device's token table. So penalties are right although the host does not know
    the last tokens yet, and also after a preemption or a replay.

    history_rL: int64 token ids. Row i has known_r[i] of them (the rest is arbitrary), and the first
    num_prompt_r[i] are the prompt.
    """
    index_L = torch.arange(history_rL.shape[1], device=x_rV.device)
    known_rL = index_L < known_r.unsqueeze(1)
    # Replace arbitrary entries by the first token: writing the same value twice is harmless.
    ids_rL = torch.where(known_rL, history_rL, history_rL[:, :1])
    counts_rV = torch.zeros(x_rV.shape, dtype=torch.int32, device=x_rV.device)
    in_answer_rL = known_rL & (index_L >= num_prompt_r.unsqueeze(1))
    counts_rV.scatter_add_(1, ids_rL, in_answer_rL.int())
    counts_rL = counts_rV.gather(1, ids_rL)
    x_rL = x_rV.gather(1, ids_rL)
    repetition_r1 = repetition_r.unsqueeze(1)
    x_rL = torch.where(x_rL > 0, x_rL / repetition_r1, x_rL * repetition_r1)
    x_rL -= frequency_r.unsqueeze(1) * counts_rL
    x_rL -= presence_r.unsqueeze(1) * (counts_rL > 0)
    x_rV.scatter_(1, ids_rL, x_rL)
