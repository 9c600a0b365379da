"""A process that compiles grammars of strangers, so that one which overflows the stack or never
ends kills only it.

    python -m moeserve.text.grammar_sandbox

Reads JSON lines on standard input: first `vocab_size`, `special` (id and name of each) and `ends`,
then one source each; answers each with a line, the JSON string of llguidance's error, "" if it
compiles.
"""

import json
import signal
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

CPU_S = 0.4  # for one grammar
MAX_MEMORY = 2**30
MAX_LEXER_STATES = 40_000  # 1.3 kB each
_STACK = 2**20  # an eighth of the stack on which the engine compiles
_STEPS = 8  # of one byte each, after compilation


class _Bytes:
    """A vocabulary of the 256 bytes and the special tokens, in the form that llguidance asks for."""

    def __init__(self, vocab_size: int, special: list[tuple[int, str]], ends: list[int]) -> None:
        self.tokens = [b""] * vocab_size
        for token_id, name in special:
            self.tokens[token_id] = name.encode()
        taken = {token_id for token_id, _ in special} | set(ends)
        self._ids = [
            token_id
            for token_id in range(min(vocab_size, 256 + len(taken)))
            if token_id not in taken
        ][:256]
        for byte, token_id in enumerate(self._ids):
            self.tokens[token_id] = bytes([byte])
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(taken)

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in text]


def serve() -> None:
    """Answers until standard input ends."""
    vocabulary: dict[str, Any] = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(**vocabulary)), eos_token=vocabulary["ends"])
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # nobody catches SIGPROF: it ends the process
        error = compile_error(tokenizer, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(error), flush=True)  # noqa: T201  the protocol


def limits() -> LLParserLimits:
    """Returns what one grammar may cost."""
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def compile_error(tokenizer: LLTokenizer, source: str) -> str:
    """Returns what llguidance has against a source or its first steps, "" for nothing."""
    matcher = LLMatcher(tokenizer, source, limits=limits(), log_level=0)
    for _ in range(_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if allowed:
            matcher.consume_token((allowed & -allowed).bit_length() - 1)
    return matcher.get_error()


if __name__ == "__main__":
    import resource

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the server, which then closes our standard input
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
