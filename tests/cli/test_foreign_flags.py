"""Flags of vLLM, SGLang and llama.cpp: translated, accepted or refused, always with a reason."""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

from moeserve.cli import main
from moeserve.cli.foreign_flags import translate
from moeserve.cli.foreign_parts import ADAPTERS, COMPOSERS
from moeserve.cli.foreign_table import LISTS, flags_of, foreign_table
from moeserve.cli.main import build_parser, parse
from moeserve.cli.settings import ResolvedSettings, all_settings, resolve
from moeserve.config import Config, ModelConfig
from moeserve.errors import ConfigError

PARSER = build_parser("serve")
OWN = PARSER._option_string_actions
ALL_FLAGS = [flag for server in LISTS for flag in flags_of(server)]
PLAIN = Config(model=ModelConfig(model="m"))
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
        (["--cache-type-k", "f16"], "cache.kv_cache_dtype", "float"),
        (["-fit", "off"], "model.fit", "off"),
        (["--fit", "on"], "model.fit", "on"),
        (["--swap-space", "4"], "cache.host_store_bytes", 4 * 2**30),
        (["--disable-radix-cache"], "cache.enable_prefix_caching", False),
        (["--context-length", "8k"], "model.max_model_len", 8000),
        (["--max_model_len", "8k"], "model.max_model_len", 8000),
        (["--dtype", "half"], "model.dtype", "float16"),
        (["--dtype=half"], "model.dtype", "float16"),
        (["--enforce-eager"], "device.graphs", "off"),
        (["--log-level", "CRITICAL"], "server.log_level", "error"),
        (["--max-model-len=32k"], "model.max_model_len", 32_000),
        (["--max-model-len", "1K"], "model.max_model_len", 1024),
        (["--no-enable-prefix-caching"], "cache.enable_prefix_caching", False),
        (["--disable-prefix-caching"], "cache.enable_prefix_caching", False),
        (["--generation-config", "vllm"], "model.generation_config", "none"),
        (["--load-format", "dummy"], "model.load_format", "dummy"),
        (["-q", "int8"], "model.quantization", "int8"),
        (["--chunked-prefill-size", "4096"], "scheduler.max_num_batched_tokens", 4096),
        (["--long-prefill-token-threshold", "512"], "scheduler.prefill_chunk", 512),
        (["--max-running-requests", "64"], "scheduler.max_num_seqs", 64),
        (["--no-async-scheduling"], "scheduler.depth", 1),
        (["--hicache-size", "2"], "cache.host_store_bytes", 2 * 10**9),
        (["--cache-ram", "2"], "cache.host_store_bytes", 2 * 2**20),
        (["--moe-a2a-backend", "deepep"], "parallel.all2all", "deepep_v2"),
        (["--all2all-backend", "mori_low_latency"], "parallel.all2all", "auto"),
        (["--eplb-config", '{"num_redundant_experts": 2}'], "parallel.redundant_experts", 2),
        (["--eplb-config.num_redundant_experts=3"], "parallel.redundant_experts", 3),
        (["--ep-size", "1"], "parallel.ep", "on"),
        (["--dist-init-addr", "10.0.0.1:5000"], "parallel.rendezvous", "10.0.0.1:5000"),
        (["--master-addr", "10.0.0.1"], "parallel.rendezvous", "10.0.0.1:29501"),
        (["--master-addr", "::1", "--master-port", "7"], "parallel.rendezvous", "[::1]:7"),
        (["--attention-backend", "fa3"], "device.attention_backend", "fa3"),
        (["--moe-runner-backend", "deep_gemm"], "device.kernels", "deep_gemm"),
        (["-ngl", "0"], "device.device", "cpu"),
        (["--sse-keep-alive-interval", "5"], "server.sse_ping_s", 5.0),
        (["--enable-log-requests"], "server.access_log", "-"),
        (["--api-key", "a"], "server.api_key", ("a",)),
        (
            ["--allowed-origins", '["https://a.example", "https://b.example"]'],
            "server.allowed_origins",
            ("https://a.example", "https://b.example"),
        ),
        (
            [
                "--speculative-algorithm",
                "NEXTN",
                "--speculative-num-steps",
                "3",
                "--speculative-num-draft-tokens",
                "4",
            ],
            "scheduler.speculate",
            "mtp:3",
        ),
        (["--speculative-algorithm", "EAGLE"], "scheduler.speculate", "mtp"),
        (
            [
                "--speculative-algorithm",
                "EAGLE3",
                "--speculative-draft-model-path",
                "/d",
                "--speculative-num-steps=5",
            ],
            "scheduler.speculate",
            "eagle:/d:5",
        ),
        (["--spec-method", "ngram", "--spec-tokens", "4"], "scheduler.speculate", "ngram:4"),
        (["-md", "/d.gguf", "--draft-max", "8"], "scheduler.speculate", "model:/d.gguf:8"),
        (["-sc.method", "mtp", "-sc.num_speculative_tokens=2"], "scheduler.speculate", "mtp:2"),
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
    flag = re.split("[=.]", words[0].replace("_", "-"))[0]
    notes = capsys.readouterr().err
    assert (flag in notes) is (flag not in OWN or "is" in notes)


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
            "--kv-cache-dtype fp8 is not supported: the KV cache has the dtype of activations",
        ),
        (["-sc", "ngram"], "expected a JSON object"),
        (
            ["-sc", '{"method": "ngram", "prompt_lookup_max": 4}'],
            "prompt_lookup_max: no counterpart",
        ),
        (["--model", "org/x", "org/y"], "both set model"),
        (["--chunked-prefill-size", "-1"], "use --max-num-batched-tokens"),
        (["--quantization", "fp8"], "a checkpoint in FP8 needs no flag"),
        (["-q", "bitsandbytes"], "use --quantization int8 or int4"),
        (["--quantization", "xyz"], "expected one of none, int8, int4"),
        (["--swap-space", "-4"], "flag --swap-space"),
        (["--gpu-memory-utilization", "1.5"], "must be from 0.01 to 1"),
        (["--gpu-memory-utilization", "nan"], "flag --gpu-memory-utilization"),
        (["--master-port", "7"], "give the address of machine 0"),
        (["--spec-method", "dflash"], "speculation by dflash has no counterpart"),
        (["--spec-method", "ngram", "--spec-model", "/d"], "needs no draft model"),
        (["--spec-method", "draft_model"], "needs a draft model"),
        (["-sc", "[1]"], "-sc: expected a JSON object"),
        (["--eplb-config", "x"], "--eplb-config: expected a JSON object"),
        (["--allowed-origins", "[1]"], "--allowed-origins: expected a JSON list"),
        (["--enable-expert-parallel=true"], "--enable-expert-parallel takes no value, got 'true'"),
        (["--no-enable-lora=x"], "--no-enable-lora takes no value"),
        (["--reasoning-parser", "none"], "thoughts are apart from the text"),
        (["-cc.a", "1", "-cc.a.b", "2"], ".a.b: a has a value already"),
        (["-cc.a.b", "1", "-cc.a", "2"], ".a: a has parts already"),
        (["-sc.method"], "speculation by  has no counterpart"),
        (["--tp", "6", "--dp", "4", "--enable-dp-attention"], "6 ranks cannot be split into 4"),
        (["--tp", "8", "--attn-dp-size", "0"], "8 ranks cannot be split into 0 groups"),
        (["--tp", "x", "--enable-dp-attention"], "--enable-dp-attention: expected a whole number"),
        (["--enable-dp-attention"], "--enable-dp-attention needs --tp beside it"),
        (["--tp", "8", "--ep-size", "8", "--ep", "off"], "disagree: both set ep"),
        (["--spec-tokens", "3", "--draft-max", "4"], "--draft-max disagree: both set tokens"),
        (["-sc", '{"method": "ngram"}', "--spec-tokens", "3"], "give either the JSON object"),
        (["--tp", "8", "--ep", "4"], "shards the experts over all 8 ranks"),
        (["--seed", "3"], "--seed 3 is not supported: a request without `seed`"),
        (["--seed", "3", "--uds", "x"], "2 flags are not supported:\n  --seed 3: a request"),
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
        ("--data_parallel_address=x", "--rendezvous HOST:PORT"),
        ("-pp", "use --tp or --dp"),
        ("--cpu-offload-gb", "use --quantization"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_ours(
    command: str, flag: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*command.split(), flag, "2"]) == 2
    assert words in capsys.readouterr().err


