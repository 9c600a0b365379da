"""Checks JSON schemas of requests, and converts them to the form that llguidance compiles."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from moeserve.errors import InvalidRequest
from moeserve.sampling import MAX_CHOICES, GrammarSpec

MAX_REGEX_BYTES = 8 * 1024
MAX_FAULT_CHARS = 500
MAX_DEPTH = 64
MAX_VALUES = 20_000
MAX_ENUM = MAX_CHOICES
MAX_DIGITS = 15  # of a fraction
# Any usual layout of JSON, but bounded, because models can loop in whitespace.
_WHITESPACE = r"[ \t]{1,4}|(\r?\n){1,2}[ \t]{0,32}"
# Keywords whose value maps names to schemas, is a list of schemas, or is a schema
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    "items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
# Keywords that never restrict anything
ANNOTATIONS = frozenset({
    "title", "description", "default", "example", "examples", "$comment", "deprecated", "readOnly",
    "writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "discriminator",
})  # fmt: skip
# The formats that llguidance enforces. Other formats are annotations.
FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
})  # fmt: skip
_DRAFT = re.compile(r"https?://json-schema\.org/")
_LARGEST = 2**63 - 1024  # the largest bound of a number that llguidance compiles, a double
_ENFORCED = re.compile(r"/(enum|const|multipleOf|(exclusiveM|m)(in|ax)imum)(/|$)")


class GrammarFault(ValueError):
    """A grammar that cannot be compiled.

    where: JSON pointer to the fault in a schema; "" for the whole grammar.
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        # Truncated, because both may quote a request, and results of checks are cached.
        self.message = message[:MAX_FAULT_CHARS]
        self.where = where[:MAX_FAULT_CHARS]

    def as_request_error(self, param: str) -> InvalidRequest:
        """Return the error for the client. param: the request's field with the grammar."""
        at = f" at {self.where}" if self.where else ""
        return InvalidRequest(f"{param}{at}: {self.message}", param=param, code="invalid_grammar")


def checked_schema(schema: Any) -> Any:
    """Check a schema, and return it without keywords that restrict nothing.

    Raise GrammarFault if it costs too much to compile, or has keywords that llguidance accepts but
    does not enforce.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarFault("a JSON schema must be an object or a boolean")
    for count, node in enumerate(_nodes(schema)):
        if node.depth > MAX_DEPTH:
            raise GrammarFault(f"nested deeper than {MAX_DEPTH}", node.where)
        if count >= MAX_VALUES:
            raise GrammarFault(f"more than {MAX_VALUES:,} values")
    schema = _simplified(schema)
    for node in _nodes(schema):
        if fault := _fault(node.value, node.where, node.key):
            raise GrammarFault(fault, node.where)
    return schema


class _Node(NamedTuple):
    """A value inside a JSON tree."""

    value: Any
    where: str  # JSON pointer to the value
    key: str | int  # in the object or array around the value
    depth: int  # 1 for the whole tree


def _nodes(tree: Any) -> Iterator[_Node]:
    """Yield each value of a JSON tree."""
    waiting = [_Node(tree, "", "", 1)]
    while waiting:
        node = waiting.pop()
        yield node
        value = node.value
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [
                _Node(item, pointer(node.where, key), key, node.depth + 1) for key, item in items
            ]


def _fault(value: Any, where: str, key: str | int) -> str:
    """Return the fault of one value in a schema, "" for none."""
    match value:
        case str() if key == "pattern" and len(value) > MAX_REGEX_BYTES:
            return f"a regex may have at most {MAX_REGEX_BYTES:,} bytes"
        case list() if key == "enum" and len(value) > MAX_ENUM:
            return f"{len(value):,} values; at most {MAX_ENUM:,} are compiled"
        case int() | float() if abs(value) >= 2**63 and re.search("/(enum|const)(/|$)", where):
            return "values of 64 bits and more cannot be enforced"
        case float() if _ENFORCED.search(where) and not _is_exact(value):
            return (
                f"fractions with exponents or more than {MAX_DIGITS} digits cannot be enforced "
                "exactly"
            )
        case {"minProperties": int(least)}:
            required = value.get("required")
            if least > 1 + (len(required) if isinstance(required, list) else 0):
                return (
                    "minProperties cannot be enforced for arbitrary names, because they could "
                    "repeat"
                )
    return ""


def _is_exact(value: float) -> bool:
    """Return whether llguidance, which rounds long fractions, keeps a value unchanged."""
    text = repr(abs(value))
    return "e" not in text and len(text.replace(".", "").lstrip("0")) <= MAX_DIGITS


def _simplified(schema: Any) -> Any:
    """Return a schema without keywords that restrict nothing, also in its subschemas."""
    if not isinstance(schema, dict):
        return schema
    schema = {key: _simplified_value(key, value) for key, value in schema.items()}
    return {key: value for key, value in schema.items() if not _is_idle(key, value, schema)}


def _simplified_value(key: str, value: Any) -> Any:
    """Return the value of a keyword: subschemas are simplified, and too large bounds reduced."""
    if key in BY_NAME and isinstance(value, dict):
        return {name: _simplified(inner) for name, inner in value.items()}
    if (key in _IN_LISTS or key == "items") and isinstance(value, list):
        return [_simplified(inner) for inner in value]
    if key in _SINGLE:
        return _simplified(value)
    if key in ("minimum", "exclusiveMinimum") and _is_number(value):
        # The new bound is tighter, so all answers respect the sender's bound.
        return -_LARGEST if value < -_LARGEST else value
    if key in ("maximum", "exclusiveMaximum") and _is_number(value):
        return _LARGEST if value > _LARGEST else value
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_idle(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a keyword restricts nothing that the rest of its schema allows."""
    condition = _IDLE_CONDITIONS.get(key)
    return condition is not None and condition(value, schema)


