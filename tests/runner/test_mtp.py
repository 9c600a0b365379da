"""Drafts of heads for multi-token prediction against a plain loop over whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.comm.world import World
from moeserve.config import config_of
from moeserve.engine.plan import StepPlan
from moeserve.errors import CheckpointError, ConfigError
from moeserve.models.hf_config import read_model_spec
from moeserve.models.mtp import with_mtp
from moeserve.ops.inputs import StepInputs
from moeserve.runner.cpu import CPUModelRunner
from moeserve.runner.load import Progress, load_mtp
from moeserve.runner.speculation.base import Verified
from moeserve.runner.speculation.model_proposer import Drafter, ModelProposer
from moeserve.runner.step import StepOutputs
from moeserve.runner.tables import HostRows
from tests.mtp import LAYER, Head, write_mtp_checkpoint

from .harness import Driver, Request, greedy

K = 3
PROMPT = torch.randint(0, 250, (75,), generator=torch.Generator().manual_seed(1)).tolist()


class DraftingRunner(CPUModelRunner):
    """Lets a head guess behind every step, and keeps what it computed."""

    num_rejected = 0  # tokens at the end of a row that were wrong drafts

    def load_model(self, progress: Progress) -> None:
        super().load_model(progress)
        self.draft_model = load_mtp(
            self.spec, self.model_dir, self.model, self.config, self.asked, self.shard(), self.properties.memory()
        )
        self.hidden: list[Tensor] = []

    def initialize_kv_cache(self) -> None:
        super().initialize_kv_cache()
        rules = [layer.mixer.rule for layer in self.spec.draft_layers]
        drafter = Drafter(self.draft_model, self.kv.draft_layers, rules, takes_hidden=True)
        self.proposer = ModelProposer(K, drafter, self.groups, self.tables, self.sampler, self.upload)
        forward = self.draft_model.forward

        def kept(*args: Any) -> Tensor:
            self.hidden.append(forward(*args))
            return self.hidden[-1]

        self.draft_model.forward = kept  # type: ignore[method-assign]

    def _sample(self, plan: StepPlan, host: HostRows, step: StepInputs, hidden_TD: Tensor) -> StepOutputs:
        outputs = super()._sample(plan, host, step, hidden_TD)
        last_S = torch.from_numpy(host.sample_S) - self.num_rejected
        accepted_S = torch.ones(len(last_S), dtype=torch.int64)
        self.hidden.clear()
        self.proposer.launch(Verified(plan, host, step, hidden_TD, outputs.slots_S, accepted_S, last_S))
        return outputs


def driver_of(path: Path, **settings: Any) -> Driver:
    values = {"max_num_seqs": 4, "kv_cache_bytes": 1 << 22, "threads": 1, "max_num_batched_tokens": 256}
    config = config_of(path, **(values | settings))
    runner = DraftingRunner(config, with_mtp(read_model_spec(path)), path, World())
    runner.prepare()
    return Driver(runner)


def naive(head: Head, tokens: Sequence[int], choose: Callable[[Tensor, int], int]) -> tuple[Tensor, list[int]]:
    """Hidden states of the head at all tokens but the last, and K drafts behind it. choose(logits, position)."""
    inputs = head.inputs(tokens[1:], head.target_hidden(tokens[:-1]))
    first, drafts = head.hidden(inputs), list[int]()
    hidden = first
    for position in range(len(tokens), len(tokens) + K):
        drafts.append(choose(head.logits(hidden[-1:]), position))
        inputs = torch.cat((inputs, head.inputs(drafts[-1:], hidden[-1:])))
        hidden = head.hidden(inputs)
    return first, drafts


@pytest.fixture(scope="module")
def make_head(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Head]:
    made: dict[str, Head] = {}

    def make(name: str) -> Head:
        if name not in made:
            made[name] = write_mtp_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", LAYER)
def test_hidden_states_and_drafts_are_those_of_a_plain_loop(
    name: str, temperature: float, make_head: Callable[[str], Head]
) -> None:
    head = make_head(name)
    driver = driver_of(head.path)
    runner, sampling = driver.runner, greedy(temperature=temperature, seed=3)
    request = driver.add(Request(PROMPT, sampling))
    other = driver.add(Request(PROMPT[:9], sampling))
    hidden: list[Tensor] = []
    for chunk in (31, 1, 43, 1, 1):
        driver.run([(other, 1), (request, chunk)])
        hidden.append(runner.hidden[0][1 : 1 + chunk])

    def choose(logits: Tensor, position: int) -> int:
        return int(runner.sampler.draft(logits, np.array([request.slot]), np.array([position])))

    tokens = PROMPT + request.output
    expected, drafts = naive(head, tokens, choose)
    assert len(tokens) == 78
    error = (torch.cat(hidden) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 1e-4, error
    assert runner.proposer.drafts_SK[request.slot].tolist() == drafts
    assert len(set(drafts)) > 1
