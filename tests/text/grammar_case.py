"""Generate tokens under a grammar's masks: shared by the tests of grammars."""

from __future__ import annotations

import json
import random

import numpy as np

from moeserve.sampling import GrammarSpec
from moeserve.text.grammar import Grammars
from moeserve.text.tokenizer import Tokenizer

EXTRA = 40  # rows of the model's embedding beyond the tokenizer's vocabulary
CLOSING = '"}],'  # characters that bring a JSON text to its end


class Case:
    """A tokenizer with its grammars, and helpers that walk through them token by token."""

    def __init__(self, tokenizer: Tokenizer, end: str) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.backend.token_to_id(end)
        self.size = tokenizer.backend.get_vocab_size()
        self.grammars = Grammars(tokenizer, self.size + EXTRA, [self.end], 2)
        self.mask_W = np.zeros(self.grammars.mask_words, np.int32)

    def allowed(self, matcher) -> list[int]:
        self.mask_W[:] = 7
        matcher.fill(self.mask_W[None])
        return bits(self.mask_W)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, special=False)

    def text(self, tokens: list[int]) -> str:
        assert tokens[-1] == self.end
        return b"".join(map(self.tokenizer.token_bytes, tokens[:-1])).decode()

    def generate(self, spec: GrammarSpec, rng: random.Random, hint: str = "") -> list[int]:
        """Return random tokens under the masks of `spec`, up to the end token.

        After 20 tokens, and sometimes before, tokens that begin with a character of `hint` (or
        close something) are preferred, so that the text ends.
        """
        closing = {
            i
            for i in range(self.size)
            if self.tokenizer.token_text(i)[:1] in tuple(hint or CLOSING)
        }
        matcher = self.grammars.matcher(spec)
        tokens = []
        while not tokens or tokens[-1] != self.end:
            allowed = self.allowed(matcher)
            if len(tokens) > 20 or rng.random() < 0.3:
                close = [self.end] if self.end in allowed else [i for i in allowed if i in closing]
                allowed = close or allowed
            tokens.append(rng.choice(allowed))
            matcher.accept(tokens[-1:])
            assert len(tokens) < 700, "does not end"
        assert matcher.is_done
        return tokens


def bits(mask_W) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")).tolist()


def schema_spec(schema, **options) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema), **options)
