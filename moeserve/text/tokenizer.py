"""The tokenizer: text to ids and back, and the special tokens of its model directory.

A thin layer over Hugging Face `tokenizers` (tokenizer.json). Thread-safe; for long texts, encode and decode release
the GIL.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from moeserve.errors import CheckpointError, InvalidRequest
from moeserve.text.control import MARK, SHORT, ControlTokens, encode_ids
from moeserve.text.pieces import Pieces

MAX_TOKENIZER_BYTES = 200 * 2**20
MAX_CONFIG_BYTES = 16 * 2**20
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer. vocab_size includes added tokens; special_tokens: the named ones, for chat templates."""

    def __init__(self, backend: Backend, special_tokens: dict[str, str], eos_token_ids: tuple[int, ...]) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_tokens = special_tokens
        self.eos_token_ids = eos_token_ids
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added), 0)
        self.bos_token_id = self._id_of("bos_token")
        self.control = ControlTokens(backend)
        self._visible = Pieces.of(backend, frozenset())
        self._skipping = Pieces.of(backend, self.special_ids)

    @classmethod
    def load(cls, model_dir: Path | str) -> Tokenizer:
        """Reads a model directory. Raises CheckpointError for a missing, huge or damaged file."""
        folder = Path(model_dir)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{path}: no such file. moeserve needs the fast tokenizer; save one with "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...), or serve token ids only"
            )
        if (size := path.stat().st_size) > MAX_TOKENIZER_BYTES:
            raise CheckpointError(f"{path}: {size:,} bytes; a tokenizer has at most {MAX_TOKENIZER_BYTES:,}")
        try:
            backend = Backend.from_buffer(path.read_bytes())
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer: {str(error)[:200]}. Download it again") from error
        special_tokens = _named_tokens(folder)
        return cls(backend, special_tokens, _end_ids(folder, backend, special_tokens))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Returns the ids of `text`. special: with the tokens around every text, such as BOS."""
        try:
            return encode_ids(self.backend, text, special=special)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("the text contains an unpaired surrogate, which is not Unicode") from error

    def encode_prompt(self, rendered: str) -> list[int]:
        """Returns the ids of a rendered chat. Control tokens that a user typed are plain text."""
        if MARK in rendered:
            return self.control.encode(rendered)
        return self.encode(rendered, special=False)

    def warm_up(self) -> None:
        """Computes tables that the first unusual request would otherwise wait for, up to a second.

        Holds the GIL for much of that time, so a server calls this before it serves.
        """
        _ = self.longest_token
        with suppress(InvalidRequest):  # a tokenizer without a twin refuses the requests that need one
            self.control.warm_up()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids."""
        if len(token_ids) < SHORT:
            text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:
            (text,) = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def pieces(self, *, skip_special_tokens: bool) -> Pieces | None:
        """Returns the table of each token's text; None if this tokenizer's decoder looks at neighbours."""
        return self._skipping if skip_special_tokens else self._visible

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the token's bytes, which need not be whole characters; empty for an id without a token."""
        if self._visible is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        piece = self._visible[token_id]
        return piece.encode() if isinstance(piece, str) else piece

    def token_text(self, token_id: int) -> str:
        """Returns the token alone as text: special tokens by name, broken characters as U+FFFD."""
        piece = self._visible[token_id] if self._visible is not None else self.token_bytes(token_id)
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    @cached_property
    def longest_token(self) -> int:
        """Length of the longest token: a text of N characters has at least N / longest_token tokens."""
        return max(len(token) for token in self.backend.get_vocab())

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        token_id: int | None = self.backend.token_to_id(token) if token is not None else None
        return token_id


def read_config(path: Path) -> dict[str, Any]:
    """Returns a JSON object of a model directory, {} if there is no such file. Raises CheckpointError."""
    if not path.is_file():
        return {}
    if (size := path.stat().st_size) > MAX_CONFIG_BYTES:
        raise CheckpointError(f"{path}: {size:,} bytes; at most {MAX_CONFIG_BYTES:,} are expected")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {str(error)[:200]}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


def _named_tokens(folder: Path) -> dict[str, str]:
    config = read_config(folder / "special_tokens_map.json") | read_config(folder / "tokenizer_config.json")
    named = {}
    for name in _NAMED:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            named[name] = content
    return named


def _end_ids(folder: Path, backend: Backend, named: dict[str, str]) -> tuple[int, ...]:
    """Returns the end-of-text ids: generation_config.json's, else config.json's, and the tokenizer's eos token."""
    found = read_config(folder / "generation_config.json").get("eos_token_id")
    if found is None:
        found = read_config(folder / "config.json").get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    if "eos_token" in named:
        ids = [*ids, backend.token_to_id(named["eos_token"])]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and not isinstance(i, bool)))
