"""One step on one device: tables, inputs, forward pass and sampling; then its `StepResult`, once the host has that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import I32, Agreed, NewRequest, StepPlan, StepResult
from moeserve.messages import Logprobs, PromptLogprobs
from moeserve.models.decoder import Decoder
from moeserve.models.spec import ModelSpec
from moeserve.ops.inputs import StepInputs
from moeserve.runner.graphs import GraphManager
from moeserve.runner.kv_cache import KVCache
from moeserve.runner.peers import Peers
from moeserve.runner.sampling.logprobs import PromptRows, prompt_logprobs, prompt_messages, to_messages
from moeserve.runner.sampling.sampler import Sampled, Sampler, Status, Trait
from moeserve.runner.tables import I64, HostRows, Tables, Upload, prepare_inputs
from moeserve.runner.ubatches import Meter, UBatchRunner


@dataclass(slots=True)
class StepOutputs:
    """Everything that one step computed for the host. Tensors are on the device; the rest is recorded at launch,
    because a later step may have reassigned a slot before this one is collected."""

    step: int
    slots_S: I64
    failed: dict[int, str]
    meter: Meter
    sampled: Sampled | None = None
    prompt: PromptRows | None = None

    def tensors(self) -> list[Tensor]:
        """Returns the tensors to copy to the host, in the order that `result` expects."""
        found: list[Tensor] = []
        if isinstance(self.meter.load_LE, Tensor):
            found.append(self.meter.load_LE)
        if self.sampled is not None:
            found += [self.sampled.tokens_S, self.sampled.status_S, *(self.sampled.logprobs or ())]
        if self.prompt is not None:
            found += self.prompt.rows
        return found

    def result(self, fetched: Sequence[Tensor], device_us: int) -> StepResult:
        """Returns the step's result. fetched: the tensors of `tensors()`, on the host."""
        arrays = iter([tensor.numpy() for tensor in fetched])
        load_LE = self.meter.load_LE
        if isinstance(load_LE, Tensor):
            load_LE = next(arrays).astype(np.int64)
        failed, tokens_S = dict(self.failed), np.zeros(0, dtype=np.int32)
        logprobs: dict[int, Logprobs] = {}
        if (sampled := self.sampled) is not None:
            tokens_S, status_S = next(arrays), next(arrays)
            if status_S.any() or sampled.failures:
                tokens_S = self._failures(sampled, tokens_S, status_S, failed)
            if sampled.logprobs is not None:
                rows = to_messages(sampled.logprob_counts, *islice(arrays, 3))
                slots = self.slots_S[sampled.logprob_rows_P].tolist()
                logprobs = {slot: row for slot, row in zip(slots, rows, strict=True) if slot not in failed}
        prompt: dict[int, PromptLogprobs] = {}
        if self.prompt is not None:
            prompt, damaged = prompt_messages(self.prompt.spans, *islice(arrays, 3))
            failed = dict.fromkeys(damaged, Status.MESSAGES[Status.NOT_FINITE]) | failed
            prompt = {slot: message for slot, message in prompt.items() if slot not in failed}
        return StepResult(
            self.step,
            tokens_S,
            logprobs,
            prompt,
            failed,
            device_us,
            *self.meter.times_us(),
            load_LE if load_LE.size else None,
            self.meter.events,
        )

    def _failures(self, sampled: Sampled, tokens_S: I32, status_S: NDArray[np.uint8], failed: dict[int, str]) -> I32:
        """Adds rows without a token to `failed`; returns the tokens with -1 there."""
        reasons = {row: Status.MESSAGES[status_S[row]] for row in status_S.nonzero()[0].tolist()} | sampled.failures
        tokens_S = tokens_S.copy()
        for row, reason in reasons.items():
            tokens_S[row] = -1
            failed.setdefault(int(self.slots_S[row]), reason)
        return tokens_S


