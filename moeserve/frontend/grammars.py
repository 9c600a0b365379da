"""Check the grammars of requests before the requests are admitted."""

import asyncio
from collections.abc import Callable, Iterable

from moeserve.errors import InvalidRequest
from moeserve.messages import Ready
from moeserve.sampling import GrammarSpec, SamplingParams
from moeserve.text.grammar_check import GrammarChecker
from moeserve.text.structured_outputs import grammar_of
from moeserve.text.tokenizer import Tokenizer


class GrammarAdmission:
    """Checks the grammars of requests. It owns the processes that compile new grammars, which
    `close` ends.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._checker: GrammarChecker | None = None

    async def checked_grammar(
        self,
        params: SamplingParams,
        grammar: GrammarSpec | None,
        *,
        param: str,
        ready: Ready,
        owner: str = "",
        parts: Callable[[], Iterable[tuple[GrammarSpec, str]]] | None = None,
    ) -> GrammarSpec | None:
        """Return the checked grammar: the given one, or the one of the sampling parameters.

        Args:
            params: The request's sampling parameters, already checked.
            grammar: The grammar of a chat with tools.
            param: The request field with the grammar, for errors.
            ready: The engine's facts.
            owner: The sender. New grammars of several owners are compiled in turns.
            parts: Returns the constraints that `grammar` combines, each with its request field. If
                `grammar` is refused, the error is about the first one that is refused by itself.

        Raises InvalidRequest, or Overloaded if the compiling processes are busy for too long.
        """
        if grammar is None and params.structured_outputs is not None:
            # In a thread, because a schema may be as long as the largest body.
            grammar = await asyncio.to_thread(grammar_of, params.structured_outputs, param)
        if grammar is not None:
            checker = self._checker_for(ready, param)
            try:
                await checker.check_async(grammar, param, owner)
            except InvalidRequest:
                if parts is not None:
                    for part, part_param in parts():
                        await checker.check_async(part, part_param, owner)
                raise
        return grammar

    def _checker_for(self, ready: Ready, param: str) -> GrammarChecker:
        if self._tokenizer is None:
            raise InvalidRequest(
                "structured output needs a tokenizer; this server runs without one", param=param
            )
        if not ready.eos_token_ids:
            raise InvalidRequest(
                f"{param}: this model has no end-of-text token (eos_token_id), so no text can be "
                "complete",
                param=param,
                code="unsupported_parameter",
            )
        if self._checker is None:
            self._checker = GrammarChecker(self._tokenizer, ready.vocab_size, ready.eos_token_ids)
        return self._checker

    async def close(self) -> None:
        """End the processes that compile grammars."""
        if self._checker is not None:
            await asyncio.to_thread(self._checker.close)
