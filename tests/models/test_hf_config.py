"""Every family's config.json is read as transformers reads it, in the keys of versions 4 and 5."""

from __future__ import annotations

import json
import math
import subprocess
import sys
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
from tests.loader.conftest import GRANITE_HYBRID, LLAMA, WriteConfig

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
    """Return the config as save_pretrained of transformers 5 writes it."""
    make, special = FAMILIES[architecture]
    values: dict[str, Any] = make(**SIZES, **special, architectures=[architecture]).to_dict()
    return values


def old_spelling(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config as transformers 4 wrote it for the same model."""
    old = dict(values)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    old["torch_dtype"] = old.pop("dtype")
    if old["model_type"] == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    return old


def meaning(config: Any) -> dict[str, Any]:
    """Return the fields of a ModelSpec that are plain attributes of a transformers config."""
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
    """Return a field of the model, its first attention, its dense MLPs or its experts."""
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
    # layer_types is derived: it would contradict the windows that the other keys imply.
    full.pop("layer_types", None)
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


@pytest.mark.parametrize(
    ("saved", "model_type", "architecture"),
    [
        ("Glm4MoeForCausalLM", "sarvam_moe", "SarvamMoEForCausalLM"),
        ("DeepseekV3ForCausalLM", "sarvam_mla", "SarvamMLAForCausalLM"),
    ],
)
def test_a_class_that_computes_several_families(
    saved: str, model_type: str, architecture: str, write_config: WriteConfig
) -> None:
    """transformers saves Sarvam's models under the names of GLM-4.5's and DeepSeek-V3's classes."""
    values = {"architectures": [saved], "model_type": model_type, "dtype": "float32"}
    spec = read_model_spec(write_config(values))
    assert spec.architecture == architecture
    assert spec.vocab_size == 262144
    with pytest.raises(CheckpointError, match="model_type is 'sarvam'"):
        read_model_spec(write_config(values | {"model_type": "sarvam"}))


def test_architecture_is_found_by_model_type_alone(write_config: WriteConfig) -> None:
    assert read_model_spec(write_config(architectures=...)).architecture == "LlamaForCausalLM"


def test_code_of_the_checkpoint_does_not_run(
    write_config: WriteConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        spec = read_model_spec(write_config(auto_map={"AutoModelForCausalLM": "evil.Model"}))
    assert spec.architecture == "LlamaForCausalLM"
    assert "LlamaForCausalLM is built in, and a checkpoint's code is never run" in caplog.text


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
        text = json.dumps(GRANITE_HYBRID | {"time_step_limit": [0.5, "INF"]}).replace(
            '"INF"', infinity
        )
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


def test_reading_a_config_imports_neither_torch_nor_transformers(write_config: WriteConfig) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from moeserve.models.hf_config import read_model_spec\n"
        "from moeserve.loader.model_dir import resolve_model_dir\n"
        "read_model_spec(resolve_model_dir(sys.argv[1]))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(write_config())], check=True, timeout=30)
