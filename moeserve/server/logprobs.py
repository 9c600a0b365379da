"""Logprobs in the formats of chats, completions and vLLM's prompt_logprobs."""

from collections.abc import Sequence
from itertools import accumulate

from moeserve import protocol
from moeserve.messages import Logprobs
from moeserve.text.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON has no minus infinity


class LogprobFormat:
    """Formats logprobs with `num_top` alternatives.

    as_ids: write tokens as "token_id:7", which is exact even if text is not. A server without a
    tokenizer always does so.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, num_top: int = 0, *, as_ids: bool | None = False
    ) -> None:
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def _token(self, token_id: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def chat(self, rows: Sequence[Logprobs]) -> protocol.ChatLogprobs:
        """Return the logprobs object of a chat's choice. Each row has the sampled token first."""
        return protocol.ChatLogprobs([self._chat_row(row) for row in rows])

    def _chat_row(self, row: Logprobs) -> protocol.TokenLogprob:
        (sampled, *top) = [
            (self._token(token_id), max(logprob, FLOOR), self._bytes(token_id))
            for token_id, logprob in zip(row.ids, row.values, strict=True)
        ]
        return protocol.TokenLogprob(
            *sampled, [protocol.TopLogprob(*entry) for entry in top[: self._num_top]]
        )

    def _bytes(self, token_id: int) -> list[int]:
        return [] if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))

    def prompt(self, rows: Sequence[Logprobs | None]) -> protocol.PromptLogprobs:
        """Return vLLM's form: for each prompt token a map from token ids to logprobs; None for the
        first token.
        """
        return [None if row is None else self._prompt_row(row) for row in rows]

    def _prompt_row(self, row: Logprobs) -> dict[str, protocol.PromptLogprob]:
        found: dict[str, protocol.PromptLogprob] = {}
        for i, (token_id, logprob) in enumerate(zip(row.ids, row.values, strict=True)):
            rank = row.rank if i == 0 else i
            found.setdefault(
                str(token_id),
                protocol.PromptLogprob(max(logprob, FLOOR), rank, self._token(token_id)),
            )
        return found

    def columns(
        self, token_ids: Sequence[int], rows: Sequence[Logprobs | None], offset: int = 0
    ) -> tuple[protocol.CompletionLogprobs, int]:
        """Return the logprobs object of /v1/completions, and the offset of the next token's text.

        Offsets count characters of token texts. A row is None for the first token of a prompt.
        """
        tokens = [self._token(token_id) for token_id in token_ids]
        *offsets, end = accumulate(map(len, tokens), initial=offset)
        values = [
            None if row is None else max(row.values[0], FLOOR)
            for _, row in zip(tokens, rows, strict=True)
        ]
        return protocol.CompletionLogprobs(
            tokens, values, [None if row is None else self._top(row) for row in rows], offsets
        ), end

    def _top(self, row: Logprobs) -> dict[str, float]:
        """Return the most likely tokens, and the sampled one if it is not among them."""
        found: dict[str, float] = {}
        for token_id, logprob in zip(row.ids[: 1 + self._num_top], row.values, strict=False):
            found.setdefault(self._token(token_id), max(logprob, FLOOR))
        return found
