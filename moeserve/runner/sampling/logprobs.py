"""Logprobs of chosen and of the likeliest tokens, from raw logits, in bounded memory."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.engine.plan import StepPlan
from moeserve.messages import Logprobs, PromptLogprobs
from moeserve.runner.sampling.noise import LANES
from moeserve.runner.sampling.rows import SamplingRows
from moeserve.runner.tables import I64, HostRows, Tables, Upload

CHUNK_ELEMENTS = 1 << 22  # the most logits that are converted to logprobs at once
PROMPT_ELEMENTS = 1 << 24  # the most logits of prompt positions that are computed at once


class LogprobRows(NamedTuple):
    """The logprobs of P rows on the device: of the chosen token, then of the n likeliest tokens."""

    ids_PN: Tensor  # int64 [P, 1 + n], the chosen token first
    values_PN: Tensor  # float32
    rank_P: Tensor  # int64: the number of tokens that are at least as likely as the chosen one


def logprob_rows(logits_PV: Tensor, chosen_P: Tensor, n: int) -> LogprobRows:
    """Return the log-softmax of raw logits at the chosen tokens (int64) and the n likeliest ones.

    Chunks of rows bound the memory.
    """
    chunk_rows = max(1, CHUNK_ELEMENTS // logits_PV.shape[1])
    chunks = [
        _logprob_rows(logits_PV[i : i + chunk_rows], chosen_P[i : i + chunk_rows], n)
        for i in range(0, len(chosen_P), chunk_rows)
    ]
    return _concatenated(chunks)


def _concatenated(chunks: Sequence[LogprobRows]) -> LogprobRows:
    if len(chunks) == 1:
        return chunks[0]
    return LogprobRows(*map(torch.cat, zip(*chunks, strict=True)))


def _logprob_rows(logits_PV: Tensor, chosen_P: Tensor, n: int) -> LogprobRows:
    logprobs_PV = torch.log_softmax(logits_PV.float(), dim=-1)
    chosen_P1 = chosen_P.unsqueeze(1)
    rank_P = (logits_PV >= logits_PV.gather(1, chosen_P1)).sum(dim=-1)
    ids_PN = torch.cat([chosen_P1, likeliest(logprobs_PV, n)], 1)
    return LogprobRows(ids_PN, logprobs_PV.gather(1, ids_PN), rank_P)


def likeliest(x_PV: Tensor, n: int) -> Tensor:
    """Return the ids of the n largest values of each row, int64 [P, min(n, V)]: the largest first,
    equal values by id.

    torch's `topk` chooses arbitrarily among equal values, which are common in half precision.

    [[1, 7, 7, 0]], 2 -> [[1, 2]]
    """
    rows, width = x_PV.shape
    n = min(n, width)
    if -(-width // LANES) <= n:
        return _ordered_topk(x_PV, torch.arange(width, device=x_PV.device), n)
    x_PV = torch.nn.functional.pad(x_PV, (0, -width % LANES), value=float("-inf"))
    x_PBL = x_PV.view(rows, -1, LANES)
    # The n blocks with the largest maxima are enough: a token in any other block has n better
    # tokens, which are these maxima.
    blocks_Pn = _ordered_topk(
        x_PBL.amax(dim=-1), torch.arange(x_PBL.shape[1], device=x_PV.device), n
    )
    ids_PnL = blocks_Pn.unsqueeze(-1) * LANES + torch.arange(LANES, device=x_PV.device)
    ids_PW = ids_PnL.view(rows, -1)
    return ids_PW.gather(1, _ordered_topk(x_PV.gather(1, ids_PW), ids_PW, n))


def _ordered_topk(x_PW: Tensor, ids_PW: Tensor, n: int) -> Tensor:
    """Return the columns of the n largest (value, -id) of each row."""
    # The bits of floats have the order of integers, after those of negative ones are inverted.
    bits_PW = (x_PW + 0.0).view(torch.int32)
    keys_PW = (bits_PW ^ ((bits_PW >> 31) & 0x7FFFFFFF)).long() << 32
    return (keys_PW - ids_PW).topk(n, dim=-1).indices


def to_messages(
    counts: Sequence[int],
    ids_PN: NDArray[np.int64],
    values_PN: NDArray[np.float32],
    rank_P: NDArray[np.int64],
) -> list[Logprobs]:
    """Return a message for each row, with its counts[i] likeliest tokens."""
    return [
        Logprobs(ids[: 1 + n], values[: 1 + n], rank)
        for ids, values, rank, n in zip(
            ids_PN.tolist(), values_PN.tolist(), rank_P.tolist(), counts, strict=True
        )
    ]


class PromptSpan(NamedTuple):
    """Consecutive prompt tokens of a request."""

    slot: int
    start: int  # position of the first one
    num_tokens: int
    alternatives: int  # likeliest tokens to report for each


class PromptRows(NamedTuple):
    """The logprobs of the prompt tokens of several requests, span after span."""

    rows: LogprobRows
    spans: list[PromptSpan]


def prompt_logprobs(
    scored_rows: I64,
    plan: StepPlan,
    host: HostRows,
    rows: SamplingRows,
    tables: Tables,
    upload: Upload,
    hidden_TD: Tensor,
    logits: Callable[[Tensor], Tensor],
) -> PromptRows | None:
    """Return the logprobs of the prompt tokens that this step predicts.

    Position p predicts token p + 1. The token is read from the token table, because it may be in
    the next prefill chunk.

    scored_rows: the plan's rows whose requests want prompt logprobs.
    """
    spans: list[PromptSpan] = []
    tokens_P: list[I64] = []
    targets_P: list[I64] = []
    for row in scored_rows.tolist():
        slot = int(plan.slots_R[row])
        start = int(plan.starts_R[row])
        end = min(start + int(plan.counts_R[row]), int(rows.num_prompt[slot]) - 1)
        if end <= start:
            continue
        spans.append(PromptSpan(slot, start + 1, end - start, int(rows.prompt_logprobs[slot])))
        tokens_P.append(np.arange(end - start, dtype=np.int64) + int(host.offsets_R1[row]))
        targets_P.append(tables.token_offsets(np.array([slot]), np.arange(start + 1, end + 1)))
    if not spans:
        return None
    max_alternatives = max(span.alternatives for span in spans)
    token_index, target_index = upload(np.concatenate(tokens_P), np.concatenate(targets_P))
    chosen = tables.arena.index_select(0, target_index).long()
    chunk_rows = max(1, PROMPT_ELEMENTS // rows.vocab_size)
    chunks = [
        logprob_rows(
            logits(hidden_TD.index_select(0, token_index[i : i + chunk_rows])),
            chosen[i : i + chunk_rows],
            max_alternatives,
        )
        for i in range(0, len(chosen), chunk_rows)
    ]
    return PromptRows(_concatenated(chunks), spans)


def prompt_messages(
    spans: Sequence[PromptSpan],
    ids_PN: NDArray[np.int64],
    values_PN: NDArray[np.float32],
    rank_P: NDArray[np.int64],
) -> tuple[dict[int, PromptLogprobs], list[int]]:
    """Return a message for each slot, and the slots whose logprobs are not finite."""
    counts = [span.alternatives for span in spans for _ in range(span.num_tokens)]
    rows = to_messages(counts, ids_PN, values_PN, rank_P)
    messages: dict[int, PromptLogprobs] = {}
    not_finite: list[int] = []
    begin = 0
    for slot, start, count, _ in spans:
        if np.isfinite(values_PN[begin : begin + count, 0]).all():
            messages[slot] = PromptLogprobs(start, rows[begin : begin + count])
        else:
            not_finite.append(slot)
        begin += count
    return messages, not_finite
