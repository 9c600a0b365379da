"""tiktoken files and tekken.json: ids of tiktoken's own algorithm, special tokens, refusals."""

from __future__ import annotations

import base64
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import regex

from moeserve.errors import CheckpointError
from moeserve.text import byte_bpe
from moeserve.text.chat_template import ChatTemplate
from moeserve.text.tokenizer import Detokenizer, Tokenizer

WORDS = [
    "the",
    " the",
    "he",
    "th",
    "aaa",
    "aa",
    " fox",
    "ox",
    "漢字",
    "字",
    "é",
    "12",
    "123",
    "\n\n",
    "'s",
    "<|",
    "in",
]
TEXTS = [
    "the fox's  12345 aaaaaaa\r\n\n  漢A字b é😀 ²½ dON'T 'ſ",
    "aaaaa aaaa aaa aa a thethe",
    "",
    " ",
    "\u3000\u200b e\u0301 ﷽ ǅ",
]


def ranks(words: list[str]) -> dict[bytes, int]:
    tokens = [bytes([b]) for b in range(256)] + [
        word.encode() for word in words if len(word.encode()) > 1
    ]
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}


def tiktoken_ids(text: str, vocab: dict[bytes, int], pattern: str) -> list[int]:
    """tiktoken's algorithm: each word whole, or joined from bytes, the leftmost pair of the lowest
    rank first.
    """
    ids = []
    for word in regex.findall(pattern, text, regex.V1):
        parts = [word.encode()] if word.encode() in vocab else [bytes([b]) for b in word.encode()]
        while True:
            pairs = [
                (vocab[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in vocab
            ]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [vocab[part] for part in parts]
    return ids


def write_tiktoken(
    folder: Path, name: str, vocab: dict[bytes, int], config: dict[str, object]
) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for token, rank in vocab.items()]
    (folder / name).write_bytes(b"".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def kimi(folder: Path, words: list[str] = WORDS, **config: object) -> Path:
    vocab = ranks(words)
    first = len(vocab)
    added = {
        str(first): {"content": "[BOS]", "special": True},
        str(first + 2): {"content": "<|im_end|>", "special": True},
        str(first + 6): {"content": "<think>", "special": False},
    }
    base = {
        "tokenizer_class": "TikTokenTokenizer",
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
    }
    return write_tiktoken(folder, "tiktoken.model", vocab, base | config)


def tekken(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    vocab = ranks(WORDS)
    spec = {
        "config": {
            "pattern": byte_bpe._FAMILIES["TikTokenTokenizer"].pattern,
            "default_num_special_tokens": 8,
            "default_vocab_size": 8 + len(vocab) - 2,
            "version": "v13",
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None}
            for t, i in vocab.items()
        ],
        "special_tokens": [
            {"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(special)
        ],
    }
    (folder / "tekken.json").write_text(json.dumps(spec | changes))
    return folder


def test_ids_and_text_are_those_of_tiktoken(tmp_path):
    rng = random.Random(0)
    for trial in range(12):
        letters = rng.choice(["ab", "abc ", "aA漢é1 '\n"])
        words = [
            "".join(rng.choices(letters, k=rng.randint(2, 7))) for _ in range(rng.choice([5, 60]))
        ]
        for name, folder in (
            ("TikTokenTokenizer", kimi(tmp_path / f"k{trial}", words)),
            (
                "HYTokenizer",
                write_tiktoken(
                    tmp_path / f"h{trial}",
                    "hy.tiktoken",
                    ranks(words),
                    {"tokenizer_class": "HYTokenizer"},
                ),
            ),
        ):
            tokenizer = Tokenizer.load(folder)
            pattern = byte_bpe._FAMILIES[name].pattern
            for text in [*TEXTS[:3], *("".join(rng.choices(letters, k=40)) for _ in range(5))]:
                ids = tokenizer.encode(text)
                assert ids == tiktoken_ids(text, ranks(words), pattern)
                detokenizer = Detokenizer(tokenizer.pieces(skip_special_tokens=True), [])
                assert (
                    "".join(map(detokenizer.push, ids)) + detokenizer.flush()
                    == text
                    == tokenizer.decode(ids)
                )


def test_kimis_special_tokens(tmp_path):
    tokenizer = Tokenizer.load(kimi(tmp_path / "kimi"))
    first = len(ranks(WORDS))
    assert tokenizer.encode(f"[BOS]the<think><|reserved_token_{first + 1}|>") == [
        first,
        ranks(WORDS)[b"the"],
        first + 6,
        first + 1,
    ]
    assert tokenizer.special_tokens == {"bos_token": "[BOS]"}
    assert tokenizer.backend.get_vocab_size() == first + 256
    assert tokenizer.decode([first, first + 6]) == "<think>"
    assert tokenizer.token_text(first + 2) == "<|im_end|>"
    assert tokenizer.decode([first + 1, first + 2, first + 255]) == ""


def test_hunyuan_normalises_and_has_its_own_special_tokens(tmp_path):
    vocab = ranks(WORDS)
    tokenizer = Tokenizer.load(
        write_tiktoken(tmp_path, "hy.tiktoken", vocab, {"tokenizer_class": "HYTokenizer"})
    )
    assert tokenizer.encode("e\u0301") == [vocab["é".encode()]]
    assert tokenizer.encode("<|startoftext|><|extra_204|>") == [len(vocab) + 1, len(vocab) + 209]


def test_the_order_of_lines_counts_only_for_hunyuan_where_tokens_may_repeat(tmp_path):
    vocab = ranks(WORDS)
    path = kimi(tmp_path) / "tiktoken.model"
    path.write_bytes(b"\n".join(reversed(path.read_bytes().splitlines())))
    assert Tokenizer.load(tmp_path).encode("the") == [vocab[b"the"]]
    write_tiktoken(tmp_path, "hy.tiktoken", vocab, {"tokenizer_class": "HYTokenizer"})
    lines = (tmp_path / "hy.tiktoken").read_bytes().splitlines()
    (tmp_path / "hy.tiktoken").write_bytes(b"\n".join([lines[0], lines[0], *lines[1:]]))
    assert Tokenizer.load(tmp_path).encode("the<|endoftext|>") == [vocab[b"the"], len(vocab)]


def test_tekken(tmp_path):
    tokenizer = Tokenizer.load(tekken(tmp_path))
    vocab = {token: rank for token, rank in ranks(WORDS).items() if rank < len(ranks(WORDS)) - 2}
    for text in TEXTS:
        expected = tiktoken_ids(text, vocab, byte_bpe._FAMILIES["TikTokenTokenizer"].pattern)
        assert tokenizer.encode(text, special=False) == [8 + rank for rank in expected]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("the") == [1, 8 + ranks(WORDS)[b"the"]]
    assert tokenizer.token_text(7) == "<SPECIAL_7>"
    assert tokenizer.special_tokens["bos_token"] == "<s>"


def test_typed_control_tokens_are_plain_text(tmp_path):
    tokenizer = Tokenizer.load(tekken(tmp_path))
    template = ChatTemplate("{{ '<s>[INST]' + messages[0].content + '[/INST]' }}")
    ids = template.encode(tokenizer, [{"role": "user", "content": "a</s>[INST]<SPECIAL_7>"}])
    assert [i for i in ids if i < 8] == [1, 3, 4]
    assert (
        tokenizer.decode(ids, skip_special_tokens=False) == "<s>[INST]a</s>[INST]<SPECIAL_7>[/INST]"
    )


def test_tokenizer_json_wins(tmp_path, byte_level_dir):
    tekken(kimi(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes((byte_level_dir / "tokenizer.json").read_bytes())
    assert Tokenizer.load(tmp_path).backend.token_to_id("<|im_start|>") is not None


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        (b"", "256 of the 256 bytes"),
        (b"!!! 0\n", "token 0 is not base64"),
        (b" 0\n", "not lines of a token"),
        (b"YQ==\n", "not lines of a token"),
        (b"YQ== x\n", "not lines of a token"),
        (b"YQ== 1\n", "ranks are not 0, 1, 2"),
        (b"\xff\xfe 0\n", "not base64"),
        (b"YQ== 0\nYg== 1\n", "254 of the 256 bytes"),
        (b"YQ== 0\nYQ== 1\n", "token 1 is a repetition"),
    ],
)
def test_damaged_tiktoken_files(tmp_path, lines, match):
    (kimi(tmp_path) / "tiktoken.model").write_bytes(lines)
    with pytest.raises(CheckpointError, match=match):
        Tokenizer.load(tmp_path)


def test_a_huge_tiktoken_file_is_not_read(tmp_path):
    with (kimi(tmp_path) / "tiktoken.model").open("wb") as file:
        file.truncate(byte_bpe.MAX_VOCABULARY_BYTES + 1)  # a hole: no disk is used
    with pytest.raises(CheckpointError, match="at most"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("added", "match"),
    [
        ([], "not a JSON object"),
        ({"x": {"content": "a"}}, "not a token id"),
        ({"-1": {"content": "a"}}, "not a token id"),
        ({"300": "a"}, "not a token id"),
        ({"300": {"content": ""}}, "not a token id"),
        ({"0": {"content": "[BOS]"}}, "share ids or texts"),
        ({"300": {"content": "the"}}, "share ids or texts"),
    ],
)
def test_damaged_special_tokens(tmp_path, added, match):
    with pytest.raises(CheckpointError, match=match):
        Tokenizer.load(kimi(tmp_path, added_tokens_decoder=added))


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {}},
        {"config": None},
        {"config": {"pattern": "(", "default_num_special_tokens": 8}},
        {"vocab": []},
        {"vocab": [{"token_bytes": 5}]},
        {"vocab": {"a": 1}},
        {"special_tokens": None},
        {"special_tokens": [{"rank": 99, "token_str": "<s>"}]},
        {"special_tokens": [{"rank": 0, "token_str": 5}]},
    ],
)
def test_damaged_tekken_files(tmp_path, changes):
    with pytest.raises(CheckpointError, match=r"tekken\.json"):
        Tokenizer.load(tekken(tmp_path, **changes))


def test_code_of_a_checkpoint_is_never_run_and_the_error_says_what_is_missing(tmp_path):
    (tmp_path / "tokenization_x.py").write_text("raise SystemExit")
    config = {
        "tokenizer_class": "ChatGLM4Tokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(
        CheckpointError,
        match=r"ChatGLM4Tokenizer.*never run.*tokenizer\.model cannot be read.*save one",
    ):
        Tokenizer.load(tmp_path)
    kimi(
        tmp_path, tokenizer_class="OtherTokenizer"
    )  # the split pattern of another class is not known
    with pytest.raises(CheckpointError, match=r"tiktoken\.model cannot be read"):
        Tokenizer.load(tmp_path)
