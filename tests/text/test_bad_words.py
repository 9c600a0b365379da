from __future__ import annotations

import pytest

from moeserve.errors import InvalidRequest
from moeserve.text.stop import bad_sequences


def test_a_word_is_banned_alone_and_after_a_space(byte_level):
    found = bad_sequences(byte_level, ["fox"])
    assert tuple(byte_level.encode("fox", special=False)) in found
    spaced = tuple(byte_level.encode(" fox", special=False))
    assert (spaced in found) == (len(spaced) == len(found[0]) and spaced[0] != found[0][0])


def test_the_mark_of_a_word_start_is_not_doubled(sentencepiece):
    assert bad_sequences(sentencepiece, ["the", " the"]) == (
        tuple(sentencepiece.encode("the", special=False)),
    )


def test_a_long_bad_word_is_refused(byte_level):
    with pytest.raises(InvalidRequest, match="tokens"):
        bad_sequences(byte_level, ["xyz " * 100])