def test_commands_without_settings_take_no_foreign_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main.main(["chat", "--tensor-parallel-size", "2"])
    assert "`moeserve chat --help` lists" in capsys.readouterr().err


@pytest.mark.parametrize("server", LISTS)
def test_every_flag_of_the_lists_has_a_meaning(server: str) -> None:
    flags = flags_of(server)
    assert len(flags) > 240
    names = [name for flag in flags for name in (*flag.names, *flag.negations)]
    assert len(names) == len(set(names))
    for name in names:
        assert name in OWN or foreign_table().meaning(name, "x") is not None, name


def test_every_flag_is_translated_accepted_or_refused_whatever_its_value() -> None:
    for flag in ALL_FLAGS:
        for name in (*flag.names, *flag.negations):
            value = "7" if name in flag.names and flag.arity != "none" else ""
            words = ["m", name, value] if value else ["m", name]
            try:
                translation = translate(words, OWN)
            except ConfigError as error:
                text = str(error)
                assert name in text or "number" in text, (name, text)
            else:
                used = translation.settings or translation.parts or translation.notes
                assert used or name in OWN, name
                assert name in OWN or translation.words == ["m"], name


def test_a_flag_has_one_meaning_and_the_table_names_only_flags_of_the_lists() -> None:
    named = [entry for entry in foreign_table().entries if not entry.is_pattern]
    keys = [(entry.flag, entry.value) for entry in named]
    assert len(keys) == len(set(keys))
    assert {entry.flag for entry in named} <= foreign_table().flags.keys()
    for flag in foreign_table().flags.values():
        plain = [entry for entry in named if entry.flag in flag.names and not entry.value]
        assert len(plain) <= 1, flag
    for entry in foreign_table().entries:
        if entry.is_pattern:
            assert any(fnmatchcase(name, entry.flag) for name in foreign_table().flags), entry


