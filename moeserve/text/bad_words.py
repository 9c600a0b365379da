"""Translates bad words into the token sequences that the engine must not complete."""

from __future__ import annotations

from collections.abc import Iterable

from moeserve.errors import InvalidRequest
from moeserve.text.tokenizer import Tokenizer

MAX_WORD_TOKENS = 64


def bad_sequences(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the token sequences of each word, at the start of a text and after a space, without duplicates.

    The form after a space counts only if it is another spelling of as many tokens with another beginning; otherwise
    the space stands for itself (`" " + word`), and banning the word's own tokens is enough.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(" ") or word, special=False))
        if not bare:
            raise InvalidRequest("a bad word has no tokens", param="bad_words")
        if len(bare) > MAX_WORD_TOKENS:
            raise InvalidRequest(
                f"a bad word has {len(bare)} tokens; at most {MAX_WORD_TOKENS} are allowed", param="bad_words"
            )
        spaced = tuple(tokenizer.encode(" " + word.lstrip(" "), special=False))
        sequences[bare] = None
        if spaced[0] != bare[0] and len(spaced) == len(bare):
            sequences[spaced] = None
    return tuple(sequences)
