"""Parsers of the contents of calls: JSON, a name and an object, tags, or Python syntax."""

import json
import re
from collections.abc import Mapping, Set
from contextlib import suppress
from functools import cached_property
from html import unescape
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from moeserve.text.answer_format import Part
from moeserve.text.answer_syntax import PreparedSyntax
from moeserve.text.answer_text import AnswerText, Emit, Malformed, Unfinished, Wait, plain
from moeserve.text.answer_values import JSON, PYTHON, as_json, is_readable, read_value, typed
from moeserve.text.schema_alternatives import members_of

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_MAX_NAME_LENGTH = 256


class ToolSchema:
    """The schema of a tool's parameters, for readers of values without types."""

    def __init__(self, root: Any) -> None:
        self._root = root

    @property
    def keys(self) -> Set[str]:
        """The keys that the schema names."""
        return self._members[0].keys()

    def typed(self, key: str, raw: str, is_text: bool | None) -> str:
        """Return the JSON of an argument that was written as text; see `answer_values.typed`."""
        members, others = self._members
        return typed(raw, members.get(key, others), root=self._root, is_text=is_text)

    @cached_property
    def _members(self) -> tuple[dict[str, Any], Any]:
        return members_of(self._root)


class CallSink:
    """Collects the calls in a body. only_offered: reject calls of other tools."""

    def __init__(self, schemas: Mapping[str, ToolSchema], *, only_offered: bool) -> None:
        self._schemas = schemas
        self._only_offered = only_offered
        self.parts: list[Part] = []  # of each call its name, then its arguments
        self.num_calls = 0
        self.schema = ToolSchema(True)  # of the latest call

    def begin(self, name: str) -> None:
        """Begin a call. Raise Malformed if the name is not allowed."""
        if (
            not name
            or len(name) > _MAX_NAME_LENGTH
            or (self._only_offered and self._schemas and name not in self._schemas)
        ):
            raise Malformed
        self.schema = self._schemas.get(name) or ToolSchema(True)
        self.parts.append(Part("call", name))
        self.num_calls += 1

    def add(self, arguments: str) -> None:
        """Add the arguments of the call. Raise Malformed if they are not readable JSON."""
        if not is_readable(arguments):
            raise Malformed
        self.parts.append(Part("arguments", arguments))


def _read_end(text: AnswerText, syntax: PreparedSyntax) -> Wait[None]:
    """Consume the closing mark, which may be missing or incomplete at the end of the answer."""
    if syntax.call_end:
        yield from text.read_space()
        if not (yield from text.read_stop(syntax.call_end)) and (yield from text.peek()):
            if not text.ends_within(syntax.call_end):
                raise Malformed
            text.consume_rest()


class _Call(Struct):
    """A call as JSON. Models write the name and the arguments under either key."""

    name: Any = ""
    function: Any = ""
    arguments: Raw = Raw()
    parameters: Raw = Raw()


def _json_body(text: AnswerText, syntax: PreparedSyntax, sink: CallSink) -> Wait[None]:
    """Read an object with a name and arguments, or a list of such objects."""
    yield from text.read_space()
    # Other values are not calls, and a string could be the whole rest of the answer.
    if (char := (yield from text.peek())) not in ("{", "["):
        raise Malformed if char else Unfinished
    whole = yield from read_value(text, JSON)
    try:
        decoded = msgspec.json.decode(whole, type=list[_Call] | _Call)
        for call in decoded if isinstance(decoded, list) else [decoded]:
            names = [name for name in (call.name, call.function) if isinstance(name, str) and name]
            sink.begin(names[0] if names else "")
            sink.add(_arguments(bytes(call.arguments or call.parameters or b"{}").decode()))
    except (ValueError, RecursionError):
        raise Malformed from None
    if not sink.num_calls:
        raise Malformed
    yield from _read_end(text, syntax)


def _arguments(raw: str) -> str:
    """Return the JSON object of a call's arguments. Raise ValueError.

    raw: JSON as the model wrote it: an object, a string that contains an object, or null.
    """
    if raw.startswith("{"):
        return raw
    inner = json.loads(raw)
    if inner is None or inner == "":
        return "{}"
    arguments = as_json(inner) if isinstance(inner, str) else ""
    if not arguments.startswith("{"):
        raise ValueError("no object")
    return arguments


def _object_body(text: AnswerText, syntax: PreparedSyntax, sink: CallSink) -> Wait[None]:
    """Read a name and an object."""
    yield from _read_call_header(text, syntax, sink)
    yield from text.read_space()
    if (yield from text.peek()) != "{":
        yield from text.read_exactly(1)
        raise Malformed
    sink.add((yield from read_value(text, syntax.dialect)))
    yield from _read_end(text, syntax)


def _read_call_header(text: AnswerText, syntax: PreparedSyntax, sink: CallSink) -> Wait[bool]:
    """Read a header, which has the name. Return whether it marks a call without arguments."""
    header = yield from text.read_header(syntax.header_end)
    match = syntax.header_pattern.fullmatch(header.strip())
    if not match:
        raise Malformed
    name = match["name"].strip()
    sink.begin(unescape(name) if syntax.parameter.escaped else name)
    if not syntax.header_end_is_body:
        yield from text.read_stop(syntax.header_end)
    return bool(match.groupdict().get("empty"))