def test_a_translated_flag_takes_a_value_if_its_setting_needs_one() -> None:
    for entry in foreign_table().entries:
        if entry.meaning.kind != "setting":
            continue
        name, _, value = entry.meaning.text.partition("=")
        name, _, part = name.partition(".")
        flag = foreign_table().flags[entry.flag]
        has_value = entry.flag in flag.names and flag.arity != "none"
        assert ("{}" in value) is (has_value and (not entry.value or "*" in entry.value)), entry
        if part:
            assert name in COMPOSERS.keys() | ADAPTERS.keys()
        elif "{}" not in value:
            NAMES[name].read(value, entry.flag)
    for theirs, ours in foreign_table().values.items():
        NAMES[theirs.partition("=")[0]].read(ours, theirs)


def test_a_negation_of_a_translated_flag_is_in_the_table() -> None:
    for flag in ALL_FLAGS:
        for name in flag.negations:
            assert name in OWN or foreign_table().meaning(name, "") is not None, name


def test_the_reasons_name_flags_and_settings_that_exist() -> None:
    for entry in foreign_table().entries:
        if entry.meaning.kind == "setting":
            continue
        reason = entry.meaning.text
        accepted = {"--hicache-size"}  # a flag of SGLang that is translated
        assert set(re.findall(r"--[a-z0-9-]+", reason)) <= OWN.keys() | accepted, reason
        for section, name in re.findall(r"`(\w+): \{(\w+):", reason):
            assert NAMES[name].section == section


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        # SGLang's tp counts all ranks, also those of other attention groups.
        ("--tp 8 --dp 8 --enable-dp-attention", (8, 1, "on")),
        ("--tp-size 16 --dp-size 4 --enable-dp-attention --ep-size 16", (4, 4, "on")),
        ("--tp 8 --attn-dp-size 4 --ep 8", (4, 2, "on")),
        ("--tp 8 --dp 2 --attn-dp-size 4", (8, 2, "on")),
        ("--tp 8 --ep 8", (1, 8, "on")),
        ("--tp 8 --ep 1", (1, 8, "off")),
        ("--tp 8 --dp 2", (2, 8, "on")),
        # vLLM's tp counts the ranks of an engine.
        ("-tp 2 -dp 4 -ep", (4, 2, "on")),
        ("-tp 2 -dp 4 --disable-expert-parallel", (4, 2, "off")),
    ],
)
def test_a_layout_of_ranks_is_the_same_layout_here(
    words: str, layout: tuple[int, int, str]
) -> None:
    parallel = asked(*words.split()).config.parallel
    assert (parallel.dp, parallel.tp, parallel.ep) == layout


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--max-model-len auto", "it is what --max-model-len does by default"),
        ("--max-model-len -1", "it is what --max-model-len does by default"),
        ("--no-enable-lora", "--no-enable-lora needs no setting: it is the default"),
        ("--disable-lora", "--disable-lora needs no setting: it is the default"),
        ("--no-enable-chunked-prefill", "has no effect: prompts are always prefilled in chunks"),
        ("--enable-custom-all-reduce", "has no effect: collectives are chosen for the machine"),
        ("-O3", "--optimization-level 3 has no effect"),
        ("-O 2", "--optimization-level 2 has no effect"),
        ("-O.mode=3", '--optimization-level {"mode": 3} has no effect'),
        ("-cc.mode 3 -cc.sizes+ 1,2", '-cc {"mode": 3, "sizes": ["1", "2"]} has no effect'),
        ("--cudagraph-capture-sizes 1 2 4 --port 7", "--cudagraph-capture-sizes 1 2 4 has no"),
        ("--uvicorn-log-level warning", "one log level counts for everything"),
        ("--moe-backend marlin", "expert kernels are chosen for the device"),
        ("--speculative-eagle-topk 1", "drafts are chains of tokens"),
        ("--quantization awq_marlin", "the quantization is read from the checkpoint"),
        ("--max-logprobs 20", "a client may ask for up to 20 logprobs"),
    ],
)
def test_accepted_flags_say_why_and_change_nothing(
    words: str, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked("m", *words.split()).config
    assert replace(found, server=PLAIN.server) == PLAIN
    assert note in capsys.readouterr().err


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
        ("--code-revision", "a checkpoint's code is never downloaded or run"),
        ("--revision", "OWNER/NAME@REVISION"),
        ("--hf-token", "HF_TOKEN"),
        ("--offline", "HF_HUB_OFFLINE=1"),
        ("--max-lora-rank", "LoRA"),
        ("--worker_cls", "plugins add"),
        ("--kv-offloading-size", "set `cache: {host_store_bytes: 4GiB}` in --config"),
        ("--data_parallel_address", "--rendezvous HOST:PORT"),
        ("--temp", "send it with each request"),
    ],
)
def test_refused_flags_name_the_alternative(flag: str, said: str) -> None:
    with pytest.raises(ConfigError, match="is not supported") as caught:
        asked("org/x", flag, "7")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--max-num", "did you mean --max-"),  # short for several flags
        ("--max-model", "did you mean --max-model-len?"),  # own flags have no abbreviations
        ("--temperatur", "did you mean --temperature?"),  # llama.cpp has no abbreviations
        ("--kv-cache-byte", "did you mean --kv-cache-bytes?"),
        ("--tensor-paralel-size", "did you mean --tensor-parallel-size?"),
        ("--xyzzy", "--help` lists the flags"),
        ("--a.b", "--help` lists the flags"),
    ],
)
def test_unknown_flags_get_a_similar_one(
    flag: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        asked("org/x", flag, "7")
    assert said in capsys.readouterr().err


def test_several_keys_are_several_values() -> None:
    assert asked("org/x", "--api-key", "a", "b").config.server.api_key == ("a", "b")
    found = asked("--api-key", "a", "org/x").config
    assert (found.server.api_key, found.model.model) == (("a",), "org/x")


def test_a_short_flag_of_several_servers_is_that_of_the_first() -> None:
    assert asked("org/x", "-n", "2").config.parallel.nnodes == 2
    with pytest.raises(ConfigError, match="--n-predict 2 is not supported: send it"):
        asked("org/x", "--n-predict", "2")


def test_an_abbreviation_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked("m", "--tensor-parallel", "2", "--gpu-memory=0.5").config.parallel.tp == 2
    notes = capsys.readouterr().err
    assert "--tensor-parallel is short for --tensor-parallel-size" in notes
    assert "--gpu-memory is short for --gpu-memory-utilization" in notes


def test_a_long_value_is_cut_in_notes(capsys: pytest.CaptureFixture[str]) -> None:
    asked("m", "-cc", "x" * 1000)
    assert len(capsys.readouterr().err) < 300


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
    translation = translate(words, OWN)
    assert translation.words == words
    assert not translation.settings
    assert not translation.notes
