"""Values in answers, in JSON and its relatives, rewritten as JSON."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from moeserve.text.answer_text import AnswerText, Malformed, Stops, Unfinished, Wait, plain
from moeserve.text.json_schema import no_constant

_MAX_SCALAR = 400
_SCALAR = re.compile(r"[\w.+-]+")
_BARE = re.compile(r"[^,\[\]{}]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_HEX = re.compile(r"[0-9A-Fa-f]{4}")
_KEY_END = Stops([":"])
_ENDS = {quote: Stops([quote, "\\"]) for quote in "\"'"}
_CLOSERS = {"{": "}", "[": "]"}
_WORDS = {"true": "true", "false": "false", "null": "null"}


class Dialect(NamedTuple):
    """How values differ from JSON. constants: words and their JSON. delimiters: around text without
    escapes. bare: keys and words need no quotes."""

    quotes: str = '"'
    constants: Mapping[str, str] = _WORDS
    delimiter: Stops | None = None
    bare: bool = False


JSON = Dialect()
PYTHON = Dialect("\"'", {**_WORDS, "True": "true", "False": "false", "None": "null"})


def value(text: AnswerText, dialect: Dialect) -> Wait[str]:
    """Takes one value and returns it as JSON. Raises Malformed."""
    pieces = list[str]()
    closers = list[str]()
    want = "value"  # or "first" of an array, "key", "first key" of an object, "next"
    while True:
        pieces.append((yield from text.space()))
        char = yield from text.peek()
        if not char:
            raise Unfinished
        if want == "next" or (want.startswith("first") and char == closers[-1]):
            if char not in (closers[-1], ","):
                raise Malformed
            pieces.append((yield from text.exactly(1)))
            if char == ",":
                want = "key" if closers[-1] == "}" else "value"
                continue
            closers.pop()
        elif "key" in want:
            pieces.append((yield from _key(text, dialect)))
            want = "value"
            continue
        elif char in _CLOSERS:
            pieces.append((yield from text.exactly(1)))
            closers.append(_CLOSERS[char])
            want = "first key" if char == "{" else "first"
            continue
        else:
            pieces.append((yield from _scalar(text, dialect)))
        if not closers:
            return "".join(pieces)
        want = "next"


def _key(text: AnswerText, dialect: Dialect) -> Wait[str]:
    key = yield from _text(text, dialect)
    if not key and not dialect.bare:
        raise Malformed
    key = key or json.dumps((yield from text.header(_KEY_END)).strip(), ensure_ascii=False)
    space = yield from text.space()
    if (yield from text.exactly(1)) != ":":
        raise Malformed
    return f"{key}{space}:"


def _scalar(text: AnswerText, dialect: Dialect) -> Wait[str]:
    if found := (yield from _text(text, dialect)):
        return found
    word = (yield from text.match(_BARE if dialect.bare else _SCALAR, _MAX_SCALAR)).strip()
    if word in dialect.constants:
        return dialect.constants[word]
    if _NUMBER.fullmatch(word):
        return word
    if dialect.bare and word:
        return json.dumps(plain(word), ensure_ascii=False)
    raise Unfinished if text.ended and not (yield from text.peek()) else Malformed


def _text(text: AnswerText, dialect: Dialect) -> Wait[str]:
    """Takes a text in quotes or between delimiters, if there is one, and returns its JSON, else "".
    Control characters in it become escapes, and unknown escapes text."""
    pieces: list[str] = []

    def add(piece: str) -> None:
        pieces.append(json.dumps(plain(piece), ensure_ascii=False)[1:-1])

    if dialect.delimiter is not None and (yield from text.next_of(dialect.delimiter)):
        if not (yield from text.until(dialect.delimiter, add)):
            raise Unfinished
    elif (yield from text.peek()) in tuple(dialect.quotes):
        ends = _ENDS[(yield from text.exactly(1))]
        while (stop := (yield from text.until(ends, add))) == "\\":
            pieces.append((yield from _escape(text)))
        if not stop:
            raise Unfinished
    else:
        return ""
    return f'"{"".join(pieces)}"'


def _escape(text: AnswerText) -> Wait[str]:
    char = yield from text.exactly(1)
    if char == "u":
        digits = yield from text.exactly(4)
        if not _HEX.fullmatch(digits):
            raise Malformed
        return "\\u" + digits
    if char in '"\\/bfnrt':
        return "\\" + char
    return char if char == "'" else json.dumps("\\" + char, ensure_ascii=False)[1:-1]


def typed(raw: str, schema: Any, text: bool | None) -> str:
    """Returns the JSON of a value that was written as text, by its schema. text: whether it is one,
    None if unknown.
    """
    types = types_of(schema)
    if text or (text is None and types == {"string"}):
        return json.dumps(raw, ensure_ascii=False)
    word = raw.strip()
    if (
        found := {"True": "true", "False": "false", "None": "null"}.get(word)
    ) and "string" not in types:
        return found
    try:
        parsed = json.loads(word, parse_constant=no_constant)
        json.dumps(parsed, allow_nan=False)
    except (ValueError, RecursionError):
        return (types & {"object", "array"} and _of_python(word)) or json.dumps(
            raw, ensure_ascii=False
        )
    kind = _KINDS.get(type(parsed), "null")
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    if kind == "number" and "number" not in types and "integer" in types and parsed == int(parsed):
        return str(int(parsed))
    return word if fits or "string" not in types else json.dumps(raw, ensure_ascii=False)


def _of_python(word: str) -> str:
    """Returns the JSON of a value in Python's syntax, "" if it is none."""
    text = AnswerText()
    text.feed(word, final=True)
    try:
        next(value(text, PYTHON))  # waits for nothing
    except StopIteration as end:
        return str(end.value) if text.is_empty else ""
    except Malformed:
        pass
    return ""


_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
}


def types_of(schema: Any, depth: int = 4) -> set[str]:
    """Returns the types that a schema names, the empty set for any."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    found = schema.get("type", [])
    types = {found} if isinstance(found, str) else {name for name in found if isinstance(name, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for inner in schema.get(key) or ():
            types |= types_of(inner, depth - 1)
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return types or {_KINDS.get(type(item), "null") for item in values}
