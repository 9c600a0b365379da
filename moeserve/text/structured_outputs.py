"""From what a request asks of its answer's text to one grammar, in one form for equal contents."""

import json
from typing import Any

from moeserve.errors import InvalidRequest
from moeserve.sampling import GrammarSpec, StructuredOutputsParams
from moeserve.text.json_schema import parse_json

_KINDS: dict[str, Any] = {
    "json": "json_schema",
    "structural_tag": "structural_tag",
}  # that come as text or as values


def grammar_of(asked: StructuredOutputsParams, param: str) -> GrammarSpec:
    """Returns the grammar. param: the field of the request that asks for it. Raises InvalidRequest
    unless there is one constraint; the grammar itself is unchecked."""
    given = asked.given
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        what = f"{param} needs one of {', '.join(asked.__struct_fields__[:6])}; it has {found}"
        raise InvalidRequest(what, param=param)
    ((name, value),) = given.items()
    kind = _KINDS.get(name, name)
    text = value
    if name == "json_object":
        text = ""
    elif name == "grammar":
        kind = "gbnf" if "::=" in value else "lark"
    elif name != "regex":
        text = _canonical(value, param, parse=name in _KINDS)
    return GrammarSpec(kind, text, not asked.disable_any_whitespace, asked.whitespace_pattern or "")


def either(first: GrammarSpec, second: GrammarSpec) -> GrammarSpec:
    """Returns the grammar of texts that match one of two grammars of answers."""
    return GrammarSpec("answer", f"start: %lark {{\n{first.text}\n}} | %lark {{\n{second.text}\n}}")


def _canonical(value: Any, param: str, *, parse: bool) -> str:
    """Returns JSON in one form for equal values. The order of keys stays, since answers follow it."""
    try:
        parsed = parse_json(value) if parse and isinstance(value, str) else value
        return json.dumps(parsed, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from error
