"""bench serve against a server that repeats its prompt: keys, counts, limits, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeserve.cli import main
from tests.cli.fake_openai import FakeOpenAI

# Written by `vllm bench serve --percentile-metrics ttft,tpot,itl,e2el --save-result` with a
# generating backend.
VLLM_KEYS = {
    "date", "endpoint_type", "backend", "model_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens",
    "total_output_tokens", "request_throughput", "output_throughput", "total_token_throughput",
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot",
                                                                                    "itl", "e2el")),
}  # fmt: skip
DETAILED = {
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "generated_texts",
    "errors",
    "start_times",
}


def bench(fake: FakeOpenAI, folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    argv = [
        "bench",
        "serve",
        "--base-url",
        fake.root,
        "--disable-tqdm",
        "--save-result",
        "--result-dir",
        str(folder),
    ]
    code = main.main(
        [*argv, "--num-prompts", "6", "--random-input-len", "5", "--random-output-len", "4", *more]
    )
    (file,) = folder.glob("*.json")
    return code, json.loads(file.read_text())


def test_keys_are_vllms_and_counts_are_right(
    fake: FakeOpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, got = bench(fake, tmp_path)
    assert code == 0
    assert set(got) == VLLM_KEYS
    assert (
        got["completed"],
        got["failed"],
        got["total_output_tokens"],
        got["total_input_tokens"],
    ) == (6, 0, 24, 12)
    assert (got["model_id"], got["request_rate"], got["num_prompts"]) == ("org/fake", "inf", 6)
    assert 0 < got["mean_ttft_ms"] <= got["mean_e2el_ms"]
    body = fake.seen[0][1]
    assert body["ignore_eos"] is True
    assert body["max_tokens"] == 4
    assert len(body["prompt"]) == 5
    assert "Serving Benchmark Result" in capsys.readouterr().out


def test_details_are_saved_on_demand(fake: FakeOpenAI, tmp_path: Path) -> None:
    _, got = bench(fake, tmp_path, "--save-detailed")
    assert set(got) == VLLM_KEYS | DETAILED
    assert [len(gaps) for gaps in got["itls"]] == [3] * 6
    assert all(text.count(" ") == 3 for text in got["generated_texts"])


def test_chat_sends_text_and_sampling_and_skips_the_role_chunk(
    fake: FakeOpenAI, tmp_path: Path
) -> None:
    argv = (
        "--backend",
        "openai-chat",
        "--temperature",
        "0.5",
        "--extra-body",
        '{"n": 1}',
        "--save-detailed",
    )
    code, got = bench(fake, tmp_path, *argv)
    assert code == 0
    assert [len(gaps) for gaps in got["itls"]] == [3] * 6
    path, body = fake.seen[0]
    assert path == "/v1/chat/completions"
    assert (body["temperature"], body["n"], body["max_completion_tokens"]) == (0.5, 1, 4)
    assert isinstance(body["messages"][0]["content"], str)


def test_limits_warm_ups_and_rates(fake: FakeOpenAI, tmp_path: Path) -> None:
    argv = (
        "--max-concurrency",
        "2",
        "--num-warmups",
        "2",
        "--request-rate",
        "200",
        "--ready-check-timeout-sec",
        "5",
    )
    code, got = bench(fake, tmp_path, *argv)
    assert code == 0
    assert fake.most_running <= 2
    assert len(fake.seen) == 8
    assert got["max_concurrency"] == 2
    assert got["duration"] >= 5 / 200


def test_a_server_without_tokenizer_needs_a_vocabulary(
    fake: FakeOpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.has_tokenizer = False
    argv = [
        "bench",
        "serve",
        "--base-url",
        fake.url,
        "--disable-tqdm",
        "--num-prompts",
        "2",
        "--random-input-len",
        "3",
    ]
    assert main.main(argv) == 2
    assert "--random-vocab-size" in capsys.readouterr().err
    assert main.main([*argv, "--random-vocab-size", "9"]) == 0
    assert all(0 <= token < 9 for token in fake.seen[0][1]["prompt"])


def test_failures_are_counted_and_shown(
    fake: FakeOpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"prompt": "FAIL"}\n{"prompt": "fine words"}\n')
    argv = (
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(path),
        "--no-oversample",
        "--custom-output-len",
        "-1",
    )
    code, got = bench(fake, tmp_path, *argv)
    assert code == 0
    assert (got["completed"], got["failed"]) == (1, 1)
    assert "failed: InvalidRequest: told to fail" in capsys.readouterr().err
    assert "max_tokens" not in fake.seen[0][1]


def test_all_failed_is_exit_code_1(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.refuse_after = 0
    code, got = bench(fake, tmp_path)
    assert code == 1
    assert got["completed"] == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--percentile-metrics", "ttft,foo"], "--percentile-metrics: unknown foo"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--request-rate", "0"], "--request-rate"),
        (["--burstiness", "nan"], "--burstiness"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--base-url", "localhost"], "--base-url"),
    ],
)
def test_bad_flags_are_refused(
    fake: FakeOpenAI, more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["bench", "serve", "--base-url", fake.root, *more]) == 2
    assert words in capsys.readouterr().err
    assert fake.seen == []
