"""Tokenizers in GGUF files: ids are those of the tokenizer that was converted, or of
SentencePiece's own rule.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from moeserve.errors import CheckpointError
from moeserve.loader.generation_config import generation_defaults
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.text.chat_template import ChatTemplate
from moeserve.text.gguf_tokenizer import _DEEPSEEK_LETTERS, _PRE_TOKENIZERS, read_gguf_tokenizer
from moeserve.text.tokenizer import Tokenizer
from tests.gguf_files import add_tokenizer

from .conftest import CORPUS

DEMO = resolve_model_dir("demo")
TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "  two   spaces ",
    "\n\n\t x\r\n",
    "I'll DON'T you've",
    "1234567 x12 ٣٤٥",
    "a/b//\n/c",
    "HelloWorld camelCase ABCdef",
    "<|im_start|>user<|im_end|>",
    "e\u0301 \ud7a3 \U0001f468",
    "漢字かなカナ abc漢",
    "!word ?x (y) $5.00 ~~~",
    "\u00a0\u3000x",
    "▁ ▁x",
    "x" * 300,
]
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6


def write(path: Path, values: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for key, value in values.items():
        if value is None:
            continue
        kinds = {
            bool: writer.add_bool,
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
        }
        kinds.get(type(value), writer.add_array)(
            key if "." in key else f"tokenizer.ggml.{key}", value
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    spec = json.loads(Tokenizer.load(DEMO).backend.to_str())
    vocab = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    types = [CONTROL if token.startswith("<|") else NORMAL for token in vocab]
    merges = [" ".join(merge) for merge in spec["model"]["merges"]]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": vocab,
        "token_type": types,
        "merges": merges,
        **more,
    }


def test_the_demo_s_tokenizer_comes_back(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "demo.gguf", "qwen3moe")
    add_tokenizer(writer, DEMO)
    writer.add_tensor("token_embd.weight", np.zeros((2560, 8), np.float32))
    for key in ("embedding_length", "attention.head_count", "block_count"):
        writer.add_uint32(f"qwen3moe.{key}", 8)
    writer.add_float32("general.sampling.temp", 0.7)
    writer.add_int32("general.sampling.top_k", 20)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path = tmp_path / "demo.gguf"
    got = Tokenizer.load(path)
    expected = Tokenizer.load(DEMO)
    for text in TEXTS:
        ids = expected.encode(text)
        assert got.encode(text) == ids
        assert got.decode(ids) == expected.decode(ids)
    assert got.special_tokens.items() <= expected.special_tokens.items()
    ours = ChatTemplate.load(path)
    theirs = ChatTemplate.load(DEMO)
    assert ours is not None and theirs is not None  # noqa: PT018
    assert generation_defaults(path) == {"temperature": 0.7, "top_k": 20}


@pytest.mark.parametrize("pre", _PRE_TOKENIZERS)
def test_every_way_to_split_keeps_the_text(pre: str, tmp_path: Path) -> None:
    backend = read_gguf_tokenizer(write(tmp_path / "x.gguf", byte_level(pre)))
    for text in TEXTS:
        expected = backend.normalizer.normalize_str(text) if backend.normalizer else text
        ids = backend.encode(text, add_special_tokens=False).ids
        assert backend.decode(ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "a1234's  b", ["a", "1234", "'s", "Ġ", "Ġb"]),
        ("refact", "a1234's  b", ["a", "1", "2", "3", "4", "'s", "Ġ", "Ġb"]),
        ("qwen2", "a1234'S\n\n  b", ["a", "1", "2", "3", "4", "'S", "ĊĊ", "Ġ", "Ġb"]),
        # A vowel sign of Devanagari is a mark.
        ("qwen35", "का12'S (\n", ["à¤ķà¤¾", "1", "2", "'S", "Ġ(Ċ"]),
        ("qwen2", "का", ["à¤ķ", "à¤¾"]),
        ("llama-bpe", "a1234'S(b/\n", ["a", "123", "4", "'S", "(b", "/Ċ"]),
        ("gpt-4o", "HelloWORLD's 1234/\n/", ["Hello", "WORLD's", "Ġ", "123", "4", "/Ċ/"]),
        ("tekken", "HelloWORLD 12", ["Hello", "WORLD", "Ġ", "1", "2"]),
        ("deepseek-v3", "ab1234 $x,y", ["ab", "123", "4", "Ġ$", "x", ",y"]),
        ("deepseek-llm", "ab é1234 $x,y\n", ["ab", "ĠÃ©", "1234", "Ġ$", "x", ",", "y", "Ċ"]),
        ("deepseek-coder", "ab1234 x,y\n", ["ab", "1", "2", "3", "4", "Ġx", ",", "y", "Ċ"]),
        ("seed-coder", "ab12 (\n", ["ab", "1", "2", "Ġ(", "Ċ"]),
        ("afmoe", "ab12345 $x,y漢字\n", ["ab", "12", "345", "Ġ$", "x", ",y", "æ¼¢åŃĹ", "Ċ"]),
        ("afmoe", "1234567 ๓๔", ["1", "234", "567", "Ġ", "à¹ĵà¹Ķ"]),
        (
            "cohere2moe",
            "1234567's HelloW 1234a",
            ["1", "234", "567", "'s", "ĠHello", "W", "Ġ", "123", "4", "a"],
        ),
        ("exaone-moe", "ab cd12 (/\n\n\n", ["abĠcd", "1", "2", "Ġ(/Ċ", "ĊĊ"]),
        ("bailingmoe2", "a12'S\n\n  b", ["a", "1", "2", "'S", "ĊĊ", "Ġ", "Ġb"]),
        ("solar-open", "a12'S\n\n  b", ["a", "1", "2", "'S", "ĊĊ", "Ġ", "Ġb"]),
        ("youtu", "HelloWORLD 12가", ["Hello", "WORLD", "Ġ", "1", "2", "ê°Ģ"]),
    ],
)
def test_words(pre: str, text: str, words: list[str], tmp_path: Path) -> None:
    backend = read_gguf_tokenizer(write(tmp_path / "x.gguf", byte_level(pre)))
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == words


def sentencepiece() -> dict[str, Any]:
    words = [
        "the",
        "fox",
        "and",
        "lantern",
        "once",
        "upon",
        "a",
        "time",
        "was",
        "not",
        "lit",
        "weiß",
        "found",
    ]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    learnt = {
        part: None
        for word in words
        for i in range(len(word))
        for part in ("▁" + word[: i + 1], word[i : i + 3])
    }
    letters = dict.fromkeys("▁" + "".join(words))
    merged = [piece for piece in learnt if len(piece) > 1]
    pieces += [*merged, *letters, "[UNUSED]"]
    scores = (
        [0.0] * 259 + [-float(i // 2) for i in range(len(merged))] + [-1e6] * (len(letters) + 1)
    )
    types += [NORMAL] * (len(merged) + len(letters)) + [UNUSED]
    return {
        "model": "llama",
        "tokens": pieces,
        "scores": scores,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def plain_sentencepiece(values: dict[str, Any], text: str, prefix: bool) -> list[int]:
    """The rule itself: the neighbours whose union has the highest score join, the first ones of
    equals.
    """
    scores = dict(zip(values["tokens"], values["scores"], strict=True))
    parts = list(("▁" * prefix + text.replace(" ", "▁")) if text else "")
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = {token: i for i, token in enumerate(values["tokens"])}
    spelled = [
        [part] if part in ids else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts
    ]
    return [ids[token] for tokens in spelled for token in tokens]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_joins_by_scores(prefix: bool, tmp_path: Path) -> None:
    values = sentencepiece()
    path = write(tmp_path / "x.gguf", {**values, "add_space_prefix": prefix})
    backend = read_gguf_tokenizer(path)
    for text in [*TEXTS, "the fox and the lantern", "once upon a time", " foxfox andand"]:
        if "<" in text or "▁" in text:
            continue
        ids = backend.encode(text, add_special_tokens=False).ids
        assert ids == plain_sentencepiece(values, text, prefix)
        assert backend.decode(ids) == text
    assert (
        backend.encode("fox").ids[0] == 1
    )  # as SentencePiece's models have it unless they say otherwise
    assert backend.token_to_id("[UNUSED]") is None


def gemma_4() -> dict[str, Any]:
    """Tokens as in Gemma 4: some are made by merges, runs of newlines and <strong> by none."""
    words = ["▁the", "▁fox", "the", "fox", "lantern", "▁▁", "▁▁▁"]
    merges = []
    for word in words:
        for i in range(2, len(word) + 1):
            if (merge := f"{word[: i - 1]} {word[i - 1]}") not in merges:
                merges.append(merge)
    made = dict.fromkeys(merge.replace(" ", "") for merge in merges)
    letters = dict.fromkeys("▁\n<>/s" + "".join(words))
    runs = ["\n" * i for i in range(2, 5)]
    visible = ["<|channel>", "<|tool_response>"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *visible, "<turn|>"]
    types = [CONTROL, CONTROL, CONTROL, CONTROL, USER_DEFINED, USER_DEFINED, CONTROL]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [BYTE] * 256
    normal = [*runs, *made, *(letter for letter in letters if letter not in made), "</s>"]
    return {
        "model": "gemma4",
        "tokens": [*tokens, *normal],
        "scores": [-1000.0] * (len(tokens) + len(normal)),
        "token_type": [*types, *[NORMAL] * len(normal)],
        "merges": merges,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "add_space_prefix": False,
        "add_bos_token": True,
    }


def plain_merges(values: dict[str, Any], text: str) -> list[int]:
    """The rule itself: lines and runs of newlines; the pair that is first in the list joins."""
    ids = {token: i for i, token in enumerate(values["tokens"])}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(values["merges"])}
    found = []
    for word in re.findall(r"[^\n]+|\n+", text.replace(" ", "▁")):
        parts = [word] if word.startswith("\n") and word in ids else list(word)
        while pairs := [
            (ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks
        ]:
            at = min(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        for part in parts:
            bytes_of_it = [f"<0x{byte:02X}>" for byte in part.encode()]
            found += [ids[token] for token in ([part] if part in ids else bytes_of_it)]
    return found


def test_gemma_4_merges_whole_texts(tmp_path: Path) -> None:
    values = gemma_4()
    backend = read_gguf_tokenizer(write(tmp_path / "x.gguf", values))
    more = ["the fox  the   lantern", "the\n\nfox\n", "\n\n\n\n the", " foxfox é\n\n\n", "a</s>b"]
    for text in [*TEXTS, *more]:
        if "<|" in text or "▁" in text:
            continue
        ids = backend.encode(text, add_special_tokens=False).ids
        assert ids == plain_merges(values, text), text
        assert backend.decode(ids) == text
        assert backend.encode(text).ids == [2, *ids]
    ids = backend.encode("<|channel>the<turn|>", add_special_tokens=False).ids
    assert [values["tokens"][i] for i in ids] == ["<|channel>", "the", "<turn|>"]
    assert backend.decode(ids) == "<|channel>the"  # only the turn's end is no text


def test_gemma_4_texts_begin_with_bos_as_in_llama_cpp(tmp_path: Path) -> None:
    values = {**gemma_4(), "add_bos_token": False}
    assert read_gguf_tokenizer(write(tmp_path / "x.gguf", values)).encode("fox").ids[0] == 2


@pytest.mark.parametrize(
    ("more", "begin", "end"),
    [
        ({}, [], []),
        ({"add_bos_token": True, "bos_token_id": 1}, [1], []),
        (
            {"add_bos_token": True, "add_eos_token": True, "bos_token_id": 1, "eos_token_id": 2},
            [1],
            [2],
        ),
        ({"add_bos_token": True}, [], []),
        ({"add_bos_token": True, "bos_token_id": 10**6}, [], []),
    ],
)
def test_tokens_around_a_text(
    more: dict[str, Any], begin: list[int], end: list[int], tmp_path: Path
) -> None:
    backend = read_gguf_tokenizer(write(tmp_path / "x.gguf", byte_level(**more)))
    inner = backend.encode("a fox", add_special_tokens=False).ids
    assert backend.encode("a fox").ids == [*begin, *inner, *end]


def short(**changes: Any) -> dict[str, Any]:
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a"], "token_type": [1]}
    return values | {"merges": ["a a"]} | changes


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; supported: gpt2, llama, gemma4"),
        ({}, "tokenizer.ggml.model is None"),
        (byte_level("unheard-of"), "tokenizer.ggml.pre is 'unheard-of'; supported: qwen2, "),
        ({"model": "gpt2", "pre": "gpt-2"}, "tokenizer.ggml.tokens is missing"),
        (short(tokens=["a", "a"]), "has 2 tokens, 1 different ones"),
        (short(tokens=["a", "b"]), "tokenizer.ggml.token_type has 1 entries for 2 tokens"),
        (short(token_type=None), "tokenizer.ggml.token_type is missing"),
        (short(merges=None), "tokenizer.ggml.merges is missing"),
        (short(merges=["a b"]), "no tokenizer: "),
        (short(merges=["ab"]), "no tokenizer: "),
        ({**sentencepiece(), "scores": [0.0]}, "tokenizer.ggml.scores has 1 entries"),
        ({**sentencepiece(), "token_type": None}, "tokenizer.ggml.token_type is missing"),
        (short(tokens=5), "tokenizer.ggml.tokens is 5, not a list of strings"),
        (short(tokens="ab"), "tokenizer.ggml.tokens is 'ab', not a list of strings"),
        (short(token_type=["x"]), "token_type is .'x'., not a list of numbers"),
        (short(token_type=[0.5]), "token_type has numbers of type float32, not integers"),
        (short(merges=[1]), "tokenizer.ggml.merges is array.* not a list of strings"),
        (short(model=[1, 2]), "tokenizer.ggml.model is array"),
        (short(add_bos_token="no"), "add_bos_token is 'no'; supported: true, false"),
        ({**sentencepiece(), "add_space_prefix": [1, 2]}, "add_space_prefix is array"),
        (
            {**sentencepiece(), "scores": [math.nan] * len(sentencepiece()["tokens"])},
            "tokenizer.ggml.scores has a value that is not a number",
        ),
        (
            {"model": "llama", "tokens": ["a" * 10**5], "token_type": [1], "scores": [0.0]},
            "of 100000 letters; supported: up to 512",
        ),
        ({**gemma_4(), "merges": None}, "tokenizer.ggml.merges is missing"),
        ({**gemma_4(), "merges": ["the"]}, "no tokenizer: "),
    ],
)
def test_what_is_no_tokenizer_is_refused(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        read_gguf_tokenizer(write(tmp_path / "x.gguf", values))


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_an_absent_bos_is_llama_cpp_s(model: str, tmp_path: Path) -> None:
    """SentencePiece's texts begin with token 1, unless the file says otherwise."""
    values = sentencepiece() if model == "llama" else byte_level()
    for key in ("bos_token_id", "add_bos_token"):
        values.pop(key, None)
    backend = read_gguf_tokenizer(write(tmp_path / "x.gguf", values))
    inner = backend.encode("a fox", add_special_tokens=False).ids
    assert backend.encode("a fox").ids == ([1, *inner] if model == "llama" else inner)


