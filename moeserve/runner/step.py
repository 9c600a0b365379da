"""One step on one device: tables, inputs, forward pass, tasks; then its `StepResult`, once the host
has the outputs.
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

Named = Mapping[str, Mapping[str, Tensor]]  # the tensors of each task, by name
NO_TOKENS = np.zeros(0, dtype=np.int32)


class StepExecutor:
    """Executes step plans with the parts that `ModelRunnerBase` makes.

    The methods that measure time and fetch results are those of a CPU, where a step is done when
    `launch` returns.
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
    proposer: Proposer | None = None  # None: no speculation
    expert_cache: Any = None  # the native one, where experts are on disk
    sampling: SampleTask
    tasks: Mapping[str, RowTask]  # by name, see `Submit.task`

    def __init__(self) -> None:
        self._refused: dict[int, str] = {}  # slot -> why its request must fail
        self._saved_step = -1  # the last step that saved blocks
        self._loading: Loading | None = None  # blocks that the step at hand waits for
        self._last_end: Any = None  # of the step before and its drafting; None before the first
        self._verified: Verified | None = None  # the last step, until `propose`
        self._drafting: tuple[Any, Any] | None = None  # begin and end of the last `propose`

    def _fetch(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Start to copy tensors to the host; return a function that waits for the copies."""
        return lambda: tensors

    def _fetch_named(self, named: Named) -> Callable[[], dict[str, dict[str, NDArray[Any]]]]:
        """Start to copy tensors to the host; return a function that waits and returns the arrays
        under the same names."""
        wait = self._fetch([tensor for tensors in named.values() for tensor in tensors.values()])

        def arrays() -> dict[str, dict[str, NDArray[Any]]]:
            found = iter(wait())
            return {
                task: {name: next(found).numpy() for name in tensors}
                for task, tensors in named.items()
            }

        return arrays

    def _mark(self) -> Any:
        """Return a point in the device's time, for `_elapsed_us`."""
        return time.perf_counter_ns()

    def _elapsed_us(self, start: Any, end: Any) -> int:
        """Return the microseconds between two marks, once the step's results have arrived."""
        return (end - start) // 1000  # type: ignore[no-any-return]

    def step_inputs(self, plan: StepPlan, host: HostRows) -> StepInputs:
        """Return the inputs of a step that is not replayed."""
        return prepare_inputs(plan, host, self.tables, self.groups, self.upload)

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one step and waits for its result."""
        result = self.launch(plan)()
        self.propose()
        return result

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start one step and returns a function that waits for the device and returns the result.

        Call `propose` next, on CPUs once the result is there: the engine plans meanwhile.

        Raises PeerLost when a rank is gone. The same plan may then be launched again, before any
        later one: its writes to tables and its loads of blocks have the same outcome once more, and
        blocks are not saved again.
        """
        self._finish_proposing()
        loading = self._apply(plan)
        if plan.decision is not None:
            self.peers.commit(plan.decision.active)
        before = self._last_end
        start = self._mark()
        drafting = self._drafting
        self._drafting = None
        outputs: dict[str, TaskOutputs] = {}
        if len(plan.slots_R):
            outputs = self._run_tasks(plan)
        elif plan.decision is not None:  # experts compute for other ranks
            self.ubatches.serve(self.model, plan.decision)
        else:
            return lambda: StepResult(plan.step, NO_TOKENS)
        meter = self.ubatches.take_meter()
        failed = self._refused_of(plan)
        end = self._last_end = self._mark()
        self._propose_beside()
        load = {"load": meter.load_LE} if isinstance(meter.load_LE, Tensor) else {}
        wait = self._fetch_named({"": load} | {name: out.tensors for name, out in outputs.items()})

        def collect() -> StepResult:
            """Wait for the step and return its result."""
            with ExitStack() as waits:
                for each in outputs.values():
                    waits.enter_context(each.awaited())
                fetched = wait()
                for transport in self.peers.checked:
                    transport.check()  # raises PeerLost if a rank was lost meanwhile
                load_LE: Any = fetched[""].get("load", meter.load_LE)
                comm_us, exposed_us = meter.times_us()
                cache = self.expert_cache
                result = StepResult(
                    plan.step,
                    NO_TOKENS,
                    failed=failed,
                    device_us=self._elapsed_us(start, end),
                    idle_us=0 if before is None else self._elapsed_us(before, start),
                    drafting_us=0 if drafting is None else self._elapsed_us(*drafting),
                    comm_us=comm_us,
                    exposed_comm_us=exposed_us,
                    load_LE=load_LE.astype(np.int64, copy=False) if load_LE.size else None,
                    events=meter.events,
                    expert_cache=() if cache is None else cache.take_stats(),
                    kv_lost=loading is not None and loading.lost(),
                )
                for name, out in outputs.items():
                    result = out.add_to(result, fetched[name])
                return self._with_drafts(plan, outputs.get("sample"), result)

        return collect

    def _finish_proposing(self) -> None:
        self._verified = None
        if self.proposer is not None:
            self.proposer.finish()

    def _propose_beside(self) -> None:
        """Let the proposer begin with what `propose` does, if it can beside the host's work."""
        if (
            self.proposer is not None
            and self._verified is not None
            and self.proposer.start(self._verified)
        ):
            self._verified = None

    @torch.inference_mode()
    def propose(self) -> None:
        """Let the proposer read the step that was launched last, and guess what follows. Raises
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

    def _run_tasks(self, plan: StepPlan) -> dict[str, TaskOutputs]:
        """Launch a plan's forward pass and the tasks that read its hidden states."""
        rows = HostRows.of(plan)
        drafts = self._write_drafts(plan) if rows.drafts_S is not None else None
        for task in self.tasks.values():
            task.begin(plan, rows, drafts)
        step = self._compute(plan, rows)
        outputs = {
            name: task.run(step) for name, task in self.tasks.items() if len(task.rows(plan))
        }
        if self.proposer is not None and self.proposer.reads_steps:
            sampled = outputs.get("sample")
            accepted_S = sampled.accepted_S if isinstance(sampled, SampleOutputs) else None
            self._verified = self.sampling.verified(step, accepted_S)
        return outputs

    def _compute(self, plan: StepPlan, rows: HostRows) -> ComputedStep:
        """Launch the forward pass of a step, by a graph if one fits."""
        shape = self.graphs.shape(plan) if self.graphs else None
        if self.graphs and shape:
            self._finish_loading()
            inputs = self.graphs.inputs(shape, plan, rows)
            hidden_TD = self.graphs.run(shape, inputs, plan.decision)
        else:
            inputs = self.step_inputs(plan, rows)
            hidden_TD = self._forward(inputs, plan.decision, plan.split_at)
            self._finish_loading()
        aux_TN = None
        if self.spec.aux_hidden_layers:
            width = self.spec.hidden_size
            aux_TN = hidden_TD[:, width:]
            hidden_TD = hidden_TD[:, :width].contiguous()
        return ComputedStep(plan, rows, inputs, hidden_TD, aux_TN)

    @torch.inference_mode()
    def drafts_of(self, plan: StepPlan) -> Tensor:
        """Return the drafts of a plan that has some, int32, one row's after the other."""
        if plan.drafts_N is not None:
            return self.upload(plan.drafts_N)[0]
        num_R = plan.num_drafts_R
        assert num_R is not None
        assert self.proposer is not None
        slots_N = np.repeat(plan.slots_R, num_R).astype(np.int64)
        return self.proposer.drafts(slots_N, ranges(np.zeros_like(num_R), num_R))

    def _write_drafts(self, plan: StepPlan) -> Tensor:
        """Write the drafts of a plan's rows behind their known tokens, and returns them."""
        num_R = plan.num_drafts_R
        drafts = self.drafts_of(plan)
        assert num_R is not None
        places = ranges(plan.starts_R + plan.counts_R - num_R, num_R)
        offsets = self.tables.token_offsets(np.repeat(plan.slots_R, num_R).astype(np.int64), places)
        self.tables.append(self.upload(offsets)[0], drafts)
        return drafts

    def _with_drafts(
        self, plan: StepPlan, sampled: TaskOutputs | None, result: StepResult
    ) -> StepResult:
        """Give new requests and tokens to the proposer; return the result with its new drafts.

        Every rank does so in the order of steps.
        """
        if self.proposer is None:
            return result
        for request in plan.new_requests:
            self.proposer.add(request)
        slots = sampled.slots_S.tolist() if isinstance(sampled, SampleOutputs) else []
        drafts_S = self.proposer.collect(slots, tokens_by_row(result, len(slots)))
        return replace(result, drafts_S=drafts_S if plan.propose else np.zeros_like(drafts_S))

    def _refused_of(self, plan: StepPlan) -> dict[int, str]:
        """Return why requests of the plan must fail, by slot."""
        if not self._refused:
            return {}
        return {
            slot: self._refused[slot] for slot in plan.slots_R.tolist() if slot in self._refused
        }

    def _add(self, request: NewRequest) -> None:
        """Write a new request to its slot, or note why the request must fail."""
        self._refused.pop(request.slot, None)
        task = self.tasks[request.task]
        reason = task.add(request)
        tokens = request.tokens
        if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= self.spec.vocab_size):
            reason = f"its tokens are not all in the vocabulary 0..{self.spec.vocab_size - 1}"
            tokens = np.zeros_like(tokens)
        if reason is not None:
            self._refused[request.slot] = reason
            task.refuse(request.slot)
        self.tables.add(request.slot, tokens)

    def _apply(self, plan: StepPlan) -> Loading | None:
        """Write a plan's changes to the tables, save blocks, and begin to load others."""
        for request in plan.new_requests:
            self._add(request)
        for group, diff in enumerate(plan.diffs):
            self.tables.update(group, diff)
        self.tables.apply()
        # Not again for a step that failed: it may have overwritten the blocks that it was to save.
        if plan.stores and plan.step > self._saved_step:
            self.transport.save(plan.stores)
            self._saved_step = plan.step
        loading = self._loading = self.transport.load(plan.loads) if plan.loads else None
        if not len(plan.slots_R):
            self._finish_loading()
        return loading

    def _finish_loading(self) -> None:
        if self._loading is not None:
            self._loading.finish()
            self._loading = None

    def _forward(
        self, step: StepInputs, decision: StepDecision | None = None, split_at: int = 0
    ) -> Tensor:
        """Return the hidden states [T, D] of a step's tokens, computed in one or two
        micro-batches.
        """
        layers: Sequence[LayerCache] = self.kv.layers
        if self._loading is not None:
            layers = LayersAsLoaded(layers, self._loading.before_layer)
        return self.ubatches.forward(self.model, step, split_at, decision, layers)
