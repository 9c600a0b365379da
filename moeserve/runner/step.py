"""One step on one device: tables, inputs, forward pass and sampling; then its `StepResult`, once
the host has that.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import I32, Agreed, NewRequest, StepPlan, StepResult, ranges
from moeserve.messages import Logprobs, PromptLogprobs
from moeserve.models.decoder import Decoder
from moeserve.models.spec import ModelSpec
from moeserve.ops.inputs import StepInputs
from moeserve.runner.graphs import GraphManager
from moeserve.runner.kv_cache import KVCache
from moeserve.runner.peers import Peers
from moeserve.runner.sampling.constraints import Constraints, StepMasks
from moeserve.runner.sampling.logprobs import (
    PromptRows,
    prompt_logprobs,
    prompt_messages,
    to_messages,
)
from moeserve.runner.sampling.rows import Trait
from moeserve.runner.sampling.sampler import Sampled, Sampler, Status
from moeserve.runner.speculation.base import Proposer, Verified, count_accepted
from moeserve.runner.tables import I64, HostRows, Tables, Upload, prepare_inputs
from moeserve.runner.ubatches import Meter, UBatchRunner

T = TypeVar("T")


@dataclass(slots=True)
class StepOutputs:
    """Everything that one step computed for the host. Tensors are on the device; the rest is
    recorded at launch, because a later step may have reassigned a slot before this one is
    collected."""

    step: int
    slots_S: I64
    failed: dict[int, str]
    meter: Meter
    sampled: Sampled | None = None
    prompt: PromptRows | None = None
    drafts_S: I32 | None = None
    accepted_S: Tensor | None = (
        None  # int64: sampled tokens of each row up to the first wrong draft
    )

    def tensors(self) -> list[Tensor]:
        """Returns the tensors to copy to the host, in the order that `result` expects."""
        found: list[Tensor] = []
        if isinstance(self.meter.load_LE, Tensor):
            found.append(self.meter.load_LE)
        if self.sampled is not None:
            found += [
                self.sampled.tokens_S,
                self.sampled.status_S,
                *(self.sampled.logprobs or ()),
                *self.sampled.raw,
            ]
        if self.accepted_S is not None:
            found.append(self.accepted_S)
        if self.prompt is not None:
            found += self.prompt.rows
        return found

    def result(
        self, fetched: Sequence[Tensor], device_us: int, idle_us: int, drafting_us: int
    ) -> StepResult:
        """Returns the step's result. fetched: the tensors of `tensors()`, on the host."""
        arrays = iter([tensor.numpy() for tensor in fetched])
        load_LE = self.meter.load_LE
        if isinstance(load_LE, Tensor):
            load_LE = next(arrays).astype(np.int64)
        failed = dict(self.failed)
        tokens_N = np.zeros(0, dtype=np.int32)
        counts_S = None
        logprobs: dict[int, list[Logprobs]] = {}
        digests: dict[int, list[bytes]] = {}
        if (sampled := self.sampled) is not None:
            tokens_N = next(arrays)
            status_N = next(arrays)
            of_logprobs = [*islice(arrays, 3)] if sampled.logprobs is not None else None
            raw = [*islice(arrays, len(sampled.raw))]
            kept_N = None
            if self.drafts_S is not None:
                counts_S = next(arrays).astype(np.int32)
            if status_N.any() or sampled.failures:
                tokens_N, counts_S = self._failures(sampled, tokens_N, status_N, counts_S, failed)
            if counts_S is not None and self.drafts_S is not None:
                first_S = (self.drafts_S + 1).cumsum() - self.drafts_S - 1
                kept_N = ranges(first_S, counts_S)
                tokens_N = tokens_N[kept_N]
            if of_logprobs is not None:
                rows = to_messages(sampled.logprob_counts, *of_logprobs)
                logprobs = self._by_slot(sampled.logprob_rows_P, rows, kept_N, failed)
            if raw:
                digests = self._by_slot(sampled.raw_rows_Q, [*map(digest, raw)], kept_N, failed)
        prompt: dict[int, PromptLogprobs] = {}
        if self.prompt is not None:
            prompt, damaged = prompt_messages(self.prompt.spans, *islice(arrays, 3))
            failed = dict.fromkeys(damaged, Status.MESSAGES[Status.NOT_FINITE]) | failed
            prompt = {slot: message for slot, message in prompt.items() if slot not in failed}
        comm_us, exposed_us = self.meter.times_us()
        return StepResult(
            self.step,
            tokens_N,
            logprobs,
            prompt,
            failed,
            counts_S,
            device_us=device_us,
            idle_us=idle_us,
            drafting_us=drafting_us,
            comm_us=comm_us,
            exposed_comm_us=exposed_us,
            load_LE=load_LE if load_LE.size else None,
            digests=digests,
            events=self.meter.events,
        )

    def _failures(
        self,
        sampled: Sampled,
        tokens_N: I32,
        status_N: NDArray[np.uint8],
        counts_S: I32 | None,
        failed: dict[int, str],
    ) -> tuple[I32, I32 | None]:
        """Adds rows without a token to `failed`; returns the tokens with -1 there, and the counts
        cut before a token that failed behind a right draft: the next step samples there again, and
        fails."""
        reasons = {
            n: Status.MESSAGES[status_N[n]] for n in status_N.nonzero()[0].tolist()
        } | sampled.failures
        tokens_N = tokens_N.copy()
        lengths_S = (
            np.ones(len(self.slots_S), np.int32) if self.drafts_S is None else self.drafts_S + 1
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

    def _by_slot(
        self, rows_P: I64, values: Sequence[T], kept_N: I64 | None, failed: dict[int, str]
    ) -> dict[int, list[T]]:
        """Returns what some rows have, of kept tokens and by slot."""
        slots_N = (
            self.slots_S if self.drafts_S is None else np.repeat(self.slots_S, self.drafts_S + 1)
        )
        kept = None if kept_N is None else set(kept_N.tolist())
        found: dict[int, list[T]] = {}
        for n, value in zip(rows_P.tolist(), values, strict=True):
            if (slot := int(slots_N[n])) not in failed and (kept is None or n in kept):
                found.setdefault(slot, []).append(value)
        return found


def digest(logits_V: NDArray[np.float32]) -> bytes:
    """Returns the SHA-256 of a row of logits, as little-endian fp32."""
    return hashlib.sha256(np.ascontiguousarray(logits_V, "<f4").data).digest()


class StepExecutor:
    """Executes step plans with the parts that `ModelRunnerBase` makes. The methods that measure
    time and fetch results are those of a CPU, where a step is done when `launch` returns.

    `on_logits(plan, logits_SV)`, if set, sees the raw logits of every step (tests compare their
    bits).
    """

    spec: ModelSpec
    groups: tuple[KVGroup, ...]
    model: Decoder
    kv: KVCache
    tables: Tables
    upload: Upload
    sampler: Sampler
    ubatches: UBatchRunner
    peers: Peers
    graphs: GraphManager | None = None  # None: no step is recorded
    proposer: Proposer | None = None  # None: no speculation
    expert_cache: Any = None  # the native one, where experts are on disk
    constraints: Constraints
    on_logits: Callable[[StepPlan, Tensor], None] | None = None

    def __init__(self) -> None:
        self._refused: dict[int, str] = {}  # slot -> why its request must fail
        self._moved_step = -1  # the last step that moved blocks
        self._last_end: Any = None  # of the step before and its drafting; None before the first
        self._verified: Verified | None = None  # the last step, until `propose`
        self._drafting: tuple[Any, Any] | None = None  # begin and end of the last `propose`

    def _fetch(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Starts copying tensors to the host and returns a function that waits for the copies."""
        return lambda: tensors

    def _mark(self) -> Any:
        """Returns a point in the device's time, for `_elapsed_us`."""
        return time.perf_counter_ns()

    def _elapsed_us(self, start: Any, end: Any) -> int:
        """Returns the microseconds between two marks; called after the step's results have arrived."""
        return (end - start) // 1000  # type: ignore[no-any-return]

    def step_inputs(self, plan: StepPlan, host: HostRows) -> StepInputs:
        """Returns the inputs of a step that is not replayed."""
        return prepare_inputs(plan, host, self.tables, self.groups, self.upload)

    def execute(self, plan: StepPlan) -> StepResult:
        """Executes one step and waits for its result."""
        result = self.launch(plan)()
        self.propose()
        return result

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Starts one step and returns a function that waits for the device and returns the result.

        Call `propose` next, on CPUs once the result is there: the engine plans meanwhile.

        Raises PeerLost when a rank is gone. The same plan may then be launched again, before any
        later one: its writes to tables have the same outcome once more, and its moves of blocks are
        not repeated.
        """
        self._finish_proposing()
        for request in plan.new_requests:
            self._add(request)
        for group, diff in enumerate(plan.diffs):
            self.tables.update(group, diff)
        self.tables.apply()
        self._move_blocks(plan)
        if plan.agreed is not None:
            self.peers.commit(plan.agreed.placed)
        before = self._last_end
        start = self._mark()
        drafting = self._drafting
        self._drafting = None
        masks = None
        if len(plan.slots_R):
            host = HostRows.of(plan)
            drafts = self._write_drafts(plan) if host.drafts_S is not None else None
            masks = self._begin_masks(plan, host, drafts)
            outputs = self._sample(plan, host, *self._hidden(plan, host), masks)
        elif plan.agreed is not None:  # experts compute for other ranks
            self.ubatches.serve(self.model, plan.agreed)
            outputs = StepOutputs(plan.step, np.zeros(0, np.int64), {}, self.ubatches.take_meter())
        else:
            return lambda: StepResult(plan.step, np.zeros(0, np.int32))
        end = self._last_end = self._mark()
        self._propose_beside()
        wait = self._fetch(outputs.tensors())

        def collect() -> StepResult:
            """Waits for the step's results and returns them."""
            with nullcontext() if masks is None else masks.lost_by_errors():
                fetched = wait()
                elapsed_us = self._elapsed_us(start, end)
                idle_us = 0 if before is None else self._elapsed_us(before, start)
                drafting_us = 0 if drafting is None else self._elapsed_us(*drafting)
                for transport in self.peers.checked:
                    transport.check()  # raises PeerLost if a rank was lost meanwhile
                result = outputs.result(fetched, elapsed_us, idle_us, drafting_us)
                if self.expert_cache is not None:
                    result = replace(result, expert_cache=self.expert_cache.take_stats())
                if self.proposer is None and masks is None:
                    return result
                return self._settled(plan, outputs.slots_S, result, masks)

        return collect

    def _finish_proposing(self) -> None:
        self._verified = None
        if self.proposer is not None:
            self.proposer.finish()

    def _propose_beside(self) -> None:
        """Lets the proposer begin with what `propose` does, if it can beside the host's work."""
        if (
            self.proposer is not None
            and self._verified is not None
            and self.proposer.start(self._verified)
        ):
            self._verified = None

    @torch.inference_mode()
    def propose(self) -> None:
        """Lets the proposer read the step that was launched last, and guess what follows. Raises
        PeerLost.
        """
        # an idle runner must not keep a step's tensors alive
        verified = self._verified
        self._verified = None
        if self.proposer is None or verified is None:
            return
        begin = self._mark()
        self.proposer.launch(verified)
        self._last_end = self._mark()
        self._drafting = begin, self._last_end

    def _hidden(self, plan: StepPlan, host: HostRows) -> tuple[StepInputs, Tensor]:
        """Returns the inputs of a step's forward pass, and what it computes: hidden states [T, D],
        padding included.
        """
        shape = self.graphs.shape(plan) if self.graphs else None
        if self.graphs and shape:
            step = self.graphs.inputs(shape, plan, host)
            return step, self.graphs.run(shape, step, plan.agreed)
        step = self.step_inputs(plan, host)
        return step, self._forward(step, plan.agreed, plan.split_at)

    @torch.inference_mode()
    def drafts_of(self, plan: StepPlan) -> Tensor:
        """Returns the drafts of a plan that has some, int32, one row's after the other."""
        if plan.drafts_N is not None:
            return self.upload(plan.drafts_N)[0]
        num_R = plan.num_drafts_R
        assert num_R is not None
        assert self.proposer is not None
        slots_N = np.repeat(plan.slots_R, num_R).astype(np.int64)
        return self.proposer.drafts(slots_N, ranges(np.zeros_like(num_R), num_R))

    def _write_drafts(self, plan: StepPlan) -> Tensor:
        """Writes the drafts of a plan's rows behind their known tokens, and returns them."""
        num_R = plan.num_drafts_R
        drafts = self.drafts_of(plan)
        assert num_R is not None
        places = ranges(plan.starts_R + plan.counts_R - num_R, num_R)
        offsets = self.tables.token_offsets(np.repeat(plan.slots_R, num_R).astype(np.int64), places)
        self.tables.append(self.upload(offsets)[0], drafts)
        return drafts

    def _begin_masks(
        self, plan: StepPlan, host: HostRows, drafts: Tensor | None
    ) -> StepMasks | None:
        """Starts to fill the masks of rows with a grammar, beside the forward pass."""
        if not self.constraints.active:
            return None
        slots_S = plan.slots_R[host.sampling_S]
        known_S = (plan.starts_R + plan.counts_R)[host.sampling_S]
        if drafts is None or host.drafts_S is None:
            return self.constraints.begin(slots_S, known_S)
        each = np.split(drafts.cpu().numpy(), host.drafts_S.cumsum()[:-1])
        return self.constraints.begin(slots_S, known_S - host.drafts_S, each)

    def _settled(
        self, plan: StepPlan, slots_S: I64, result: StepResult, masks: StepMasks | None
    ) -> StepResult:
        """Gives new tokens to grammars, and new requests and tokens to the proposer, in the order
        of steps on every rank. Returns the result with what they say."""
        counts_S = np.ones(len(slots_S), np.int32) if result.counts_S is None else result.counts_S
        tokens_S = np.split(result.tokens_N, counts_S.cumsum()[:-1]) if len(slots_S) else []
        if result.failed:
            tokens_S = [tokens[tokens >= 0] for tokens in tokens_S]
        if masks is not None:
            complete, failed = masks.accept(tokens_S)
            result = replace(result, complete=complete, failed=failed | result.failed)
        if self.proposer is None:
            return result
        for request in plan.new_requests:
            self.proposer.add(request)
        drafts_S = self.proposer.collect(slots_S.tolist(), tokens_S)
        return replace(result, drafts_S=drafts_S if plan.propose else np.zeros_like(drafts_S))

    def _add(self, request: NewRequest) -> None:
        """Writes a new request to its slot, or notes why the request must fail."""
        self._refused.pop(request.slot, None)
        reason = self.sampler.add(request)
        tokens = request.tokens
        if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= self.spec.vocab_size):
            reason = f"its tokens are not all in the vocabulary 0..{self.spec.vocab_size - 1}"
            tokens = np.zeros_like(tokens)
        if reason is not None:
            self._refused[request.slot] = reason
            self.sampler.rows.refuse(request.slot)
        self.tables.add(request.slot, tokens)
        self.constraints.add(request)

    def _move_blocks(self, plan: StepPlan) -> None:
        # Not again for a step that failed: it may have overwritten the blocks that it was to save.
        if (plan.stores or plan.loads) and plan.step > self._moved_step:
            self.kv.move(plan.stores, plan.loads)
            self._moved_step = plan.step

    def _forward(self, step: StepInputs, agreed: Agreed | None = None, split_at: int = 0) -> Tensor:
        """Returns the hidden states [T, D] of a step's tokens, computed in one or two
        micro-batches.
        """
        return self.ubatches.forward(self.model, step, split_at, agreed, self.kv.layers)

    def _sample(
        self,
        plan: StepPlan,
        host: HostRows,
        step: StepInputs,
        hidden_TD: Tensor,
        masks: StepMasks | None,
    ) -> StepOutputs:
        """Chooses the step's tokens and writes them to the tables, where the next step reads them."""
        taps_TN = None
        if self.spec.taps:
            width = self.spec.hidden_size
            hidden_TD, taps_TN = hidden_TD[:, :width].contiguous(), hidden_TD[:, width:]
        slots_S = plan.slots_R[host.sampling_S].astype(np.int64)
        failed = {}
        if self._refused:
            failed = {
                slot: self._refused[slot] for slot in plan.slots_R.tolist() if slot in self._refused
            }
        outputs = StepOutputs(plan.step, slots_S, failed, self.ubatches.take_meter())
        asking = self.sampler.rows.having(Trait.PROMPT_LOGPROBS, plan.slots_R)
        if len(asking):
            outputs.prompt = prompt_logprobs(
                asking,
                plan,
                host,
                self.sampler.rows,
                self.tables,
                self.upload,
                hidden_TD,
                self.model.logits,
            )
        reads_steps = self.proposer is not None and self.proposer.reads_steps
        if not len(slots_S):
            if reads_steps:
                none_N = step.sample_N
                self._verified = Verified(
                    plan, host, step, hidden_TD, slots_S, none_N, none_N, taps_TN
                )
            return outputs
        slots_N = slots_S if host.drafts_S is None else np.repeat(slots_S, host.drafts_S + 1)
        positions_N = host.positions_T[host.sample_N] + 1
        logits_NV = self.model.logits(hidden_TD.index_select(0, step.sample_N))
        if self.on_logits is not None:
            self.on_logits(plan, logits_NV)
        outputs.sampled = self.sampler.sample(
            logits_NV, slots_N, positions_N, None if masks is None else masks.result()
        )
        tokens_N = outputs.sampled.tokens_S
        (offsets_N,) = self.upload(self.tables.token_offsets(slots_N, positions_N))
        if host.drafts_S is not None:
            outputs.drafts_S = host.drafts_S
            right_N = self.tables.arena.index_select(0, offsets_N) == tokens_N
            outputs.accepted_S = count_accepted(right_N, host.drafts_S, self.upload)
        self.tables.append(offsets_N, tokens_N)
        if reads_steps:
            accepted_S = outputs.accepted_S
            last_S = step.sample_N
            if accepted_S is None or host.drafts_S is None:
                accepted_S = torch.ones_like(last_S)
            else:
                (first_S,) = self.upload((host.drafts_S + 1).cumsum() - host.drafts_S - 1)
                last_S = last_S.index_select(0, first_S) + accepted_S - 1
            self._verified = Verified(
                plan, host, step, hidden_TD, slots_S, accepted_S, last_S, taps_TN
            )
        return outputs
