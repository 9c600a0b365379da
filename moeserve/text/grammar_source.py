"""From a `GrammarSpec` to the source that llguidance compiles. Limits are checked first.

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

from collections.abc import Mapping

from moeserve.sampling import GrammarSpec
from moeserve.text.grammar_limits import check_length
from moeserve.text.json_schema import GrammarFault, checked_schema, json_of, schema_text
from moeserve.text.lark import exactly
from moeserve.text.structural_tag import structural_tag
from moeserve.text.tokenizer import Tokenizer

# Without this option llguidance looks ahead for text that must come, and never ends where that text
# is endless: /b+/ /b+/.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'


def grammar_source(spec: GrammarSpec, special: Mapping[str, int]) -> str:
    """Return the source of a spec, in Lark. special: the tokenizer's special tokens. Raise
    GrammarFault.
    """
    return lark_of(spec, special) + _OPTIONS


def lark_of(spec: GrammarSpec, special: Mapping[str, int]) -> str:
    """Return the source without options, which a source may have only once."""
    check_length(spec.kind, spec.text, spec.whitespace_pattern)
    if spec.kind == "lark" and "%llguidance" in spec.text:
        raise GrammarFault("%llguidance is not accepted")
    return _lark_of(spec, special)


def _lark_of(spec: GrammarSpec, special: Mapping[str, int]) -> str:
    match spec.kind:
        case "json_schema":
            schema = checked_schema(json_of(spec.text))
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
    """Return name -> id of the tokens that are not text to llguidance: special ones, and added ones
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
