"""Values in answers, in JSON and its relatives, rewritten as JSON while they come."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from moeserve.text.answer_text import AnswerText, Emit, Malformed, Stops, Unfinished, Wait, plain

_MAX_SCALAR = 400
_SCALAR = re.compile(r"[\w.+-]+")
_BARE = re.compile(r"[^,\[\]{}]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_HEX = re.compile(r"[0-9A-Fa-f]{4}")
_KEY_END = Stops([":"])
_CLOSERS = {"{": "}", "[": "]"}


_WORDS = {"true": "true", "false": "false", "null": "null"}


class Dialect(NamedTuple):
    """How values differ from JSON. constants: words and their JSON. delimiters: around text without escapes.
    bare: keys and words need no quotes."""

    quotes: str = '"'
    constants: Mapping[str, str] = _WORDS
    delimiter: Stops | None = None
    bare: bool = False


JSON = Dialect()
PYTHON = Dialect("\"'", {**_WORDS, "True": "true", "False": "false", "None": "null"})


def value(text: AnswerText, dialect: Dialect, emit: Emit) -> Wait[None]:
    """Takes one value and emits it as JSON. Raises Malformed."""
    closers: list[str] = []
    want = "value"  # or "first" of an array, "key", "first key" of an object, "next"
    while True:
        emit((yield from text.space()))
        char = yield from text.peek()
        if not char:
            raise Unfinished
        if want == "next" or (want.startswith("first") and char == closers[-1]):
            if char == closers[-1]:
                emit((yield from text.exactly(1)))
                closers.pop()
            elif char == ",":
                emit((yield from text.exactly(1)))
                want = "key" if closers[-1] == "}" else "value"
                continue
            else:
                raise Malformed
        elif "key" in want:
            yield from _key(text, dialect, emit)
            want = "value"
            continue
        elif char in _CLOSERS:
            emit((yield from text.exactly(1)))
            closers.append(_CLOSERS[char])
            want = "first key" if char == "{" else "first"
            continue
        else:
            yield from _scalar(text, dialect, emit)
        if not closers:
            return
        want = "next"


def _key(text: AnswerText, dialect: Dialect, emit: Emit) -> Wait[None]:
    char = yield from text.peek()
    if dialect.bare and char not in dialect.quotes and not (yield from _delimited(text, dialect, emit)):
        emit(json.dumps((yield from text.header(_KEY_END)).strip(), ensure_ascii=False))
    elif char in dialect.quotes:
        yield from _string(text, dialect, emit)
    elif not dialect.bare:
        raise Malformed
    emit((yield from text.space()))
    if (yield from text.exactly(1)) != ":":
        raise Malformed
    emit(":")


def _scalar(text: AnswerText, dialect: Dialect, emit: Emit) -> Wait[None]:
    if (yield from text.peek()) in dialect.quotes:
        yield from _string(text, dialect, emit)
    elif not (yield from _delimited(text, dialect, emit)):
        word = (yield from text.match(_BARE if dialect.bare else _SCALAR, _MAX_SCALAR)).strip()
        if word in dialect.constants:
            emit(dialect.constants[word])
        elif _NUMBER.fullmatch(word):
            emit(word)
        elif dialect.bare and word:
            emit(json.dumps(plain(word), ensure_ascii=False))
        else:
            raise Unfinished if text.ended and not (yield from text.peek()) else Malformed


def _delimited(text: AnswerText, dialect: Dialect, emit: Emit) -> Wait[bool]:
    """Takes a text between delimiters, if there is one, and returns whether there was."""
    if dialect.delimiter is None or not (yield from text.next_of(dialect.delimiter)):
        return False
    emit('"')
    found = yield from text.until(
        dialect.delimiter, lambda piece: emit(json.dumps(plain(piece), ensure_ascii=False)[1:-1])
    )
    if not found:
        raise Unfinished
    emit('"')
    return True


_RUN = {quote: re.compile(f"[^{quote}\\\\]+") for quote in "\"'"}


def _string(text: AnswerText, dialect: Dialect, emit: Emit) -> Wait[None]:
    """Takes a quoted text. Control characters in it become escapes, and unknown escapes text."""
    quote = yield from text.exactly(1)
    emit('"')
    while True:
        char = yield from text.peek()
        if not char:
            raise Unfinished
        if char == quote:
            yield from text.exactly(1)
            emit('"')
            return
        if char != "\\":
            run = yield from text.match(_RUN[quote])
            emit(json.dumps(plain(run), ensure_ascii=False)[1:-1])
            continue
        yield from text.exactly(1)
        emit((yield from _escape(text)))


def _escape(text: AnswerText) -> Wait[str]:
    char = yield from text.exactly(1)
    if char in '"\\/bfnrt':
        return "\\" + char
    if char == "'":
        return char
    if char == "u":
        digits = yield from text.exactly(4)
        if _HEX.fullmatch(digits):
            return "\\u" + digits
        raise Malformed
    return json.dumps("\\" + char, ensure_ascii=False)[1:-1]


def typed(raw: str, schema: Any, text: bool | None) -> str:
    """Returns the JSON of a value that was written as text, by its schema. text: whether it is one, None if unknown."""
    types = types_of(schema)
    if text or (text is None and types == {"string"}):
        return json.dumps(raw, ensure_ascii=False)
    word = raw.strip()
    if (found := {"True": "true", "False": "false", "None": "null"}.get(word)) and "string" not in types:
        return found
    try:
        parsed = json.loads(word, parse_constant=_refuse)
        json.dumps(parsed, allow_nan=False)
    except (ValueError, RecursionError):
        return (types & {"object", "array"} and _of_python(word)) or json.dumps(raw, ensure_ascii=False)
    kind = _KINDS.get(type(parsed), "null")
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    if kind == "number" and "number" not in types and "integer" in types and parsed == int(parsed):
        return str(int(parsed))
    return word if fits or "string" not in types else json.dumps(raw, ensure_ascii=False)


def _of_python(word: str) -> str:
    """Returns the JSON of a value in Python's syntax, "" if it is none."""
    text, pieces = AnswerText(), list[str]()
    text.feed(word, final=True)
    with suppress(Malformed):
        for _ in value(text, PYTHON, pieces.append):
            pass
        return "".join(pieces) if text.is_empty else ""
    return ""


_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
}


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


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
