"""Execute one step plan on one device.

A step updates the tables, prepares the inputs, runs the forward pass and then the tasks, such as
sampling. Its `StepResult` is assembled when the outputs have arrived on the host.

Suffixes of arrays are their dimensions: R rows (scheduled requests), S rows that sample, N drafts
or sampled tokens, T tokens of the step, D width of the hidden states, A width of the auxiliary
hidden states, L MoE layers, E logical experts.

A *mark* is a point in time on the device.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.engine.blocks import KVGroup
from moeserve.engine.plan import NewRequest, StepDecision, StepPlan, StepResult, ranges
from moeserve.models.decoder import Decoder
from moeserve.models.spec import ModelSpec
from moeserve.ops.inputs import LayerCache, StepInputs
from moeserve.runner.graphs import GraphManager
from moeserve.runner.kv_cache import KVCache
from moeserve.runner.kv_transport import KVTransport, LayersAsLoaded, Loading
from moeserve.runner.peers import Peers
from moeserve.runner.sampling.sampler import Sampler
from moeserve.runner.sampling.task import SampleOutputs, SampleTask, tokens_by_row
from moeserve.runner.speculation.base import Proposer, Verified
from moeserve.runner.tables import HostRows, Tables, Upload, prepare_inputs
from moeserve.runner.tasks import ComputedStep, RowTask, TaskOutputs
from moeserve.runner.ubatches import UBatchRunner

NamedTensors = Mapping[str, Mapping[str, Tensor]]  # by the name of a task, then of the tensor
METER = "meter"  # key of the step's measurements in NamedTensors, beside the tasks
NO_TOKENS = np.zeros(0, dtype=np.int32)


class StepExecutor:
    """Executes step plans. `ModelRunnerBase` sets its attributes.

    The methods that measure time and fetch results are for a CPU, where a step is done when
    `launch` returns. An asynchronous device overrides them.
    """

    spec: ModelSpec
    groups: tuple[KVGroup, ...]
    model: Decoder
    kv: KVCache
    transport: KVTransport
    tables: Tables
    upload: Upload
    sampler: Sampler
    ubatches: UBatchRunner
    peers: Peers
    graphs: GraphManager | None = None  # None: no step is recorded
    proposer: Proposer | None = None  # None: no speculative decoding
    expert_cache: Any = None  # the native cache of experts, if experts are on disk
    sampling: SampleTask
    tasks: Mapping[str, RowTask]  # by name, see `Submit.task`

    def __init__(self) -> None:
        # The error message of each request that must fail, by slot.
        self._refusal_reasons: dict[int, str] = {}
        self._last_saved_step = -1  # number of the last step that saved blocks
        self._kv_loading: Loading | None = None  # KV blocks that the current step has to wait for
        self._last_end_mark: Any = None  # end of the previous step, including its drafting
        self._drafting_marks: tuple[Any, Any] | None = None  # begin and end of the last `propose`
        # The last step, if the proposer has not read it yet. Set by `launch`, cleared by whoever
        # drafts from it.
        self._step_to_propose: Verified | None = None

    def _fetch(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Start to copy tensors to the host. Return a function that waits for the copies."""
        return lambda: tensors

    def _fetch_named(self, named: NamedTensors) -> Callable[[], dict[str, dict[str, NDArray[Any]]]]:
        """Start to copy tensors to the host.

        Return a function that waits for the copies, and returns them as arrays under the same
        names.
        """
        wait_for_copies = self._fetch(
            [tensor for tensors in named.values() for tensor in tensors.values()]
        )

        def wait_for_arrays() -> dict[str, dict[str, NDArray[Any]]]:
            copies = iter(wait_for_copies())
            return {
                task: {name: next(copies).numpy() for name in tensors}
                for task, tensors in named.items()
            }

        return wait_for_arrays

    def _mark(self) -> Any:
        """Return a point in time on the device, for `_elapsed_us`."""
        return time.perf_counter_ns()

    def _elapsed_us(self, start: Any, end: Any) -> int:
        """Return the microseconds between two marks, once the step's results have arrived."""
        return (end - start) // 1000  # type: ignore[no-any-return]

    def step_inputs(self, plan: StepPlan, rows: HostRows) -> StepInputs:
        """Return the inputs of a step that runs without a graph."""
        num_earlier_ids = self.spec.num_earlier_ids
        return prepare_inputs(plan, rows, self.tables, self.groups, self.upload, num_earlier_ids)

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one step and wait for its result."""
        result = self.launch(plan)()
        self.propose()
        return result

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start one step. Return a function that waits for the device and returns the result.

        Call `propose` next. On a CPU, call it after collecting the result: the engine then plans
        the next step while drafts are computed.

        Raises PeerLost if a rank is gone. The same plan may then be launched again, before any
        later plan: its table updates and loads are idempotent, and its blocks are not saved again.
        """
        self._wait_for_proposer()
        kv_loading = self._apply(plan)
        if plan.decision is not None:
            self.peers.commit(plan.decision.active)
        previous_end_mark = self._last_end_mark
        start_mark = self._mark()
        drafting_marks = self._drafting_marks
        self._drafting_marks = None
        outputs: dict[str, TaskOutputs] = {}
        if len(plan.slots_R):
            outputs = self._run_tasks(plan)
        elif plan.decision is not None:
            # This engine has no tokens, but its experts compute for other ranks.
            self.ubatches.serve(self.model, plan.decision)
        else:
            return lambda: StepResult(plan.step, NO_TOKENS)
        meter = self.ubatches.take_meter()
        failed = self._refusals_of(plan)
        end_mark = self._mark()
        self._last_end_mark = end_mark
        self._try_propose_in_thread()
        to_fetch: dict[str, Mapping[str, Tensor]] = {
            name: task.tensors for name, task in outputs.items()
        }
        if isinstance(meter.expert_tokens_LE, Tensor):
            to_fetch[METER] = {"expert_tokens": meter.expert_tokens_LE}
        wait_for_copies = self._fetch_named(to_fetch)

        def collect() -> StepResult:
            with ExitStack() as watching:
                for task_outputs in outputs.values():
                    watching.enter_context(task_outputs.watch_wait())
                fetched = wait_for_copies()
                for transport in self.peers.transports_to_check:
                    transport.check()  # raises PeerLost if a transfer of this step failed
                expert_tokens_LE: Any = meter.expert_tokens_LE
                if METER in fetched:
                    expert_tokens_LE = fetched[METER]["expert_tokens"]
                comm_us, exposed_us = meter.times_us()
                cache = self.expert_cache
                result = StepResult(
                    plan.step,
                    NO_TOKENS,
                    failed=failed,
                    device_us=self._elapsed_us(start_mark, end_mark),
                    idle_us=0
                    if previous_end_mark is None
                    else self._elapsed_us(previous_end_mark, start_mark),
                    drafting_us=0 if drafting_marks is None else self._elapsed_us(*drafting_marks),
                    comm_us=comm_us,
                    exposed_comm_us=exposed_us,
                    expert_tokens_LE=expert_tokens_LE.astype(np.int64, copy=False)
                    if expert_tokens_LE.size
                    else None,
                    events=meter.events,
                    expert_cache=() if cache is None else cache.take_stats(),
                    kv_lost=kv_loading is not None and kv_loading.lost(),
                )
                for name, task_outputs in outputs.items():
                    result = task_outputs.add_to(result, fetched[name])
                return self._with_drafts(plan, outputs.get("sample"), result)

        return collect

    def _wait_for_proposer(self) -> None:
        self._step_to_propose = None
        if self.proposer is not None:
            self.proposer.wait_for_thread()

    def _try_propose_in_thread(self) -> None:
        """Let the proposer draft in parallel to the host, if it can. Otherwise `propose` will."""
        if (
            self.proposer is not None
            and self._step_to_propose is not None
            and self.proposer.try_launch_in_thread(self._step_to_propose)
        ):
            self._step_to_propose = None

    @torch.inference_mode()
    def propose(self) -> None:
        """Let the proposer draft the next tokens after the step that was launched last.

        Raises PeerLost.
        """
        step = self._step_to_propose
        self._step_to_propose = None  # so that an idle runner does not keep its tensors alive
        if self.proposer is None or step is None:
            return
        begin_mark = self._mark()
        self.proposer.launch(step)
        end_mark = self._mark()
        self._last_end_mark = end_mark
        self._drafting_marks = begin_mark, end_mark

    def _run_tasks(self, plan: StepPlan) -> dict[str, TaskOutputs]:
        """Launch a plan's forward pass, and the tasks that read its hidden states."""
        rows = HostRows.of(plan)
        drafts = self._write_drafts(plan) if rows.num_drafts_S is not None else None
        for task in self.tasks.values():
            task.begin(plan, rows, drafts)
        step = self._compute(plan, rows)
        outputs = {
            name: task.run(step) for name, task in self.tasks.items() if len(task.rows(plan))
        }
        if self.proposer is not None and self.proposer.reads_steps:
            sampled = outputs.get("sample")
            accepted_S = sampled.accepted_S if isinstance(sampled, SampleOutputs) else None
            self._step_to_propose = self.sampling.verified(step, accepted_S)
        return outputs

    def _compute(self, plan: StepPlan, rows: HostRows) -> ComputedStep:
        """Launch the forward pass of a step, as a graph if one has the right shape."""
        shape = self.graphs.shape(plan) if self.graphs else None
        if self.graphs and shape:
            # A graph reads all layers without waiting, so all of their blocks must have arrived.
            self._wait_for_kv_loading()
            inputs = self.graphs.inputs(shape, plan, rows)
            hidden_TD = self.graphs.run(shape, inputs, plan.decision)
        else:
            inputs = self.step_inputs(plan, rows)
            hidden_TD = self._forward(inputs, plan.decision, plan.split_at)
            # `_forward` has waited for the model's layers. The draft model's layers remain.
            self._wait_for_kv_loading()
        aux_TA = None
        if self.spec.aux_hidden_layers:
            hidden_size = self.spec.hidden_size
            aux_TA = hidden_TD[:, hidden_size:]
            hidden_TD = hidden_TD[:, :hidden_size].contiguous()
        return ComputedStep(plan, rows, inputs, hidden_TD, aux_TA)

    @torch.inference_mode()
    def drafts_of(self, plan: StepPlan) -> Tensor:
        """Return the drafts of a plan that has some: int32 [N], row after row."""
        if plan.drafts_N is not None:
            return self.upload(plan.drafts_N)[0]
        num_drafts_R = plan.num_drafts_R
        assert num_drafts_R is not None
        assert self.proposer is not None
        slots_N = np.repeat(plan.slots_R, num_drafts_R).astype(np.int64)
        return self.proposer.drafts(slots_N, ranges(np.zeros_like(num_drafts_R), num_drafts_R))

    def _write_drafts(self, plan: StepPlan) -> Tensor:
        """Write the drafts of a plan to the token table, after the known tokens. Return them."""
        num_drafts_R = plan.num_drafts_R
        drafts = self.drafts_of(plan)
        assert num_drafts_R is not None
        slots_N = np.repeat(plan.slots_R, num_drafts_R).astype(np.int64)
        positions_N = ranges(plan.starts_R + plan.counts_R - num_drafts_R, num_drafts_R)
        offsets_N = self.tables.token_offsets(slots_N, positions_N)
        self.tables.append(self.upload(offsets_N)[0], drafts)
        return drafts

    def _with_drafts(
        self, plan: StepPlan, sampled: TaskOutputs | None, result: StepResult
    ) -> StepResult:
        """Pass new requests and tokens to the proposer. Return the result with its new drafts.

        Called on every rank, in the order of steps.
        """
        if self.proposer is None:
            return result
        for request in plan.new_requests:
            self.proposer.add(request)
        slots = sampled.slots_S.tolist() if isinstance(sampled, SampleOutputs) else []
        num_drafts_S = self.proposer.collect(slots, tokens_by_row(result, len(slots)))
        if not plan.propose:  # the scheduler wants no drafts for the next step
            num_drafts_S = np.zeros_like(num_drafts_S)
        return replace(result, num_drafts_S=num_drafts_S)

    def _refusals_of(self, plan: StepPlan) -> dict[int, str]:
        """Return the error messages of requests of the plan that must fail, by slot."""
        if not self._refusal_reasons:
            return {}
        return {
            slot: self._refusal_reasons[slot]
            for slot in plan.slots_R.tolist()
            if slot in self._refusal_reasons
        }

    def _add(self, request: NewRequest) -> None:
        """Write a new request to its slot. If the request must fail, store the reason."""
        self._refusal_reasons.pop(request.slot, None)
        task = self.tasks[request.task]
        reason = task.add(request)
        tokens = request.tokens
        if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= self.spec.vocab_size):
            reason = f"its tokens are not all in the vocabulary 0..{self.spec.vocab_size - 1}"
            tokens = np.zeros_like(tokens)
        if reason is not None:
            self._refusal_reasons[request.slot] = reason
            task.refuse(request.slot)
        self.tables.add(request.slot, tokens)

    def _apply(self, plan: StepPlan) -> Loading | None:
        """Apply a plan's changes to the tables, save blocks, and start to load others."""
        for request in plan.new_requests:
            self._add(request)
        for group, diff in enumerate(plan.diffs):
            self.tables.update(group, diff)
        self.tables.apply()
        # When a failed step is repeated, its blocks are not saved again, because the first attempt
        # may have overwritten them.
        if plan.stores and plan.step > self._last_saved_step:
            self.transport.save(plan.stores)
            self._last_saved_step = plan.step
        self._kv_loading = self.transport.load(plan.loads) if plan.loads else None
        kv_loading = self._kv_loading
        if not len(plan.slots_R):  # no forward pass will wait for the blocks
            self._wait_for_kv_loading()
        return kv_loading

    def _wait_for_kv_loading(self) -> None:
        """Wait until all KV blocks that the plan loads have arrived."""
        if self._kv_loading is not None:
            self._kv_loading.finish()
            self._kv_loading = None

    def _forward(
        self, inputs: StepInputs, decision: StepDecision | None = None, split_at: int = 0
    ) -> Tensor:
        """Return the hidden states [T, D] of a step, computed in one or two micro-batches."""
        layers: Sequence[LayerCache] = self.kv.layers
        if self._kv_loading is not None:
            layers = LayersAsLoaded(layers, self._kv_loading.before_layer)
        return self.ubatches.forward(self.model, inputs, split_at, decision, layers)