def _python_body(text: AnswerText, syntax: PreparedSyntax, sink: CallSink) -> Wait[None]:
    """Read `[name(key=value, ...), ...]`."""
    yield from text.read_space()
    if (yield from text.read_exactly(1)) != "[":
        raise Malformed
    mark = ","
    while mark == ",":
        yield from text.read_space()
        name = yield from text.read_match(_NAME, _MAX_NAME_LENGTH)
        if not (yield from text.peek()):
            raise Unfinished
        sink.begin(name)
        if (yield from text.read_exactly(1)) != "(":
            raise Malformed
        members: dict[str, str] = {}
        yield from text.read_space()
        while (yield from text.peek()) != ")":
            key = yield from text.read_match(_NAME, _MAX_NAME_LENGTH)
            yield from text.read_space()
            if (yield from text.read_exactly(1)) != "=" or not key:
                raise Malformed
            yield from text.read_space()
            argument = yield from read_value(text, PYTHON)
            members.setdefault(key, argument)
            yield from text.read_space()
            if (yield from text.peek()) != ")" and (yield from text.read_exactly(1)) != ",":
                raise Malformed
            yield from text.read_space()
        yield from text.read_exactly(1)
        sink.add(_object(members))
        yield from text.read_space()
        mark = yield from text.read_exactly(1)
    if mark != "]":
        raise Malformed


def _tags_body(text: AnswerText, syntax: PreparedSyntax, sink: CallSink) -> Wait[None]:
    """Read a name and parameters between tags."""
    if (yield from _read_call_header(text, syntax, sink)):
        sink.add("{}")
        return
    yield from text.read_space()
    members: dict[str, str] = {}
    stop = yield from text.read_stop(syntax.in_tags)
    while stop != syntax.calls.close:
        if not stop:
            if text.ends_within(syntax.in_tags):
                raise Unfinished
            yield from text.read_exactly(1)  # raises Unfinished at the end
            raise Malformed
        opening = yield from _read_opening(text, syntax)
        if opening is None:
            raise Malformed
        while opening is not None:
            key, is_text = opening
            pieces: list[str] = []
            stop, opening = yield from _read_tagged_value(
                text, syntax, pieces.append, sink.schema.keys - {*members, key}
            )
            raw = plain("".join(pieces))
            if syntax.parameter.newlines:
                raw = raw.removeprefix("\n").removesuffix("\n")
            members.setdefault(key, sink.schema.typed(key, raw, is_text))
        if not stop:
            yield from text.read_space()
            stop = yield from text.read_stop(syntax.in_tags)
    sink.add(_object(members))


def _object(members: Mapping[str, str]) -> str:
    """Return the JSON of an object. members: key -> JSON of its value."""
    inside = ", ".join(
        f"{json.dumps(key, ensure_ascii=False)}: {member}" for key, member in members.items()
    )
    return f"{{{inside}}}"


class _Opening(NamedTuple):
    """The opening of a parameter."""

    key: str
    is_text: bool | None  # whether the value is a string; None: not marked


def _read_opening(
    text: AnswerText, syntax: PreparedSyntax, keys: Set[str] | None = None
) -> Wait[_Opening | None]:
    """Read the rest of a parameter's opening.

    If it is not an opening, or the key is not in `keys`, return None and consume nothing.
    """
    header = yield from text.read_header(syntax.key_guard, consume=False)
    match = syntax.key_pattern.fullmatch(header.strip())
    key = match["key"].strip() if match else ""
    if syntax.parameter.escaped:
        key = unescape(key)
    if not match or not key or (keys is not None and key not in keys):
        return None
    yield from text.read_header(syntax.key_end)
    yield from text.read_stop(syntax.key_end)
    mark = match.groupdict().get("text")
    return _Opening(key, None if mark is None else mark in ("true", "string"))


def _read_tagged_value(
    text: AnswerText, syntax: PreparedSyntax, emit: Emit, keys: Set[str]
) -> Wait[tuple[str, _Opening | None]]:
    """Read a value and its closing mark, and return the mark and the next parameter's opening.

    Without a closing mark, the value ends at the opening of a parameter in `keys`, or at the end of
    the call. Other marks belong to the value.

    keys: the parameters that have no value yet.
    """
    while True:
        stop = yield from text.read_until(syntax.in_value, emit)
        if not stop:
            raise Unfinished
        if stop == syntax.parameter.open:
            with suppress(Malformed):
                opening = yield from _read_opening(text, syntax, keys)
                if opening is not None:
                    return "", opening
        else:
            space = yield from text.read_space()
            closes_parameter = stop == syntax.parameter.close
            # A closing mark belongs to the value, unless another mark or the answer's end follows.
            next_marks = syntax.in_tags if closes_parameter else syntax.in_section
            is_followed = bool((yield from text.read_stop(next_marks, consume=False)))
            if is_followed or not (yield from text.peek()):
                return "" if closes_parameter else stop, None
            stop += space
        emit(stop)


BODIES = {"json": _json_body, "object": _object_body, "tags": _tags_body, "python": _python_body}
