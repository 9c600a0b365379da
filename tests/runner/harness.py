"""A tiny model whose logits depend on every KV entry of a request, and a naive driver."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeserve.config import Config, config_of
from moeserve.engine.plan import BlockDiff, NewRequest, StepPlan, StepResult
from moeserve.models.spec import ModelSpec
from moeserve.ops.inputs import LayerCache, StepInputs
from moeserve.runner.base import ModelRunnerBase
from moeserve.runner.cpu import CPUModelRunner
from moeserve.runner.load import Progress
from moeserve.sampling import TokenSampling
from tests.specs import make_spec

VOCAB = 101


def spec_of(**changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "architecture": "Fake",
        "dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": 4,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 2,
        "max_position": 512,
        "norm_eps": 1e-6,
    }
    return make_spec(**(values | changes))


class HistoryModel:
    """Writes each token id into its K entry of every layer.

    A token's hidden state is a digest of the history that the block tables give, in float64, stored
    as four 16-bit numbers. The logits are a random row that the digest selects.
    """

    moe_layers = ()
    why_not_recordable = "not all kernels that serve can be recorded"

    def __init__(self, spec: ModelSpec) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(997, spec.vocab_size, generator=generator)
        self.seen: list[StepInputs] = []

    def forward(self, step: StepInputs, caches: Sequence[LayerCache], ubatch: Any = None) -> Tensor:
        self.seen.append(step)
        digest_T = torch.zeros(len(step.ids_T), dtype=torch.int64)
        for layer, (k, _) in enumerate(caches):
            group = step.groups[layer % len(step.groups)]
            k.view(-1, *k.shape[2:]).index_copy_(
                0,
                group.slot_mapping_T,
                step.ids_T.float().view(-1, 1, 1).expand(-1, *k.shape[2:]).to(k.dtype),
            )
            for row, start in enumerate(step.starts_R.tolist()):
                begin = step.offsets_R1[row]
                end = step.offsets_R1[row + 1]
                context = k[group.blocks_RN[row]].reshape(-1, *k.shape[2:])[:, 0, 0]
                for token in range(begin, end):
                    position = start + token - begin
                    assert int(step.positions.text_T[token]) == position
                    first = 0 if group.window is None else max(0, position - group.window + 1)
                    ids = context[first : position + 1].long()
                    weights = torch.arange(first + 1, position + 2) * 7919 % 1013 + layer
                    digest_T[token] += int((ids * weights).sum())
        return (digest_T % 997).float().unsqueeze(1)

    def serve(self, ubatch: Any) -> None:
        """Do nothing, because there are no experts."""

    def logits(self, hidden_SD: Tensor) -> Tensor:
        return self.table[hidden_SD[:, 0].long()].clone()


class FakeRunner(CPUModelRunner):
    def load_model(self, progress: Progress) -> None:
        self.model = HistoryModel(self.spec)

    def profile_run(self) -> int:
        return 0


def fake_runner(
    spec: ModelSpec | None = None, cls: type[ModelRunnerBase] = FakeRunner, **settings: Any
) -> Any:
    config: Config = config_of(
        None, **({"max_num_seqs": 8, "block_size": 4, "kv_cache_bytes": 1 << 16} | settings)
    )
    runner = cls(config, spec or spec_of(), Path(os.devnull))
    runner.prepare()
    return runner


def written() -> None:
    """Wait for the packed weights that earlier starts still write."""
    for thread in threading.enumerate():
        if thread.name == "packed cache":
            thread.join()


def greedy(**changes: Any) -> TokenSampling:
    return TokenSampling(**({"seed": 0, "max_tokens": 100, "temperature": 0.0} | changes))


@dataclass
class Request:
    """A request.

    num_computed counts planned tokens, and num_known those that are known or in flight.
    """

    prompt: list[int]
    sampling: TokenSampling
    slot: int = -1
    num_computed: int = 0
    num_known: int = 0
    output: list[int] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)


class Driver:
    """Plans steps by hand: lists of free blocks and slots, one row per request."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.free_blocks = list(range(1, runner.limits.num_blocks))
        self.free_slots = list(range(runner.limits.max_num_seqs))
        self.new_requests: list[NewRequest] = []
        self.step = 0
        runner.sampling.on_logits = self._on_logits
        self._logits: dict[int, Tensor] = {}

    def _on_logits(self, plan: StepPlan, logits_SV: Tensor) -> None:
        self._logits[plan.step] = logits_SV.clone()

    def add(self, request: Request) -> Request:
        """Add a new request, or one that was preempted and resumes."""
        tokens = np.array(request.prompt + request.output, dtype=np.int32)
        request.slot = self.free_slots.pop(0)
        request.num_computed = 0
        request.num_known = len(tokens)
        request.blocks = [[] for _ in self.runner.groups]
        self.new_requests.append(
            NewRequest(request.slot, tokens, len(request.prompt), request.sampling)
        )
        return request

    def remove(self, request: Request) -> None:
        for blocks in request.blocks:
            self.free_blocks = blocks + self.free_blocks
        self.free_slots.insert(0, request.slot)

    def plan(self, chunks: Sequence[tuple[Request, int]]) -> StepPlan:
        size = self.runner.config.cache.block_size
        rows = []
        diffs = [([], [], []) for _ in self.runner.groups]
        for request, chunk in chunks:
            count = min(chunk, request.num_known - request.num_computed)
            assert count > 0
            rows.append(
                (
                    request.slot,
                    request.num_computed,
                    count,
                    request.num_computed + count == request.num_known,
                )
            )
            for group in range(len(diffs)):
                held = request.blocks[group]
                while len(held) * size < request.num_computed + count:
                    for column, value in zip(
                        diffs[group], (request.slot, len(held), self.free_blocks[0]), strict=True
                    ):
                        column.append(value)
                    held.append(self.free_blocks.pop(0))
            request.num_computed += count
            request.num_known += rows[-1][3]
        self.step += 1
        columns = np.array(rows, dtype=np.int32).reshape(-1, 4).T
        new_requests = tuple(self.new_requests)
        self.new_requests = []
        return StepPlan(
            step=self.step,
            slots_R=columns[0],
            starts_R=columns[1],
            counts_R=columns[2],
            samples_R=columns[3].astype(bool),
            diffs=tuple(BlockDiff(*(np.array(c, dtype=np.int32) for c in diff)) for diff in diffs),
            new_requests=new_requests,
        )

    def update_from_output(
        self, chunks: Sequence[tuple[Request, int]], plan: StepPlan, result: StepResult
    ) -> None:
        assert result.step == plan.step
        sampling = [
            request for (request, _), samples in zip(chunks, plan.samples_R, strict=True) if samples
        ]
        assert len(sampling) == len(result.tokens_N)
        for i, (request, token) in enumerate(zip(sampling, result.tokens_N.tolist(), strict=True)):
            request.output.append(token)
            request.logits.append(self._logits[plan.step][i])
        for request, _ in chunks:
            request.results.append(result)
        self._logits.pop(plan.step, None)

    def run(self, chunks: Sequence[tuple[Request, int]]) -> StepResult:
        plan = self.plan(chunks)
        result = self.runner.execute(plan)
        self.update_from_output(chunks, plan, result)
        return result

    def generate(self, request: Request, num_tokens: int, chunk: int = 1 << 30) -> list[int]:
        while len(request.output) < num_tokens:
            self.run([(request, chunk)])
        return request.output
