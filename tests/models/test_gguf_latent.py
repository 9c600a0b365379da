"""GGUF files of DeepSeek, Mistral 4, GLM, Ling, ERNIE and Hunyuan: older forms, and metadata
that cannot be meant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from moeserve.blocks.feed_forward import MoE
from moeserve.comm.world import World
from moeserve.errors import CheckpointError
from moeserve.models.hf_config import read_model_spec
from moeserve.ops.native import native
from tests.gguf_files import OPTIONS, matrices, write_gguf

from .conftest import Driver
from .test_gguf import PROMPT, params_of

module: Any = native()


def written(name: str, make_checkpoint: Any, folder: Path, **metadata: Any) -> tuple[Path, Path]:
    """Return a family's checkpoint, and its GGUF file."""
    path = make_checkpoint(name, **OPTIONS.get(name, {})).path
    return path, write_gguf(name, path, folder / "model.gguf", **metadata)


def rewritten(file: Path, to: Path, add: dict[str, torch.Tensor], *without: str) -> Path:
    """Copy a file with the tensors in `add`, and without those whose names have parts `without`."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kind, of = field.types[0], field.types[-1]
            of = of if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, of)
    for tensor in reader.tensors:
        if not any(part in tensor.name for part in without):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, values in add.items():
        writer.add_tensor(name, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()
    return to


def test_files_without_groups_have_one(make_checkpoint: Any, tmp_path: Path) -> None:
    """The family's own default is 8 groups, of which 4 are kept."""
    keys = dict.fromkeys(("expert_group_count", "expert_group_used_count"))
    _, file = written("bailing_moe", make_checkpoint, tmp_path, **keys)
    groups = [
        (layer.feed_forward.router.groups, layer.feed_forward.router.kept_groups)
        for layer in read_model_spec(file).layers
        if isinstance(layer.feed_forward, MoE)
    ]
    assert set(groups) == {(1, 1)}


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "kimi_k25"])
def test_old_files_have_keys_and_values_in_one_tensor(
    name: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    old = {
        "attention.key_length": 24,
        "attention.value_length": 16,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
        "attention.head_count_kv": 4,
    }
    path, file = written(name, make_checkpoint, tmp_path, **old)
    whole = {
        f"blk.{key.split('layers.')[1].split('.')[0]}.attn_kv_b.weight": tensor
        for key, tensor in load_file(path / "model.safetensors").items()
        if key.endswith("kv_b_proj.weight")
    }
    file = rewritten(file, tmp_path / "old.gguf", whole, "attn_k_b", "attn_v_b")
    ours, theirs = (Driver(one).prefill("a", PROMPT, 31) for one in (file, path))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["mistral3", "mistral4"])
