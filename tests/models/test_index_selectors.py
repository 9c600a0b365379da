"""Queries that attend to what an index selector chooses: where it selects, which layers choose,
what it needs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from moeserve.blocks.latent_attention import LatentAttention
from moeserve.errors import CheckpointError
from moeserve.models.hf_config import read_model_spec
from moeserve.models.spec import ModelSpec
from moeserve.models.workspace import workspace_bytes
from moeserve.ops.native import native
from moeserve.ops.table import Choice

from .conftest import Driver
from .test_bits import alone, in_company
from .test_workspace import peak_bytes

MODULE: Any = native()
NAMES = ["deepseek_v32", "glm_moe_dsa"]
PROMPT = torch.randint(0, 256, (75,), generator=torch.Generator().manual_seed(1)).tolist()


def with_top_k(spec: ModelSpec, top_k: int) -> ModelSpec:
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.mixer, LatentAttention)
        assert layer.mixer.indexer
        indexer = replace(layer.mixer.indexer, top_k=top_k)
        layers.append(replace(layer, mixer=replace(layer.mixer, indexer=indexer)))
    return replace(spec, layers=tuple(layers))


@pytest.mark.full("models", keep="each")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_queries_that_see_few_tokens_have_the_bits_of_plain_attention(
    name: str, kernels: Choice, dtype: torch.dtype, make_checkpoint: Any
) -> None:
    path = make_checkpoint(name).path
    spec = read_model_spec(path)
    plain, some = (
        Driver(path, dtype, spec=with_top_k(spec, top_k), kernels=kernels).prefill("a", PROMPT, 29)
        for top_k in (1000, 24)
    )
    assert torch.equal(plain[:24], some[:24])
    assert not torch.isclose(plain[24:], some[24:]).all(-1).any()


@pytest.mark.full("models", keep=1)
@pytest.mark.parametrize("isa", MODULE.supported_isas() if MODULE else [])
@pytest.mark.parametrize("name", NAMES)
def test_every_instruction_set_has_the_same_bits(name: str, isa: Any, make_checkpoint: Any) -> None:
    path = make_checkpoint(name).path
    expected = alone(Driver(path, torch.bfloat16))
    best = MODULE.serving_isa()
    driver = Driver(path, torch.bfloat16, num_blocks=1024)
    MODULE.use_isa(isa)
    try:
        assert torch.equal(in_company(driver, others=9, chunk=7, seed=1), expected)
    finally:
        MODULE.use_isa(best)


@pytest.mark.full("models", keep="each")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize(("rows", "count", "before"), [(1, 512, 0), (20, 1, 90), (3, 64, 500)])
def test_memory_stays_below_the_bound(
    name: str, kernels: Choice, rows: int, count: int, before: int, make_checkpoint: Any
) -> None:
    driver = Driver(make_checkpoint(name).path, num_blocks=1000, kernels=kernels)
    for key in range(rows if before else 0):
        driver.step([(key, [1] * before)])
    peak = peak_bytes(lambda: driver.step([(key, [5] * count) for key in range(rows)]))
    bound = workspace_bytes(driver.spec, rows * count, rows * count, before + count, torch.float32)
    assert peak <= bound, (peak, bound)


CHOOSES: list[dict[str, Any]] = [
    {},
    {"index_topk_freq": 3},
    {"index_topk_freq": 4, "index_skip_topk_offset": 5},
    {"index_topk_freq": 0},
    {"index_topk_pattern": "FSFSSF"},
    {"index_topk_pattern": ["full", "shared", "shared", "shared", "full", "full"]},
    {
        "indexer_types": ["full", "full", "shared", "full", "shared", "shared"],
        "index_topk_pattern": "FSFSSF",
    },
]


@pytest.mark.parametrize("keys", CHOOSES, ids=str)
def test_layers_choose_as_transformers_says(keys: dict[str, Any], tmp_path: Path) -> None:
    values = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "dtype": "float32",
        "num_hidden_layers": 6,
        **keys,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    mixers = [layer.mixer for layer in read_model_spec(tmp_path).layers]
    shared = [
        isinstance(mixer, LatentAttention) and mixer.indexer and mixer.indexer.shared
        for mixer in mixers
    ]
    theirs = transformers.GlmMoeDsaConfig(num_hidden_layers=6, **keys).indexer_types
    assert ["shared" if there else "full" for there in shared] == theirs


@pytest.mark.parametrize(
    ("architecture", "keys", "says"),
    [
        (
            "GlmMoeDsa",
            {"indexer_types": ["shared", "full"]},
            "the first layer must be full",
        ),
        ("GlmMoeDsa", {"indexer_types": ["full"]}, "full or shared for each of 2 layers"),
        ("GlmMoeDsa", {"index_topk_pattern": "FX"}, "full or shared for each of 2 layers"),
        ("GlmMoeDsa", {"index_topk_freq": "4"}, "index_topk_freq is '4'"),
        ("GlmMoeDsa", {"indexer_rope_interleave": False}, "only True is supported"),
        ("DeepseekV32", {"indexer_rope_interleave": True}, "only False is supported"),
        ("DeepseekV32", {"index_topk": 0}, "index_topk is 0"),
        (
            "DeepseekV32",
            {"index_head_dim": 32},
            "index_head_dim is 32; it must be an integer from 64",
        ),
        ("DeepseekV32", {"index_n_heads": None}, "index_n_heads is None"),
        ("DeepseekV32", {"q_lora_rank": None}, "q_lora_rank is None"),
        ("DeepseekV32", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    ],
)
def test_bad_config_is_refused(
    architecture: str, keys: dict[str, Any], says: str, tmp_path: Path
) -> None:
    own = {
        "architectures": [f"{architecture}ForCausalLM"],
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
    }
    values = {**own, "dtype": "float32", **keys}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=says):
        read_model_spec(tmp_path)
