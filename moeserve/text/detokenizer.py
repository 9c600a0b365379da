"""Token ids to text, one token at a time, so that the pieces joined are the text of the whole.

A character whose bytes are spread over tokens is held back until it is whole; bytes that can never become a character
turn into U+FFFD at once. The prompt's tail is taken into account: the answer continues its text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from moeserve.text.tokenizer import Pieces, Tokenizer

_TAIL = 4  # tokens: a UTF-8 character has at most four bytes, and a token at least one
_WINDOW = 32  # tokens held back at most by `WindowDetokenizer`


class PieceDetokenizer:
    """The usual detokenizer: a table look-up per token, and a UTF-8 decoder for split characters (0.15 us a token)."""

    __slots__ = ("_pending", "_pieces", "_strip", "_utf8")

    def __init__(self, pieces: Pieces, prompt_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = False  # whether the decoder holds an incomplete character
        self._strip = False
        for token_id in prompt_ids[-_TAIL:]:
            self.push(token_id)
        self._strip = pieces.strips_start and not any(pieces[token_id] for token_id in prompt_ids)

    def push(self, token_id: int) -> str:
        """Returns the text that is certain after this token, maybe empty."""
        piece = self._pieces[token_id]
        if self._pending or self._strip or piece.__class__ is bytes:
            return self._slow(piece)
        return piece  # type: ignore[return-value]  # bytes were handled above

    def flush(self) -> str:
        """Returns the text that is still held back."""
        self._pending = False
        return self._utf8.decode(b"", final=True)

    def _slow(self, piece: str | bytes) -> str:
        if not piece:
            return ""
        text = self._utf8.decode(piece.encode() if isinstance(piece, str) else piece)
        self._pending = bool(self._utf8.getstate()[0])
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """A detokenizer for decoders that look at neighbours: decodes the last tokens again and returns new text (2.5 us a
    token)."""

    __slots__ = ("_ids", "_read", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-_TAIL:])
        self._read = len(self._ids)  # ids before this one have been emitted

    def push(self, token_id: int) -> str:
        """Returns the text that is certain after this token, maybe empty."""
        self._ids.append(token_id)
        return self._emit(force=len(self._ids) - self._read > _WINDOW)

    def flush(self) -> str:
        """Returns the text that is still held back."""
        return self._emit(force=True)

    def _emit(self, *, force: bool) -> str:
        before = self._decode(self._ids[: self._read])
        text = self._decode(self._ids)
        if len(text) <= len(before) or (text.endswith("\ufffd") and not force):
            return ""
        del self._ids[: self._read]  # what was just emitted, whole characters, is the next window's beginning
        self._read = len(self._ids)
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


Detokenizer = PieceDetokenizer | WindowDetokenizer


def make_detokenizer(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> Detokenizer:
    """Returns the fastest detokenizer for this tokenizer. prompt_ids: the prompt, whose text the answer continues."""
    pieces = tokenizer.pieces(skip_special_tokens=skip_special_tokens)
    if pieces is None:
        return WindowDetokenizer(tokenizer, prompt_ids, skip_special_tokens)
    return PieceDetokenizer(pieces, prompt_ids)
