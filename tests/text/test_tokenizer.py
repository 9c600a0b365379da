"""Loading, ids equal to transformers', and refusals."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from moeserve.errors import CheckpointError, InvalidRequest
from moeserve.text.tokenizer import MAX_TOKENIZER_BYTES, SHORT_LENGTH, Tokenizer

TEXTS = [
    "Once upon a time",
    " leading and trailing ",
    "😀 漢字 naïve\r\n\t\x00 end",
    "",
    "<|im_start|>user</s><s>",
    "\u202emirrored e\u0301\u0301",
]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_ids_equal_transformers(kind, request):
    from transformers import AutoTokenizer

    ours = request.getfixturevalue(kind)
    theirs = AutoTokenizer.from_pretrained(request.getfixturevalue(f"{kind}_dir"))
    for text in TEXTS:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, special=special) == ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_named_tokens(byte_level, sentencepiece):
    assert sentencepiece.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    assert byte_level.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def test_token_text_and_bytes(tokenizer):
    ids = tokenizer.encode("漢😀 fox", special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == "漢😀 fox"
    assert tokenizer.token_text(tokenizer.backend.get_vocab_size() + 5) == ""
    for token in tokenizer.special_tokens.values():
        assert tokenizer.token_text(tokenizer.backend.token_to_id(token)) == token


def test_a_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_bad_files_are_refused_at_once(tmp_path, byte_level_dir):
    started = time.process_time()
    with pytest.raises(CheckpointError, match="no such file"):
        Tokenizer.load(tmp_path)
    path = tmp_path / "tokenizer.json"
    whole = (byte_level_dir / "tokenizer.json").read_bytes()
    for damaged in (b"", b"{}", b"\x00" * 50, whole[: len(whole) // 2], b"[" * 100_000):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            Tokenizer.load(tmp_path)
    with path.open("wb") as file:
        file.truncate(MAX_TOKENIZER_BYTES + 1)  # a hole: no disk is used
    with pytest.raises(CheckpointError, match="at most"):
        Tokenizer.load(tmp_path)
    path.write_bytes(whole)
    for damaged in ("[1]", "{", "[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_text(damaged)
        with pytest.raises(CheckpointError, match="tokenizer_config"):
            Tokenizer.load(tmp_path)
    assert time.process_time() - started < 8


def test_padding_and_truncation_of_the_file_do_not_apply(byte_level_dir, tmp_path):
    spec = json.loads((byte_level_dir / "tokenizer.json").read_text())
    spec["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert len(Tokenizer.load(tmp_path).encode("Once upon a time a fox found it")) > 3


async def test_long_texts_leave_other_threads_alone(tokenizer):
    text = "ab cd " * 50_000
    slices = 0

    async def count() -> None:
        nonlocal slices
        while True:
            await asyncio.sleep(0)
            slices += 1

    counting = asyncio.create_task(count())
    ids = await asyncio.to_thread(tokenizer.encode, text)
    back = await asyncio.to_thread(tokenizer.decode, ids)
    counting.cancel()
    assert back.strip() == text.strip()
    assert slices > 100


def test_long_and_short_texts_have_the_same_ids(tokenizer):
    for part in ("ab cd ", "é🦊<|im_end|> \n\n  x ", "a\x00"):
        long = part * SHORT_LENGTH
        assert len(long) >= SHORT_LENGTH
        for special in (True, False):
            assert (
                tokenizer.encode(long, special=special)
                == tokenizer.backend.encode(long, add_special_tokens=special).ids
            )
    with pytest.raises(InvalidRequest):
        tokenizer.encode("\ud800" * SHORT_LENGTH)
