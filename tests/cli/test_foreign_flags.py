"""Flags of vLLM and SGLang: accepted, mapped or rejected, always with an explanation."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from moeserve.cli import main
from moeserve.cli.foreign_flags import flag_table, translate
from moeserve.cli.main import build_parser, parse
from moeserve.cli.settings import ResolvedSettings, all_settings, resolve
from moeserve.errors import ConfigError

PARSER = build_parser("serve")
NAMES = {setting.name: setting for setting in all_settings()}


def asked(*words: str) -> ResolvedSettings:
    return resolve(parse(PARSER, list(words)), {})


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--tensor-parallel-size", "2"], "parallel.tp", 2),
        (["-tp=2"], "parallel.tp", 2),
        (["--data_parallel_size=4"], "parallel.dp", 4),
        (["--no-enable-expert-parallel"], "parallel.ep", "off"),
        (["--all2all-backend", "deepep_low_latency"], "parallel.all2all", "deepep_ll"),
        (["--enable-dbo"], "parallel.dbo", "on"),
        (["--enable-eplb"], "parallel.rebalance", "auto"),
        (["--gpu-memory-utilization", "0.5"], "cache.memory_utilization", 0.5),
        (["--mem-fraction-static", "0.5"], "cache.memory_utilization", 0.5),
        (["--kv-cache-dtype", "int8"], "cache.kv_cache_dtype", "int8"),
        (["--swap-space", "4"], "cache.host_store_bytes", 4 * 2**30),
        (["--disable-radix-cache"], "cache.enable_prefix_caching", False),
        (["--context-length", "8k"], "model.max_model_len", 8000),
        (["--max_model_len", "8k"], "model.max_model_len", 8000),
        (["--dtype", "half"], "model.dtype", "float16"),
        (["--dtype=half"], "model.dtype", "float16"),
        (["--enforce-eager"], "device.graphs", "off"),
        (["--uvicorn-log-level", "critical"], "server.log_level", "error"),
        (["--model", "org/x"], "model.model", "org/x"),
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
            "scheduler.speculate",
            "ngram:3",
        ),
        (
            ["-sc", '{"model": "/d", "num_speculative_tokens": 3}'],
            "scheduler.speculate",
            "model:/d:3",
        ),
        (["-sc", '{"method": "eagle3", "model": "/d"}'], "scheduler.speculate", "eagle:/d"),
        (
            ["-sc", '{"method": "deepseek_mtp", "num_speculative_tokens": 1}'],
            "scheduler.speculate",
            "mtp:1",
        ),
    ],
)
def test_a_foreign_flag_sets_ours_and_says_so(
    words: list[str], path: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked("--port", "7", *words)
    section, name = path.split(".")
    assert getattr(getattr(found.config, section), name) == value
    assert found.origins.keys() == {path, "server.port"}
    same = words[0].replace("_", "-") == "--max-model-len"
    assert (words[0].partition("=")[0].replace("_", "-") in capsys.readouterr().err) is not same


def test_what_is_granted_anyway_changes_nothing_and_takes_its_value_along(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "--trust-remote-code",
        "--tool-call-parser",
        "hermes",
        "--quantization",
        "awq_marlin",
        "-pp",
        "1",
        "org/x",
    ]
    found = asked(*words, "--enable-auto-tool-choice", "--reasoning-parser=qwen3")
    assert found.config.model == replace(found.config.model, model="org/x", quantization="none")
    assert found.origins == {"model.model": "argument MODEL"}
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 6
    assert notes[0].startswith(
        "moeserve serve: --trust-remote-code needs no setting: code in a checkpoint is never"
    )
    assert notes[1].startswith("moeserve serve: --tool-call-parser hermes needs no setting")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--tensor-parallel-size", "2", "--tp", "4"],
            "--tensor-parallel-size and --tp both set tp",
        ),
        (["--tp-size", "2", "-tp", "4"], "--tp-size and -tp disagree"),
        (["--tensor-parallel-size"], "--tensor-parallel-size needs a value"),
        (["--tensor-parallel-size", "--port", "1"], "--tensor-parallel-size needs a value"),
        (["--tensor-parallel-size", "two"], "flag --tensor-parallel-size: expected a whole number"),
        (
            ["--kv-cache-dtype", "fp8"],
            "flag --kv-cache-dtype: expected one of auto, int8, got 'fp8'",
        ),
        (["-sc", "ngram"], "expected a JSON object"),
        (
            ["-sc", '{"method": "ngram", "prompt_lookup_max": 4}'],
            "prompt_lookup_max: no counterpart",
        ),
        (["--model", "org/x", "org/y"], "both set model"),
    ],
)
def test_a_value_that_ours_cannot_have_is_refused_by_its_own_name(
    words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        asked(*words)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "command", ["serve", "config show", "bench latency", "run-batch -i x -o y"]
)
@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--enable-lora", "not supported"),
        ("--data_parallel_address=x", "use --rendezvous"),
        ("-pp", "use --tp or --dp"),
        ("--cpu-offload-gb", "use --quantization"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_ours(
    command: str, flag: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main.main([*command.split(), flag, "2"])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_commands_without_settings_take_no_foreign_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main.main(["chat", "--tensor-parallel-size", "2"])
    assert "`moeserve chat --help` lists" in capsys.readouterr().err


def test_the_table_names_flags_settings_and_values_that_exist() -> None:
    flags = PARSER._option_string_actions
    for flag, template in flag_table().settings.items():
        name, _, value = template.partition("=")
        assert flag not in flags
        if "{}" not in value:
            NAMES[name].read(value, flag)
    for theirs, ours in flag_table().values.items():
        name = theirs.partition("=")[0]
        NAMES[name].read(ours, theirs)
    for flag, hint in flag_table().refused.items():
        assert flag not in flags
        assert flag not in flag_table().settings
        assert set(re.findall(r"--[a-z0-9-]+", hint)) <= flags.keys(), hint
        for section, name in re.findall(r"`(\w+): \{(\w+):", hint):
            assert NAMES[name].section == section


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["org/x", "--served-model-name", "a", "b", "c"], "a,b,c"),
        (["org/x", "--served-model-name", "a", "b", "--port", "7"], "a,b"),
        (["--model", "org/x", "--served_model_name", "a", "b"], "a,b"),
        (["--served-model-name", "a", "org/x"], "a"),
        (["org/x", "--served-model-name=a"], "a"),
    ],
)
def test_served_model_names_are_a_name_and_aliases(words: list[str], names: str) -> None:
    found = asked(*words).config.model
    assert (found.model, found.served_model_name) == ("org/x", names)


@pytest.mark.parametrize(
    "words",
    [
        ["--exclude-tools-when-tool-choice-none"],
        ["--disable-fastapi-docs"],
        ["--stream-interval", "1"],
        ["--response-role", "assistant"],
        ["--enable-tokenizer-info-endpoint"],
    ],
)
def test_harmless_flags_are_granted(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert asked("org/x", *words).config.model.model == "org/x"
    assert f"{' '.join(words)} needs no setting" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--uds", "use --host and --port"),
        ("--convert", "no embeddings"),
        ("--code-revision", "never executed"),
        ("--max-lora-rank", "LoRA"),
        ("--gc-threshold", "a flag of SGLang that has no counterpart"),
        ("--worker_cls", "a flag of vLLM that has no counterpart"),
        ("--kv-cache-byte", "did you mean --kv-cache-bytes?"),
        ("--stream-interval", "each token is sent"),
        ("--xyzzy", "--help` lists the flags"),
    ],
)
def test_unknown_flags_get_no_odd_advice(
    flag: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        asked("org/x", flag, "7")
    assert said in capsys.readouterr().err


def test_no_flag_is_both_named_without_a_counterpart_and_known() -> None:
    others = [f"--{name}" for names in flag_table().others.values() for name in names.split()]
    assert len(others) == len(set(others)) > 500
    granted = {flag.partition(" ")[0] for flag in flag_table().granted}
    known = {
        *flag_table().settings,
        *granted,
        *flag_table().refused,
        *PARSER._option_string_actions,
    }
    assert not known & {*others}
    assert all(flag_table().advice(flag) for flag in others)


def test_own_flags_pass_untouched() -> None:
    words = [
        "m",
        "--dtype",
        "bfloat16",
        "--port=3",
        "--no-enable-prefix-caching",
        "--api-key",
        "a_b",
    ]
    assert translate(words, PARSER._option_string_actions) == (words, {}, [])
