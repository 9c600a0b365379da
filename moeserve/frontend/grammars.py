"""The grammars of requests, checked before a request is admitted."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from moeserve.errors import InvalidRequest
from moeserve.messages import Ready
from moeserve.sampling import GrammarSpec, SamplingParams
from moeserve.text.grammar_check import GrammarChecker
from moeserve.text.structured_outputs import grammar_of
from moeserve.text.tokenizer import Tokenizer


class GrammarAdmission:
    """Checks grammars in a thread of its own, one after the other; those that were checked before
    need no thread.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._checker: GrammarChecker | None = None
        self._thread = ThreadPoolExecutor(1, "grammars")  # starts with its first work

    async def of(
        self, params: SamplingParams, grammar: GrammarSpec | None, param: str, ready: Ready
    ) -> GrammarSpec | None:
        """Returns the checked grammar: the given one, else what the parameters ask for. Raises
        InvalidRequest, naming `param`, the field that asks for it."""
        params.check(ready.vocab_size)
        if grammar is None and params.structured_outputs is not None:
            grammar = grammar_of(params.structured_outputs, param)
        if grammar is not None:
            await self._check(grammar, param, ready)
        return grammar

    async def _check(self, spec: GrammarSpec, param: str, ready: Ready) -> None:
        if self._tokenizer is None:
            raise InvalidRequest(
                "structured output needs a tokenizer; this server runs without one", param=param
            )
        if not ready.eos_token_ids:
            what = "this model names no token that ends an answer (eos_token_id), so no text can be complete"
            raise InvalidRequest(f"{param}: {what}", param=param, code="unsupported_parameter")
        if self._checker is None:
            self._checker = GrammarChecker(self._tokenizer, ready.vocab_size, ready.eos_token_ids)
        checker = self._checker
        if not checker.recall(spec, param):
            await asyncio.get_running_loop().run_in_executor(
                self._thread, checker.check, spec, param
            )

    async def close(self) -> None:
        """Ends the thread and the checker's process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._checker is not None:
            await asyncio.to_thread(self._checker.close)
