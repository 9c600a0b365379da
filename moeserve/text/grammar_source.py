"""From a `GrammarSpec` to the source that llguidance compiles, within limits that are checked
first.

    json_object      any JSON object
    json_schema      a JSON schema; keywords that cannot be enforced are errors, never ignored
    regex            the whole text matches; Rust's syntax, without look-around
    choice           one of these texts
    lark, gbnf       a context-free grammar, as llguidance and llama.cpp write them
    structural_tag   free text with tags whose contents are JSON, as vLLM and SGLang write them
    answer           Lark that an answer format made of tools, or around one of the above

A quoted text means these characters, even if they spell a special token. Only Lark's <name> and the
literals of structural tags mean the special tokens themselves.
"""

import hashlib
from collections.abc import Mapping

from moeserve.sampling import GrammarSpec
from moeserve.text.json_schema import (
    MAX_REGEX_BYTES,
    GrammarFault,
    check_schema,
    json_of,
    schema_text,
)
from moeserve.text.structural_tag import exactly, structural_tag
from moeserve.text.tokenizer import Tokenizer

MAX_JSON_BYTES = 256 * 1024
MAX_GRAMMAR_BYTES = 32 * 1024
# Without it llguidance looks ahead for the text that must come, and never ends where that is
# endless: /b+/ /b+/.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_LIMITS = {"regex": MAX_REGEX_BYTES, "lark": MAX_GRAMMAR_BYTES, "gbnf": MAX_GRAMMAR_BYTES}


def digest(spec: GrammarSpec) -> bytes:
    """Return a key for dictionaries that does not keep the grammar's text in memory."""
    shape = f"{spec.kind} {spec.any_whitespace} {len(spec.whitespace_pattern)}\n"
    text = shape + spec.whitespace_pattern + spec.text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def check_length(kind: str, text: str, whitespace_pattern: str = "") -> None:
    """Raise GrammarFault for a text or a pattern that is too long to compile."""
    limit = _LIMITS.get(kind, MAX_JSON_BYTES)
    if (size := len(text)) <= limit:  # characters; as many bytes or fewer than there are
        size = len(text.encode("utf-8", "surrogatepass"))
    if size > limit:
        raise GrammarFault(f"{size:,} bytes; at most {limit:,} are compiled")
    if len(whitespace_pattern) > MAX_REGEX_BYTES:
        raise GrammarFault(f"the whitespace pattern is longer than {MAX_REGEX_BYTES:,} bytes")


def grammar_source(spec: GrammarSpec, special: Mapping[str, int]) -> str:
    """Returns the source of a spec, in Lark. special: the tokenizer's special tokens. Raises
    GrammarFault.
    """
    return lark_of(spec, special) + _OPTIONS


def lark_of(spec: GrammarSpec, special: Mapping[str, int]) -> str:
    """Returns the same without the options, which may stand there only once."""
    check_length(spec.kind, spec.text, spec.whitespace_pattern)
    if spec.kind == "lark" and "%llguidance" in spec.text:
        raise GrammarFault("%llguidance is not accepted")
    return _lark_of(spec, special)


def _lark_of(spec: GrammarSpec, special: Mapping[str, int]) -> str:
    match spec.kind:
        case "json_schema":
            schema = json_of(spec.text)
            check_schema(schema)
            return f"start: %json {schema_text(schema, spec)}"
        case "regex":
            return f"start: {_regex(spec.text)}"
        case "choice":
            return f"start: {_regex('|'.join(map(exactly, json_of(spec.text))))}"
        case "lark" | "answer":
            return spec.text
        case "gbnf":
            return _lark_of_gbnf(spec.text)
        case "structural_tag":
            return structural_tag(spec, special)
        case _:
            return f"start: %json {schema_text({'type': 'object'}, spec)}"


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns name -> id of the tokens that are no text to llguidance: special ones, and added ones
    in <...>.
    """
    added = tokenizer.backend.get_added_tokens_decoder().items()
    return {
        t.content: i
        for i, t in added
        if t.special or (t.content[:1] == "<" and t.content[-1:] == ">")
    }


def _regex(pattern: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern)}/" if pattern else '""'


def _lark_of_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text).replace("%llguidance {}", "", 1)
    except RecursionError:
        raise GrammarFault("the grammar is nested too deeply") from None
    except Exception as error:  # the library's parser has many
        raise GrammarFault(f"not a GBNF grammar: {error}") from error
