"""Logprobs in the formats of chats, completions and vLLM's prompt_logprobs."""

from collections.abc import Sequence
from itertools import accumulate

from moeserve import protocol
from moeserve.messages import Logprobs
from moeserve.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no minus infinity


class LogprobFormat:
    """Formats logprobs with `num_top` alternatives.

    as_ids: write tokens as "token_id:7", which is exact even if text is not. A server without a
    tokenizer always does so.

    In all methods a row has the logprobs of one position, the sampled token's first.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, num_top: int = 0, *, as_ids: bool | None = False
    ) -> None:
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._writes_ids = as_ids or tokenizer is None

    def _token_text(self, token_id: int) -> str:
        if self._writes_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def chat_logprobs(self, rows: Sequence[Logprobs]) -> protocol.ChatLogprobs:
        """Return the logprobs object of a chat's choice."""
        return protocol.ChatLogprobs([self._chat_row(row) for row in rows])

    def _chat_row(self, row: Logprobs) -> protocol.TokenLogprob:
        (sampled, *top) = [
            (self._token_text(token_id), max(logprob, MIN_LOGPROB), self._token_bytes(token_id))
            for token_id, logprob in zip(row.ids, row.values, strict=True)
        ]
        return protocol.TokenLogprob(
            *sampled, [protocol.TopLogprob(*entry) for entry in top[: self._num_top]]
        )

    def _token_bytes(self, token_id: int) -> list[int]:
        return [] if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))

    def prompt_logprobs(self, rows: Sequence[Logprobs | None]) -> protocol.PromptLogprobs:
        """Return vLLM's form: for each prompt token a map from token ids to logprobs; None for the
        first token.
        """
        return [None if row is None else self._prompt_row(row) for row in rows]

    def _prompt_row(self, row: Logprobs) -> dict[str, protocol.PromptLogprob]:
        by_id: dict[str, protocol.PromptLogprob] = {}
        for i, (token_id, logprob) in enumerate(zip(row.ids, row.values, strict=True)):
            rank = row.rank if i == 0 else i
            by_id.setdefault(
                str(token_id),
                protocol.PromptLogprob(max(logprob, MIN_LOGPROB), rank, self._token_text(token_id)),
            )
        return by_id

    def completion_logprobs(
        self, token_ids: Sequence[int], rows: Sequence[Logprobs | None], offset: int = 0
    ) -> tuple[protocol.CompletionLogprobs, int]:
        """Return the logprobs object of /v1/completions, and the offset of the next token's text.

        Offsets count characters of token texts. A row is None for the first token of a prompt.
        """
        tokens = [self._token_text(token_id) for token_id in token_ids]
        *offsets, next_offset = accumulate(map(len, tokens), initial=offset)
        token_logprobs = [
            None if row is None else max(row.values[0], MIN_LOGPROB)
            for _, row in zip(tokens, rows, strict=True)
        ]
        top_logprobs = [None if row is None else self._top_logprobs(row) for row in rows]
        shown = protocol.CompletionLogprobs(
            tokens=tokens,
            token_logprobs=token_logprobs,
            top_logprobs=top_logprobs,
            text_offset=offsets,
        )
        return shown, next_offset

    def _top_logprobs(self, row: Logprobs) -> dict[str, float]:
        """Return the most likely tokens, and the sampled one if it is not among them."""
        by_text: dict[str, float] = {}
        for token_id, logprob in zip(row.ids[: 1 + self._num_top], row.values, strict=False):
            by_text.setdefault(self._token_text(token_id), max(logprob, MIN_LOGPROB))
        return by_text
