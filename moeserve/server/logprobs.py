"""Logprobs in the shapes of the two OpenAI APIs and of vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeserve.messages import Logprobs
from moeserve.text.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON has no minus infinity


class LogprobFormat:
    """as_ids shows tokens as "token_id:7", which is exact where text is not; so does a server without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, num_top: int, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids

    def token(self, token_id: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def chat(self, rows: Sequence[Logprobs]) -> dict[str, Any]:
        return {"content": [self._chat_row(row) for row in rows], "refusal": None}

    def _chat_row(self, row: Logprobs) -> dict[str, Any]:
        top = list(zip(row.ids, row.values, strict=True))
        entry = self._chat_token(*top[0])
        entry["top_logprobs"] = [self._chat_token(*pair) for pair in top[1 : 1 + self._num_top]]
        return entry

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return {"token": self.token(token_id), "logprob": max(logprob, FLOOR), "bytes": list(raw)}

    def prompt(self, rows: Sequence[Logprobs | None]) -> list[dict[str, Any] | None]:
        """vLLM's form: for each prompt token a map from token id to its logprob and rank, None for the first."""
        return [None if row is None else self._prompt_row(row) for row in rows]

    def _prompt_row(self, row: Logprobs) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for place, (token_id, logprob) in enumerate(zip(row.ids, row.values, strict=True)):
            rank = row.rank if place == 0 else place
            entry = {"logprob": max(logprob, FLOOR), "rank": rank, "decoded_token": self.token(token_id)}
            found.setdefault(str(token_id), entry)
        return found


class CompletionColumns:
    """The logprobs object of /v1/completions, grown token by token; offsets count characters of token texts."""

    def __init__(self, form: LogprobFormat, num_top: int) -> None:
        self._form = form
        self._num_top = num_top
        self._offset = 0

    def take(self, token_ids: Sequence[int], rows: Sequence[Logprobs | None]) -> dict[str, Any]:
        """Columns of the next tokens."""
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, row in zip(token_ids, rows, strict=True):
            token = self._form.token(token_id)
            tokens.append(token)
            offsets.append(self._offset)
            self._offset += len(token)
            token_logprobs.append(None if row is None else max(row.values[0], FLOOR))
            top_logprobs.append(None if row is None else self._top(row))
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }

    def _top(self, row: Logprobs) -> dict[str, float]:
        """The most likely tokens and the one that came, which makes one entry more if it is not among them."""
        found: dict[str, float] = {}
        for token_id, logprob in zip(row.ids[: 1 + self._num_top], row.values, strict=False):
            found.setdefault(self._form.token(token_id), max(logprob, FLOOR))
        return found
