"""Bad words: no spelling of a word is ever completed, whatever the tokenizer."""

from __future__ import annotations

import random

import pytest

from moeserve.errors import InvalidRequest
from moeserve.text.stop import bad_sequences
from tests.text.conftest import CORPUS

WORDS = sorted(
    {word for text in CORPUS for word in text.split()} | {"fox", "lived", "12", "é", "fo"}
)
CONTEXTS = ["", " ", "\n", "a ", "a\n", "the fox ", "Once upon a time ", "x == 3:\n\n"]


def completes(tokens: list[int], sequences) -> bool:
    return any(
        tuple(tokens[i : i + len(sequence)]) == sequence
        for sequence in sequences
        for i in range(len(tokens))
    )


@pytest.mark.parametrize("word", WORDS)
def test_a_text_with_the_word_completes_a_bad_sequence(tokenizer, word):
    for given in (word, " " + word):
        sequences = bad_sequences(tokenizer, [given])
        assert len(sequences) <= 3
        for context in CONTEXTS:
            for special in (False, True):
                tokens = tokenizer.encode(context + word, special=special)
                assert completes(tokens, sequences), (given, context)


def test_each_sequence_is_the_word(tokenizer):
    rng = random.Random(0)
    for word in rng.sample(WORDS, 20):
        for sequence in bad_sequences(tokenizer, [word]):
            assert tokenizer.decode(list(sequence)).strip() == word


def test_spellings_of_another_number_of_tokens(byte_level):
    uneven = []
    for word in WORDS:
        bare = tuple(byte_level.encode(word, special=False))
        spaced = tuple(byte_level.encode(" " + word, special=False))
        if len(bare) != len(spaced) and spaced[-len(bare) :] != bare:
            uneven.append((word, {bare, spaced}))
    assert uneven
    for word, sequences in uneven:
        assert set(bad_sequences(byte_level, [word])) == sequences


def test_a_long_bad_word_is_refused(byte_level):
    with pytest.raises(InvalidRequest, match=r"'xyz xyz .* at most 64"):
        bad_sequences(byte_level, ["xyz " * 100])
