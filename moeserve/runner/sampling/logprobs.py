"""Logprobs of chosen and likely tokens, from the raw logits, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.messages import Logprobs
from moeserve.runner.sampling.noise import LANES

CHUNK_ELEMENTS = 1 << 22  # most logits that are turned into logprobs at once


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """P rows, each a chosen token and the n likeliest in order: on the device, before it becomes messages."""

    ids_PN: Tensor  # int64 [P, 1 + n], the chosen token first
    values_PN: Tensor  # float32
    rank_P: Tensor  # int64: number of tokens at least as likely as the chosen one


def logprob_rows(logits_PV: Tensor, chosen_P: Tensor, n: int) -> LogprobRows:
    """Returns log-softmax of raw logits at the chosen tokens (int64) and the n likeliest, in chunks of rows."""
    step = max(1, CHUNK_ELEMENTS // logits_PV.shape[1])
    parts = [_logprob_rows(logits_PV[i : i + step], chosen_P[i : i + step], n) for i in range(0, len(chosen_P), step)]
    return join(parts)


def join(parts: Sequence[LogprobRows]) -> LogprobRows:
    """Returns the rows of all parts, which have as many columns each."""
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
    rank_P = (logits_PV >= logits_PV.gather(1, chosen_P1)).sum(dim=-1)
    ids_PN = torch.cat([chosen_P1, likeliest(logprobs_PV, n)], 1)
    return LogprobRows(ids_PN, logprobs_PV.gather(1, ids_PN), rank_P)


def likeliest(x_PV: Tensor, n: int) -> Tensor:
    """Returns the ids of the n largest values of each row, best first, equal ones by id: int64 [P, min(n, V)].

    torch's `topk` picks among equal values as it likes, by n among others; half-precision logits are full of them.
    [[1, 7, 7, 0]], 2 -> [[1, 2]]
    """
    rows, width = x_PV.shape
    n = min(n, width)
    if -(-width // LANES) <= n:
        return _ordered_topk(x_PV, torch.arange(width, device=x_PV.device), n)
    x_PV = torch.nn.functional.pad(x_PV, (0, -width % LANES), value=float("-inf"))
    x_PBL = x_PV.view(rows, -1, LANES)
    # Each block before the one of a token that is in has a better token: its maximum. So n blocks are enough.
    blocks_Pn = _ordered_topk(x_PBL.amax(dim=-1), torch.arange(x_PBL.shape[1], device=x_PV.device), n)
    ids_PnL = blocks_Pn.unsqueeze(-1) * LANES + torch.arange(LANES, device=x_PV.device)
    ids_PW = ids_PnL.view(rows, -1)
    return ids_PW.gather(1, _ordered_topk(x_PV.gather(1, ids_PW), ids_PW, n))


def _ordered_topk(x_PW: Tensor, ids_PW: Tensor, n: int) -> Tensor:
    """Returns the columns of each row's n largest (value, -id)."""
    # A float's bits order as an integer, once negative ones flip.
    bits_PW = (x_PW + 0.0).view(torch.int32)
    keys_PW = (bits_PW ^ ((bits_PW >> 31) & 0x7FFFFFFF)).long() << 32
    return (keys_PW - ids_PW).topk(n, dim=-1).indices


def to_messages(
    ids_PN: NDArray[np.int64], values_PN: NDArray[np.float32], rank_P: NDArray[np.int64], counts: Sequence[int]
) -> list[Logprobs]:
    """Returns a message for each row: row i with its counts[i] likeliest tokens."""
    return [
        Logprobs(ids[: 1 + n], values[: 1 + n], rank)
        for ids, values, rank, n in zip(ids_PN.tolist(), values_PN.tolist(), rank_P.tolist(), counts, strict=True)
    ]
