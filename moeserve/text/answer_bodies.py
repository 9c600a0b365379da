"""What is between the marks of a call, by kind of content."""

import json
import re
from collections.abc import Mapping, Set
from contextlib import suppress
from html import unescape
from typing import Any

from moeserve.text.answer_format import Part
from moeserve.text.answer_syntax import Reading
from moeserve.text.answer_text import AnswerText, Emit, Malformed, Unfinished, Wait, plain
from moeserve.text.answer_values import JSON, PYTHON, typed, value

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_MAX_NAME = 256


class CallSink:
    """What a body has read: names and arguments, in this order. known: only calls of tools that are offered."""

    def __init__(self, schemas: Mapping[str, Any], *, known: bool) -> None:
        self._schemas, self._known = schemas, known
        self.parts: list[Part] = []
        self.count = 0
        self.schema: Mapping[str, Any] = {}

    def begin(self, name: str) -> None:
        """Begins a call. Raises Malformed if the name cannot be one."""
        if not name or len(name) > _MAX_NAME or (self._known and self._schemas and name not in self._schemas):
            raise Malformed
        found = self._schemas.get(name)
        self.schema = found.get("properties") or {} if isinstance(found, Mapping) else {}
        self.parts.append(Part("call", name))
        self.count += 1

    def add(self, arguments: str) -> None:
        """Adds to the arguments of the call."""
        if arguments:
            self.parts.append(Part("arguments", arguments))


def _close(text: AnswerText, reading: Reading) -> Wait[None]:
    if reading.close:
        yield from text.space()
        if not (yield from text.next_of(reading.close)) and (yield from text.peek()):
            raise Malformed


def _json_body(text: AnswerText, reading: Reading, calls: CallSink) -> Wait[None]:
    """Takes an object with a name and arguments, or a list of such."""
    yield from text.space()
    if (yield from text.peek()) == "[":
        yield from text.exactly(1)
        while True:
            yield from _json_call(text, reading, calls)
            yield from text.space()
            if (mark := (yield from text.exactly(1))) == "]":
                break
            if mark != ",":
                raise Malformed
    else:
        yield from _json_call(text, reading, calls)
    yield from _close(text, reading)


def _json_call(text: AnswerText, reading: Reading, calls: CallSink) -> Wait[None]:
    name, arguments = "", list[str]()
    yield from text.space()
    if (yield from text.exactly(1)) != "{":
        raise Malformed
    mark = ","
    while mark != "}":
        if mark != ",":
            raise Malformed
        key = json.loads((yield from _joined(text)), strict=False)
        yield from text.space()
        if (yield from text.exactly(1)) != ":":
            raise Malformed
        yield from text.space()
        if key in ("name", "function") and not name and (yield from text.peek()) == '"':
            name = json.loads((yield from _joined(text)))
            calls.begin(name)
        elif key in ("arguments", "parameters") and not arguments:
            yield from _arguments(text, arguments.append)
        else:
            yield from value(text, JSON, lambda piece: None)
        yield from text.space()
        mark = yield from text.exactly(1)
    if not name:
        raise Malformed
    calls.add("".join(arguments) or "{}")


def _joined(text: AnswerText) -> Wait[str]:
    """Takes a quoted text and returns its JSON."""
    yield from text.space()
    if (yield from text.peek()) != '"':
        yield from text.exactly(1)  # raises at the end
        raise Malformed
    pieces: list[str] = []
    yield from value(text, JSON, pieces.append)
    return "".join(pieces)


def _arguments(text: AnswerText, emit: Emit) -> Wait[None]:
    """Takes arguments: an object, the text of one, or null."""
    if (yield from text.peek()) == "{":
        yield from value(text, JSON, emit)
    else:
        pieces: list[str] = []
        yield from value(text, JSON, pieces.append)
        inner = json.loads("".join(pieces))
        if inner is None or inner == "":
            inner = "{}"
        try:
            if not isinstance(inner, str) or not isinstance(json.loads(inner), dict):
                raise Malformed
        except (ValueError, RecursionError):
            raise Malformed from None
        emit(inner)


def _object_body(text: AnswerText, reading: Reading, calls: CallSink) -> Wait[None]:
    """Takes a name and an object."""
    yield from _header(text, reading, calls)
    yield from text.space()
    if (yield from text.peek()) != "{":
        yield from text.exactly(1)
        raise Malformed
    yield from value(text, reading.dialect, calls.add)
    yield from _close(text, reading)


