"""--config files of vLLM and SGLang: flags as names of a flat YAML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.cli import main
from moeserve.cli.main import build_parser, parse
from moeserve.cli.settings import ResolvedSettings, resolve
from moeserve.errors import ConfigError

PARSER = build_parser("serve")
FILE = """
model: org/x
served_model_name: [a, b]
port: 8123
tensor-parallel-size: 4
max-model-len: 16k
gpu-memory-utilization: 0.5
enable-expert-parallel: true
enable-prefix-caching: false
enable-auto-tool-choice: true
enable-log-requests: false
disable-log-stats: false
api-key: [k1, k2]
speculative-config:
  method: mtp
  num_speculative_tokens: 2
compilation-config: {mode: 3}
download-dir: null
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "vllm.yaml"
    file.write_text(FILE)
    return file


def asked(path: Path, *words: str, **env: str) -> ResolvedSettings:
    return resolve(parse(PARSER, [*words, "--config", str(path)]), env)


def test_its_flags_are_settings(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(path)
    config = found.config
    assert (config.model.model, config.model.served_model_name) == ("org/x", "a,b")
    assert config.model.max_model_len == 16_000
    assert (config.parallel.tp, config.parallel.ep) == (4, "on")
    assert config.cache.memory_utilization == 0.5
    assert not config.cache.enable_prefix_caching
    assert config.scheduler.speculate == "mtp:2"
    assert (config.server.port, config.server.api_key) == (8123, ("k1", "k2"))
    assert found.origins["server.port"] == f"{path}: server.port"
    notes = capsys.readouterr().err
    assert f"moeserve: {path}: --tensor-parallel-size 4 is --tp 4" in notes
    assert '--compilation-config {"mode": 3} has no effect' in notes


def test_flags_and_variables_come_first(path: Path) -> None:
    config = asked(path, "org/y", "-tp", "2", MOESERVE_PORT="7").config
    assert (config.model.model, config.parallel.tp, config.server.port) == ("org/y", 2, 7)


def test_config_check_and_show_read_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["config", "check", str(path)]) == 0
    assert "ok, 10 settings" in capsys.readouterr().out
    assert main.main(["config", "show", str(path)]) == 0
    assert "tp: 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 3\nenable-lora: true", "--seed 3: a request without `seed`"),
        ("tensor-parallel-size: two", "flag --tensor-parallel-size: expected a whole number"),
        ("tensor-parallel-size: [1, 2]", "unknown name '2'"),
        ("port: 1\ntensor-paralel-size: 2", "did you mean 'tensor-parallel-size'?"),
        ("speculative-config: {method: ngram, n: 3}", "n: no counterpart"),
        ("port: 8000\nserver: {port: 1}", "unknown section 'port'"),  # a file of moeserve
        ("port: 1\n7: x", "unknown name '7'"),
        ("port: 1\nfoo-bar: false", "unknown name 'foo-bar'"),
        ("port: 1\nfoo-bar:", "unknown name 'foo-bar'"),
        ("enable-lora: 'yes'", "--enable-lora takes no value, got 'yes'"),
        ("speculative-config: {method: 2026-11-28}", "speculation by 2026-11-28"),
        ("servr: {port: 1}", "did you mean 'server'?"),
        ("- a", "expected sections"),
        ("model:\n  modl: x", "unknown setting model.modl"),
    ],
)
def test_what_it_cannot_mean_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        asked(file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 1000  # not all names that other servers know
