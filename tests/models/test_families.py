"""Weight plans: spellings of checkpoints, ranks, refusals; and the step without tokens."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.comm.world import World
from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import fingerprint, open_checkpoint
from moeserve.loader.load_plan import is_packed
from moeserve.models.build import build_decoder
from moeserve.models.hf_config import read_model_spec
from moeserve.models.load_plan import load_plan
from moeserve.models.registry import FAMILIES
from moeserve.moe.placement.placement import Placement
from moeserve.ops.inputs import GroupInputs, Positions, StepInputs
from moeserve.ops.table import Choice
from tests.diffusion import DIFFUSION
from tests.families import architecture
from tests.loader.eager import load

from .conftest import FAMILIES as CHECKPOINTS
from .conftest import Driver, carry_out

FUSED = {
    "qwen3_moe": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    "mixtral": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    "granite_moe": ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
}


def test_every_family_is_tested() -> None:
    # PhiMoE's class has one name in transformers and another in its published checkpoints.
    # tests/diffusion.py has models that decode blocks.
    blocks = {changes["architectures"][0] for _, changes in DIFFUSION.values()}
    others = {"PhiMoEForCausalLM"} | blocks
    assert {architecture(name) for name in CHECKPOINTS} | others == set(FAMILIES)


@pytest.mark.parametrize("name", FUSED)
def test_fused_expert_tensors_fill_the_same_parameters(name: str, make_checkpoint: Any) -> None:
    """Names are those of a transformers 5 state dict in memory, and those per expert on disk."""
    checkpoint = make_checkpoint(name)
    spec = read_model_spec(checkpoint.path)
    separate = carry_out(checkpoint.path, spec, torch.float32)
    tensors = checkpoint.reference.state_dict()
    assert f"model.layers.0.{FUSED[name][0]}" in tensors
    plan = load_plan(spec, tensors.keys())
    assert tensors.keys() - plan.ignore == {piece.source for piece in plan.pieces}
    for piece in plan.pieces:
        assert tensors[piece.source].shape == piece.shape
        assert torch.equal(separate[piece.param][piece.at], tensors[piece.source][piece.take])


@pytest.mark.parametrize("fused", [True, False])
def test_ranks_share_out_the_experts(fused: bool, make_checkpoint: Any) -> None:
    checkpoint = make_checkpoint("qwen3_moe")
    spec = read_model_spec(checkpoint.path)
    tensors = checkpoint.reference.state_dict()
    names = tensors.keys() if fused else list(_safetensors_names(checkpoint))
    everything = carry_out(checkpoint.path, spec, torch.float32)
    for rank in range(4):
        plan = load_plan(spec, names, World(rank, 4))
        shapes = {param.name: param.shape for param in plan.params}
        assert shapes["layers.0.w13"] == (2, 64, 64)
        assert {piece.source for piece in plan.pieces} | plan.ignore >= set(names)
        if fused:
            pieces = [piece for piece in plan.pieces if piece.param == "layers.1.w2"]
            part = torch.stack([tensors[piece.source][piece.take] for piece in pieces])
            assert torch.equal(part, everything["layers.1.w2"][2 * rank : 2 * rank + 2])
        else:
            sources = [piece.source for piece in plan.pieces if piece.param == "layers.1.w2"]
            assert [int(source.split(".")[5]) for source in sources] == [2 * rank, 2 * rank + 1]


def _safetensors_names(checkpoint: Any) -> list[str]:
    from safetensors import safe_open

    with safe_open(checkpoint.path / "model.safetensors", "pt") as file:
        return list(file.keys())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_loader_carries_out_the_plan(name: str, make_checkpoint: Any) -> None:
    path = make_checkpoint(name).path
    spec = read_model_spec(path)
    checkpoint = open_checkpoint(path)
    plan = load_plan(spec, checkpoint.tensors.keys())
    loaded = load(checkpoint, plan, torch.bfloat16)
    expected = carry_out(path, spec, torch.bfloat16)
    assert loaded.keys() == expected.keys()
    for param in plan.params:
        if param.on_disk:
            loaded[param.name] = loaded[param.name].read(torch.arange(param.shape[0]))
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_matrix_is_known_as_a_products(name: str, make_checkpoint: Any) -> None:
    """Products are recognized by their names.

    Otherwise packed_cache, --quantization and quantized checkpoints would not apply to them.
    """
    path = make_checkpoint(name).path
    params = load_plan(read_model_spec(path), open_checkpoint(path).names).params
    read = [
        param
        for param in params
        if len(param.shape) > 1
        and not (param.on_disk or param.int64)
        and (not param.fp32 or is_packed(param.name))
    ]
    matrices = {param.name for param in read if not param.name.endswith("_bias")}
    others = {
        one for one in matrices if one == "embed" or one.endswith((".kv_b", ".out_groups"))
    }  # gathered; taken apart by heads
    assert {param.name for param in params if is_packed(param.name)} == matrices - others


def test_a_saved_lm_head_is_ignored_when_tied(make_checkpoint: Any) -> None:
    spec = read_model_spec(make_checkpoint("llama", tie_word_embeddings=True).path)
    plan = load_plan(spec, ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
    assert plan.ignore >= {"lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}
    assert "lm_head" not in {param.name for param in plan.params}


def test_missing_tensors_are_still_asked_for(make_checkpoint: Any) -> None:
    """An empty checkpoint gets a full plan, so that the loader can name what is missing."""
    spec = read_model_spec(make_checkpoint("mixtral").path)
    sources = {piece.source for piece in load_plan(spec, []).pieces}
    assert "model.layers.1.block_sparse_moe.experts.7.w3.weight" in sources
    assert "lm_head.weight" in sources


def test_parameters_are_taken_out_while_building(make_checkpoint: Any) -> None:
    """So each weight's memory can be freed as soon as it is packed."""
    from moeserve.ops.pick import pick_ops

    path = make_checkpoint("qwen2_moe").path
    spec = read_model_spec(path)
    params = carry_out(path, spec, torch.bfloat16)
    build_decoder(spec, params, pick_ops("cpu", torch.bfloat16))
    assert params == {}


