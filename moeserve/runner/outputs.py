"""A step's outputs on the device, and the `StepResult` made of them once they are on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moeserve.engine.plan import I32, StepPlan, StepResult
from moeserve.messages import Logprobs, PromptLogprobs
from moeserve.runner.inputs import HostRows
from moeserve.runner.sampling.logprobs import LogprobRows, join, logprob_rows, to_messages
from moeserve.runner.sampling.rows import SamplingRows, Trait
from moeserve.runner.sampling.sampler import Sampled, Status
from moeserve.runner.tables import Tables, Upload
from moeserve.runner.ubatches import Meter

I64 = NDArray[np.int64]
PROMPT_ELEMENTS = 1 << 24  # most logits of prompt positions that are computed at once


@dataclass(frozen=True, slots=True)
class Span:
    """`count` prompt tokens of one request from position `start` on, with `alternatives` each."""

    slot: int
    start: int
    count: int
    alternatives: int


@dataclass(slots=True)
class StepOutputs:
    """Everything that one step computed for the host. Tensors are on the device; the rest is recorded at launch,
    because a later step may have reassigned a slot before this one is collected."""

    step: int
    slots_S: I64
    failed: dict[int, str]
    meter: Meter
    sampled: Sampled | None = None
    logprob_counts: list[int] = field(default_factory=list)  # alternatives asked for, of each row with logprobs
    prompt: LogprobRows | None = None
    spans: list[Span] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        """Returns the tensors to copy to the host, in the order that `to_result` expects."""
        found: list[Tensor] = []
        rows = [self.prompt]
        if self.sampled is not None:
            found += [self.sampled.tokens_S, self.sampled.status_S]
            rows = [self.sampled.logprobs, self.prompt]
        for logprobs in rows:
            if logprobs is not None:
                found += [logprobs.ids_PN, logprobs.values_PN, logprobs.rank_P]
        if isinstance(self.meter.load_LE, Tensor):
            found.append(self.meter.load_LE)
        return found


def prompt_logprobs(
    plan: StepPlan,
    host: HostRows,
    rows: SamplingRows,
    tables: Tables,
    upload: Upload,
    hidden_TD: Tensor,
    logits: Callable[[Tensor], Tensor],
    vocab_size: int,
) -> tuple[LogprobRows | None, list[Span]]:
    """Returns the logprobs of the prompt tokens that this step's positions predict: position p predicts token p + 1.

    The next token comes from the token table, so a chunk's last position needs nothing of the next chunk.
    """
    spans: list[Span] = []
    tokens_P: list[I64] = []
    targets_P: list[I64] = []
    for row in (rows.traits[plan.slots_R] & Trait.PROMPT_LOGPROBS).nonzero()[0].tolist():
        slot, start = int(plan.slots_R[row]), int(plan.starts_R[row])
        end = min(start + int(plan.counts_R[row]), int(rows.num_prompt[slot]) - 1)
        if end <= start:
            continue
        spans.append(Span(slot, start + 1, end - start, int(rows.prompt_logprobs[slot])))
        tokens_P.append(np.arange(end - start, dtype=np.int64) + int(host.offsets_R1[row]))
        targets_P.append(tables.token_offsets(np.array([slot]), np.arange(start + 1, end + 1)))
    if not spans:
        return None, []
    most = max(span.alternatives for span in spans)
    token_index, target_index = upload(np.concatenate(tokens_P), np.concatenate(targets_P))
    chosen = tables.arena.index_select(0, target_index).long()
    at_once = max(1, PROMPT_ELEMENTS // vocab_size)
    parts = [
        logprob_rows(logits(hidden_TD.index_select(0, token_index[i : i + at_once])), chosen[i : i + at_once], most)
        for i in range(0, len(chosen), at_once)
    ]
    return join(parts), spans


def to_result(outputs: StepOutputs, fetched: Sequence[Tensor], device_us: int) -> StepResult:
    """Returns the step's result. fetched: the tensors of `outputs.tensors()`, on the host."""
    arrays = [tensor.numpy() for tensor in fetched]
    meter = outputs.meter
    load_LE = arrays.pop().astype(np.int64) if isinstance(meter.load_LE, Tensor) else meter.load_LE
    comm_us, exposed_us = meter.times_us()
    failed = dict(outputs.failed)
    tokens_S = np.zeros(0, dtype=np.int32)
    logprobs: dict[int, Logprobs] = {}
    if outputs.sampled is not None:
        tokens_S, status_S = arrays[0], arrays[1]
        arrays = arrays[2:]
        if status_S.any() or outputs.sampled.failures:
            tokens_S = _failures(outputs, outputs.sampled, tokens_S, status_S, failed)
        if outputs.sampled.logprobs is not None:
            rows = to_messages(arrays[0], arrays[1], arrays[2], outputs.logprob_counts)
            arrays = arrays[3:]
            slots = outputs.slots_S[outputs.sampled.logprob_rows_P].tolist()
            logprobs = {slot: row for slot, row in zip(slots, rows, strict=True) if slot not in failed}
    prompt = _prompt_messages(outputs, arrays, failed) if outputs.spans else {}
    return StepResult(
        outputs.step,
        tokens_S,
        logprobs,
        prompt,
        failed,
        device_us,
        comm_us,
        exposed_us,
        load_LE if load_LE.size else None,
        meter.events,
    )


def _failures(
    outputs: StepOutputs, sampled: Sampled, tokens_S: I32, status_S: NDArray[np.uint8], failed: dict[int, str]
) -> I32:
    """Adds rows without a token to `failed`; returns the tokens with -1 there."""
    reasons = {row: Status.MESSAGES[status_S[row]] for row in status_S.nonzero()[0].tolist()} | sampled.failures
    tokens_S = tokens_S.copy()
    for row, reason in reasons.items():
        tokens_S[row] = -1
        failed.setdefault(int(outputs.slots_S[row]), reason)
    return tokens_S


def _prompt_messages(
    outputs: StepOutputs, arrays: Sequence[NDArray[Any]], failed: dict[int, str]
) -> dict[int, PromptLogprobs]:
    counts = [span.alternatives for span in outputs.spans for _ in range(span.count)]
    rows = to_messages(arrays[0], arrays[1], arrays[2], counts)
    sent: dict[int, PromptLogprobs] = {}
    begin = 0
    for span in outputs.spans:
        mine = rows[begin : begin + span.count]
        if not np.isfinite(arrays[1][begin : begin + span.count, 0]).all():
            failed.setdefault(span.slot, Status.MESSAGES[Status.NOT_FINITE])
        elif span.slot not in failed:
            sent[span.slot] = PromptLogprobs(span.start, mine)
        begin += span.count
    return sent
