"""Settings from flags, environment and YAML: precedence, origins, and answers to bad input."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from moeserve.cli import main
from moeserve.cli.config import rendered
from moeserve.cli.main import build_parser
from moeserve.cli.settings import (
    SECRET_SETTINGS,
    ResolvedSettings,
    all_settings,
    resolve,
    unknown_variables,
)
from moeserve.config import SECTIONS, Config
from moeserve.errors import ConfigError


def asked(*argv: str, env: Mapping[str, str] | None = None) -> ResolvedSettings:
    return resolve(build_parser("serve").parse_args(argv), env or {})


def write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text, "utf-8")
    return str(path)


def test_serve_has_few_flags() -> None:
    """A new flag replaces another one.

    There are at most 40 besides --help and --config; all other settings are YAML.
    """
    flags = [a for a in build_parser("serve")._actions if a.option_strings]
    assert len(flags) - 2 == 40


def test_every_field_of_the_config_is_a_setting() -> None:
    names = [f"{section}.{f.name}" for section, kind in SECTIONS.items() for f in fields(kind)]
    assert [s.path for s in all_settings()] == names
    # Flags and variables have no section.
    assert len({s.name for s in all_settings()}) == len(names)
    assert set(SECRET_SETTINGS) <= {s.name for s in all_settings()}


def test_nothing_asked_is_the_default() -> None:
    assert asked() == ResolvedSettings(Config(), {})


def test_precedence_is_flag_variable_file_default(tmp_path: Path) -> None:
    file = write(tmp_path, "server:\n  port: 1\n  host: file\n  strict: true\n")
    env = {"MOESERVE_PORT": "2", "MOESERVE_HOST": "variable", "MOESERVE_THREADS": ""}
    got = asked("--config", file, "--port", "3", env=env)
    assert (got.config.server.port, got.config.server.host, got.config.server.strict) == (
        3,
        "variable",
        True,
    )
    assert got.config.device.threads is None
    assert got.origins == {
        "server.port": "flag --port",
        "server.host": "environment MOESERVE_HOST",
        "server.strict": f"{file}: server.strict",
    }


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["m"], "model.model", "m"),
        (["--no-enable-prefix-caching"], "cache.enable_prefix_caching", False),
        (["--enable-prefix-caching"], "cache.enable_prefix_caching", True),
        (["--max-model-len", "25.6k"], "model.max_model_len", 25_600),
        (["--kv-cache-bytes", "2GiB"], "cache.kv_cache_bytes", 2**31),
        (["--memory-utilization=0.5"], "cache.memory_utilization", 0.5),
        (["--api-key", "a", "--api-key", "b"], "server.api_key", ("a", "b")),
        (["--dtype", "bfloat16"], "model.dtype", "bfloat16"),
        (["--allowed-origins", "https://a.b"], "server.allowed_origins", ("https://a.b",)),
    ],
)
def test_flags(argv: list[str], path: str, value: object) -> None:
    section, name = path.split(".")
    got = asked(*argv)
    assert getattr(getattr(got.config, section), name) == value
    assert list(got.origins) == [path]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "eighty"], ["flag --port", "whole number", "'eighty'"]),
        (["--port", "65536"], ["flag --port", "from 0 to 65535", "65536"]),
        (["--max-num-seqs", "0"], ["flag --max-num-seqs", "at least 1"]),
        (["--max-num-seqs", "-1"], ["flag --max-num-seqs", "at least 1"]),
        (["--memory-utilization", "1.5"], ["flag --memory-utilization", "from 0.01 to 1"]),
        (["--shutdown-timeout", "-1"], ["flag --shutdown-timeout", "at least 0"]),
        (["--dtype", "fp8"], ["flag --dtype", "auto, float32, bfloat16, float16", "'fp8'"]),
        (["--host", ""], ["flag --host", "expected a text"]),
        # Odd bytes of a command line, which no other process could be given.
        (["/models/caf\udce9"], ["MODEL", "text in UTF-8", "caf\\udce9", "LC_ALL=C.UTF-8"]),
        (["--served-model-name", "caf\udcc3"], ["--served-model-name", "text in UTF-8"]),
        (["--api-key", "a,\udcc3"], ["flag --api-key", "text in UTF-8"]),
    ],
)
def test_a_bad_flag_is_named_with_what_it_takes(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        asked(*argv)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"MOESERVE_PORT": "x"}, ["environment MOESERVE_PORT", "whole number"]),
        (
            {"MOESERVE_ENABLE_PREFIX_CACHING": "perhaps"},
            ["environment MOESERVE_ENABLE_PREFIX_CACHING", "true or false"],
        ),
        ({"MOESERVE_PORT": "tcp://10.0.0.1:8000"}, ["Kubernetes", "enableServiceLinks"]),
    ],
)
def test_a_bad_variable_is_named(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        asked(env=env)
    assert all(word in str(caught.value) for word in words)


def test_a_mistyped_variable_is_noticed() -> None:
    env = {
        "MOESERVE_MAX_MODLE_LEN": "1",
        "MOESERVE_PORT": "1",
        "MOESERVE_SERVICE_HOST": "10.0.0.1",
        "MOESERVE_PLUGINS": "mine",
        "PATH": "x",
    }
    assert unknown_variables(env) == [
        "MOESERVE_MAX_MODLE_LEN; did you mean 'MOESERVE_MAX_MODEL_LEN'?"
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("server:\n  prot: 1\n", ["unknown setting server.prot", "did you mean 'port'?"]),
        ("sever:\n  port: 1\n", ["unknown section 'sever'", "did you mean 'server'?"]),
        ("port: 1\n", ["unknown section 'port'", "write it under `server:`"]),
        ("model:\n  port: 1\n", ["unknown setting model.port", "it belongs under `server:`"]),
        ("server:\n  port: many\n", ["server.port", "whole number"]),
        ("server:\n  port: 1\n  port: 2\n", ["'port' is given twice", "line 3"]),
        ("server: 5\n", ["server", "`name: value` lines"]),
        ("- 1\n", ["expected sections"]),
        ("[]\n", ["expected sections"]),
        ("false\n", ["expected sections"]),
        ("server: {port: [1}\n", ["not valid YAML", "line 1"]),
        ("server: !!python/object/apply:os.system [true]\n", ["not valid YAML"]),
        ("? [1, 2]\n: 3\n", ["not valid YAML"]),
        ("model:\n  served_model_name: 7\n", ["served_model_name", "in quotes"]),
        (
            "model:\n  lossless_compression: off\n",
            ["expected one of auto, off, experts, all (in quotes", "got False"],
        ),
    ],
)
def test_a_bad_file_is_refused_with_the_place(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        asked("--config", write(tmp_path, text))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read --config"):
        asked("--config", str(tmp_path / "none.yaml"))


def test_yaml_only_settings_have_neither_flag_nor_variable(tmp_path: Path) -> None:
    got = asked("--config", write(tmp_path, "device: {null_runner: true}\nscheduler:\n"))
    assert got.config.device.null_runner
    assert not asked(env={"MOESERVE_NULL_RUNNER": "1"}).config.device.null_runner


def test_show_prints_a_file_that_reads_back_the_same(tmp_path: Path) -> None:
    first = asked(
        "org/model", "--port", "0", "--kv-cache-bytes", "1GiB", "--no-enable-prefix-caching"
    )
    again = asked("--config", write(tmp_path, rendered(first)))
    assert again.config == first.config


def test_show_names_origins_and_hides_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["config", "show", "--port", "9", "--api-key", "s3cret"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["port:", "9", "#", "flag", "--port"] for line in lines)
    assert any(line.split() == ["host:", "127.0.0.1", "#", "default"] for line in lines)
    assert not any("s3cret" in line for line in lines)
    assert any("1 set, not shown" in line for line in lines)


def test_check_says_ok_or_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "server: {port: 1, strict: true}\n")
    assert main.main(["config", "check", file]) == 0
    assert capsys.readouterr().out == f"{file}: ok, 2 settings\n"
    assert main.main(["config", "check", write(tmp_path, "servr: {}\n")]) == 2
    assert "did you mean 'server'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["FILE"], ["--config", "FILE"]])
def test_show_and_check_take_a_file_alike(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "server: {port: 7}\n")
    words = [file if word == "FILE" else word for word in words]
    assert main.main(["config", "check", *words]) == 0
    assert capsys.readouterr().out == f"{file}: ok, 1 settings\n"
    assert main.main(["config", "show", *words]) == 0
    assert f"# {file}: server.port" in capsys.readouterr().out
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    for model in ("org/model", str(tmp_path / "a.gguf")):
        assert main.main(["config", "show", model]) == 0
        assert f"model: {model}" in capsys.readouterr().out
    assert (
        main.main(["config", "check"])
        == main.main(["config", "check", "--config", file, file])
        == 2
    )


def test_flags_are_spelled_as_the_fields() -> None:
    for setting in all_settings():
        if setting.flag is not None:
            assert setting.flag == "--" + setting.name.replace("_", "-")
            assert setting.env == "MOESERVE_" + setting.name.upper()
    assert isinstance(build_parser("serve"), argparse.ArgumentParser)
