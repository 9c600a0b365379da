"""`compile` computes the same, traces equal layers once, and compiles nothing twice."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from moeserve.blocks.kda import KimiDelta
from moeserve.blocks.mamba1 import Mamba1
from moeserve.blocks.mixer import Mixer
from moeserve.engine.blocks import groups_of
from moeserve.models.build import build_decoder
from moeserve.models.load_plan import load_plan
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import GraphBreak, GroupInputs, Positions, StepInputs
from moeserve.ops.pick import pick_ops
from moeserve.ops.table import Ops
from moeserve.ops.traced import FOLDER, traced
from moeserve.runner.kv_cache import KVCache
from tests.runner.harness import spec_of

CPU = torch.device("cpu")
MODEL: dict[str, Any] = {
    "architecture": "Qwen2MoeForCausalLM",
    "vocab_size": 50,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_size": 32,
    "shared_expert_size": 32,
}


def hidden(
    ops: Ops,
    layers: int,
    tokens: int,
    graph_break: GraphBreak | None = None,
    mixers: tuple[Mixer, ...] = (),
) -> torch.Tensor:
    """Return a random model's output for one request's first tokens.

    Every other layer has experts; `mixers` are those of further layers.
    """
    moe_layers = tuple(i % 2 == 0 for i in range(layers))
    spec = spec_of(**MODEL, num_layers=layers, moe_layers=moe_layers)
    spec = replace(
        spec, layers=(*spec.layers, *(replace(spec.layers[1], mixer=mixer) for mixer in mixers))
    )
    generator = torch.Generator().manual_seed(0)
    params = {
        param.name: torch.randn(param.shape, generator=generator) * 0.15 + ("norm" in param.name)
        for param in load_plan(spec, ()).params
    }
    model = build_decoder(spec, params, ops)
    groups = groups_of(spec.kv_rules, 16)
    kv = KVCache(groups, spec, 4, torch.float32, CPU, num_states=4)
    starts_R = np.zeros(1, np.int32)
    offsets_R1 = np.array([0, tokens], np.int32)
    step = StepInputs(
        ids_T=torch.arange(tokens) % 50,
        positions=Positions.of_text(torch.arange(tokens)),
        groups=(GroupInputs(torch.arange(tokens) + 16, torch.tensor([[1, 2]]), 16, None),)
        * len(groups),
        logits_indices_N=torch.tensor([tokens - 1]),
        offsets_R1=offsets_R1,
        starts_R=starts_R,
        rows_on_device=(torch.from_numpy(starts_R), torch.from_numpy(offsets_R1)),
        graph_break=graph_break,
    )
    with torch.inference_mode():
        return model.forward(step, kv.layers, UBatch())


@pytest.mark.full("graphs")
@pytest.mark.timeout(240)
def test_layers_share_traces_and_results_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    torch._dynamo.reset()
    counters.clear()
    plain = pick_ops(CPU, torch.float32, "torch")
    compiled = traced(plain)
    graphs = []
    for layers, tokens in ((2, 7), (4, 7), (4, 12), (4, 1), (2, 3)):
        torch.testing.assert_close(hidden(compiled, layers, tokens), hidden(plain, layers, tokens))
        graphs.append(counters["stats"]["unique_graphs"])
    # One for any number of layers and of tokens; torch makes another for one token alone.
    assert 0 < graphs[0] == graphs[1] == graphs[2] <= graphs[3] == graphs[4], graphs
    assert graphs[3] - graphs[0] <= graphs[0]
    misses = counters["inductor"]["fxgraph_cache_miss"]
    assert misses > 0
    torch._dynamo.reset()  # as another process would begin
    hidden(traced(plain), 4, 7)
    assert counters["stats"]["unique_graphs"] > graphs[4]
    assert counters["inductor"]["fxgraph_cache_miss"] == misses, "compiled again"


def test_no_trace_looks_into_what_cuts_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each recording has a function of its own, and its warm-up another.

    Compiled into the layers, they would be compiled anew for each while the stream is captured.
    """
    monkeypatch.setenv(FOLDER, str(tmp_path))
    torch._dynamo.reset()
    compiled = traced(pick_ops(CPU, torch.float32, "torch"))
    compiled = replace(
        compiled, compile=partial(torch.compile, dynamic=True, backend="eager")
    )  # traces, no code
    calls: list[str] = []

    def break_of(name: str) -> GraphBreak:
        def graph_break(q_THd: torch.Tensor, plan: Any, attend: Any, width: int) -> torch.Tensor:
            calls.append(name)
            return q_THd.flatten(1) * 2

        return graph_break

    hidden(compiled, 2, 7, break_of("warm-up"))
    graphs = counters["stats"]["unique_graphs"]
    hidden(compiled, 2, 7, break_of("recording"))
    assert calls == ["warm-up"] * 2 + ["recording"] * 2
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.full("graphs")
@pytest.mark.parametrize(
    "mixer",
    [KimiDelta(num_heads=1, head_dim=8, conv=4), Mamba1(channels=20, state=4, rank=3, conv=4)],
)
def test_no_trace_looks_into_recurrences(
    mixer: Mixer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their loops over a step's tiles differ in every step."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    torch._dynamo.reset()
    counters.clear()
    plain = pick_ops(CPU, torch.float32, "torch")
    graphs = []
    compiled = replace(traced(plain), compile=partial(torch.compile, dynamic=True, backend="eager"))
    for tokens in (7, 20, 13, 18):
        expected = hidden(plain, 2, tokens, mixers=(mixer,))
        torch.testing.assert_close(hidden(compiled, 2, tokens, mixers=(mixer,)), expected)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[1] == graphs[2] == graphs[3], graphs
