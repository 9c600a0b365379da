"""What is between the marks of a call, by kind of content."""

import json
import re
from collections.abc import Mapping, Set
from contextlib import suppress
from html import unescape
from typing import Any

import msgspec
from msgspec import Raw, Struct

from moeserve.text.answer_format import Part
from moeserve.text.answer_syntax import Reading
from moeserve.text.answer_text import AnswerText, Emit, Malformed, Unfinished, Wait, plain
from moeserve.text.answer_values import JSON, PYTHON, typed, value

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_MAX_NAME = 256


class CallSink:
    """What a body has read: names and arguments, in this order. known: only calls of tools that are
    offered.
    """

    def __init__(self, schemas: Mapping[str, Any], *, known: bool) -> None:
        self._schemas = schemas
        self._known = known
        self.parts: list[Part] = []
        self.count = 0
        self.schema: Mapping[str, Any] = {}

    def begin(self, name: str) -> None:
        """Begins a call. Raises Malformed if the name cannot be one."""
        if (
            not name
            or len(name) > _MAX_NAME
            or (self._known and self._schemas and name not in self._schemas)
        ):
            raise Malformed
        found = self._schemas.get(name)
        self.schema = found.get("properties") or {} if isinstance(found, Mapping) else {}
        self.parts.append(Part("call", name))
        self.count += 1

    def add(self, arguments: str) -> None:
        """Adds the arguments of the call."""
        self.parts.append(Part("arguments", arguments))


def _close(text: AnswerText, reading: Reading) -> Wait[None]:
    if reading.close:
        yield from text.space()
        if not (yield from text.next_of(reading.close)) and (yield from text.peek()):
            raise Malformed


class _Call(Struct):
    name: Any = ""
    function: Any = ""
    arguments: Raw = Raw()
    parameters: Raw = Raw()


def _json_body(text: AnswerText, reading: Reading, calls: CallSink) -> Wait[None]:
    """Takes an object with a name and arguments, or a list of such."""
    yield from text.space()
    if (char := (yield from text.peek())) not in ("{", "["):  # a text could take all that follows
        raise Malformed if char else Unfinished
    whole = yield from value(text, JSON)
    try:
        found = msgspec.json.decode(whole, type=list[_Call] | _Call)
        for call in found if isinstance(found, list) else [found]:
            calls.begin(
                next(
                    (name for name in (call.name, call.function) if name and isinstance(name, str)),
                    "",
                )
            )
            calls.add(_arguments(bytes(call.arguments or call.parameters or b"{}").decode()))
    except (ValueError, RecursionError):
        raise Malformed from None
    if not calls.count:
        raise Malformed
    yield from _close(text, reading)


def _arguments(given: str) -> str:
    """Returns arguments: an object, the text of one, or null. Raises ValueError for others."""
    inner = given if given.startswith("{") else json.loads(given)
    inner = "{}" if inner is None or inner == "" else inner
    if not isinstance(inner, str) or not isinstance(json.loads(inner), dict):
        raise ValueError("no object")
    return inner


def _object_body(text: AnswerText, reading: Reading, calls: CallSink) -> Wait[None]:
    """Takes a name and an object."""
    yield from _header(text, reading, calls)
    yield from text.space()
    if (yield from text.peek()) != "{":
        yield from text.exactly(1)
        raise Malformed
    calls.add((yield from value(text, reading.dialect)))
    yield from _close(text, reading)


def _header(text: AnswerText, reading: Reading, calls: CallSink) -> Wait[bool]:
    """Takes a name and what is around it, and returns whether that says that there are no
    arguments.
    """
    header = yield from text.header(reading.header_end)
    found = reading.header.fullmatch(header.strip())
    if not found:
        raise Malformed
    calls.begin(
        unescape(found["name"].strip()) if reading.parameter.escaped else found["name"].strip()
    )
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
        members: dict[str, str] = {}
        yield from text.space()
        while (yield from text.peek()) != ")":
            key = yield from text.match(_NAME, _MAX_NAME)
            yield from text.space()
            if (yield from text.exactly(1)) != "=" or not key or key in members:
                raise Malformed
            yield from text.space()
            members[key] = yield from value(text, PYTHON)
            yield from text.space()
            if (yield from text.peek()) != ")" and (yield from text.exactly(1)) != ",":
                raise Malformed
            yield from text.space()
        yield from text.exactly(1)
        calls.add(_object(members))
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
    members: dict[str, str] = {}
    stop = yield from text.next_of(reading.in_tags)
    while stop != reading.calls.close:
        if not stop:
            yield from text.exactly(1)  # raises at the end
            raise Malformed
        found = yield from _key(text, reading)
        if found is None:
            raise Malformed
        while found is not None:
            key, is_text = found
            pieces: list[str] = []
            stop, found = yield from _tagged_value(
                text, reading, pieces.append, calls.schema.keys() - {*members, key}
            )
            raw = plain("".join(pieces))
            if reading.parameter.newlines:
                raw = raw.removeprefix("\n").removesuffix("\n")
            members.setdefault(key, typed(raw, calls.schema.get(key), is_text))
        if not stop:
            yield from text.space()
            stop = yield from text.next_of(reading.in_tags)
    calls.add(_object(members))


def _object(members: Mapping[str, str]) -> str:
    """Returns the JSON of an object. members: the JSON of each value."""
    inside = ", ".join(
        f"{json.dumps(key, ensure_ascii=False)}: {member}" for key, member in members.items()
    )
    return f"{{{inside}}}"


def _key(
    text: AnswerText, reading: Reading, keys: Set[str] | None = None
) -> Wait[tuple[str, bool | None] | None]:
    """Takes the rest of a parameter's opening and returns its key and whether its value is a text,
    as far as it says. Takes nothing and returns None if it is none, or none of `keys`."""
    header = yield from text.header(reading.key_guard, take=False)
    found = reading.key.fullmatch(header.strip())
    key = found["key"].strip() if found else ""
    if reading.parameter.escaped:
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
    """Takes a value and its closing, or what shows that this is missing: the opening of a parameter
    of `keys`, which are not given yet, or the end of the call. Other such marks belong to the
    value."""
    while True:
        stop = yield from text.until(reading.in_value, emit)
        if not stop:
            raise Unfinished
        if stop == reading.parameter.open:
            with suppress(Malformed):
                found = yield from _key(text, reading, keys)
                if found is not None:
                    return "", found
        else:
            space = yield from text.space()
            after = reading.in_tags if stop == reading.parameter.close else reading.in_section
            if (yield from text.next_of(after, take=False)) or not (yield from text.peek()):
                return "" if stop == reading.parameter.close else stop, None
            stop += space
        emit(stop)


BODIES = {"json": _json_body, "object": _object_body, "tags": _tags_body, "python": _python_body}
