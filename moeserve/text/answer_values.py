"""Reads values in answers, in JSON or similar notations, and converts them to strict JSON."""

import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from moeserve.text.answer_text import AnswerText, Malformed, Stops, Unfinished, Wait, plain
from moeserve.text.schema_alternatives import kind_of, kinds_of
from moeserve.text.schema_values import is_valid

_MAX_SCALAR_LENGTH = 400
_SCALAR = re.compile(r"[\w.+-]+")
_BARE = re.compile(r"[^,\[\]{}]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_HEX = re.compile(r"[0-9A-Fa-f]{4}")
# Escapes: pairs of surrogates (12 characters), unpaired surrogates (6), and all others
_ESCAPE = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u[dD][89a-fA-F]..|\\.", re.DOTALL)
_KEY_END = Stops([":"])
_STRING_ENDS = {quote: Stops([quote, "\\"]) for quote in "\"'"}
_CLOSERS = {"{": "}", "[": "]"}
_JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's, and their JSON


class Dialect(NamedTuple):
    """A notation of values similar to JSON."""

    quotes: str = '"'
    constants: Mapping[str, str] = _JSON_WORDS  # word -> JSON
    delimiter: Stops | None = None  # quotation mark of strings without escapes
    bare: bool = False  # keys and words need no quotes


JSON = Dialect()
PYTHON = Dialect("\"'", _JSON_WORDS | _PYTHON_WORDS)


def read_value(text: AnswerText, dialect: Dialect) -> Wait[str]:
    """Read one value, and return it as JSON. Raise Malformed."""
    pieces = list[str]()
    closers = list[str]()
    # One of: "value"; "key"; "first" (a value, or the end of an array); "first key" (a key, or the
    # end of an object); "next" (a comma, or the end of an array or object)
    expected = "value"
    while True:
        pieces.append((yield from text.read_space()))
        char = yield from text.peek()
        if not char:
            raise Unfinished
        if expected == "next" or (expected.startswith("first") and char == closers[-1]):
            if char not in (closers[-1], ","):
                raise Malformed
            pieces.append((yield from text.read_exactly(1)))
            if char == ",":
                expected = "key" if closers[-1] == "}" else "value"
                continue
            closers.pop()
        elif "key" in expected:
            pieces.append((yield from _read_key(text, dialect)))
            expected = "value"
            continue
        elif char in _CLOSERS:
            pieces.append((yield from text.read_exactly(1)))
            closers.append(_CLOSERS[char])
            expected = "first key" if char == "{" else "first"
            continue
        else:
            pieces.append((yield from _read_scalar(text, dialect)))
        if not closers:
            return "".join(pieces)
        expected = "next"


def _read_key(text: AnswerText, dialect: Dialect) -> Wait[str]:
    key = yield from _read_string(text, dialect)
    if not key and not dialect.bare:
        raise Malformed
    key = key or json.dumps((yield from text.read_header(_KEY_END)).strip(), ensure_ascii=False)
    space = yield from text.read_space()
    if (yield from text.read_exactly(1)) != ":":
        raise Malformed
    return f"{key}{space}:"


def _read_scalar(text: AnswerText, dialect: Dialect) -> Wait[str]:
    if found := (yield from _read_string(text, dialect)):
        return found
    word = (
        yield from text.read_match(_BARE if dialect.bare else _SCALAR, _MAX_SCALAR_LENGTH)
    ).strip()
    if word in dialect.constants:
        return dialect.constants[word]
    if _NUMBER.fullmatch(word):
        return _json_number(word)
    if dialect.bare and word:
        return json.dumps(plain(word), ensure_ascii=False)
    raise Unfinished if text.ended and not (yield from text.peek()) else Malformed


def _read_string(text: AnswerText, dialect: Dialect) -> Wait[str]:
    """Read a string in quotes or between delimiters. Return its JSON, "" if there is none.

    Control characters become escapes, and unknown escapes become ordinary text.
    """
    pieces: list[str] = []

    def add(piece: str) -> None:
        pieces.append(json.dumps(plain(piece), ensure_ascii=False)[1:-1])

    if dialect.delimiter is not None and (yield from text.read_stop(dialect.delimiter)):
        if not (yield from text.read_until(dialect.delimiter, add)):
            raise Unfinished
    elif (yield from text.peek()) in tuple(dialect.quotes):
        ends = _STRING_ENDS[(yield from text.read_exactly(1))]
        while (stop := (yield from text.read_until(ends, add))) == "\\":
            pieces.append((yield from _read_escape(text)))
        if not stop:
            raise Unfinished
    else:
        return ""
    body = "".join(pieces)
    if "\\u" in body:
        body = _ESCAPE.sub(_replace_unpaired, body)
    return f'"{body}"'


def _replace_unpaired(match: re.Match[str]) -> str:
    """Return U+FFFD for an unpaired surrogate, and other escapes unchanged."""
    return "\\ufffd" if len(match[0]) == 6 else match[0]


def _json_number(word: str) -> str:
    """Return a number as JSON.

    A number beyond the range of doubles, such as 1e400, becomes the largest double: JSON allows
    such numbers, but parsers reject them or read infinity.
    """
    if word.lstrip("-").isdigit() or math.isfinite(float(word)):
        return word
    return repr(math.copysign(sys.float_info.max, float(word)))


def _read_escape(text: AnswerText) -> Wait[str]:
    char = yield from text.read_exactly(1)
    if char == "u":
        digits = yield from text.read_exactly(4)
        if not _HEX.fullmatch(digits):
            raise Malformed
        return "\\u" + digits
    if char in '"\\/bfnrt':
        return "\\" + char
    return char if char == "'" else json.dumps("\\" + char, ensure_ascii=False)[1:-1]


def is_readable(word: str) -> bool:
    """Return whether JSON parsers accept a text."""
    try:
        msgspec.json.decode(word)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def as_json(word: str) -> str:
    """Return the JSON in a text with one JSON value, "" if it is not one.

    Values that JSON allows but parsers reject are changed: numbers beyond the range of doubles, and
    unpaired surrogates.
    """
    return word if is_readable(word) else _parse_whole(word, JSON)


def _parse_whole(word: str, dialect: Dialect) -> str:
    """Return the JSON of a text with one value, "" if it has none."""
    text = AnswerText()
    text.feed(word, final=True)
    try:
        next(read_value(text, dialect))  # yields only if it needs more text
    except StopIteration as end:
        value = str(end.value)
        return value if text.is_empty and is_readable(value) else ""
    except Malformed:
        pass
    return ""


def typed(raw: str, schema: Any, *, root: Any, is_text: bool | None) -> str:
    """Return the JSON of a value that was written without quotes.

    If the schema allows strings and other types, the text is another type's value if it is valid
    as such.

    Args:
        raw: The text.
        schema: The value's schema.
        root: The whole schema, in which references are followed.
        is_text: Whether the format marks the value as a string; None if it has no marks.
    """
    kinds = kinds_of(schema, root)
    if is_text or (is_text is None and kinds == {"string"}):
        return json.dumps(raw, ensure_ascii=False)
    word = raw.strip()
    may_be_text = "string" in kinds
    if not may_be_text and (constant := _PYTHON_WORDS.get(word)):
        return constant
    value = as_json(word)
    if not value and kinds & {"object", "array"}:
        value = _parse_whole(word, PYTHON)
    if not value:
        return json.dumps(raw, ensure_ascii=False)
    parsed = msgspec.json.decode(value)
    if "integer" in kinds and "number" not in kinds and _is_integral(parsed):
        return str(int(parsed))
    if is_text is None and may_be_text and not is_valid(parsed, schema, root):
        kind = kind_of(parsed)
        fits = kind in kinds or (kind == "integer" and "number" in kinds)
        if not fits or is_valid(raw, schema, root):
            return json.dumps(raw, ensure_ascii=False)
    return value


def _is_integral(parsed: Any) -> bool:
    return isinstance(parsed, float) and parsed.is_integer()