@pytest.mark.parametrize("name", ["qwen2_moe", "llama"])
def test_a_step_without_tokens(name: str, make_checkpoint: Any) -> None:
    """An idle rank of an expert-parallel group runs such steps."""
    driver = Driver(make_checkpoint(name).path)
    none = torch.zeros(0, dtype=torch.int64)
    groups = tuple(
        GroupInputs(none, torch.zeros((0, 1), dtype=torch.int64), 16, rule.window)
        for rule in driver.rules
    )
    step = StepInputs(
        none,
        Positions.of_text(none),
        groups,
        none,
        np.zeros(1, np.int32),
        np.zeros(0, np.int32),
        (),
    )
    hidden = driver.model.forward(step, driver.kv, driver.ubatch)
    assert hidden.shape == (0, 64)
    assert driver.model.logits(hidden).shape == (0, 256)
    load = driver.ubatch.take_load()
    assert load.sum() == 0


def test_expert_load_counts_tokens_and_no_padding(make_checkpoint: Any) -> None:
    driver = Driver(make_checkpoint("qwen3_moe").path)
    driver.prefill("a", list(range(37)))
    load = driver.ubatch.take_load()
    assert load.shape == (2, 8)
    assert load.sum(1).tolist() == [37 * 3, 37 * 3]
    assert not len(driver.ubatch.take_load())


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_experts_in_any_slots_of_one_rank(kernels: Choice, make_checkpoint: Any) -> None:
    """Eleven slots for eight experts: the same logits, and loads of experts, not of slots."""
    path = make_checkpoint("qwen3_moe").path
    spec = read_model_spec(make_checkpoint("qwen3_moe").path)
    row = np.array([3, 1, 0, 2, 7, 6, 5, 4, 0, 3, 3], np.int32)
    placements = [None, Placement(0, 1, spec.num_experts, np.tile(row, (2, 1)))]
    if kernels == "triton" and torch.cuda.is_available():
        pytest.skip("there the kernels are not interpreted")
    drivers = [Driver(path, kernels=kernels, placement=placement) for placement in placements]
    expected, found = (driver.prefill("a", list(range(9))) for driver in drivers)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    loads = [np.asarray(driver.ubatch.take_load()) for driver in drivers]
    assert np.array_equal(*loads)


def test_a_class_with_two_names_is_one_family(make_checkpoint: Any, tmp_path: Path) -> None:
    """PhiMoE's is PhimoeForCausalLM in transformers."""
    path = make_checkpoint("phimoe").path
    values = json.loads((path / "config.json").read_text())
    specs = []
    for name in ("PhimoeForCausalLM", "PhiMoEForCausalLM"):
        (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": [name]}))
        specs.append(replace(read_model_spec(tmp_path), architecture=""))
    assert specs[0] == specs[1]


def _ernie_vl(make_checkpoint: Any, **changes: Any) -> dict[str, Any]:
    """Return ERNIE-4.5-VL's config.json in the publisher's form: without `text_config`, and with
    lists of a value for text and one for pictures.
    """
    values = json.loads((make_checkpoint("ernie4_5_vl_moe").path / "config.json").read_text())
    text = values.pop("text_config")
    del text["mlp_layer_types"]
    text |= {"moe_num_experts": [8, 8], "moe_layer_start_index": [1, 1]}
    text |= {"moe_layer_end_index": [4, 3], "model_type": "ernie4_5_moe_vl"}
    return {**values, **text, **changes}


def test_the_form_of_ernie_vl_that_its_publisher_writes(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_ernie_vl(make_checkpoint)))
    expected = read_model_spec(make_checkpoint("ernie4_5_vl_moe").path)
    assert read_model_spec(tmp_path) == expected


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("moe_num_experts", [8, 4], "experts as many of both"),
        ("moe_intermediate_size", [48], "a number for text and one for pictures"),
        ("moe_layer_end_index", [2, 1], "experts for text alone are not supported"),
    ],
)
def test_ernie_vl_without_experts_for_both(
    key: str, value: Any, message: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    values = _ernie_vl(make_checkpoint, **{key: value})
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        read_model_spec(tmp_path)


def test_params_json_is_read_where_it_is_alone(make_checkpoint: Any, tmp_path: Path) -> None:
    """Mistral's own format; its fingerprint covers that file."""
    checkpoint = make_checkpoint("mistral_large_3")
    shutil.copytree(checkpoint.path, tmp_path, dirs_exist_ok=True)
    assert read_model_spec(tmp_path).architecture == "MistralLarge3ForCausalLM"
    before = fingerprint(open_checkpoint(tmp_path))
    params = json.loads((tmp_path / "params.json").read_text())
    (tmp_path / "params.json").write_text(json.dumps(params | {"rope_theta": 5e4}))
    assert fingerprint(open_checkpoint(tmp_path)) != before
    (tmp_path / "params.json").write_text(
        json.dumps(params | {"quantization": {"qformat_weight": "fp8_e4m3"}})
    )
    with pytest.raises(CheckpointError, match=r"params.json: quantization is .* not supported"):
        read_model_spec(tmp_path)


def test_a_text_of_another_kind_is_refused(make_checkpoint: Any, tmp_path: Path) -> None:
    values = json.loads((make_checkpoint("mistral3").path / "config.json").read_text())
    values["text_config"]["model_type"] = "mistral"
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"model_type is 'mistral'; supported: mistral4"):
        read_model_spec(tmp_path)