class StepExecutor:
    """Executes step plans with the parts that `ModelRunnerBase` makes. The methods that measure time and fetch results
    are those of a CPU, where a step is done when `launch` returns.

    `on_logits(plan, logits_SV)`, if set, sees the raw logits of every step (tests compare their bits).
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
    on_logits: Callable[[StepPlan, Tensor], None] | None = None

    def __init__(self) -> None:
        self._refused: dict[int, str] = {}  # slot -> why its request must fail
        self._moved_step = -1  # the last step that moved blocks

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
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Starts one step and returns a function that waits for the device and returns the result.

        Raises PeerLost when a rank is gone. The same plan may then be launched again, before any later one: its writes
        to tables have the same outcome once more, and its moves of blocks are not repeated.
        """
        for request in plan.new_requests:
            self._add(request)
        for group, diff in enumerate(plan.diffs):
            self.tables.update(group, diff)
        self.tables.apply()
        self._move_blocks(plan)
        if plan.agreed is not None:
            self.peers.commit(plan.agreed.placed)
        start = self._mark()
        if len(plan.slots_R):
            host = HostRows.of(plan)
            shape = self.graphs.shape(plan) if self.graphs else None
            if self.graphs and shape:
                step = self.graphs.inputs(shape, plan)
                hidden_TD = self.graphs.run(shape, step, plan.agreed)
            else:
                step = self.step_inputs(plan, host)
                hidden_TD = self._forward(step, plan.agreed, plan.split_at)
            outputs = self._sample(plan, host, step, hidden_TD)
        elif plan.agreed is not None:  # experts compute for other ranks
            self.ubatches.serve(self.model, plan.agreed)
            outputs = StepOutputs(plan.step, np.zeros(0, np.int64), {}, self.ubatches.take_meter())
        else:
            return lambda: StepResult(plan.step, np.zeros(0, dtype=np.int32))
        end = self._mark()
        wait = self._fetch(outputs.tensors())

        def collect() -> StepResult:
            """Waits for the step's results and returns them."""
            fetched, elapsed_us = wait(), self._elapsed_us(start, end)
            for transport in self.peers.checked:
                transport.check()  # raises PeerLost if a rank was lost meanwhile
            return outputs.result(fetched, elapsed_us)

        return collect

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

    def _move_blocks(self, plan: StepPlan) -> None:
        # Not again for a step that failed: it may have overwritten the blocks that it was to save.
        if (plan.stores or plan.loads) and plan.step > self._moved_step:
            self.kv.move(plan.stores, plan.loads)
            self._moved_step = plan.step

    def _forward(self, step: StepInputs, agreed: Agreed | None = None, split_at: int = 0) -> Tensor:
        """Returns the hidden states [T, D] of a step's tokens, computed in one or two micro-batches."""
        return self.ubatches.forward(self.model, step, split_at, agreed, self.kv.layers)

    def _sample(self, plan: StepPlan, host: HostRows, step: StepInputs, hidden_TD: Tensor) -> StepOutputs:
        """Chooses the step's tokens and writes them to the tables, where the next step reads them."""
        slots_S = plan.slots_R[host.sampling_S].astype(np.int64)
        failed = {}
        if self._refused:
            failed = {slot: self._refused[slot] for slot in plan.slots_R.tolist() if slot in self._refused}
        outputs = StepOutputs(plan.step, slots_S, failed, self.ubatches.take_meter())
        asking = self.sampler.rows.having(Trait.PROMPT_LOGPROBS, plan.slots_R)
        if len(asking):
            outputs.prompt = prompt_logprobs(
                asking, plan, host, self.sampler.rows, self.tables, self.upload, hidden_TD, self.model.logits
            )
        if not len(slots_S):
            return outputs
        positions_S = (plan.starts_R + plan.counts_R)[host.sampling_S].astype(np.int64)
        logits_SV = self.model.logits(hidden_TD.index_select(0, step.sample_S))
        if self.on_logits is not None:
            self.on_logits(plan, logits_SV)
        outputs.sampled = self.sampler.sample(logits_SV, slots_S, positions_S)
        (offsets,) = self.upload(self.tables.token_offsets(slots_S, positions_S))
        self.tables.append(offsets, outputs.sampled.tokens_S)
        return outputs
