"""Converts a `GrammarSpec` to the source that llguidance compiles, after checking its limits.

    kind             the answer is
    json_object      any JSON object
    json_schema      JSON of a schema; keywords that cannot be enforced are errors
    regex            a match of a regex in Rust's syntax, without look-around
    choice           one of several texts
    lark, gbnf       a text of a context-free grammar, in llguidance's or llama.cpp's syntax
    structural_tag   free text with tags that contain JSON, as in vLLM and SGLang
    answer           a text of Lark that an answer format made from tools or another kind

Quoted text stands for its characters, even if they spell a special token. Only Lark's <name> and
the literals of structural tags stand for special tokens.
"""

from collections.abc import Mapping

from moeserve.sampling import GrammarSpec
from moeserve.text.grammar_limits import check_length
from moeserve.text.json_schema import GrammarFault, checked_schema, parse_grammar_json, schema_text
from moeserve.text.lark import exactly
from moeserve.text.structural_tag import structural_tag
from moeserve.text.tokenizer import Tokenizer

# Without this option llguidance computes forced text in advance, and never ends if the forced text
# is endless, as in /b+/ /b+/.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'


def grammar_source(spec: GrammarSpec, special: Mapping[str, int]) -> str:
    """Return the Lark source of a grammar. Raise GrammarFault.

    special: the tokenizer's special tokens.
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
            schema = checked_schema(parse_grammar_json(spec.text))
            return f"start: %json {schema_text(schema, spec)}"
        case "regex":
            return f"start: {_regex(spec.text)}"
        case "choice":
            return f"start: {_regex('|'.join(map(exactly, parse_grammar_json(spec.text))))}"
        case "lark" | "answer":
            return spec.text
        case "gbnf":
            return _lark_of_gbnf(spec.text)
        case "structural_tag":
            return structural_tag(spec, special)
        case _:  # json_object
            return f"start: %json {schema_text({'type': 'object'}, spec)}"


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return name -> id of special tokens and added tokens in <...>, as llguidance treats them."""
    added = tokenizer.backend.get_added_tokens_decoder().items()
    return {
        token.content: token_id
        for token_id, token in added
        if token.special or (token.content[:1] == "<" and token.content[-1:] == ">")
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
