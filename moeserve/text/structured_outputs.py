"""Converts a request's `structured_outputs` to a grammar, in a canonical form for caches."""

import json
from typing import Any, NamedTuple

from moeserve.errors import InvalidRequest
from moeserve.sampling import GrammarSpec, StructuredOutputsParams
from moeserve.text.grammar_limits import answer_spec, check_length
from moeserve.text.json_schema import GrammarFault, parse_json


class Constraint(NamedTuple):
    """A constraint on a text, and the field of the request that has it."""

    params: StructuredOutputsParams
    field: str


# Constraint that may be JSON text or a value -> kind of its grammar
_KINDS: dict[str, Any] = {"json": "json_schema", "structural_tag": "structural_tag"}


def grammar_of(params: StructuredOutputsParams, param: str) -> GrammarSpec:
    """Return the grammar of a constraint; only its length is checked.

    param: the field of the request with the constraint. Raise InvalidRequest unless there is
    exactly one constraint.
    """
    given = params.given
    if len(given) != 1:
        given_names = " and ".join(given) if given else "none"
        names = ", ".join(params.__struct_fields__[:6])  # the constraints; options follow
        raise InvalidRequest(f"{param} needs one of {names}; it has {given_names}", param=param)
    ((name, value),) = given.items()
    kind = _KINDS.get(name, name)
    text = value
    if name == "json_object":
        text = ""
    elif name == "grammar":
        kind = "gbnf" if "::=" in value else "lark"
    elif name != "regex":
        text = _canonical(value, param, parse=name in _KINDS)
    pattern = params.whitespace_pattern or ""
    try:
        check_length(kind, text, pattern)
    except GrammarFault as fault:
        raise fault.as_request_error(param) from None
    return GrammarSpec(kind, text, not params.disable_any_whitespace, pattern)


def either(first: GrammarSpec, second: GrammarSpec) -> GrammarSpec:
    """Return the union of two grammars of answers. Raise GrammarFault."""
    return answer_spec(f"start: %lark {{\n{first.text}\n}} | %lark {{\n{second.text}\n}}")


def _canonical(value: Any, param: str, *, parse: bool) -> str:
    """Return canonical JSON. Keys keep their order, because answers follow it."""
    try:
        parsed = parse_json(value) if parse and isinstance(value, str) else value
        return json.dumps(parsed, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from error
