"""Logprobs of chosen and likely tokens, from the raw logits, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.messages import Logprobs

CHUNK_ELEMENTS = 1 << 22  # most logits that are turned into logprobs at once


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """P rows, each a chosen token and the n likeliest tokens: what the device computes, before it becomes messages."""

    ids_PN: Tensor  # int64 [P, 1 + n], the chosen token first
    values_PN: Tensor  # float32
    rank_P: Tensor  # int64: number of tokens at least as likely as the chosen one


def logprob_rows(logits_PV: Tensor, chosen_P: Tensor, n: int) -> LogprobRows:
    """Raw log-softmax at the chosen tokens (int64) and the n most likely ones, a bounded number of rows at a time."""
    step = max(1, CHUNK_ELEMENTS // logits_PV.shape[1])
    parts = [_logprob_rows(logits_PV[i : i + step], chosen_P[i : i + step], n) for i in range(0, len(chosen_P), step)]
    return join(parts)


def join(parts: Sequence[LogprobRows]) -> LogprobRows:
    if len(parts) == 1:
        return parts[0]
    return LogprobRows(
        torch.cat([part.ids_PN for part in parts]),
        torch.cat([part.values_PN for part in parts]),
        torch.cat([part.rank_P for part in parts]),
    )


def _logprob_rows(logits_PV: Tensor, chosen_P: Tensor, n: int) -> LogprobRows:
    logprobs_PV = torch.log_softmax(logits_PV.float(), dim=-1)
    chosen_P1 = chosen_P.unsqueeze(1)
    value_P1 = logprobs_PV.gather(1, chosen_P1)
    rank_P = (logits_PV >= logits_PV.gather(1, chosen_P1)).sum(dim=-1)
    top = logprobs_PV.topk(min(n, logprobs_PV.shape[1]), dim=-1)
    return LogprobRows(torch.cat([chosen_P1, top.indices], 1), torch.cat([value_P1, top.values], 1), rank_P)


def to_messages(
    ids_PN: NDArray[np.int64], values_PN: NDArray[np.float32], rank_P: NDArray[np.int64], counts: Sequence[int]
) -> list[Logprobs]:
    """Row i with its counts[i] likeliest tokens, equally likely ones by id."""
    order_PN = np.lexsort((ids_PN[:, 1:], -values_PN[:, 1:]), axis=-1)
    ids_PN[:, 1:] = np.take_along_axis(ids_PN[:, 1:], order_PN, axis=-1)
    values_PN[:, 1:] = np.take_along_axis(values_PN[:, 1:], order_PN, axis=-1)
    return [
        Logprobs(ids[: 1 + n], values[: 1 + n], rank)
        for ids, values, rank, n in zip(ids_PN.tolist(), values_PN.tolist(), rank_P.tolist(), counts, strict=True)
    ]
