"""Runners with a part of the experts in memory: the bits of those with all, a bounded start, and
clear errors.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moeserve import LLM, SamplingParams
from moeserve.comm.world import World
from moeserve.config import config_of
from moeserve.errors import ConfigError, EngineLost
from moeserve.loader.weights import Reader
from moeserve.models.hf_config import read_model_spec
from moeserve.ops.native import native
from moeserve.runner.cpu import CPUModelRunner
from tests.runner.engines import alone
from tests.runner.test_packed_cache import PROMPT, refuse, run, same

pytestmark = pytest.mark.skipif(native() is None, reason="needs the native kernels")
SMALL = 200_000  # bytes: holds some of qwen3_moe's experts


def least(path: Path, **settings: Any) -> int:
    """Return the bytes that a start with too few reports as the minimum."""
    with pytest.raises(ConfigError, match="is too small") as caught:
        alone(path, **settings, expert_memory=1)
    return int(str(caught.value).rpartition(" ")[2].replace(",", ""))


@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3", "granite_moe", "gpt_oss", "int4"])
def test_tokens_and_logits_are_those_of_experts_in_memory(
    case: str, make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the start that writes the file, in later ones, and in one that maps all of it."""
    path = make_checkpoint("qwen3_moe" if case == "int4" else case).path
    settings: dict[str, Any] = {"quantization": "int4"} if case == "int4" else {}
    expected = run(path, **settings)
    settings["packed_cache"] = str(tmp_path / "cache")
    memory = least(path, **settings)
    first = run(path, **settings, expert_memory=memory)
    same(first, expected)
    hits, misses, _, read = map(
        sum, zip(*(result.expert_cache for result in first.results), strict=True)
    )
    assert hits
    assert misses
    assert read
    monkeypatch.setattr(Reader, "read", refuse)
    same(run(path, **settings, expert_memory=memory), expected)
    same(run(path, **settings), expected)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_file_of_a_start_with_all_experts_serves_too(
    make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint("qwen3_moe").path
    settings = {"packed_cache": str(tmp_path / "cache")}
    expected = run(path, **settings)
    monkeypatch.setattr(Reader, "read", refuse)
    same(run(path, **settings, expert_memory=SMALL), expected)


def test_a_damaged_file_is_packed_anew(
    make_checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint("qwen3_moe").path
    settings = {"packed_cache": str(tmp_path), "expert_memory": SMALL}
    expected = run(path, **settings)
    (file,) = tmp_path.iterdir()
    with file.open("r+b") as data:
        data.seek(file.stat().st_size // 2)
        byte = data.read(1)
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte[0] ^ 1]))
    same(run(path, **settings), expected)
    assert "will be replaced" in caplog.text
    caplog.clear()
    same(run(path, **settings), expected)
    assert "will be replaced" not in caplog.text


def test_a_file_cut_short_while_serving_ends_the_engine(
    make_checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint("qwen3_moe", num_hidden_layers=4).path
    settings = {
        "packed_cache": str(tmp_path),
        "expert_memory": SMALL,
        "skip_tokenizer_init": True,
        "threads": 1,
    }
    with LLM(path, max_model_len=128, **settings) as llm:
        (file,) = tmp_path.iterdir()
        os.truncate(file, 1 << 20)
        with pytest.raises(EngineLost):
            llm.generate(
                [{"prompt_token_ids": PROMPT}], SamplingParams(temperature=0, max_tokens=20)
            )
    assert re.search(
        rf"expert \d+ of MoE layer \d+ cannot be read from {file}.*start again.*ends at byte",
        caplog.text,
    )


def test_a_full_disk_is_said_before_anything_is_served(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    path = make_checkpoint("qwen3_moe").path
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((1 << 20) + 5000, limits[1]))
    try:
        with pytest.raises(
            ConfigError,
            match=r"cannot be written: .*free disk space.*packed_cache to another directory",
        ):
            run(path, packed_cache=str(tmp_path), expert_memory=SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"may hold 1,000 bytes .*free disk space"):
        run(path, packed_cache=str(tmp_path), expert_memory=SMALL, packed_cache_bytes=1000)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"packed_cache": "off"}, "expert_memory=200000 keeps .*packed_cache is 'off'"),
        (
            {"expert_memory": 5000},
            (
                r"expert_memory=5,000 is too small for 2 tokens with 3 experts each, of .*at least "
                r"[\d,]+"
            ),
        ),
        ({"kernels": "torch"}, "expert_memory needs the native kernels"),
        ({"expert_memory": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(
    settings: Any, words: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    values = {"packed_cache": str(tmp_path), "expert_memory": SMALL} | settings
    with pytest.raises(ConfigError, match=words):
        alone(make_checkpoint("qwen3_moe").path, **values)


def test_models_without_experts_and_experts_that_move_are_refused(make_checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match="this model has no experts"):
        alone(make_checkpoint("llama").path, expert_memory=SMALL)
    path = make_checkpoint("qwen3_moe").path
    config = config_of(path, expert_memory=SMALL)
    spec = read_model_spec(path)
    with pytest.raises(ConfigError, match="Use --ep off"):
        CPUModelRunner(config, spec, path, World(0, 2), grouped=True)
    CPUModelRunner(config, spec, path, World(0, 2, ep=False), grouped=True)


MEASURED = """
import re, sys
from pathlib import Path
from moeserve import LLM, SamplingParams
path, folder, memory = sys.argv[1], sys.argv[2], int(sys.argv[3])
settings = {"load_format": "dummy", "skip_tokenizer_init": True, "threads": 1}
settings |= {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}
settings |= {"packed_cache": folder, "expert_memory": memory or None}
with LLM(path, **settings) as llm:
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(temperature=0, max_tokens=2))
    print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10)
"""


def test_no_start_holds_all_experts(tmp_path: Path) -> None:
    """Neither the one that writes the file nor one that finds it."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 256,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "torch_dtype": "bfloat16",
    }
    # 768 MiB
    model = tmp_path / "model"
    experts = 8 * 64 * 3 * 512 * 512 * 2
    model.mkdir()
    (model / "config.json").write_bytes(msgspec.json.encode(config))
    peaks = []
    for memory in (64 << 20, 64 << 20, 0):
        command = [sys.executable, "-c", MEASURED, str(model), str(tmp_path / "cache"), str(memory)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[2] - max(peaks[:2]) > experts / 2, peaks
