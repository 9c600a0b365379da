"""A sandbox process that compiles untrusted grammars, which may overflow the stack or never end.

    python -m moeserve.text.grammar_sandbox

The first line of standard input is a JSON object with `vocab_size`, `special` (id and name of each
special token) and `ends` (ids of end tokens). Each further line is a source as a JSON string. Each
line of output is llguidance's error as a JSON string, "" if the source compiles.
"""

import json
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from moeserve.text.sandbox_child import serve, set_limits

CPU_S = 0.4  # for one grammar
MAX_MEMORY = 2**30
MAX_LEXER_STATES = 40_000  # 1.3 kB each
_STACK = 2**20  # an eighth of the stack on which the engine compiles
_STEPS = 8  # of one byte each, after compilation


class _Bytes:
    """A vocabulary of the 256 bytes and the special tokens, with the attributes that llguidance
    reads.
    """

    def __init__(self, vocab_size: int, special: list[tuple[int, str]], ends: list[int]) -> None:
        self.tokens = [b""] * vocab_size
        for token_id, name in special:
            self.tokens[token_id] = name.encode()
        special_ids = {token_id for token_id, _ in special} | set(ends)
        candidates = range(min(vocab_size, 256 + len(special_ids)))
        # The tokens of the bytes: the first ids that are not special
        self._ids = [token_id for token_id in candidates if token_id not in special_ids][:256]
        for byte, token_id in enumerate(self._ids):
            self.tokens[token_id] = bytes([byte])
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(special_ids)

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in text]


def limits() -> LLParserLimits:
    """Return the limits on the cost of one grammar."""
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def compile_error(tokenizer: LLTokenizer, source: str) -> str:
    """Return llguidance's error in a source or in its first steps, "" for none."""
    matcher = LLMatcher(tokenizer, source, limits=limits(), log_level=0)
    for _ in range(_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if allowed:
            matcher.consume_token((allowed & -allowed).bit_length() - 1)  # the lowest set bit
    return matcher.get_error()


def _work() -> None:
    lines = sys.stdin.buffer
    vocabulary: dict[str, Any] = json.loads(lines.readline())
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(**vocabulary)), eos_token=vocabulary["ends"])

    def answer(line: bytes) -> bytes:
        return json.dumps(compile_error(tokenizer, json.loads(line))).encode()

    serve(lines, answer, CPU_S)


if __name__ == "__main__":
    set_limits(MAX_MEMORY)
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_work)
    thread.start()
    thread.join()
