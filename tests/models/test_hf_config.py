"""Every family's config.json, in both spellings, means what transformers says; a bad one is refused
at once.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import zeros

from moeserve.blocks.attention import Attention
from moeserve.blocks.feed_forward import Dense
from moeserve.blocks.mamba2 import Mamba2
from moeserve.blocks.rope import RopeSpec
from moeserve.engine.kv_rule import FULL, KVRule
from moeserve.errors import CheckpointError
from moeserve.models.hf_config import read_model_spec
from moeserve.models.spec import ModelSpec
from moeserve.ops.rules import RouterRule
from tests.loader.conftest import LLAMA, QWEN3_MOE, WriteConfig

SIZES = {
    "vocab_size": 60_001,
    "hidden_size": 256,
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "rms_norm_eps": 3e-6,
    "tie_word_embeddings": True,
    "eos_token_id": [5, 7],
    "dtype": "float16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 54321.0},
}
QWEN_MOE = {
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
}
SLIDING = {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 3}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Qwen3MoeForCausalLM": (
        transformers.Qwen3MoeConfig,
        {
            **QWEN_MOE,
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 32,
        },
    ),
    "Qwen2MoeForCausalLM": (
        transformers.Qwen2MoeConfig,
        {**QWEN_MOE, **SLIDING, "shared_expert_intermediate_size": 56, "qkv_bias": False},
    ),
    "MixtralForCausalLM": (
        transformers.MixtralConfig,
        {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 64, "head_dim": 20},
    ),
    "OlmoeForCausalLM": (
        transformers.OlmoeConfig,
        {
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "clip_qkv": 8.0,
            "norm_topk_prob": True,
            "attention_bias": True,
        },
    ),
    "GraniteMoeForCausalLM": (
        transformers.GraniteMoeConfig,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "attention_multiplier": 0.25,
            "embedding_multiplier": 12,
            "residual_multiplier": 0.5,
            "logits_scaling": 6.0,
            "attention_bias": True,
        },
    ),
    "LlamaForCausalLM": (
        transformers.LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
    ),
    "Qwen3ForCausalLM": (
        transformers.Qwen3Config,
        {**SLIDING, "attention_bias": True, "head_dim": 16},
    ),
}


def new_spelling(architecture: str) -> dict[str, Any]:
    """What save_pretrained of transformers 5 writes."""
    make, special = FAMILIES[architecture]
    values: dict[str, Any] = make(**SIZES, **special, architectures=[architecture]).to_dict()
    return values


def old_spelling(values: dict[str, Any]) -> dict[str, Any]:
    """What transformers 4 wrote for the same model."""
    old = dict(values)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    old["torch_dtype"] = old.pop("dtype")
    if old["model_type"] == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    return old


def meaning(config: Any) -> dict[str, Any]:
    """The parts of a ModelSpec that can be read off a transformers configuration by attribute
    alone.
    """
    heads = config.num_attention_heads
    eos = config.eos_token_id
    parts = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "max_position": config.max_position_embeddings,
        "norm_eps": config.rms_norm_eps,
        "tie_embeddings": config.tie_word_embeddings,
        "clip": getattr(config, "clip_qkv", None),
        "qkv_bias": getattr(config, "qkv_bias", getattr(config, "attention_bias", False)),
        "out_bias": getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "scale": getattr(config, "attention_multiplier", None),
        "embedding_scale": getattr(config, "embedding_multiplier", 1.0),
        "residual_scale": getattr(config, "residual_multiplier", 1.0),
        "logits_divisor": getattr(config, "logits_scaling", 1.0),
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        "num_experts": getattr(config, "num_experts", getattr(config, "num_local_experts", 0)),
        "experts_per_token": getattr(config, "num_experts_per_tok", 0),
        "shared_expert_size": getattr(config, "shared_expert_intermediate_size", 0),
    }
    if parts["num_experts"]:
        parts["expert_size"] = getattr(config, "moe_intermediate_size", config.intermediate_size)
    return parts


def windows(config: Any) -> tuple[int | None, ...]:
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def first(spec: ModelSpec) -> Attention:
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Attention)
    return mixer


def read(spec: ModelSpec, name: str) -> Any:
    """A field of the model, of its attention, of its dense MLPs, or of its experts."""
    if name == "mlp_bias":
        return any(
            layer.feed_forward.bias
            for layer in spec.layers
            if isinstance(layer.feed_forward, Dense)
        )
    if name == "shared_expert_size":
        return spec.moe.shared.size if spec.moe and spec.moe.shared else 0
    return getattr(spec if hasattr(spec, name) else first(spec), name)


def check(spec: ModelSpec, config: Any) -> None:
    assert {name: read(spec, name) for name in meaning(config)} == meaning(config)
    assert tuple(rule.window for rule in spec.kv_rules) == windows(config)
    rope = first(spec).rope
    assert rope == RopeSpec(theta=config.rope_parameters["rope_theta"])


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("spelling", ["transformers 4", "transformers 5"])
def test_both_spellings_mean_what_transformers_says(
    architecture: str, spelling: str, write_config: WriteConfig
) -> None:
    values = new_spelling(architecture)
    if spelling == "transformers 4":
        values = old_spelling(values)
    spec = read_model_spec(write_config(values))
    check(spec, FAMILIES[architecture][0].from_dict(dict(values)))
    assert (spec.architecture, spec.dtype) == (architecture, "float16")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_absent_key_has_the_value_that_transformers_gives_it(
    architecture: str, tmp_path: Path
) -> None:
    full = old_spelling(new_spelling(architecture))
    full.pop(
        "layer_types", None
    )  # derived; it would contradict the windows that other keys then imply
    skipped = {"architectures", "model_type", "torch_dtype", "num_hidden_layers", "hidden_size"}
    for key in full.keys() - skipped:
        values = {name: value for name, value in full.items() if name != key}
        (tmp_path / "config.json").write_text(json.dumps(values))
        spec = read_model_spec(tmp_path)
        check(spec, FAMILIES[architecture][0].from_dict(dict(values)))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_empty_config_is_transformers_default_model(
    architecture: str, write_config: WriteConfig
) -> None:
    make = FAMILIES[architecture][0]
    spec = read_model_spec(write_config({"architectures": [architecture], "dtype": "float32"}))
    check(spec, make())


def test_moe_layers_skip_the_dense_ones(write_config: WriteConfig) -> None:
    spec = read_model_spec(write_config(new_spelling("Qwen3MoeForCausalLM")))
    assert spec.moe_layers == (1, 5)
    assert spec.layers[0].feed_forward == Dense(size=40)
    assert first(spec).qk_norm == "head"
    assert spec.moe
    assert spec.moe.router == RouterRule(renormalize=True)


def test_routers_and_norms_of_the_other_families(write_config: WriteConfig) -> None:
    def spec_of(architecture: str) -> ModelSpec:
        return read_model_spec(write_config({"architectures": [architecture], "dtype": "float32"}))

    def router_of(architecture: str) -> RouterRule:
        moe = spec_of(architecture).moe
        assert moe
        return moe.router

    assert router_of("MixtralForCausalLM") == RouterRule(renormalize=True)
    assert router_of("Qwen2MoeForCausalLM") == RouterRule(renormalize=False)
    assert router_of("GraniteMoeForCausalLM") == RouterRule(score="softmax_selected")
    assert first(spec_of("OlmoeForCausalLM")).qk_norm == "full"
    assert first(spec_of("Qwen3ForCausalLM")).qk_norm == "head"
    dense = spec_of("LlamaForCausalLM")
    assert (dense.moe_layers, dense.num_experts, first(dense).qk_norm) == ((), 0, "none")


def test_qwen3_windows_follow_layer_types(write_config: WriteConfig) -> None:
    values = new_spelling("Qwen3ForCausalLM")
    values["layer_types"] = ["sliding_attention", "full_attention"] * 3
    assert read_model_spec(write_config(values)).kv_rules == (KVRule(48), FULL) * 3


def test_architecture_is_found_by_model_type_alone(write_config: WriteConfig) -> None:
    assert read_model_spec(write_config(architectures=...)).architecture == "LlamaForCausalLM"


def test_code_of_the_checkpoint_does_not_run(
    write_config: WriteConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        spec = read_model_spec(write_config(auto_map={"AutoModelForCausalLM": "evil.Model"}))
    assert spec.architecture == "LlamaForCausalLM"
    assert "LlamaForCausalLM is built in, and code of a checkpoint never runs" in caplog.text


def test_end_ids_that_no_token_has_are_dropped(
    write_config: WriteConfig, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_model_spec(write_config(eos_token_id=[96, -1, 3, 3])).eos_token_ids == (3,)
    assert "[96, -1]" in caplog.text


def test_dtype_wins_over_torch_dtype(write_config: WriteConfig) -> None:
    assert read_model_spec(write_config(dtype="float16")).dtype == "float16"


def test_without_a_dtype_the_first_weight_decides(write_config: WriteConfig) -> None:
    model_dir = write_config(torch_dtype=...)
    assert read_model_spec(model_dir).dtype == "float32"
    save_file({"x": zeros(3).half()}, model_dir / "model.safetensors")
    assert read_model_spec(model_dir).dtype == "float16"


def test_spellings_that_transformers_takes_for_the_same(write_config: WriteConfig) -> None:
    plain = write_config(**LLAMA)
    expected = read_model_spec(plain)
    for values in (
        {"quantization_config": {}},
        {"quantization_config": None},
        {"tie_word_embeddings": None},
        {"hidden_act": "swish"},
        {"mlp_bias": None, "attention_bias": None},
    ):
        assert read_model_spec(write_config(**LLAMA | values)) == expected, values
    for key in ("torch_dtype", "dtype"):
        model_dir = write_config(**LLAMA | {"torch_dtype": ...} | {key: "auto"})
        save_file({"x": zeros(3).half()}, model_dir / "model.safetensors")
        assert read_model_spec(model_dir).dtype == "float16"


HYBRID = {
    **LLAMA, "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
    "mamba_n_heads": 4,
}  # fmt: skip
QWEN3_NEXT = LLAMA | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
KIMI_LINEAR = LLAMA | {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
DOTS1 = LLAMA | {"architectures": ["Dots1ForCausalLM"], "model_type": "dots1"}
NEMOTRON = {
    **LLAMA,
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_act": "silu",
}
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"architectures": ["GPT2LMHeadModel"]}, "supported: AXK1, Afmoe, BailingMoe"),
    (LLAMA, {"architectures": "LlamaForCausalLM"}, "architectures"),
    (LLAMA, {"architectures": []}, "architectures"),
    (LLAMA, {"architectures": [["LlamaForCausalLM"]]}, "architectures"),
    (LLAMA, {"architectures": ..., "model_type": "gpt2"}, "'gpt2'"),
    (LLAMA, {"architectures": ..., "model_type": ...}, "architectures is missing"),
    (LLAMA, {"model_type": "qwen3"}, "fix one of the two"),
    (LLAMA, {"model_type": ["llama"]}, "model_type"),
    (
        LLAMA,
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "supported: compressed-tensors, fp8",
    ),
    (LLAMA, {"compression_config": {"x": 1}}, "config_groups is None; it must have a group"),
    (LLAMA, {"per_layer_config": {"0": {}}}, "per_layer_config"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
    (LLAMA, {"hidden_act": None}, "hidden_act"),
    (LLAMA, {"vocab_size": -5}, "vocab_size is -5; it must be an integer from 1"),
    (LLAMA, {"vocab_size": 2**40}, "vocab_size"),
    (LLAMA, {"vocab_size": 10**400}, "vocab_size"),
    (LLAMA, {"vocab_size": "96"}, "vocab_size is '96'"),
    (LLAMA, {"vocab_size": 96.0}, "vocab_size"),
    (LLAMA, {"vocab_size": True}, "vocab_size is True"),
    (LLAMA, {"vocab_size": None}, "vocab_size is None"),
    (LLAMA, {"vocab_size": "9" * 10_000}, "..."),
    (LLAMA, {"num_hidden_layers": 10**6}, "num_hidden_layers"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers"),
    (
        LLAMA,
        {"num_attention_heads": 5},
        "num_key_value_heads is 2; it must divide num_attention_heads (5)",
    ),
    (LLAMA, {"num_key_value_heads": 3}, "it must divide"),
    (LLAMA, {"num_key_value_heads": 8}, "num_key_value_heads"),
    (LLAMA, {"hidden_size": 66}, "num_attention_heads (4) must divide it"),
    (LLAMA, {"hidden_size": 60}, "must be even"),
    (LLAMA, {"head_dim": 15}, "must be even"),
    (LLAMA, {"head_dim": -16}, "head_dim"),
    (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps"),
    (LLAMA, {"rms_norm_eps": 1e300}, "rms_norm_eps"),
    (LLAMA, {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    (LLAMA, {"max_position_embeddings": 0}, "max_position_embeddings"),
    (LLAMA, {"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
    (LLAMA, {"attention_bias": "no"}, "attention_bias"),
    (LLAMA, {"mlp_bias": 0}, "mlp_bias"),
    (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "supported: float32, bfloat16, float16"),
    (LLAMA, {"dtype": 16}, "dtype is 16"),
    (LLAMA, {"sliding_window": 128}, "no sliding window"),
    (LLAMA, {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
    (LLAMA, {"layer_types": 3}, "layer_types"),
    (
        LLAMA,
        {"eos_token_id": [1, 2.0]},
        "eos_token_id is [1, 2.0]; it must be one token id, a list of them, or null",
    ),
    (LLAMA, {"eos_token_id": True}, "eos_token_id"),
    (LLAMA, {"eos_token_id": "</s>"}, "eos_token_id"),
    (LLAMA, {"eos_token_id": list(range(96)) * 10}, "eos_token_id"),
    (
        QWEN3_MOE,
        {"num_experts": 10**9},
        "num_experts is 1000000000; it must be an integer from 1 to 4096",
    ),
    (QWEN3_MOE, {"num_experts": 0}, "num_experts"),
    (QWEN3_MOE, {"num_local_experts": 16}, "num_experts is 8; but num_local_experts is 16"),
    (
        QWEN3_MOE,
        {"num_experts_per_tok": 9},
        "num_experts_per_tok is 9; it must be an integer from 1 to 8",
    ),
    (QWEN3_MOE, {"moe_intermediate_size": -48}, "moe_intermediate_size"),
    (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    (
        QWEN3_MOE,
        {"mlp_only_layers": [2]},
        "mlp_only_layers is [2]; it must be a list of integers from 0 to 1",
    ),
    (QWEN3_MOE, {"mlp_only_layers": [True]}, "mlp_only_layers"),
    (QWEN3_MOE, {"norm_topk_prob": "no"}, "norm_topk_prob"),
    (QWEN3_MOE, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
    (QWEN3_MOE, {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    (
        {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
        {"layer_types": ["sliding_attention", "full_attention"]},
        "sliding layers need use_sliding_window",
    ),
    (
        {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
        {"layer_types": ["full_attention"]},
        "for each of 2 layers",
    ),
    (
        {**LLAMA, "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe"},
        {"logits_scaling": 0},
        "logits_scaling",
    ),
    (
        {**LLAMA, "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe"},
        {"attention_multiplier": None},
        "attention_multiplier",
    ),
    (HYBRID, {"mamba_n_heads": 7}, "mamba_n_heads is 7; it must divide mamba_expand * hidden_size"),
    (HYBRID, {"mamba_d_head": 24}, "mamba_d_head is 24; mamba_n_heads and mamba_expand make it"),
    (HYBRID, {"mamba_n_groups": 3}, "mamba_n_groups is 3; it must divide mamba_n_heads (4)"),
    (HYBRID, {"mamba_conv_bias": False}, "mamba_conv_bias is False; only True is supported"),
    (
        HYBRID,
        {"time_step_limit": [0.1]},
        "time_step_limit is [0.1]; it must be a list of two numbers",
    ),
    (HYBRID, {"time_step_limit": [2, 1.0]}, "time_step_limit"),
    (HYBRID, {"time_step_limit": None}, "time_step_limit"),
    (HYBRID, {"layer_types": ["mamba", "sliding_attention"]}, "layer_types"),
    (
        NEMOTRON,
        {"hybrid_override_pattern": "EM"},
        "layer 0 (moe) must follow one that reads earlier tokens",
    ),
    (
        NEMOTRON,
        {"hybrid_override_pattern": "M*E-"},
        "hybrid_override_pattern is 'M*E-'; layer 3 (mlp)",
    ),
    (
        NEMOTRON,
        {"hybrid_override_pattern": "MX"},
        "hybrid_override_pattern is 'MX'; it must list one of",
    ),
    (NEMOTRON, {"hybrid_override_pattern": ""}, "hybrid_override_pattern"),
    (NEMOTRON, {"layers_block_type": ["mamba", "mamba", "attention", 3]}, "layers_block_type"),
    (NEMOTRON, {"n_groups": 3}, "n_groups is 3; it must divide mamba_num_heads (128)"),
    (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; supported: relu2"),
    (NEMOTRON, {"moe_latent_size": 32}, "moe_latent_size"),
    (NEMOTRON, {"use_conv_bias": False}, "use_conv_bias"),
    (
        {**LLAMA, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"},
        {"clip_qkv": -1},
        "clip_qkv",
    ),
    (
        QWEN3_NEXT,
        {"linear_num_value_heads": 6},
        "linear_num_value_heads is 6; linear_num_key_heads (4) must divide it",
    ),
    (
        QWEN3_NEXT,
        {"linear_conv_kernel_dim": 1},
        "linear_conv_kernel_dim is 1; it must be an integer from 2 to 16",
    ),
    (
        QWEN3_NEXT,
        {"layer_types": ["linear_attention", "sliding_attention"]},
        "list one of linear_attention, full",
    ),
    (KIMI_LINEAR, {"mla_use_nope": False}, "mla_use_nope is False; only True is supported"),
    (KIMI_LINEAR, {"moe_router_activation_func": "softmax"}, "only 'sigmoid' is supported"),
    (
        KIMI_LINEAR,
        {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [2]}},
        (
            "linear_attn_config.kda_layers is [2]; it and full_attn_layers must name each of "
            "layers 1 to 2 once"
        ),
    ),
    (
        KIMI_LINEAR,
        {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [0]}},
        "linear_attn_config.kda_layers is [0]; it must be a list of integers from 1 to 2",
    ),
    (
        KIMI_LINEAR,
        {"linear_attn_config": {"head_dim": "128"}},
        "linear_attn_config.head_dim is '128'",
    ),
    (DOTS1, {"max_window_layers": None}, "max_window_layers is None; it must be an integer"),
    (DOTS1, {"max_window_layers": "1"}, "max_window_layers is '1'"),
]


@pytest.mark.parametrize(
    ("base", "changes", "says"), BAD, ids=[f"{i}-{next(iter(b[1]))}" for i, b in enumerate(BAD)]
)
def test_bad_config_is_refused_with_key_and_remedy(
    base: dict[str, Any], changes: dict[str, Any], says: str, write_config: WriteConfig
) -> None:
    model_dir = write_config(base, **changes)
    began = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read_model_spec(model_dir)
    assert time.process_time() - began < 10
    assert says in str(caught.value)
    assert str(model_dir / "config.json") in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"vocab_size": NaN}',
        b'{"vocab_size": 1e999}',
        b"\xff\xfe{}",
        b"[" * 200_000,
    ],
    ids=["empty", "cut", "list", "null", "nan", "infinite", "utf16", "deep"],
)
def test_a_file_that_is_no_config_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_spec(tmp_path)


ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=6,
)
ROPE_KEYS = (
    "rope_type",
    "type",
    "factor",
    "rope_theta",
    "low_freq_factor",
    "original_max_position_embeddings",
)
ANY_ROPE = st.dictionaries(
    st.sampled_from(ROPE_KEYS), ANY_JSON | st.sampled_from(["yarn", "linear", "llama3"])
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), architecture=st.sampled_from(list(FAMILIES)))
def test_any_value_under_any_key_is_read_or_refused(
    data: st.DataObject, architecture: str, tmp_path: Path
) -> None:
    values = old_spelling(new_spelling(architecture))
    keys = [
        *values,
        "num_experts",
        "num_local_experts",
        "rope_parameters",
        "layer_types",
        "head_dim",
        "sliding_window",
    ]
    for key in data.draw(st.lists(st.sampled_from(keys), max_size=3)):
        values[key] = data.draw(
            ANY_ROPE if key.startswith("rope_") and data.draw(st.booleans()) else ANY_JSON
        )
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": data.draw(ANY_JSON)})
    )
    with suppress(CheckpointError):
        spec = read_model_spec(tmp_path)
        assert (
            len(spec.kv_rules)
            == spec.num_layers
            == values.get("num_hidden_layers", spec.num_layers)
        )


def test_infinity_is_read_as_both_versions_of_transformers_write_it(tmp_path: Path) -> None:
    specs = []
    for infinity in ("Infinity", '{"__float__": "Infinity"}'):
        text = json.dumps(HYBRID | {"time_step_limit": [0.5, "INF"]}).replace('"INF"', infinity)
        (tmp_path / "config.json").write_text(text)
        specs.append(read_model_spec(tmp_path))
    assert specs[0] == specs[1]
    assert specs[0].layers[0].mixer == Mamba2(
        num_heads=4,
        num_groups=1,
        state_dim=256,
        head_dim=specs[0].hidden_size // 2,
        conv=4,
        time_limit=(0.5, math.inf),
    )


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_model_spec(tmp_path)


def test_reading_a_config_imports_neither_torch_nor_transformers(write_config: WriteConfig) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from moeserve.models.hf_config import read_model_spec\n"
        "from moeserve.loader.model_dir import resolve_model_dir\n"
        "read_model_spec(resolve_model_dir(sys.argv[1]))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(write_config())], check=True, timeout=30)
