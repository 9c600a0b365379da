"""Layouts of a cluster: which there are, which the engine refuses, and what they serve."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeserve.config import Config, config_of
from moeserve.errors import ConfigError
from moeserve.models.hf_config import read_model_spec
from moeserve.models.spec import ModelSpec, model_size
from moeserve.plan.candidates import Candidate, Workload, candidates
from moeserve.plan.hardware import read_gpus
from tests.models.test_published_configs import RELEASES
from tests.plan.test_roofline import QWEN3_30B


def spec_of(name: str, folder: Path) -> ModelSpec:
    values: dict[str, Any] = {"torch_dtype": "bfloat16", "eos_token_id": 1, **RELEASES[name][0]}
    (folder / "config.json").write_text(json.dumps(values))
    return read_model_spec(folder)


def config(**settings: Any) -> Config:
    return config_of("model", max_model_len=4096, **{"max_num_batched_tokens": 2048, **settings})


def layouts(
    spec: ModelSpec, gpus: str, asked: Config | None = None
) -> dict[tuple[int, int, str], Candidate]:
    found = candidates(spec, asked or config(), read_gpus(gpus))
    return {(c.config.parallel.dp, c.config.parallel.tp, c.config.parallel.ep): c for c in found}


@pytest.mark.parametrize("name", RELEASES)
def test_every_released_model_has_a_layout(name: str, tmp_path: Path) -> None:
    """All weights are there once: those of the fewest ranks that share everything add up to the
    model's.
    """
    spec = spec_of(name, tmp_path)
    found = {key: c for key, c in layouts(spec, "8x8xB200").items() if not c.refused}
    assert found
    for candidate in found.values():
        assert candidate.cost is not None
        weights = candidate.cost.weights
        each = max(
            1, candidate.config.parallel.num_ranks if candidate.config.parallel.ep == "on" else 1
        )
        assert weights.num_local_experts == -(-spec.num_experts // each)
        assert candidate.cost.seconds([_decoding(candidate)] * candidate.config.parallel.dp) > 0
    one = next(iter(layouts(spec, "1xB200").values()))
    if one.cost is not None and not spec.stored:
        embedding = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size
        counted = one.cost.weights.dense_params + one.cost.weights.head_params + embedding
        counted += (
            spec.num_experts * one.cost.weights.num_moe_layers * one.cost.weights.expert_params
        )
        assert counted == pytest.approx(model_size(spec).total, rel=0.01)


def _decoding(candidate: Candidate) -> Any:
    from moeserve.plan.roofline import Shape

    assert candidate.cost is not None
    sums = (8 * 1000.0,) * len(candidate.cost.windows)
    return Shape(8, 8, 8, sums, sums)


def test_layouts_are_those_that_the_engine_runs(tmp_path: Path) -> None:
    """Ranks of an engine share 32 heads and are on one machine.

    Whole copies of the weights do not fit beside each other.
    """
    assert set(layouts(QWEN3_30B, "2x8xH100")) == {
        (16 // tp, tp, ep) for tp in (1, 2, 4, 8) for ep in ("on", "off")
    }
    found = layouts(spec_of("DeepSeek-V3.1", tmp_path), "4x8xH200")
    assert {key for key, c in found.items() if not c.refused} == {
        (32, 1, "on"),
        (16, 2, "on"),
        (8, 4, "on"),
        (4, 8, "on"),
    }
    assert all("free" in c.refused for key, c in found.items() if key[2] == "off")


def test_redundant_experts_are_tried_where_experts_are_not_alike() -> None:
    found = candidates(QWEN3_30B, config(), read_gpus("8xH100"), zipf=1.0)
    assert {c.config.parallel.redundant_experts for c in found} == {0, 8}


def test_more_requests_take_longer_until_too_many_come() -> None:
    candidate = layouts(QWEN3_30B, "H200")[1, 1, "on"]
    load = Workload(1.0, 1000, 200)
    most = candidate.capacity(load)
    times = [candidate.estimate(replace(load, rate=share * most)) for share in (0.1, 0.5, 0.9)]
    assert all(found is not None for found in times)
    itl_s = [found.itl_s for found in times if found is not None]
    assert itl_s == sorted(itl_s)
    assert candidate.estimate(replace(load, rate=1.1 * most)) is None


def test_goals_bound_the_rate() -> None:
    candidate = layouts(QWEN3_30B, "H200")[1, 1, "on"]
    free, bound = (
        candidate.capacity(Workload(1.0, 1000, 200, itl_s=itl_s)) for itl_s in (math.inf, 0.02)
    )
    assert 0 < bound < free
    assert candidate.capacity(Workload(1.0, 1000, 200, itl_s=1e-6)) == 0.0


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("8", "must be like"),
        ("2x8x", "must be like"),
        ("8xH300", "did you mean h"),
        ("0xH100", "1 to 1024"),
    ],
)
def test_bad_clusters(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_gpus(text)
    with pytest.raises(ConfigError, match="ib400"):
        read_gpus("H100", "string")


def test_clusters() -> None:
    found = [read_gpus(text) for text in ("2x8xH100", "8xh200", "B200")]
    assert [(c.nodes, c.per_node, c.device.name) for c in found] == [
        (2, 8, "H100"),
        (1, 8, "H200"),
        (1, 1, "B200"),
    ]
