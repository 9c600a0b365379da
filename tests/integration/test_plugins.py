"""Plugins of every group serve requests, and a broken one ends the start with its own error."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from moeserve import LLM, SamplingParams
from moeserve.errors import ConfigError
from moeserve.loader.fields import Fields
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.loader.quantization import read_stored_formats
from moeserve.loader.stored_format import StoredFormat
from moeserve.text.answer_data import find_format
from moeserve.text.answer_syntax import FORMATS
from moeserve.text.tokenizer import Tokenizer
from tests.plugin_packages import Install

PARTS = """
from dataclasses import replace
from pathlib import Path

from moeserve.loader.stored_format import StoredFormat
from moeserve.models.qwen3_moe import QWEN3_MOE
from moeserve.moe.experts import native, reference
from moeserve.runner.cpu import CPUModelRunner
from moeserve.runner.speculation import ngram

USED = set()
FAMILY = replace(QWEN3_MOE, architecture="MyMoeForCausalLM", model_type="my_moe")
ANSWERS = Path(__file__).with_name("my_answers.yaml")


class Device(CPUModelRunner):
    def prepare(self, *args):
        USED.add("device")
        return super().prepare(*args)


def kernels(facts):
    USED.add("kernels")
    return (native if facts.ops.native else reference).make(facts)


def proposer(facts):
    USED.add(f"proposer {facts.spec}")
    return ngram.make(facts)


def negative(args):
    USED.add("processor")
    return lambda prompt_ids, output_ids, logits: -logits


def weights(config):
    return [StoredFormat(kind="int4", group=config.integer("group", 8, 1024))]
"""
ENTRIES = {
    "moeserve.models": {"MyMoeForCausalLM": "my_parts:FAMILY"},
    "moeserve.devices": {"my_device": "my_parts:Device"},
    "moeserve.expert_kernels": {"my_kernels": "my_parts:kernels"},
    "moeserve.proposers": {"my_guess": "my_parts:proposer"},
    "moeserve.logits_processors": {"negative": "my_parts:negative"},
    "moeserve.weight_formats": {"my_bits": "my_parts:weights"},
    "moeserve.answer_formats": {"my_answers": "my_parts:ANSWERS"},
}
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture
def my_parts(install: Install) -> Any:
    hermes = yaml.safe_load((FORMATS / "hermes.yaml").read_text())
    answers = hermes | {"template": ["{# my answers #}"]}
    install(
        "my-package", ENTRIES, {"my_parts.py": PARTS, "my_answers.yaml": yaml.safe_dump(answers)}
    )
    yield importlib.import_module("my_parts")
    sys.modules.pop("my_parts")


def my_model(folder: Path) -> Path:
    """Write the demo model under an architecture that only the plugin defines."""
    shutil.copytree(resolve_model_dir("demo"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MyMoeForCausalLM"], "model_type": "my_moe"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_one_model_is_served_by_plugins_alone(my_parts: Any, tmp_path: Path) -> None:
    with LLM("demo", threads=1, max_model_len=64) as plain:
        (expected,) = plain.generate("Once upon a time", GREEDY)
    settings = {"device": "my_device", "kernels": "my_kernels", "speculate": "my_guess:why:2"}
    with LLM(my_model(tmp_path / "model"), threads=1, max_model_len=64, **settings) as llm:
        (found,) = llm.generate("Once upon a time", GREEDY)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        changed = SamplingParams(temperature=0, max_tokens=12, logits_processors=["negative"])
        (other,) = llm.generate("Once upon a time", changed)
        assert other.outputs[0].token_ids != expected.outputs[0].token_ids
    assert {"device", "kernels", "proposer my_guess:why:2", "processor"} == my_parts.USED


def test_a_weight_format(my_parts: Any, tmp_path: Path) -> None:
    values = {"quantization_config": {"quant_method": "my_bits", "group": 64}}
    config = Fields(tmp_path / "config.json", values, {})
    assert read_stored_formats(config) == (StoredFormat(kind="int4", group=64),)


def test_an_answer_format(my_parts: Any) -> None:
    tokenizer = Tokenizer.load(resolve_model_dir("demo"))
    for template, name in (("{# my answers #}", None), ("", "my_answers")):
        found = find_format(template, tokenizer, name)
        assert found is not None
        assert found.name == "my_answers"


@pytest.mark.parametrize("group", ["moeserve.models", "moeserve.answer_formats"])
def test_a_broken_plugin_ends_the_server_at_start(group: str, install: Install) -> None:
    install("bad-package", {group: {"bad": "bad_module:x"}}, {"bad_module.py": "1 / 0\n"})
    command = [sys.executable, "-m", "moeserve.cli.main", "serve", "demo", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 2
    assert "plugin 'bad' of bad-package 1.0" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "group",
    [
        "moeserve.devices",
        "moeserve.all2all",
        "moeserve.expert_kernels",
        "moeserve.proposers",
        "moeserve.logits_processors",
        "moeserve.weight_formats",
    ],
)
def test_a_broken_plugin_ends_an_engine_at_start(group: str, install: Install) -> None:
    install("bad-package", {group: {"bad": "bad_module:x"}}, {"bad_module.py": "1 / 0\n"})
    with pytest.raises(ConfigError, match=f"'bad' of bad-package 1.0 .{group}.*ZeroDivisionError"):
        LLM("demo", threads=1, max_model_len=64)


def test_values_of_settings_that_nothing_offers(my_parts: Any) -> None:
    for setting, value, known in (
        ("device", "tpu", "known: auto, cpu, cuda, my_device"),
        (
            "kernels",
            "onnx",
            "known: auto, native, torch, triton, deep_gemm, flashinfer, my_kernels",
        ),
        ("kernels", "reference", "known: auto, native"),
        ("speculate", "oracle:3", r"auto:mtp\[:3\]\), my_guess\[:TEXT\]\[:K\]"),
    ):
        with pytest.raises(ConfigError, match=f"^{setting}.*'{value.split(':')[0]}.*{known}"):
            LLM("demo", threads=1, max_model_len=64, **{setting: value})
