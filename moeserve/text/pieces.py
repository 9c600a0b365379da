"""The text of each token id, computed on first use, so that streams need no decoder call per token.

Supports the usual decoders: byte-level BPE (GPT-2, Llama 3, Qwen, OLMoE) and SentencePiece with byte fallback (Llama 2,
Mixtral). `Pieces.of` returns None for others; `detokenizer.py` then decodes windows of tokens.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's character of each byte: printable Latin-1 as it is, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


class Pieces(dict[int, "str | bytes"]):
    """Token id -> text, or bytes if they are not valid UTF-8 alone; "" for ids without a token.

    strips_start: the decoder drops one space before the very first word of a text.
    """

    def __init__(self, backend: Backend, kind: str, replacements: dict[str, str], hidden: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._byte_level = kind == "byte_level"
        self._replacements = replacements
        self._hidden = hidden
        self.strips_start = kind == "sentencepiece"

    @classmethod
    def of(cls, backend: Backend, hidden: frozenset[int]) -> Pieces | None:
        """Returns the table of a tokenizer; None if its decoder is not supported. hidden: ids with empty text."""
        if backend.decoder is None:
            return None
        steps = _steps(json.loads(backend.decoder.__getstate__()))
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(backend, "byte_level", {}, hidden)
        replacements: dict[str, str] = {}
        strips = False
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    replacements[old] = new
                case {"type": "Metaspace", "replacement": str(mark)}:
                    replacements[mark] = " "
                    strips |= step.get("prepend_scheme", "always") != "never"
                case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                    strips |= start == 1
                case {"type": "ByteFallback" | "Fuse"}:
                    pass
                case _:
                    return None
        return cls(backend, "sentencepiece" if strips else "plain", replacements, hidden)

    def __missing__(self, token_id: int) -> str | bytes:
        raw = b"" if token_id in self._hidden else self._bytes(token_id)
        try:
            piece: str | bytes = raw.decode()
        except UnicodeDecodeError:
            piece = raw
        self[token_id] = piece
        return piece

    def _bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes([_ALPHABET[char] for char in token])
            except KeyError:
                return token.encode()
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        for old, new in self._replacements.items():
            token = token.replace(old, new)
        return token.encode()


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
