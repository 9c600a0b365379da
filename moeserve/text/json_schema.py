"""JSON schemas as text and as trees: limits, JSON pointers, and the form that llguidance takes."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from moeserve.errors import InvalidRequest
from moeserve.sampling import MAX_CHOICES, GrammarSpec

MAX_REGEX_BYTES = 8 * 1024
MAX_FAULT_CHARS = 500
MAX_DEPTH = 64
# JSON laid out in any usual way; models loop in endless whitespace
_WHITESPACE = r"[ \t]{1,4}|(\r?\n){1,2}[ \t]{0,32}"
MAX_VALUES = 20_000
MAX_ENUM = MAX_CHOICES
MAX_DIGITS = 15  # of a fraction
BY_NAME = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
)  # keywords that map names to schemas
_ENFORCED = re.compile(r"/(enum|const|multipleOf|(exclusiveM|m)(in|ax)imum)(/|$)")
_IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


class GrammarFault(ValueError):
    """A grammar that cannot be compiled. where: the JSON pointer to the place in its JSON, "" for
    the whole.
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        # Cut, because both may quote a request, and verdicts are kept.
        self.message = message[:MAX_FAULT_CHARS]
        self.where = where[:MAX_FAULT_CHARS]

    def as_request_error(self, param: str) -> InvalidRequest:
        """Returns the error for the client. param: the request's field with the grammar."""
        at = f" at {self.where}" if self.where else ""
        return InvalidRequest(f"{param}{at}: {self.message}", param=param, code="invalid_grammar")


def check_schema(schema: Any) -> None:
    """Raises GrammarFault for what costs too much to compile, and for what llguidance takes but
    does not keep.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarFault("a JSON schema must be an object or a boolean")
    count = 0
    waiting = [(schema, "", "", 1)]
    while waiting:
        value, where, name, depth = waiting.pop()
        count += 1
        if fault := _fault(value, where, name):
            raise GrammarFault(fault, where)
        if depth > MAX_DEPTH:
            raise GrammarFault(f"nested deeper than {MAX_DEPTH}", where)
        if count > MAX_VALUES:
            raise GrammarFault(f"more than {MAX_VALUES:,} values")
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(item, pointer(where, key), key, depth + 1) for key, item in items]


def _fault(value: Any, where: str, name: str | int) -> str:
    """Returns what is wrong with one value of a schema, "" for nothing."""
    match value:
        case str() if name == "pattern" and len(value) > MAX_REGEX_BYTES:
            return f"a regex may have at most {MAX_REGEX_BYTES:,} bytes"
        case list() if name == "enum" and len(value) > MAX_ENUM:
            return f"{len(value):,} values; at most {MAX_ENUM:,} are compiled"
        case int() | float() if abs(value) >= 2**63 and re.search("/(enum|const)(/|$)", where):
            return "values of 64 bits and more cannot be enforced"
        case float() if _ENFORCED.search(where) and not _is_exact(value):
            return f"fractions with exponents or more than {MAX_DIGITS} digits cannot be enforced exactly"
        case {"minProperties": int(least)}:
            required = value.get("required")
            if least > 1 + (len(required) if isinstance(required, list) else 0):
                return "minProperties cannot be enforced for names that are free, since they could repeat"
    return ""


def _is_exact(value: float) -> bool:
    """Whether llguidance, which rounds long fractions, writes a value as it is."""
    text = repr(abs(value))
    return "e" not in text and len(text.replace(".", "").lstrip("0")) <= MAX_DIGITS


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the schemas directly inside a schema, each with the pointer from the one to the other."""
    for key, value in schema.items():
        inner: Any = []
        if key in BY_NAME and isinstance(value, dict):
            inner = value.items()
        elif key in _IN_LISTS and isinstance(value, list):
            inner = enumerate(value)
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            yield pointer("", key), value
        yield from (
            (pointer(pointer("", key), name), item)
            for name, item in inner
            if isinstance(item, dict)
        )


def pointer(where: str, key: str | int) -> str:
    """Returns the JSON pointer (RFC 6901) to an entry of the value at `where`."""
    return f"{where}/{str(key).replace('~', '~0').replace('/', '~1')}"


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError for anything else, NaN and infinity
    included.
    """
    try:
        value = json.loads(text, parse_constant=no_constant)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def json_of(text: str) -> Any:
    """Returns the value of a JSON text. Raises GrammarFault."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise GrammarFault(f"not JSON: {error}") from error


def no_constant(name: str) -> Any:
    """Refuses NaN and infinity, for parsers of JSON."""
    raise ValueError(f"{name} is not a JSON number")


def schema_text(schema: Any, spec: GrammarSpec) -> str:
    """Returns a schema with the spec's whitespace, on one line of JSON."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    options: dict[str, Any] = {} if spec.any_whitespace else {"whitespace_flexible": False}
    if pattern := spec.whitespace_pattern or (_WHITESPACE if spec.any_whitespace else ""):
        options["whitespace_pattern"] = pattern
    return json.dumps(
        schema | {"x-guidance": options}
    )  # replaces the sender's, which could switch checks off
