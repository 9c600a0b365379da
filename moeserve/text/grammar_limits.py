"""Limits on the size of grammars, and their keys in caches."""

import hashlib

from moeserve.sampling import GrammarSpec
from moeserve.text.json_schema import MAX_REGEX_BYTES, GrammarFault

MAX_JSON_BYTES = 256 * 1024
MAX_GRAMMAR_BYTES = 32 * 1024
_LIMITS = {"regex": MAX_REGEX_BYTES, "lark": MAX_GRAMMAR_BYTES, "gbnf": MAX_GRAMMAR_BYTES}


def check_length(kind: str, text: str, whitespace_pattern: str = "") -> None:
    """Raise GrammarFault for a text or a pattern that is too long to compile."""
    limit = _LIMITS.get(kind, MAX_JSON_BYTES)
    if (size := len(text)) <= limit:  # characters; there are at least as many bytes
        size = len(text.encode("utf-8", "surrogatepass"))
    if size > limit:
        raise GrammarFault(f"{size:,} bytes; at most {limit:,} are compiled")
    if len(whitespace_pattern) > MAX_REGEX_BYTES:
        raise GrammarFault(f"the whitespace pattern is longer than {MAX_REGEX_BYTES:,} bytes")


def answer_spec(lark: str) -> GrammarSpec:
    """Return the grammar of an answer. Raise GrammarFault for one that is too long to compile."""
    check_length("answer", lark)
    return GrammarSpec("answer", lark)


def digest(spec: GrammarSpec) -> bytes:
    """Return a key for dictionaries that does not keep the grammar's text in memory."""
    shape = f"{spec.kind} {spec.any_whitespace} {len(spec.whitespace_pattern)}\n"
    text = shape + spec.whitespace_pattern + spec.text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
