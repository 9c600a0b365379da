"""GGUF files: logits are, to the bit, those of the safetensors checkpoint with the same weights."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import gguf
import pytest
import torch

from moeserve.comm.world import World
from moeserve.errors import CheckpointError
from moeserve.loader import gguf_architectures
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.gguf_architectures.registry import ARCHITECTURES, variants_of
from moeserve.loader.gguf_vocab import end_ids, tokenizer_config
from moeserve.models.hf_config import read_model_spec
from moeserve.models.load_plan import load_plan
from moeserve.models.mtp import mtp_load_plan, with_mtp
from moeserve.ops.native import native
from tests.families import FULL, SLIDING
from tests.gguf_families import windows
from tests.gguf_files import F32, FAMILIES, KINDS, OPTIONS, as_f32, matrices, write_gguf
from tests.loader.eager import load
from tests.mtp import write_mtp_checkpoint

from .conftest import Driver

PROMPT = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(1)).tolist()
WIDE = {  # rows of whole blocks of 256
    "hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256, "head_dim": 64,
}  # fmt: skip
module: Any = native()


def test_every_architecture_is_tested() -> None:
    assert set(FAMILIES.values()) == set(ARCHITECTURES)


def test_the_table_has_every_architecture_of_the_modules() -> None:
    modules = [
        import_module(f"{gguf_architectures.__name__}.{info.name}")
        for info in iter_modules(gguf_architectures.__path__)
    ]
    entries = [getattr(module, "ARCHITECTURES", {}) for module in modules]
    described = {name for entry in entries if isinstance(entry, dict) for name in entry}
    assert described == set(ARCHITECTURES)
    for name in ARCHITECTURES:
        assert "" in variants_of(name)


# Files of Qwen3.5 have columns in another order: test_gguf_recurrent.py.
TILED = ("qwen35moe", "qwen4exp")


@pytest.mark.parametrize("name", [name for name, arch in FAMILIES.items() if arch not in TILED])
def test_a_family_is_what_its_safetensors_are(
    name: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    path = make_checkpoint(name, **OPTIONS.get(name, {})).path
    got = Driver(write_gguf(name, path, tmp_path / "model.gguf"))
    expected = Driver(path)
    ours, theirs = (driver.prefill("a", PROMPT, 31) for driver in (got, expected))
    assert torch.equal(ours, theirs)
    assert got.spec.dtype == expected.spec.dtype == "float32"


@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        "deepseek_v3",
        "gpt_oss",
        "gemma4_text",
        "mimo_v2_flash",
        "afmoe",
        "mistral3",
        "bailing_moe",
        "glm_moe_dsa",
    ],
)
def test_ranks_read_their_share(name: str, make_checkpoint: Any, tmp_path: Path) -> None:
    path = make_checkpoint(name, **OPTIONS.get(name, {})).path
    file = write_gguf(name, path, tmp_path / "model.gguf")
    for rank in range(2):
        world = World(rank, 2, tp_size=2)
        plain, own = (params_of(folder, world) for folder in (path, file))
        order = read_model_spec(file).layers[0].mixer.rope.interleaved and name == "mixtral"
        different = {key for key in plain if not torch.equal(plain[key], own[key])}
        assert different == ({key for key in plain if key.endswith("qkv")} if order else set())


def params_of(path: Path, world: World) -> dict[str, Any]:
    spec = read_model_spec(path)
    checkpoint = open_checkpoint(path, spec.stored)
    return load(checkpoint, load_plan(spec, checkpoint.names, world), torch.float32)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_a_file_in_16_bits_has_its_dtype(kind: str, make_checkpoint: Any, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_moe").path
    wanted = gguf.GGMLQuantizationType[kind]
    file = write_gguf(
        "qwen3_moe",
        path,
        tmp_path / "x.gguf",
        lambda name, shape: wanted if len(shape) > 1 else F32,
    )
    assert read_model_spec(file).dtype == {"F16": "float16", "BF16": "bfloat16"}[kind]
    got = params_of(file, World())
    plain = params_of(path, World())
    dtype = getattr(torch, read_model_spec(file).dtype)
    assert torch.equal(got["layers.0.qkv"], plain["layers.0.qkv"].to(dtype).float())


@pytest.mark.skipif(module is None or not module.serving_isa(), reason="needs the native kernels")
@pytest.mark.parametrize(
    "kinds",
    [*((kind,) for kind in KINDS), KINDS, ("Q4_0", "Q8_0", "Q6_K", "MXFP4"), ("Q8_0", "F32")],
)
def test_quantized_weights_mean_what_ggml_says(
    kinds: tuple[str, ...], make_checkpoint: Any, tmp_path: Path
) -> None:
    """Types that are mixed within a product are computed as int8. Rows in int8 are near those of
    floats.
    """
    path = make_checkpoint("qwen3_moe", **WIDE).path
    choose = matrices(*kinds)
    file = write_gguf("qwen3_moe", path, tmp_path / "model.gguf", choose)
    got = Driver(file, activations="float")
    rounded = Driver(file)
    expected = Driver(
        write_gguf("qwen3_moe", path, tmp_path / "meaning.gguf", choose, meaning=True)
    )
    assert got.spec.stored
    assert {form.ggml for form in got.spec.stored} <= set(kinds)
    ours, integers, theirs = (
        driver.prefill("a", PROMPT, 31) for driver in (got, rounded, expected)
    )
    assert ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max() <= 2e-5
    assert 1e-4 < ((integers - theirs).norm(dim=-1) / theirs.norm(dim=-1)).median() <= 5e-2


@pytest.mark.skipif(module is None or not module.serving_isa(), reason="needs the native kernels")
def test_nvfp4_weights_may_have_scales_beside_them(make_checkpoint: Any, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_moe", **WIDE).path
    options: dict[str, Any] = {"choose": matrices("NVFP4"), "outer_scales": True}
    file = write_gguf("qwen3_moe", path, tmp_path / "model.gguf", **options)
    meaning = write_gguf("qwen3_moe", path, tmp_path / "meaning.gguf", meaning=True, **options)
    ours, rounded, theirs = (
        driver.prefill("a", PROMPT, 31)
        for driver in (Driver(file, activations="float"), Driver(file), Driver(meaning))
    )
    assert ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max() <= 2e-5
    assert ((rounded - theirs).norm(dim=-1) / theirs.norm(dim=-1)).median() <= 5e-2


def test_other_types_have_no_scales_beside_them(make_checkpoint: Any, tmp_path: Path) -> None:
    file = write_gguf(
        "qwen3_moe",
        make_checkpoint("qwen3_moe", **WIDE).path,
        tmp_path / "model.gguf",
        choose=matrices("Q8_0"),
        outer_scales=True,
    )
    with pytest.raises(CheckpointError, match=r"tensor '\S+.scale' .* only NVFP4 weights have"):
        open_checkpoint(file, read_model_spec(file).stored)


@pytest.mark.skipif(module is None or not module.serving_isa(), reason="needs the native kernels")
@pytest.mark.parametrize(
    "name", ["gpt_oss", "deepseek_v3", "mixtral", "granite_moe_shared", "qwen2_moe"]
)
def test_quantized_families(name: str, make_checkpoint: Any, tmp_path: Path) -> None:
    """Biases, a split kv_b with rows of 32, rows in pairs; and a tied head, which has a weight of
    its own.
    """
    sizes = (
        {"qk_nope_head_dim": 32, "kv_lora_rank": 32}
        if name == "deepseek_v3"
        else {"tie_word_embeddings": True}
    )
    path = make_checkpoint(name, **OPTIONS.get(name, {}), **sizes).path
    choose = matrices("MXFP4", "Q8_0", "Q4_1")
    got = Driver(write_gguf(name, path, tmp_path / "model.gguf", choose), activations="float")
    expected = Driver(write_gguf(name, path, tmp_path / "meaning.gguf", choose, meaning=True))
    ours, theirs = (driver.prefill("a", PROMPT, 31) for driver in (got, expected))
    assert ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max() <= 2e-5


def test_a_split_model_is_the_whole(make_checkpoint: Any, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_moe").path
    first = write_gguf("qwen3_moe", path, tmp_path / "model.gguf", split=9)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    got = params_of(first, World())
    assert all(torch.equal(got[key], value) for key, value in params_of(path, World()).items())
    parts[1].rename(tmp_path / "elsewhere")
    with pytest.raises(
        CheckpointError, match=f"{parts[1].name} is missing: the model has {len(parts)} files"
    ):
        read_model_spec(first)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (
            {"rope.scaling.type": "longrope"},
            "rope.scaling.type is 'longrope'; supported: none, linear, yarn",
        ),
        ({"expert_gating_func": 2}, "expert_gating_func is 2; Qwen3MoeForCausalLM has 1"),
        ({"attention.value_length": 16}, "attention.value_length is 16; supported: 32"),
        ({"attention.causal": False}, "attention.causal is False"),
        ({"attention.head_count": 0}, "attention.head_count is 0"),
        ({"block_count": None}, "'block_count' of its architecture is missing"),
        ({"block_count": 3}, "is missing"),
        (
            {"final_logit_softcapping": 30.0},
            "'final_logit_softcapping' of its architecture is not known",
        ),
        ({"attention.head_count_kv": [2, 1]}, r"num_key_value_heads is \[2, 1\]"),
        (
            {"rope.dimension_count": 16},
            "partial_rotary_factor is 0.5; this architecture rotates the whole head",
        ),
        ({"embedding_length": 2**31}, "hidden_size is"),
        ({"block_count": [2, 2, 2]}, r"block_count is \[2, 2, 2\]; it must be an integer"),
        ({"attention.head_count_kv": [2] * 2**17}, f"has {2**17} values; supported: up to 65536"),
        ({"expert_group_count": 2}, "'expert_group_used_count' of its architecture is missing"),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 2.0,
                "rope.scaling.yarn_log_multiplier": "0.1",
            },
            "yarn_log_multiplier is '0.1'; it must be a number",
        ),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_meant(
    metadata: dict[str, Any], says: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    file = write_gguf(
        "qwen3_moe", make_checkpoint("qwen3_moe").path, tmp_path / "m.gguf", as_f32, **metadata
    )
    with pytest.raises(CheckpointError, match=says):
        params_of(file, World())


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_a_router_s_bias_tells_a_sigmoid(name: str, make_checkpoint: Any, tmp_path: Path) -> None:
    """Converters write expert_gating_func only if config.json has scoring_func: GLM-4.7-Flash."""
    path = make_checkpoint(name, **OPTIONS.get(name, {})).path
    files = [
        write_gguf(name, path, tmp_path / f"{i}.gguf", expert_gating_func=value, split=9 * i)
        for i, value in enumerate((None, None, 0))
    ]
    expected = Driver(path).prefill("a", PROMPT, 31)
    for file in files:
        assert torch.equal(Driver(file).prefill("a", PROMPT, 31), expected)


@pytest.mark.parametrize("name", ["llama", "llama4_text", "step3p5"])
def test_rope_freqs_are_llama_3_1_s(name: str, make_checkpoint: Any, tmp_path: Path) -> None:
    """The converter rounds the factors to fp32."""
    rope: dict[str, Any] = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain_rope = {"rope_type": "default", "rope_theta": 1e4}
    both = [rope, plain_rope]
    if name == "step3p5":
        sliding = {**plain_rope, "partial_rotary_factor": 1.0}
        both = [{FULL: {**full, "partial_rotary_factor": 0.5}, SLIDING: sliding} for full in both]
    options, plain_options = ({**OPTIONS.get(name, {}), "rope_parameters": one} for one in both)
    path = make_checkpoint(name, **options).path
    file = write_gguf(name, path, tmp_path / "model.gguf")
    ours, theirs = (Driver(one).prefill("a", PROMPT, 31) for one in (file, path))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    plain = make_checkpoint(name, **plain_options)
    other = Driver(plain.path).prefill("a", PROMPT, 31)
    assert (other - theirs).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen3_moe", "attention.layer_norm_rms_epsilon"),
        ("qwen3_moe", "context_length"),
        ("qwen3_moe", "embedding_length"),
        ("qwen3_moe", "attention.head_count"),
        ("qwen3_moe", "expert_used_count"),
        ("gpt_oss", "attention.sliding_window"),
        ("granite_moe", "logit_scale"),
    ],
)
def test_a_number_that_only_the_metadata_have_must_be_there(
    name: str, key: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    path = make_checkpoint(name, **OPTIONS.get(name, {})).path
    file = write_gguf(name, path, tmp_path / "m.gguf", **{key: None})
    with pytest.raises(CheckpointError, match=f"metadata key '{key}' of its .* is missing"):
        read_model_spec(file)


def test_keys_that_may_be_absent_mean_what_llama_cpp_takes(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    def spec_of(name: str, **metadata: Any) -> Any:
        file = tmp_path / f"{name}.gguf"
        file.unlink(missing_ok=True)
        path = make_checkpoint(name, **OPTIONS.get(name, {})).path
        return read_model_spec(write_gguf(name, path, file, **metadata))

    moe = spec_of("deepseek_v3", expert_weights_scale=None, expert_weights_norm=None).moe
    assert (moe.router.scale, moe.router.renormalize) == (1.0, False)
    names = ("attention.scale", "embedding_scale", "residual_scale")
    granite = spec_of("granite_moe", **dict.fromkeys(names))
    mixer = granite.layers[0].mixer
    assert mixer.scale == pytest.approx(mixer.head_dim**-0.5)
    assert (granite.embedding_scale, granite.residual_scale) == (1.0, 1.0)
    mixer = spec_of("qwen3_moe", **{"attention.head_count_kv": None}).layers[0].mixer
    assert mixer.num_kv_heads == mixer.num_heads
    olmoe = spec_of("olmoe", **{"attention.clamp_kqv": 2.0})  # llama.cpp's converter omits it
    assert olmoe.layers[0].mixer.clip == 2.0
    rope = spec_of("qwen3_moe", **{"rope.scaling.factor": 4.0}).layers[0].mixer.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)
    nemotron = spec_of("nemotron_h", **{"attention.layer_norm_rms_epsilon": 0.25})
    assert nemotron.norm_eps == 0.25
    without_factor: dict[str, Any] = {"rope.scaling.type": "yarn", "rope.scaling.factor": None}
    for name in ("qwen3_moe", "gpt_oss"):
        rope = spec_of(name, **without_factor).layers[0].mixer.rope
        assert (rope.kind, rope.factor) == ("default", 1.0)
    sliding = [
        layer.mixer.rope.theta
        for layer in spec_of("step3p5", **{"rope.freq_base_swa": None}).layers
        if layer.mixer.rule.window
    ]
    assert set(sliding) == {10_000.0}


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "gemma4_text", "cohere2_moe"])
def test_gates_and_ups_of_experts_may_be_one_tensor(
    name: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    path = make_checkpoint(name, **OPTIONS.get(name, {})).path
    file = write_gguf(name, path, tmp_path / "model.gguf", fused=True)
    assert "blk.2.ffn_up_exps.weight" not in {
        tensor.name for tensor in gguf.GGUFReader(file).tensors
    }
    for rank in range(2):
        split = write_gguf(name, path, tmp_path / f"{rank}.gguf")
        ours, theirs = (params_of(one, World(rank, 2, tp_size=2)) for one in (file, split))
        assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    assert torch.equal(*(Driver(one).prefill("a", PROMPT, 31) for one in (file, path)))


@pytest.mark.skipif(module is None or not module.serving_isa(), reason="needs the native kernels")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gemma4_text", "step3p5", "mimo_v2_flash"])
def test_wide_quantized_families(
    name: str, kind: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    """Rows of whole blocks of 256, and gates and ups in one tensor."""
    heads = {
        "gemma4_text": {"global_head_dim": 128},
        "step3p5": {"share_expert_dim": 256},
        "mimo_v2_flash": {"head_dim": 24},
    }
    sizes = {**WIDE, **OPTIONS.get(name, {}), **heads.get(name, {})}
    path = make_checkpoint(name, **sizes).path
    options: dict[str, Any] = {"choose": matrices(kind), "fused": True}
    file = write_gguf(name, path, tmp_path / "model.gguf", **options)
    meaning = write_gguf(name, path, tmp_path / "meaning.gguf", meaning=True, **options)
    got = Driver(file, activations="float")
    assert {form.ggml for form in got.spec.stored} == {kind}
    ours, theirs = (driver.prefill("a", PROMPT, 31) for driver in (got, Driver(meaning)))
    assert ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max() <= 2e-5


@pytest.mark.parametrize(
    ("name", "metadata", "says"),
    [
        (
            "gemma4_text",
            {"attention.sliding_window_pattern": [True, True]},
            r"pattern is \[True, True\]; it must have a value for each of 3 layers",
        ),
        (
            "gemma4_text",
            {"attention.sliding_window_pattern": [1, 2, 0]},
            "it must be a list of true and false",
        ),
        (
            "gemma4_text",
            {"attention.sliding_window_pattern": [True, True, True]},
            "at least one layer must have full attention",
        ),
        ("gemma4_text", {"attention.head_count_kv": [2, 2]}, "it must have a value for each of 3"),
        (
            "gemma4_text",
            {"attention.head_count_kv": [2, 1, 1]},
            "it must be the same for all layers with sliding_attention",
        ),
        (
            "gemma4_text",
            {"rope.dimension_count_swa": 8},
            "rope.dimension_count_swa is 8; supported",
        ),
        ("gemma4_text", {"attention.key_length_swa": None}, "'attention.key_length_swa' of its"),
        (
            "gemma4_text",
            {"attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 64},
            r"rope_freqs.weight is .*must have 32 numbers",
        ),
        (
            "gemma4_text",
            {"embedding_length_per_layer_input": 256},
            "hidden_size_per_layer_input is 256; only 0 is supported",
        ),
        ("gemma4_text", {"attention.shared_kv_layers": 1}, "num_kv_shared_layers is 1"),
        ("llama4_text", {"attention.sliding_window": 0}, "without chunked attention"),
        ("llama4_text", {"expert_gating_func": 1}, "expert_gating_func is 1"),
        ("phimoe", {"rope.scaling.attn_factor": None}, "rope.scaling.attn_factor is missing"),
        ("phimoe", {"rope.dimension_count": 8}, "partial_rotary_factor is 0.5"),
        ("mimo_v2_flash", {"rope.scaling.factor": 2.0}, "rope.scaling.factor is 2.0; MiMoV2Flash"),
        ("mimo_v2_flash", {"attention.head_count_kv": 1}, "swa_num_key_value_heads is 1"),
        (
            "mimo_v2_flash",
            {"attention.sliding_window_pattern": [1] * 6, "attention.head_count_kv": 2},
            "at least one layer must have full_attention",
        ),
        ("mimo_v2_flash", {"rope.dimension_count": None}, "'rope.dimension_count' of its"),
        ("step3p5", {"swiglu_clamp_exp": [0.5] * 3}, "swiglu_clamp_exp is .*each of 4 layers"),
        ("step3p5", {"swiglu_clamp_exp": [0.5, 0.0, -1.0, 0.0]}, "must have a number from 0"),
        ("step3p5", {"swiglu_clamp_shexp": [math.nan] * 5}, "must have a number from 0"),
        ("step3p5", {"expert_weights_norm": False}, "expert_weights_norm is False; only True"),
        (
            "step3p5",
            {"attention.head_count": [4, 6, 8, 6, 6]},
            "it must be the same for all layers",
        ),
        ("step3p5", {"attention.head_count_kv": [2, 1, 1, 1, 1]}, "the same for all layers"),
        ("step3p5", {"rope.dimension_count": "all"}, "rope.dimension_count is 'all'"),
        ("step3p5", {"rope.dimension_count_swa": "all"}, "rope.dimension_count_swa is 'all'"),
        ("afmoe", {"rope.dimension_count": "all"}, "rope.dimension_count is 'all'"),
        ("step3p5", {"attention.head_count": "four"}, "attention.head_count is 'four'"),
        ("afmoe", {"expert_weights_norm": None}, "'expert_weights_norm' of its .* is missing"),
        ("exaone_moe", {"expert_shared_feed_forward_length": 80}, "length is 80; only 48"),
        ("cohere2_moe", {"expert_gating_func": 1}, "expert_gating_func is 1"),
        ("cohere2_moe", {"expert_shared_count": "many"}, "expert_shared_count is 'many'"),
        ("cohere2_moe", {"attention.layer_norm_epsilon": None}, "'attention.layer_norm_epsilon'"),
        ("mellum", {"attention.sliding_window_pattern": 0}, "is 0; it must be an integer from 1"),
    ],
)
def test_layers_that_differ_are_told_in_full(
    name: str, metadata: dict[str, Any], says: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    path = make_checkpoint(name, **OPTIONS.get(name, {})).path
    file = write_gguf(name, path, tmp_path / "m.gguf", **metadata)
    with pytest.raises(CheckpointError, match=says):
        params_of(file, World())


@pytest.mark.parametrize("name", windows.GROUP.architectures)
def test_layers_are_those_of_the_checkpoint(
    name: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    """Also where a short prompt would not tell: windows, chunks and the growth of queries."""
    path = make_checkpoint(name, **OPTIONS.get(name, {})).path
    file = write_gguf(name, path, tmp_path / "model.gguf")
    assert read_model_spec(file).layers == read_model_spec(path).layers


def test_mimo_s_head_for_drafts_is_the_checkpoint_s(tmp_path: Path) -> None:
    """The file counts three MTP layers, and the checkpoint has one."""
    path = write_mtp_checkpoint("mimo_v2_flash", tmp_path / "checkpoint").path
    file = write_gguf("mimo_v2_flash", path, tmp_path / "model.gguf")
    heads = []
    for model in (file, path):
        spec = with_mtp(read_model_spec(model))
        checkpoint = open_checkpoint(model, spec.stored)
        plan = mtp_load_plan(spec, checkpoint.names, World())
        heads.append((spec.draft_layers, load(checkpoint, plan, torch.float32)))
    (ours, our_params), (theirs, their_params) = heads
    assert ours == theirs
    assert our_params.keys() == their_params.keys()
    assert all(torch.equal(our_params[key], value) for key, value in their_params.items())


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<eos>", "a", "<turn|>", "<|tool_response>", "</s>"], {0, 2, 3}),  # Gemma 4
        (["<|endoftext|>", "<|end|>", "a"], {0, 1}),  # Phi-3.5-MoE
        (["<|return|>", "<|call|>", "<|end|>"], {0, 1}),  # gpt-oss: its eos, and a call
        (["<|endoftext|>", "<|flush|>", "<|calls|>", "<|end|>"], {0, 1, 2}),  # Solar Open
        (["<|im_end|>", "</s>", "[EOT]", "a"], {0, 1, 2}),  # of another format than its eos
        (["<｜end▁of▁sentence｜>", "a", ""], {0}),
    ],
)
def test_tokens_that_end_an_answer_are_llama_cpp_s(tokens: list[str], ends: set[int]) -> None:
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 0}
    assert set(end_ids(metadata)) == ends


def test_a_sentencepiece_vocabulary_may_omit_its_special_tokens() -> None:
    """llama.cpp takes the ids of Llama 2's, also for an id that no token has."""
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "<end>", "a"],
    }
    for ids in ({}, {"tokenizer.ggml.eos_token_id": 4}):
        assert end_ids(metadata | ids) == [2]
    config = tokenizer_config(Path("x.gguf"), metadata)
    assert config == {"bos_token": "<s>", "eos_token": "<end>", "unk_token": "<unk>"}
    assert end_ids(metadata | {"tokenizer.ggml.model": "gpt2"}) == []


def test_windows_may_follow_a_period(make_checkpoint: Any, tmp_path: Path) -> None:
    """Where the file has a number instead of a list, or neither."""
    path = make_checkpoint("afmoe", **OPTIONS["afmoe"]).path
    for i, (pattern, full) in enumerate([(None, [3]), (2, [1, 3]), ([False, True] * 2, [0, 2])]):
        options: dict[str, Any] = {"attention.sliding_window_pattern": pattern}
        layers = read_model_spec(
            write_gguf("afmoe", path, tmp_path / f"{i}.gguf", **options)
        ).layers
        found = [i for i, layer in enumerate(layers) if layer.mixer.rule.window is None]
        assert found == full


@pytest.mark.parametrize("names", ["gemma3", ["llama", "qwen3"], [1, 2, 3]])
def test_other_architectures_are_refused_with_the_known_ones(names: Any, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "gemma3")
    if isinstance(names, list):
        del writer.kv_data[0]["general.architecture"]
        writer.add_array("general.architecture", names)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        CheckpointError,
        match=r"general.architecture is .*; supported as GGUF: afmoe, bailingmoe2",
    ):
        read_model_spec(tmp_path / "x.gguf")
