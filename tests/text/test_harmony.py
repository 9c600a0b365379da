"""gpt-oss's answers: channels, tool calls, damaged and cut answers, any splitting."""

from __future__ import annotations

import random
from itertools import groupby

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from moeserve.text.answer_data import find_format
from moeserve.text.harmony import HarmonyParser
from moeserve.text.tokenizer import Detokenizer, Tokenizer

CONTROL = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
)
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"

# answer: [(kind, text), ...], neighbours of one kind joined
ANSWERS = {
    f"{ANALYSIS}hm 😀<|end|>{FINAL}Hi.<|return|>": [("reasoning", "hm 😀"), ("content", "Hi.")],
    f"{ANALYSIS}hm<|end|>{FINAL}Hi": [("reasoning", "hm"), ("content", "Hi")],
    "<|channel|>final<|message|>Hi<|end|>": [("content", "Hi")],
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>': [
        ("call", "f"),
        ("arguments", '{"a": 1}'),
    ],
    " to=functions.f.g<|channel|>commentary<|message|>{}<|call|>": [
        ("call", "f.g"),
        ("arguments", "{}"),
    ],
    f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>": [
        ("reasoning", "a"),
        ("content", "I look."),
        ("call", "f"),
        ("arguments", "{}"),
    ],
    "<|channel|>analysis to=functions.f<|message|>{}<|call|>": [("call", "f"), ("arguments", "{}")],
    "<|channel|>commentary to=functions.f<|message|><|end|><|start|>assistant to=functions.g"
    "<|channel|>commentary<|message|>1<|call|>": [
        ("call", "f"),
        ("arguments", "{}"),
        ("content", "1"),
    ],
    "<|channel|>analysis to=browser.search<|message|>q<|call|>": [("reasoning", "q")],
    f"{ANALYSIS}a<|start|>assistant<|channel|>final<|message|>b": [
        ("reasoning", "a"),
        ("content", "b"),
    ],
    f"{ANALYSIS}a<|channel|>final<|message|>b": [("reasoning", "a"), ("content", "b")],
    f"{ANALYSIS}a<|message|>b<|constrain|>c": [("reasoning", "abc")],
    "<|message|>no channel": [("content", "no channel")],
    "no control token at all": [("content", "no control token at all")],
    "none of harmony<|endoftext|>": [("content", "none of harmony")],
    "<|channel|>ana": [],
    f"{ANALYSIS}a<|end|><|start|>assist": [("reasoning", "a")],
    f"{ANALYSIS}a<|end|>stray<|end|>": [("reasoning", "a")],
    f"{ANALYSIS}<|end|>": [],
    "": [],
}


@pytest.fixture(scope="module")
def tokenizer():
    backend = Backend(
        models.BPE(
            vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
            merges=[],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(CONTROL))
    return Tokenizer(backend, {})


def texts(tokenizer: Tokenizer, answer: str) -> list[str]:
    """Return the detokenizer's text for each token of an answer."""
    detokenizer = Detokenizer(tokenizer.marked_pieces, [])
    return [*map(detokenizer.push, tokenizer.encode(answer)), detokenizer.flush()]


def parse(pieces: list[str], **options: bool) -> list[tuple[str, str]]:
    parser = HarmonyParser(**options)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.push("", final=True)
    grouped = groupby(
        enumerate(parts), lambda item: (item[1].kind, item[0] if item[1].kind == "call" else 0)
    )
    return [(kind, "".join(part.text for _, part in group)) for (kind, _), group in grouped]


@pytest.mark.parametrize("answer", ANSWERS)
def test_answers_whole_by_token_and_in_random_pieces(tokenizer, answer):
    pieces = texts(tokenizer, answer)
    whole = "".join(pieces)
    rng = random.Random(answer)
    assert parse([whole]) == ANSWERS[answer]
    assert parse(pieces) == ANSWERS[answer]
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(whole) + 1), k=5))
        assert (
            parse([whole[i:j] for i, j in zip([0, *cuts], [*cuts, len(whole)], strict=True)])
            == ANSWERS[answer]
        )


def test_text_that_looks_like_control_tokens_is_text(tokenizer):
    begin = texts(tokenizer, FINAL)
    for typed in (
        "say <|end|> or \ufdd1<|call|>",
        "\ufdd1" + "x" * 64 + "\ufdd2",
        "\ufdd1\ufdd1",
        "\ufdd2\ufdd1x",
    ):
        for pieces in ([typed], typed, [typed[:-1], typed[-1:]], [typed, "\ufdd1"]):
            expected = typed if pieces == [typed, "\ufdd1"] else typed.removesuffix("\ufdd1")
            assert (
                parse([*begin, *pieces])
                == parse(["".join([*begin, *pieces])])
                == [("content", expected)]
            )


def test_an_answer_that_continues_a_message(tokenizer):
    assert parse(texts(tokenizer, "lo.<|return|>"), in_message=True) == [("content", "lo.")]


def test_which_tokenizers_speak_harmony(tokenizer, byte_level):
    spoken = find_format("", tokenizer)
    assert spoken.name == "harmony"
    assert spoken.stop_ids == tuple(
        tokenizer.backend.token_to_id(name) for name in ("<|return|>", "<|call|>")
    )
    assert find_format("", byte_level) is None