def test_queries_of_mistral_4_grow_with_the_position(
    name: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    """Converters write the slope for Mistral-Large-3 only; every published model has 0.1."""
    path, file = written(name, make_checkpoint, tmp_path)
    ours, theirs = (read_model_spec(one).layers[0].mixer for one in (file, path))
    assert ours.query_scale == theirs.query_scale
    assert ours.query_scale is not None
    slope = {"attention.temperature_scale": 0.25}
    other = write_gguf(name, path, tmp_path / "other.gguf", **slope)
    assert read_model_spec(other).layers[0].mixer.query_scale.slope == 0.25


def test_glm_5_files_without_types_of_indexers(make_checkpoint: Any, tmp_path: Path) -> None:
    """As in llama.cpp: all layers of GLM-5 have one, and a quarter of GLM-5.2's."""
    path = make_checkpoint("glm_moe_dsa", **OPTIONS["glm_moe_dsa"]).path

    def shared(**metadata: Any) -> list[bool]:
        metadata = {"block_count": 12, **metadata, "attention.indexer.types": None}
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        spec = read_model_spec(write_gguf("glm_moe_dsa", path, file, **metadata))
        return [layer.mixer.indexer.shared for layer in spec.layers]

    assert not any(shared())
    assert [i for i, reuses in enumerate(shared(context_length=2**20)) if not reuses] == [
        0,
        1,
        2,
        6,
        10,
    ]


def test_a_trunk_without_its_mtp_layer_is_served(make_checkpoint: Any, tmp_path: Path) -> None:
    """Some files have lost the layer that their metadata count."""
    path, file = written("glm4_moe", make_checkpoint, tmp_path)
    trunk = rewritten(file, tmp_path / "trunk.gguf", {}, "blk.2.")
    ours, theirs = (Driver(one).prefill("a", PROMPT, 31) for one in (trunk, path))
    assert torch.equal(ours, theirs)


@pytest.mark.skipif(module is None or not module.serving_isa(), reason="needs the native kernels")
@pytest.mark.parametrize("name", ["mistral3", "bailing_moe", "glm_moe_dsa", "ernie4_5_moe"])
def test_quantized_tensors(name: str, make_checkpoint: Any, tmp_path: Path) -> None:
    """Gates and ups are in one tensor, or queries, keys and values; there are indexers."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256}
    latent = {"qk_nope_head_dim": 32, "kv_lora_rank": 32, "q_lora_rank": 64}
    sizes |= {
        "mistral3": {**latent, "qk_rope_head_dim": 32},
        "glm_moe_dsa": latent,
    }.get(name, {})
    path = make_checkpoint(name, **{**OPTIONS.get(name, {}), **sizes}).path
    choose = matrices("Q4_K", "Q8_0", "Q6_K")
    got = Driver(write_gguf(name, path, tmp_path / "model.gguf", choose), activations="float")
    expected = Driver(write_gguf(name, path, tmp_path / "meaning.gguf", choose, meaning=True))
    assert got.spec.stored
    ours, theirs = (driver.prefill("a", PROMPT, 31) for driver in (got, expected))
    assert ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max() <= 1e-4


@pytest.mark.parametrize(
    ("name", "metadata", "says"),
    [
        ("mistral3", {"rope.scaling.original_context_length": None}, "original_context_.* missing"),
        ("mistral4", {"attention.temperature_length": 65}, "length is 65; supported: 64, rope"),
        ("mistral4", {"attention.temperature_scale": "x"}, "llama_4_scaling_beta is 'x'"),
        ("mistral4", {"expert_gating_func": 2}, "gating_func is 2; Mistral4ForCausalLM has 1"),
        ("glm_moe_dsa", {"attention.indexer.types": [True, False]}, "list full or shared for each"),
        ("glm_moe_dsa", {"attention.indexer.types": [2, 0, 1]}, "types is .2, 0, 1.; it must be"),
        ("glm_moe_dsa", {"attention.indexer.types": [False, True, True]}, "first layer must be"),
        ("glm_moe_dsa", {"attention.indexer.types": "full"}, "types is 'full'; it must be true or"),
        ("glm_moe_dsa", {"attention.indexer.top_k": None}, "'attention.indexer.top_k' .* missing"),
        ("glm_moe_dsa", {"attention.indexer.top_k": 0}, "index_topk is 0"),
        ("deepseek_v32", {"attention.q_lora_rank": None}, "'attention.q_lora_rank' .* missing"),
        ("deepseek_v32", {"attention.indexer.key_length": 4}, "index_head_dim is 4"),
        ("deepseek_v32", {"nextn_predict_layers": 9}, "nextn_predict_layers is 9"),
        ("bailing_moe", {"expert_shared_feed_forward_length": 96}, "intermediate_size is 96"),
        ("bailing_moe", {"expert_gating_func": 1}, "expert_gating_func is 1; .* has 2"),
        ("ernie4_5_moe", {"interleave_moe_layer_step": None}, "'interleave_moe_.* is missing"),
        ("ernie4_5_moe", {"expert_weights_scale": 2.0}, "expert_weights_scale is 2.0; only 1.0"),
        ("ernie4_5_moe", {"leading_dense_block_count": 4}, "moe_layer_start_index is 4"),
        ("hunyuan_v1_moe", {"expert_weights_norm": False}, "expert_weights_norm is False"),
        ("hunyuan_v1_moe", {"attention.key_length": None}, "'attention.key_length' .* missing"),
        ("hunyuan_v1_moe", {"expert_feed_forward_length": 48}, "moe_intermediate_size is 48"),
        ("hy_v3", {"expert_weights_norm": None}, "'expert_weights_norm' .* missing"),
        ("hy_v3", {"expert_shared_feed_forward_length": 50}, "is 50; it must be a multiple of 48"),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_meant(
    name: str, metadata: dict[str, Any], says: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    _, file = written(name, make_checkpoint, tmp_path, **metadata)
    with pytest.raises(CheckpointError, match=says):
        params_of(file, World())


def test_alpha_of_hunyuan_is_recovered(make_checkpoint: Any, tmp_path: Path) -> None:
    """The converter writes the base that alpha gives, rounded to fp32; other bases stay."""
    path, file = written("hunyuan_v1_moe", make_checkpoint, tmp_path)
    ours, theirs = (read_model_spec(one).layers[0].mixer.rope for one in (file, path))
    assert ours == theirs
    base = {"rope.freq_base": 11158000.0}
    other = write_gguf("hunyuan_v1_moe", path, tmp_path / "other.gguf", **base)
    assert read_model_spec(other).layers[0].mixer.rope.theta == 11158000.0
