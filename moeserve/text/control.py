"""Tells control tokens that a user typed (`<|im_end|>`) apart from those that the chat template writes.

`shield` puts an invisible mark inside each control token in user text, so that it no longer matches. After rendering,
`ControlTokens.encode` gives the template's own control tokens private names in a twin tokenizer that knows only those
names, removes the marks, and encodes: typed ones become ordinary text, everything else gets the same ids as ever.
"""

from __future__ import annotations

import json
import re
import threading
from typing import Any

from tokenizers import Tokenizer as Backend

from moeserve.errors import InvalidRequest

MARK = "\ufdd0"  # a Unicode noncharacter, never part of meaningful text; dropped if a user sends it
SHORT = 1000  # characters or tokens
_TAG = re.compile(r"<[^\s<>]+>|\[[A-Z_/]+\]")


class ControlTokens:
    """One tokenizer's control tokens: special ones, and added ones that look like a tag (`<think>`, `[INST]`)."""

    def __init__(self, backend: Backend) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._names = {
            token.content: f"\ufdd1{token_id}\ufdd2"
            for token_id, token in added.items()
            if token.special or _TAG.fullmatch(token.content)
        }
        special = [token.content for token in added.values() if token.special]
        self._any = _alternatives(list(self._names))
        self._special = _alternatives(special)
        self._twin: Backend | None = None
        self._lock = threading.Lock()

    def shield(self, text: str, *, only_special: bool = False) -> str:
        """Returns `text` with its control tokens broken by marks. only_special: but not tags such as `<think>`."""
        pattern = self._special if only_special else self._any
        return pattern.sub(lambda match: _mark(match.group()), text.replace(MARK, ""))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a rendered prompt that contains marks. May take a second the first time."""
        named = self._any.sub(lambda match: self._names[match.group()], text)
        return encode_ids(self._get_twin(), unshield(named), special=False)

    def warm_up(self) -> None:
        """Makes the twin tokenizer. Raises InvalidRequest if this tokenizer cannot have one."""
        self._get_twin()

    def _get_twin(self) -> Backend:
        with self._lock:
            if self._twin is None:
                self._twin = self._make_twin()
            return self._twin

    def _make_twin(self) -> Backend:
        spec: dict[str, Any] = json.loads(self._backend.to_str())
        names = self._names
        for token in spec["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = spec["model"]
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {names.get(token, token): i for token, i in vocab.items()}
        else:
            model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        spec["post_processor"] = None
        twin = Backend.from_str(json.dumps(spec))
        for content, name in names.items():
            if twin.encode(name, add_special_tokens=False).ids != [self._backend.token_to_id(content)]:
                raise InvalidRequest("this model's tokenizer cannot take control tokens as plain text")
        return twin


def encode_ids(backend: Backend, text: str, *, special: bool) -> list[int]:
    """Returns the ids of a text. Long texts use the batched call, which releases the GIL."""
    if len(text) < SHORT:
        ids: list[int] = backend.encode(text, add_special_tokens=special).ids
    else:
        ids = backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
    return ids


def unshield(text: str) -> str:
    """Returns `text` without marks, for display."""
    return text.replace(MARK, "")


def _mark(token: str) -> str:
    return token[:1] + MARK + token[1:]


def _alternatives(tokens: list[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
