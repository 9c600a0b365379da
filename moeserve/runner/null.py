"""A runner without a model, for measuring everything else: tables and inputs are real, tokens are made up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from moeserve.engine.plan import StepPlan, StepResult
from moeserve.runner.cpu import CPUModelRunner
from moeserve.runner.inputs import HostRows, prepare_inputs
from moeserve.runner.load import Progress


class NullRunner(CPUModelRunner):
    """Answers a row that samples position p with token p modulo the vocabulary, from 1 on."""

    def load_model(self, progress: Progress) -> None:
        self.notes.append("null runner: tokens are made up, no model is loaded")

    def profile_run(self) -> int:
        return 0

    def warm_up(self) -> None:
        """There is nothing that could be cold."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self._add(plan.added)
        self._update(plan.diffs)
        self.tables.apply()
        if not len(plan.slots_R):
            return self._no_forward(plan)
        host = HostRows.of(plan)
        prepare_inputs(plan, host, self.tables, self.groups, self.upload)
        positions_S = (plan.starts_R + plan.counts_R)[host.sampling_S]
        tokens_S = (positions_S % (self.spec.vocab_size - 1) + 1).astype(np.int32)
        offsets, tokens = self.upload(self.tables.token_offsets(plan.slots_R[host.sampling_S], positions_S), tokens_S)
        self.tables.append(offsets, tokens)
        return lambda: StepResult(plan.step, tokens_S)
