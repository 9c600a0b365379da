"""The task that samples the next tokens of requests from hidden states.

S: rows that sample. N: the tokens at which they sample: the last token of each row, and the token
before each of its drafts. P: values of logprobs or digests. V: vocabulary.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.engine.plan import I32, NewRequest, StepPlan, StepResult, TaskOutput, ranges
from moeserve.models.decoder import Decoder
from moeserve.runner.sampling.constraints import Constraints, StepMasks
from moeserve.runner.sampling.logprobs import (
    LogprobRows,
    PromptRows,
    prompt_logprobs,
    prompt_messages,
    to_messages,
)
from moeserve.runner.sampling.rows import Trait
from moeserve.runner.sampling.sampler import Sampled, Sampler, Status
from moeserve.runner.speculation.base import Verified, count_accepted
from moeserve.runner.tables import I64, HostRows, Tables, Upload
from moeserve.runner.tasks import Arrays, ComputedStep, RowTask, TaskOutputs

T = TypeVar("T")


class SampleTask(RowTask):
    """Samples tokens, and writes them to the tables, where the next step reads them."""

    def __init__(
        self,
        model: Decoder,
        sampler: Sampler,
        constraints: Constraints,
        tables: Tables,
        upload: Upload,
    ) -> None:
        # on_logits(plan, logits_NV): called with the raw logits of each step, for tests.
        self.on_logits: Callable[[StepPlan, Tensor], None] | None = None
        self._model = model
        self._sampler = sampler
        self._constraints = constraints
        self._tables = tables
        self._upload = upload
        self._masks: StepMasks | None = None  # masks of the step between `begin` and `run`

    def add(self, request: NewRequest) -> str | None:
        reason = self._sampler.add(request)
        self._constraints.add(request)
        return reason

    def refuse(self, slot: int) -> None:
        self._sampler.rows.refuse(slot)

    def begin(self, plan: StepPlan, rows: HostRows, drafts: Tensor | None) -> None:
        self._masks = None
        if not self._constraints.active:
            return
        slots_S = plan.slots_R[rows.sampling_rows_S]
        known_S = (plan.starts_R + plan.counts_R)[rows.sampling_rows_S]
        if drafts is None or rows.num_drafts_S is None:
            self._masks = self._constraints.begin(slots_S, known_S)
            return
        drafts_by_row = np.split(drafts.cpu().numpy(), rows.num_drafts_S.cumsum()[:-1])
        self._masks = self._constraints.begin(slots_S, known_S - rows.num_drafts_S, drafts_by_row)

    def rows(self, plan: StepPlan) -> I64:
        has_prompt_logprobs_R = (
            self._sampler.rows.traits[plan.slots_R] & Trait.PROMPT_LOGPROBS
        ) > 0
        return np.flatnonzero(plan.samples_R | has_prompt_logprobs_R)

    def run(self, step: ComputedStep) -> "SampleOutputs":
        plan = step.plan
        rows = step.rows
        masks = self._masks
        self._masks = None
        outputs = SampleOutputs(plan.slots_R[rows.sampling_rows_S].astype(np.int64), masks)
        scored_rows = self._sampler.rows.having(Trait.PROMPT_LOGPROBS, plan.slots_R)
        if len(scored_rows):
            outputs.prompt = prompt_logprobs(
                scored_rows,
                plan,
                rows,
                self._sampler.rows,
                self._tables,
                self._upload,
                step.hidden_TD,
                self._model.logits,
            )
        slots_S = outputs.slots_S
        if not len(slots_S):
            return outputs
        slots_N = (
            slots_S if rows.num_drafts_S is None else np.repeat(slots_S, rows.num_drafts_S + 1)
        )
        positions_N = rows.positions_T[rows.logits_indices_N] + 1
        logits_NV = self._model.logits(step.hidden_TD.index_select(0, step.inputs.logits_indices_N))
        if self.on_logits is not None:
            self.on_logits(plan, logits_NV)
        outputs.sampled = self._sampler.sample(
            logits_NV, slots_N, positions_N, None if masks is None else masks.result()
        )
        tokens_N = outputs.sampled.tokens_S
        (offsets_N,) = self._upload(self._tables.token_offsets(slots_N, positions_N))
        if rows.num_drafts_S is not None:
            outputs.num_drafts_S = rows.num_drafts_S
            is_right_N = self._tables.arena.index_select(0, offsets_N) == tokens_N
            outputs.accepted_S = count_accepted(is_right_N, rows.num_drafts_S, self._upload)
        self._tables.append(offsets_N, tokens_N)
        return outputs

    def verified(self, step: ComputedStep, accepted_S: Tensor | None) -> Verified:
        """Return a step for the proposer. accepted_S: see `SampleOutputs`."""
        num_drafts_S = step.rows.num_drafts_S
        last_S = step.inputs.logits_indices_N
        if accepted_S is None or num_drafts_S is None:
            accepted_S = torch.ones_like(last_S)
        else:
            (first_S,) = self._upload((num_drafts_S + 1).cumsum() - num_drafts_S - 1)
            last_S = last_S.index_select(0, first_S) + accepted_S - 1
        slots_S = step.plan.slots_R[step.rows.sampling_rows_S].astype(np.int64)
        return Verified(
            plan=step.plan,
            rows=step.rows,
            step=step.inputs,
            hidden_TD=step.hidden_TD,
            slots_S=slots_S,
            accepted_S=accepted_S,
            last_S=last_S,
            aux_TA=step.aux_TA,
        )


@dataclass(slots=True)
class SampleOutputs(TaskOutputs):
    """The tokens of a step on the device, and facts about its rows on the host.

    The facts are stored at launch, because a later step may reuse a slot before this step's result
    is collected.
    """

    slots_S: I64
    masks: StepMasks | None
    sampled: Sampled | None = None  # None: no row samples
    prompt: PromptRows | None = None
    num_drafts_S: I32 | None = None  # number of drafts of each row; None: there are no drafts
    accepted_S: Tensor | None = None  # int64: sampled tokens of each row that are kept

    @property
    def tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        if self.sampled is not None:
            tensors["tokens"] = self.sampled.tokens_S
            tensors["status"] = self.sampled.status_S
            if self.sampled.logprobs is not None:
                tensors |= _named("logprobs", self.sampled.logprobs)
            for i, logits_V in enumerate(self.sampled.logits_to_digest):
                tensors[f"logits {i}"] = logits_V
        if self.accepted_S is not None:
            tensors["accepted"] = self.accepted_S
        if self.prompt is not None:
            tensors |= _named("prompt", self.prompt.rows)
        return tensors

    def watch_wait(self) -> AbstractContextManager[None]:
        return nullcontext() if self.masks is None else self.masks.lost_by_errors()

    def add_to(self, result: StepResult, fetched: Arrays) -> StepResult:
        failed = dict(result.failed)
        kept_N = None
        if self.sampled is not None:
            tokens_N, counts_S, kept_N = self._kept_tokens(self.sampled, fetched, failed)
            result = replace(result, tokens_N=tokens_N, counts_S=counts_S)
        outputs = self._other_outputs(fetched, kept_N, failed)
        result = replace(result, failed=failed, outputs=outputs)
        return result if self.masks is None else self._advance_grammars(result, self.masks)

    def _kept_tokens(
        self, sampled: Sampled, fetched: Arrays, failed: dict[int, str]
    ) -> tuple[I32, I32 | None, I64 | None]:
        """Return the kept tokens, their counts by row, and their indices among the N sampled ones.

        Without drafts, each row has one token, and counts and indices are None. Rows without a
        token are added to `failed`.
        """
        tokens_N = fetched["tokens"]
        counts_S = fetched["accepted"].astype(np.int32) if "accepted" in fetched else None
        status_N = fetched["status"]
        if status_N.any() or sampled.failures:
            reasons = {n: Status.MESSAGES[status_N[n]] for n in status_N.nonzero()[0].tolist()}
            reasons |= sampled.failures
            tokens_N, counts_S = self._mark_failed(reasons, tokens_N, counts_S, failed)
        if counts_S is None or self.num_drafts_S is None:
            return tokens_N, None, None
        first_S = (self.num_drafts_S + 1).cumsum() - self.num_drafts_S - 1
        kept_N = ranges(first_S, counts_S)
        return tokens_N[kept_N], counts_S, kept_N

    def _other_outputs(
        self, fetched: Arrays, kept_N: I64 | None, failed: dict[int, str]
    ) -> dict[int, TaskOutput]:
        """Return the outputs of requests besides tokens, by slot.

        Requests whose prompt logprobs are not finite are added to `failed`.
        """
        outputs: dict[int, TaskOutput] = {}
        sampled = self.sampled
        if sampled is not None and sampled.logprobs is not None:
            rows = to_messages(sampled.logprob_counts, *_values(fetched, "logprobs"))
            for slot, logprobs in self._by_slot(sampled.logprob_rows_P, rows, kept_N).items():
                outputs.setdefault(slot, TaskOutput()).logprobs = logprobs
        if sampled is not None and sampled.logits_to_digest:
            num_digests = len(sampled.logits_to_digest)
            hashes = [digest(fetched[f"logits {i}"]) for i in range(num_digests)]
            for slot, digests in self._by_slot(sampled.digest_rows_Q, hashes, kept_N).items():
                outputs.setdefault(slot, TaskOutput()).digests = digests
        if self.prompt is not None:
            messages, not_finite = prompt_messages(self.prompt.spans, *_values(fetched, "prompt"))
            for slot, message in messages.items():
                outputs.setdefault(slot, TaskOutput()).prompt_logprobs = message
            for slot in not_finite:
                failed.setdefault(slot, Status.MESSAGES[Status.NOT_FINITE])
        return {slot: output for slot, output in outputs.items() if slot not in failed}

    def _advance_grammars(self, result: StepResult, masks: StepMasks) -> StepResult:
        """Advance the grammars of the step by its tokens."""
        complete, failed = masks.accept(tokens_by_row(result, len(self.slots_S)))
        return replace(result, complete=complete, failed=failed | result.failed)

    def _mark_failed(
        self,
        reasons: Mapping[int, str],
        tokens_N: I32,
        counts_S: I32 | None,
        failed: dict[int, str],
    ) -> tuple[I32, I32 | None]:
        """Add rows without a token to `failed`. Return the tokens, with -1 in those rows, and the
        counts.

        If sampling failed after an accepted draft, the count ends before that token. The next step
        samples at that position again, and fails.

        reasons: error messages by index (of N).
        """
        tokens_N = tokens_N.copy()
        lengths_S = (
            np.ones(len(self.slots_S), np.int32)
            if self.num_drafts_S is None
            else self.num_drafts_S + 1
        )
        rows_N = np.repeat(np.arange(len(lengths_S)), lengths_S)
        first_S = lengths_S.cumsum() - lengths_S
        for n, reason in sorted(reasons.items(), reverse=True):
            row = rows_N[n]
            if n == first_S[row]:
                tokens_N[n] = -1
                failed.setdefault(int(self.slots_S[row]), reason)
            if counts_S is not None:
                counts_S[row] = min(counts_S[row], max(1, n - first_S[row]))
        return tokens_N, counts_S

    def _by_slot(self, rows_P: I64, values: Sequence[T], kept_N: I64 | None) -> dict[int, list[T]]:
        """Group values by slot, without those of rejected tokens. rows_P: their indices (of N)."""
        slots_N = (
            self.slots_S
            if self.num_drafts_S is None
            else np.repeat(self.slots_S, self.num_drafts_S + 1)
        )
        kept = None if kept_N is None else set(kept_N.tolist())
        by_slot: dict[int, list[T]] = {}
        for n, value in zip(rows_P.tolist(), values, strict=True):
            if kept is None or n in kept:
                by_slot.setdefault(int(slots_N[n]), []).append(value)
        return by_slot


def _named(prefix: str, rows: LogprobRows) -> dict[str, Tensor]:
    return {f"{prefix} {name}": tensor for name, tensor in rows._asdict().items()}


def _values(fetched: Arrays, prefix: str) -> list[NDArray[Any]]:
    return [fetched[f"{prefix} {name}"] for name in LogprobRows._fields]


def digest(logits_V: NDArray[np.float32]) -> bytes:
    """Return the SHA-256 of a row of logits as little-endian fp32."""
    return hashlib.sha256(np.ascontiguousarray(logits_V, "<f4").data).digest()


def tokens_by_row(result: StepResult, num_rows: int) -> list[I32]:
    """Return the tokens of each row that samples; a failed row has none."""
    if not num_rows:
        return []
    counts_S = np.ones(num_rows, np.int32) if result.counts_S is None else result.counts_S
    tokens_S = np.split(result.tokens_N, counts_S.cumsum()[:-1])
    if result.failed:
        return [tokens[tokens >= 0] for tokens in tokens_S]
    return tokens_S
