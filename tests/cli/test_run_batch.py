"""run-batch: every line is answered once, whatever happens in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeserve.cli import main
from tests.cli.fake_openai import FakeOpenAI


def chat(custom_id: str, content: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "in.jsonl"
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


def batch(fake: FakeOpenAI, source: Path, *more: str) -> int:
    out = str(source.parent / "out.jsonl")
    argv = [
        "run-batch",
        "-i",
        str(source),
        "-o",
        out,
        "--base-url",
        fake.url,
        "--disable-tqdm",
        *more,
    ]
    return main.main(argv)


def results(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def test_both_urls_are_answered_and_faults_stay_in_their_line(
    fake: FakeOpenAI, tmp_path: Path
) -> None:
    source = write(
        tmp_path,
        chat("a", "hello there"),
        {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": [1, 2]}},
        chat("c", "FAIL"),
        "",
        chat("d", "x", stream=True),
        {**chat("e", "x"), "method": "GET"},
        {**chat("f", "x"), "url": "/v1/embeddings"},
        {**chat("g", "x"), "body": "x"},
    )
    assert batch(fake, source) == 0
    got = results(tmp_path)
    assert got["a"]["response"]["status_code"] == 200
    assert got["a"]["response"]["request_id"] == "r"
    assert got["a"]["response"]["body"]["choices"][0]["message"]["content"] == "hello there"
    assert got["a"]["error"] is None
    assert got["b"]["response"]["body"]["choices"][0]["text"] == "1 2"
    assert got["c"]["response"]["status_code"] == 400
    assert got["c"]["response"]["body"]["error"]["message"] == "told to fail"
    for custom_id, words in {"d": "stream", "e": "method", "f": "url", "g": "body"}.items():
        assert got[custom_id]["response"] is None
        assert words in got[custom_id]["error"]["message"]
    assert len(fake.seen) == 3


def test_what_is_answered_is_not_asked_again(fake: FakeOpenAI, tmp_path: Path) -> None:
    assert batch(fake, write(tmp_path, chat("a", "one"))) == 0
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"id":"batch_req_b","custom_id":"b","respon')  # an earlier run died here
    three = write(tmp_path, chat("a", "one"), chat("b", "two"), chat("c", "three"))
    assert batch(fake, three, "--max-concurrency", "1") == 0
    assert set(results(tmp_path)) == {"a", "b", "c"}
    assert [body["messages"][0]["content"] for _, body in fake.seen] == ["one", "two", "three"]
    assert batch(fake, write(tmp_path, chat("a", "one"), chat("b", "two"), chat("c", "three"))) == 0
    assert len(fake.seen) == 3


def test_a_server_that_goes_away_ends_the_run_and_the_next_run_resumes(
    fake: FakeOpenAI,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from moeserve.client import faults

    monkeypatch.setattr(faults, "FIRST_DELAY_S", 0.001)
    source = write(tmp_path, *(chat(str(i), f"word {i}") for i in range(10)))
    fake.refuse_after = 4
    assert batch(fake, source, "--max-concurrency", "1") == 1
    assert "the connection broke" in capsys.readouterr().err
    assert list(results(tmp_path)) == ["0", "1", "2", "3"]
    fake.refuse_after = None
    assert batch(fake, source) == 0
    assert len(results(tmp_path)) == 10


def test_concurrency_is_bounded(fake: FakeOpenAI, tmp_path: Path) -> None:
    source = write(tmp_path, *(chat(str(i), "w " * 20) for i in range(30)))
    assert batch(fake, source, "--max-concurrency", "3") == 0
    assert 1 <= fake.most_running <= 3
    assert len(results(tmp_path)) == 30


def test_bad_lines_get_an_error_and_the_others_go_on(fake: FakeOpenAI, tmp_path: Path) -> None:
    lines = [
        "{nonsense",
        chat("a", "x"),
        {"url": "/v1/completions"},
        [1],
        chat("", "x"),
        chat("a", "y"),
        chat("b", "z"),
    ]
    source = write(tmp_path, *lines)
    assert batch(fake, source) == 0
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {line["custom_id"] for line in results if line["error"] is None} == {"a", "b"}
    bad = {line["id"]: line["error"]["message"] for line in results if line["custom_id"] is None}
    words = {
        1: "not JSON",
        3: "expected",
        4: "expected",
        5: "expected",
        6: "'a' is already on line 2",
    }
    assert bad.keys() == {f"batch_req_line_{number}" for number in words}
    assert all(
        f"line {n}: " in bad[f"batch_req_line_{n}"] and w in bad[f"batch_req_line_{n}"]
        for n, w in words.items()
    )
    assert len(fake.seen) == 2
    assert batch(fake, source) == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len(lines)


@pytest.mark.parametrize(
    "diary", ["my diary\n", "my diary", '{"custom_id": "a", "method": "POST"}\n', "{}\n", "{}"]
)
def test_other_files_are_not_overwritten(
    fake: FakeOpenAI, tmp_path: Path, diary: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.jsonl").write_text(diary)
    assert batch(fake, write(tmp_path, chat("a", "x"))) == 2
    assert "is this the right output file?" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == diary
    assert fake.seen == []


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1"),
        (["--model", "demo"], "give only one of them"),
        (["-i", "/nowhere/in.jsonl"], "cannot read /nowhere/in.jsonl"),
        (["-o", "/nowhere/out.jsonl"], "cannot write /nowhere/out.jsonl"),
    ],
)
def test_bad_flags_are_refused(
    fake: FakeOpenAI,
    tmp_path: Path,
    more: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert batch(fake, write(tmp_path, chat("a", "x")), *more) == 2
    assert words in capsys.readouterr().err
