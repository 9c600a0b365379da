"""GGUF files of models with recurrent layers: the order of Qwen3.5's value heads, tensors of older
files, and metadata that cannot be meant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.comm.world import World
from moeserve.errors import CheckpointError
from moeserve.models.hf_config import read_model_spec
from moeserve.ops.native import native
from tests.gguf_families.group import Tensors
from tests.gguf_files import F32, OPTIONS, matrices, write_gguf

from .conftest import Driver
from .test_gguf import PROMPT, params_of
from .test_tensor_parallel import check

module: Any = native()
needs_integers = pytest.mark.skipif(
    module is None or not module.serving_isa(), reason="needs the native kernels"
)
QWEN = "qwen3_5_moe_text"


def prefill(path: Path, **options: Any) -> torch.Tensor:
    return Driver(path, **options).prefill("a", PROMPT, 31)


@pytest.fixture
def sparse(make_checkpoint: Any, tmp_path: Path) -> Path:
    """A checkpoint whose out_proj has one weight in each row: the order of its sums decides
    nothing.
    """
    path: Path = make_checkpoint(QWEN).path
    folder = tmp_path / "sparse"
    folder.mkdir()
    (folder / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for name in (name for name in tensors if name.endswith("linear_attn.out_proj.weight")):
        weight = torch.zeros_like(tensors[name])
        columns = torch.randperm(weight.shape[1], generator=generator)[: len(weight)]
        weight[range(len(weight)), columns] = torch.randn(len(weight), generator=generator)
        tensors[name] = weight
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_each_value_head_is_where_the_file_has_it(
    kernels: Any, sparse: Path, tmp_path: Path
) -> None:
    file = write_gguf(QWEN, sparse, tmp_path / "model.gguf")
    assert read_model_spec(file).layers[0].mixer.places == [0, 4, 1, 5, 2, 6, 3, 7]  # type: ignore[attr-defined]
    assert torch.equal(prefill(file, kernels=kernels), prefill(sparse, kernels=kernels))


@pytest.mark.parametrize("name", [QWEN, "qwen4_exp_text"])
@pytest.mark.parametrize(
    ("value_heads", "most"),
    [
        (4, 0.0),  # one for each key head: the file has them in order
        (8, 1e-4),  # out_proj sums in the order of the file
    ],
)
def test_logits_of_qwen_3_5(
    name: str, value_heads: int, most: float, make_checkpoint: Any, tmp_path: Path
) -> None:
    options = OPTIONS.get(name, {})
    path = make_checkpoint(name, linear_num_value_heads=value_heads, **options).path
    ours, theirs = (prefill(each) for each in (write_gguf(name, path, tmp_path / "m.gguf"), path))
    assert (ours - theirs).abs().max() <= most


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_have_their_value_heads(
    tp_size: int, sparse: Path, tmp_path: Path, one_torch_thread: None
) -> None:
    check(write_gguf(QWEN, sparse, tmp_path / "model.gguf"), torch.float32, tp_size)


@needs_integers
@pytest.mark.parametrize("name", [QWEN, "granite_moe_hybrid", "jamba", "lfm2_moe", "nemotron_h"])
def test_quantized_weights_mean_what_ggml_says(
    name: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    """Rows of whole blocks of 256, those of ssm_out included: two value heads share a block."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256}
    qwen = {"linear_value_head_dim": 128} if name == QWEN else {}
    path = make_checkpoint(name, **{**OPTIONS.get(name, {}), **sizes, **qwen}).path
    quantized = matrices("Q4_K", "Q8_0", "Q6_K")

    def choose(tensor: str, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType:
        """As llama.cpp does, leave norms, convolutions and decays unquantized."""
        is_plain = any(part in tensor for part in ("norm", "conv", ".ssm_a", ".ssm_d"))
        return F32 if is_plain else quantized(tensor, shape)

    got = prefill(
        write_gguf(name, path, tmp_path / "model.gguf", choose), activations="float"
    )  # fmt: skip
    expected = prefill(write_gguf(name, path, tmp_path / "meaning.gguf", choose, meaning=True))
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() <= 2e-5
    assert error.max() <= 5e-4  # states sum up the differences of many tokens


def test_an_older_file_of_qwen3_next_has_one_tensor_of_inputs(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    path = make_checkpoint("qwen3_next").path
    theirs = load_file(path / "model.safetensors")

    def older(tensors: Tensors) -> Tensors:
        kept = {k: v for k, v in tensors.items() if "attn_qkv" not in k and "attn_gate" not in k}
        return kept | {
            f"blk.{name.split('.')[2]}.ssm_in.weight": tensor
            for name, tensor in theirs.items()
            if name.endswith("in_proj_qkvz.weight")
        }

    file = write_gguf("qwen3_next", path, tmp_path / "old.gguf", change=older)
    assert torch.equal(prefill(file), prefill(path))


def test_an_mtp_block_of_nemotron_is_not_part_of_the_model(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    def with_mtp(tensors: Tensors) -> Tensors:
        names = ("attn_norm", "attn_q", "ffn_up_exps", "nextn.eh_proj", "post_attention_norm")
        return tensors | {f"blk.5.{name}.weight": torch.ones(2, 2) for name in names}

    path = make_checkpoint("nemotron_h", **OPTIONS["nemotron_h"]).path
    metadata = {
        "attention.head_count_kv": [0, 0, 0, 2, 0, 2],
        "block_count": 6,
        "feed_forward_length": [0, 48, 0, 0, 48, 48],
        "nextn_predict_layers": 1,
    }
    file = write_gguf("nemotron_h", path, tmp_path / "m.gguf", change=with_mtp, **metadata)
    assert torch.equal(prefill(file), prefill(path))


def test_granite_4_without_experts(make_checkpoint: Any, tmp_path: Path) -> None:
    name = "granite_moe_hybrid"
    sizes = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96}
    path = make_checkpoint(name, **OPTIONS[name], **sizes).path
    file = write_gguf(name, path, tmp_path / "m.gguf")
    assert torch.equal(prefill(file), prefill(path))


def test_quantization_may_drop_dimensions_of_kimi_linear(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    def without_ones(tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for name, tensor in tensors.items():
            if "conv1d" in name:
                found[name] = tensor[0]
            elif name.endswith("ssm_a"):
                found[name] = tensor[0, 0]
        return found

    path = make_checkpoint("kimi_linear", **OPTIONS["kimi_linear"]).path
    file = write_gguf("kimi_linear", path, tmp_path / "m.gguf", change=without_ones)
    assert torch.equal(prefill(file), prefill(path))


@pytest.mark.parametrize(
    ("name", "metadata", "says"),
    [
        (QWEN, {"ssm.inner_size": 100}, r"inner_size is 100; ssm.time_step_rank \(8\) must divide"),
        (QWEN, {"ssm.group_count": None}, "'ssm.group_count' of its architecture is missing"),
        (QWEN, {"ssm.group_count": 3}, r"linear_num_value_heads is 8; linear_num_key_heads \(3\)"),
        (QWEN, {"rope.dimension_count": 64}, "rope.dimension_count is 64; it must be an integer"),
        (QWEN, {"rope.dimension_count": None}, "'rope.dimension_count' of its .* is missing"),
        (QWEN, {"attention.recurrent_layers": [True, False]}, "must have a value for each of 4"),
        (QWEN, {"attention.recurrent_layers": [2, 1, 1, 0]}, "it must be true or false for each"),
        (QWEN, {"full_attention_interval": 0, "attention.recurrent_layers": None}, "interval is 0"),
        ("jamba", {"attention.head_count_kv": [2, 0]}, "must have a value for each of 3 layers"),
        ("jamba", {"attention.head_count_kv": [2, 0, -1]}, "an integer from 0 for each layer"),
        ("jamba", {"attention.head_count_kv": [2, 1, 0]}, "must have the same number of KV heads"),
        ("jamba", {"ssm.inner_size": 65}, r"embedding_length \(64\) must divide it"),
        ("granite_moe_hybrid", {"ssm.inner_size": 65}, r"embedding_length \(64\) must divide it"),
        ("granite_moe_hybrid", {"attention.head_count_kv": None}, "'attention.head_count_kv' of"),
        ("nemotron_h", {"feed_forward_length": [0, 48, 0, 48, 48]}, "0 for layers with KV heads"),
        ("nemotron_h", {"feed_forward_length": [0, 48, 0, 0, 49]}, "0 or the same integer for"),
        ("nemotron_h", {"ssm.inner_size": 100}, r"ssm.time_step_rank \(8\) must divide it"),
        ("nemotron_h", {"moe_latent_size": 32}, "narrower than the model are not supported"),
        ("lfm2_moe", {"shortconv.l_cache": None}, "'shortconv.l_cache' of its .* is missing"),
        ("kimi_linear", {"kda.head_dim": None}, "'kda.head_dim' of its architecture is missing"),
        ("kimi_linear", {"kda.head_dim": 13}, r"shape \[12, 64\], config.json implies \[13, 64"),
        ("kimi_linear", {"kda.safe_gate": True}, "'kda.safe_gate' of its .* is not known"),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_meant(
    name: str, metadata: dict[str, Any], says: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    path = make_checkpoint(name, **OPTIONS.get(name, {})).path
    file = write_gguf(name, path, tmp_path / "m.gguf", **metadata)
    with pytest.raises(CheckpointError, match=says):
        params_of(file, World())


def test_the_interval_of_attention_decides_without_a_list(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    path = make_checkpoint("qwen3_next").path
    absent = {"attention.recurrent_layers": None, "full_attention_interval": None}
    file = write_gguf("qwen3_next", path, tmp_path / "m.gguf", **absent)
    assert torch.equal(prefill(file), prefill(path))
