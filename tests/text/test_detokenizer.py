"""Streamed text is the text of the whole, for every split of characters over tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from moeserve.errors import CheckpointError
from moeserve.text.tokenizer import Detokenizer, Pieces

TEXTS = [
    "Once upon a time a fox",
    "漢字漢字 😀😀👩‍👩‍👧 naïve",
    "  two  spaces\n\n\ttab",
    "Привет, мир. مرحبا",
    "\ufffd odd \ufffd",
]


def stream(tokenizer, prompt, ids, skip_special_tokens=True):
    detok = Detokenizer(tokenizer.pieces(skip_special_tokens=skip_special_tokens), prompt)
    pieces = [detok.push(i) for i in ids]
    return pieces, "".join(pieces) + detok.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_continues_the_prompt(tokenizer, text):
    prompt = tokenizer.encode("the fox said:")
    ids = tokenizer.encode(text, special=False)
    pieces, whole = stream(tokenizer, prompt, ids)
    assert whole == tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_the_first_space_of_a_text_goes_only_at_its_start(sentencepiece):
    ids = sentencepiece.encode("the fox", special=False)
    assert stream(sentencepiece, [1], ids)[1] == "the fox"
    assert stream(sentencepiece, sentencepiece.encode("a"), ids)[1] == " the fox"


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_random_tokens_decode_as_the_library_does(byte_level, seed):
    rng = random.Random(seed)
    ids = [
        rng.randrange(byte_level.backend.get_vocab_size() + 3) for _ in range(rng.randrange(1, 40))
    ]
    for skip in (True, False):
        # the library turns broken bytes into U+FFFD over the whole text, so must the joined stream
        assert stream(byte_level, [], ids, skip_special_tokens=skip)[1] == byte_level.decode(
            ids, skip_special_tokens=skip
        )


def test_broken_bytes_recover_at_once(byte_level):
    to_id = {byte_level.token_bytes(i): i for i in range(256)}
    lead = to_id[b"\xf0"]
    rest = to_id[b"\x80"]
    letter = to_id[b"a"]
    assert stream(byte_level, [], [rest, letter])[0] == ["\ufffd", "a"]
    assert stream(byte_level, [], [lead, letter])[0] == ["", "\ufffda"]
    assert stream(byte_level, [], [lead])[1] == "\ufffd"


def test_a_character_that_the_prompt_began_is_finished(byte_level):
    ids = [
        i
        for byte in "漢".encode()
        for i in range(256)
        if byte_level.token_bytes(i) == bytes([byte])
    ]
    assert len(ids) == 3
    assert stream(byte_level, ids[:2], ids[2:])[1] == "漢"


def test_special_tokens_are_shown_on_request(byte_level):
    end = byte_level.backend.token_to_id("<|im_end|>")
    assert stream(byte_level, [5], [end])[1] == ""
    assert stream(byte_level, [5], [end], skip_special_tokens=False)[1] == "<|im_end|>"


def test_unknown_decoders_are_refused(byte_level):
    backend = type(byte_level.backend).from_str(byte_level.backend.to_str())
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="decoder"):
        Pieces(backend)
