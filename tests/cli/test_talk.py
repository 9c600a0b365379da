"""chat and complete against a server that repeats what it is asked."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moeserve.cli import main
from moeserve.cli.talk import note
from tests.cli.fake_openai import FakeOpenAI


def test_one_question_is_answered(fake: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "chat",
        "--url",
        fake.url,
        "-q",
        "a b c",
        "--system-prompt",
        "Be brief",
        "--max-tokens",
        "2",
        "--stats",
    ]
    assert main.main(argv) == 0
    printed = capsys.readouterr()
    assert printed.out == "a b\n"
    assert re.fullmatch(
        r"\[TTFT \d+ ms, 2 tokens, [\d.]+ tok/s\]\n\[cut off at --max-tokens 2\]\n", printed.err
    )
    path, body = fake.seen[0]
    assert path == "/v1/chat/completions"
    assert body["model"] == "org/fake"
    assert body["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "a b c"},
    ]
    assert "temperature" not in body


@pytest.mark.parametrize("leave", ["/quit", "/exit"])
def test_a_conversation_remembers_clears_and_survives_errors(
    leave: str,
    fake: FakeOpenAI,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = f"one\n\nFAIL\ntwo\n/help\n/clear\nthree\n{leave}\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main.main(["chat", "--url", fake.url]) == 0
    printed = capsys.readouterr()
    assert printed.out == "one\ntwo\nthree\n"
    assert "told to fail" in printed.err
    assert printed.err.count("/clear forgets") == 1
    assert "\x1b" not in printed.err
    contents = [[m["content"] for m in body["messages"]] for _, body in fake.seen]
    assert contents == [["one"], ["one", "one", "FAIL"], ["one", "one", "two"], ["three"]]


def test_complete_continues_each_line(
    fake: FakeOpenAI, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x y\nFAIL\nz"))
    assert main.main(["complete", "--url", fake.url, "--model", "m", "--seed", "3"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "x y\nz\n"
    assert "told to fail" in printed.err
    path, body = fake.seen[0]
    assert (path, body["prompt"], body["model"], body["seed"], body["max_tokens"]) == (
        "/v1/completions", "x y", "m", 3, 128
    )  # fmt: skip


@pytest.mark.parametrize("no_color", ["", "1"])
def test_remarks_are_dim_on_a_terminal_unless_no_color_is_set(
    no_color: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    note("hello")
    assert capsys.readouterr().err == ("hello\n" if no_color else "\x1b[2mhello\x1b[0m\n")


@pytest.mark.parametrize("flag", ["--base-url", "--url"])
@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
@pytest.mark.parametrize("command", ["chat", "complete", "bench", "run-batch"])
def test_every_command_takes_both_url_flags_with_and_without_v1(
    command: str, flag: str, tail: str, fake: FakeOpenAI, tmp_path: Path
) -> None:
    (tmp_path / "in").write_text(
        '{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
    )
    words = {
        "chat": ["chat", "-q", "x"],
        "complete": ["complete", "-q", "x"],
        "bench": [
            "bench",
            "serve",
            "--num-prompts",
            "1",
            "--random-vocab-size",
            "9",
            "--disable-tqdm",
        ],
        "run-batch": [
            "run-batch",
            "-i",
            str(tmp_path / "in"),
            "-o",
            str(tmp_path / "out"),
            "--disable-tqdm",
        ],
    }[command]
    assert main.main([*words, flag, fake.root + tail]) == 0
    assert [path for path, _ in fake.seen] == [
        "/v1/chat/completions" if command == "chat" else "/v1/completions"
    ]


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_no_server_is_one_line_and_exit_code_1(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([command, "--url", "http://127.0.0.1:9/v1", "-q", "hi"]) == 1
    error = capsys.readouterr().err
    assert "cannot connect" in error
    assert "is the server running" in error
    assert main.main([command, "--url", "localhost:8000", "-q", "hi"]) == 2
    assert "--base-url: base_url must start with http://" in capsys.readouterr().err


def test_a_failed_question_is_exit_code_1(
    fake: FakeOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["chat", "--url", fake.url, "-q", "FAIL"]) == 1
    assert capsys.readouterr().err == "moeserve chat: told to fail\n"


def test_ctrl_c_stops_the_answer_on_the_server_too(fake: FakeOpenAI) -> None:
    argv = [sys.executable, "-m", "moeserve.cli.main", "chat", "--url", fake.url, "-q", "so SLOW"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert os.read(process.stdout.fileno(), 2) == b"so"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == b""
    assert fake.vanished.wait(30)


def test_ctrl_c_in_a_conversation_goes_back_to_the_prompt(fake: FakeOpenAI) -> None:
    argv = [sys.executable, "-m", "moeserve.cli.main", "chat", "--url", fake.url]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"so SLOW\n")
        process.stdin.flush()
        assert os.read(process.stdout.fileno(), 2) == b"so"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(b"again\n", timeout=30)
    assert process.returncode == 0
    assert out.endswith(b"again\n")
    assert b"[stopped]" in err
    assert [m["content"] for m in fake.seen[1][1]["messages"]] == ["again"]