def _allows_any_name(schema: Any) -> bool:
    """Return whether a simplified schema of names allows any property name."""
    if allows_all(schema):
        return True
    return (
        isinstance(schema, dict)
        and schema.get("type") == "string"
        and schema.keys() - ANNOTATIONS == {"type"}
    )


def _allow_all(schemas: Any) -> bool:
    """Return whether each entry is a schema that allows all, or an empty list of names."""
    return isinstance(schemas, dict) and all(
        inner == [] or allows_all(inner) for inner in schemas.values()
    )


def allows_all(schema: Any) -> bool:
    """Return whether a simplified schema allows any value."""
    return schema is True or (isinstance(schema, dict) and schema.keys() <= ANNOTATIONS)


# Keyword -> function that tells whether its value, in a simplified schema, restricts nothing
_IDLE_CONDITIONS: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "uniqueItems": lambda value, _: value is False,
    "propertyNames": lambda value, _: _allows_any_name(value),
    "not": lambda value, _: value is False,
    "if": lambda _, schema: "then" not in schema and "else" not in schema,
    "then": lambda value, schema: "if" not in schema or allows_all(value),
    "else": lambda value, schema: "if" not in schema or allows_all(value),
    "contains": lambda _, schema: schema.get("minContains") == 0 and "maxContains" not in schema,
    "minContains": lambda value, schema: (
        "contains" not in schema or (value == 0 and "maxContains" not in schema)
    ),
    "maxContains": lambda _, schema: "contains" not in schema,
    "unevaluatedProperties": lambda value, _: allows_all(value),
    "unevaluatedItems": lambda value, _: allows_all(value),
    "dependentRequired": lambda value, _: _allow_all(value),
    "dependentSchemas": lambda value, _: _allow_all(value),
    "dependencies": lambda value, _: _allow_all(value),
    "format": lambda value, _: isinstance(value, str) and value not in FORMATS,
    "$schema": lambda value, _: isinstance(value, str) and not _DRAFT.match(value),
    "$dynamicAnchor": lambda *_: True,
    "$recursiveAnchor": lambda *_: True,
}


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the direct subschemas of a schema that are objects, each with its pointer."""
    for key, value in schema.items():
        where = pointer("", key)
        entries: Any = []
        if key in BY_NAME and isinstance(value, dict):
            entries = value.items()
        elif key in _IN_LISTS and isinstance(value, list):
            entries = enumerate(value)
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            yield where, value
        for name, inner in entries:
            if isinstance(inner, dict):
                yield pointer(where, name), inner


def pointer(where: str, key: str | int) -> str:
    """Return the JSON pointer (RFC 6901) to an entry of the value at `where`."""
    return f"{where}/{str(key).replace('~', '~0').replace('/', '~1')}"


def parse_json(text: str) -> Any:
    """Parse JSON. Raise ValueError if it is invalid, also for NaN and infinity."""
    try:
        value = json.loads(text, parse_constant=reject_constant)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def parse_grammar_json(text: str) -> Any:
    """Parse JSON. Raise GrammarFault if it is invalid."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise GrammarFault(f"not JSON: {error}") from error


def reject_constant(name: str) -> Any:
    """Raise ValueError for NaN and infinity (`parse_constant` of json.loads)."""
    raise ValueError(f"{name} is not a JSON number")


def schema_text(schema: Any, spec: GrammarSpec) -> str:
    """Return a checked schema as one line of JSON, with the whitespace options of `spec`."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    options: dict[str, Any] = {} if spec.any_whitespace else {"whitespace_flexible": False}
    if pattern := spec.whitespace_pattern or (_WHITESPACE if spec.any_whitespace else ""):
        options["whitespace_pattern"] = pattern
    # This replaces "x-guidance" of the sender, which could disable checks.
    return json.dumps(schema | {"x-guidance": options})