@pytest.mark.parametrize("template", [5, [1, 2], ["a", "b"]])
def test_a_chat_template_is_a_text(template: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf", byte_level() | {"tokenizer.chat_template": template})
    with pytest.raises(CheckpointError, match=r"tokenizer.chat_template is .*, not a string"):
        ChatTemplate.load(file)


def test_tokens_without_text_and_ends_that_are_typed_as_text(tmp_path: Path) -> None:
    values = byte_level()
    end = values["tokens"].index("<|im_end|>")
    start = values["tokens"].index("<|im_start|>")
    values["token_type"] = [NORMAL] * len(values["tokens"])
    values["tokens"] = [*values["tokens"], "", ""]
    values["token_type"] += [NORMAL, UNUSED]
    backend = read_gguf_tokenizer(write(tmp_path / "x.gguf", values))
    size = len(values["tokens"])
    assert backend.token_to_id(f"[EMPTY_{size - 2}]") == size - 2
    assert backend.token_to_id(f"[EMPTY_{size - 1}]") is None
    # As in llama.cpp: it knows the ends by their names, and splits other tokens of this type.
    assert backend.encode("a<|im_end|>", add_special_tokens=False).ids[-1] == end
    assert start not in backend.encode("<|im_start|>a", add_special_tokens=False).ids
    assert backend.get_added_tokens_decoder()[end].special


@pytest.mark.parametrize("pre", ["dbrx", "chatglm-bpe"])
def test_words_that_are_tokens_are_merged_from_their_parts(pre: str, tmp_path: Path) -> None:
    values = byte_level(pre)
    values["tokens"] = [*values["tokens"], "qzqz"]  # a token that no merge makes
    values["token_type"] = [*values["token_type"], NORMAL]
    whole = len(values["tokens"]) - 1
    backend = read_gguf_tokenizer(write(tmp_path / "x.gguf", values))
    assert whole not in backend.encode("qzqz", add_special_tokens=False).ids
    for name in ("llama-bpe", "glm4"):
        other = read_gguf_tokenizer(write(tmp_path / f"{name}.gguf", values | {"pre": name}))
        assert other.encode("qzqz", add_special_tokens=False).ids == [whole]


def test_the_letters_of_deepseek_v2_have_cases() -> None:
    units = re.findall(r"(.)-(.)|(.)", _DEEPSEEK_LETTERS)
    ranges = [(first or one, last or one) for first, last, one in units]
    assert ranges == sorted(ranges)
    letters = {chr(i) for first, last in ranges for i in range(ord(first), ord(last) + 1)}
    assert not [x for x in letters if unicodedata.category(x) not in ("Lu", "Ll", "Lt", "Cn")]
    assert {"K", "\u212a", "Ω", "\u2126", "ß", "ώ", "\u1f7d", "Ж"} <= letters  # no NFC of them
