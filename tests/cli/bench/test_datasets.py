"""Prompts of each dataset: lengths, sharing, filters, and bad files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeserve.cli.bench.datasets import Sample, ServerTokenizer, build_samples
from moeserve.cli.main import build_parser
from moeserve.errors import ConfigError


class WordTokens(ServerTokenizer):
    """A word is a token; its id is its length."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    async def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    async def decode(self, ids: list[int]) -> str:
        return " ".join("x" * i for i in ids)


async def build(*argv: str, text_only: bool = False) -> list[Sample]:
    args = build_parser("bench serve").parse_args(argv)
    return await build_samples(args, WordTokens(50), text_only=text_only)


async def test_random_prompts_have_the_length_that_was_asked() -> None:
    samples = await build(
        "--num-prompts", "20", "--random-input-len", "7", "--random-output-len", "3"
    )
    assert all(len(s.prompt) == s.prompt_len == 7 and s.output_len == 3 for s in samples)
    assert len({tuple(s.prompt) for s in samples}) == 20
    assert all(0 <= token < 50 for s in samples for token in s.prompt if isinstance(token, int))


async def test_random_lengths_spread_and_prefixes_are_shared() -> None:
    argv = (
        "--num-prompts",
        "200",
        "--input-len",
        "10",
        "--output-len",
        "20",
        "--random-range-ratio",
        "0.5",
    )
    samples = await build(*argv, "--random-prefix-len", "4")
    assert {s.prompt_len - 4 for s in samples} == set(range(5, 16))
    assert {s.output_len for s in samples} == set(range(10, 31))
    assert len({tuple(s.prompt[:4]) for s in samples}) == 1


async def test_the_same_seed_gives_the_same_prompts() -> None:
    argv = ("--num-prompts", "5", "--seed", "3")
    assert await build(*argv) == await build(*argv)
    assert await build(*argv) != await build("--num-prompts", "5", "--seed", "4")


async def test_chat_gets_text() -> None:
    samples = await build("--num-prompts", "2", "--input-len", "3", text_only=True)
    assert all(isinstance(s.prompt, str) for s in samples)


def talk(question: int, answer: int) -> dict[str, Any]:
    return {
        "conversations": [
            {"from": "human", "value": "q " * question},
            {"from": "gpt", "value": "a " * answer},
        ]
    }


async def test_sharegpt_keeps_what_vllm_keeps(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    talks: list[Any] = [
        talk(3, 10),
        talk(10, 3),
        talk(1025, 10),
        talk(1000, 1049),
        talk(4, 4),
        talk(1000, 1048),
    ]
    path.write_text(json.dumps([*talks, {"conversations": [{"value": "alone"}]}, 5, {}]))
    argv = ("--dataset-name", "sharegpt", "--dataset-path", str(path), "--disable-shuffle")
    samples = await build(*argv, "--no-oversample")
    assert [(s.prompt_len, s.output_len) for s in samples] == [(4, 4), (1000, 1048)]
    assert len(await build(*argv, "--num-prompts", "5")) == 5
    fixed = await build(*argv, "--no-oversample", "--sharegpt-output-len", "7")
    assert [(s.prompt_len, s.output_len) for s in fixed] == [(10, 7), (1000, 7), (4, 7), (1000, 7)]


async def test_custom_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"prompt": "one two"}\n\n{"prompt": "three", "output_tokens": 9}\n')
    argv = ("--dataset-name", "custom", "--dataset-path", str(path), "--disable-shuffle")
    samples = await build(*argv, "--num-prompts", "3")
    assert [(s.prompt, s.prompt_len, s.output_len) for s in samples] == [
        ("one two", 2, 256),
        ("three", 1, 9),
        ("one two", 2, 256),
    ]
    assert (await build(*argv, "--custom-output-len", "-1"))[0].output_len is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--random-range-ratio", "1"], "--random-range-ratio must be in"),
        (["--random-input-len", "0"], "must be at least 1, got 0"),
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--dataset-name", "custom", "--dataset-path", "/nowhere"], "No such file"),
    ],
)
async def test_bad_flags_are_refused(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await build(*argv)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("sharegpt", "{", "not JSON"),
        ("sharegpt", "{}", "expected a list"),
        ("sharegpt", "[]", "no usable prompt"),
        ("custom", "", "no usable prompt"),
        ("custom", '{"prompt": "x"}\n{', "file:2: not JSON"),
        ("custom", '{"text": "x"}', "each line must be"),
    ],
)
async def test_bad_files_are_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        await build("--dataset-name", name, "--dataset-path", str(path))