def _header(text: AnswerText, reading: Reading, calls: CallSink) -> Wait[bool]:
    """Takes a name and what is around it, and returns whether that says that there are no arguments."""
    header = yield from text.header(reading.header_end)
    found = reading.header.fullmatch(header.strip())
    if not found:
        raise Malformed
    calls.begin(unescape(found["name"].strip()) if reading.escaped else found["name"].strip())
    if not reading.header_end_stays:
        yield from text.next_of(reading.header_end)
    return bool(found.groupdict().get("empty"))


def _python_body(text: AnswerText, reading: Reading, calls: CallSink) -> Wait[None]:
    """Takes `[name(key=value, ...), ...]`."""
    yield from text.space()
    if (yield from text.exactly(1)) != "[":
        raise Malformed
    mark = ","
    while mark == ",":
        yield from text.space()
        calls.begin((yield from text.match(_NAME, _MAX_NAME)))
        if (yield from text.exactly(1)) != "(":
            raise Malformed
        begin, seen = "{", set[str]()
        while True:
            yield from text.space()
            if (yield from text.peek()) == ")":
                break
            key = yield from text.match(_NAME, _MAX_NAME)
            yield from text.space()
            if (yield from text.exactly(1)) != "=" or not key or key in seen:
                raise Malformed
            seen.add(key)
            calls.add(f"{begin}{json.dumps(key)}: ")
            begin = ", "
            yield from text.space()
            yield from value(text, PYTHON, calls.add)
            yield from text.space()
            if (yield from text.peek()) == ")":
                break
            if (yield from text.exactly(1)) != ",":
                raise Malformed
        yield from text.exactly(1)
        calls.add("}" if seen else "{}")
        yield from text.space()
        mark = yield from text.exactly(1)
    if mark != "]":
        raise Malformed


def _tags_body(text: AnswerText, reading: Reading, calls: CallSink) -> Wait[None]:
    """Takes a name and parameters between tags."""
    if (yield from _header(text, reading, calls)):
        calls.add("{}")
        return
    yield from text.space()
    seen = set[str]()
    stop = yield from text.next_of(reading.in_tags)
    while stop != reading.call_close:
        if not stop:
            yield from text.exactly(1)  # raises at the end
            raise Malformed
        found = yield from _key(text, reading)
        if found is None:
            raise Malformed
        while found is not None:
            key, is_text = found
            pieces: list[str] = []
            stop, found = yield from _tagged_value(text, reading, pieces.append, calls.schema.keys() - {*seen, key})
            raw = plain("".join(pieces))
            if reading.newlines:
                raw = raw.removeprefix("\n").removesuffix("\n")
            if key not in seen:
                begin = ", " if seen else "{"
                name = json.dumps(key, ensure_ascii=False)
                calls.add(f"{begin}{name}: {typed(raw, calls.schema.get(key), is_text)}")
            seen.add(key)
        if not stop:
            yield from text.space()
            stop = yield from text.next_of(reading.in_tags)
    calls.add("}" if seen else "{}")


def _key(text: AnswerText, reading: Reading, keys: Set[str] | None = None) -> Wait[tuple[str, bool | None] | None]:
    """Takes the rest of a parameter's opening and returns its key and whether its value is a text, as far as it says.
    Takes nothing and returns None if it is none, or none of `keys`."""
    header = yield from text.header(reading.key_guard, take=False)
    found = reading.key.fullmatch(header.strip())
    key = found["key"].strip() if found else ""
    if reading.escaped:
        key = unescape(key)
    if not found or not key or (keys is not None and key not in keys):
        return None
    yield from text.header(reading.key_end)
    yield from text.next_of(reading.key_end)
    said = found.groupdict().get("text")
    return key, None if said is None else said in ("true", "string")


def _tagged_value(
    text: AnswerText, reading: Reading, emit: Emit, keys: Set[str]
) -> Wait[tuple[str, tuple[str, bool | None] | None]]:
    """Takes a value and its closing, or what shows that this is missing: the opening of a parameter of `keys`, which
    are not given yet, or the end of the call. Other such marks belong to the value."""
    while True:
        stop = yield from text.until(reading.in_value, emit)
        if not stop:
            raise Unfinished
        if stop == reading.key_open:
            with suppress(Malformed):
                found = yield from _key(text, reading, keys)
                if found is not None:
                    return "", found
        else:
            space = yield from text.space()
            after = reading.in_tags if stop == reading.value_close else reading.in_section
            if (yield from text.next_of(after, take=False)) or not (yield from text.peek()):
                return "" if stop == reading.value_close else stop, None
            stop += space
        emit(stop)


BODIES = {"json": _json_body, "object": _object_body, "tags": _tags_body, "python": _python_body}
