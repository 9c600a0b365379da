"""The parser of all formats whose syntax is data: one generator reads an answer from its beginning to its end."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from html import unescape
from itertools import groupby
from typing import Any

from moeserve.text.answer_format import Part, Tool
from moeserve.text.answer_syntax import Reading
from moeserve.text.answer_text import AnswerText, Emit, Malformed, Stops, Unfinished, Wait, plain, without_controls
from moeserve.text.answer_values import JSON, PYTHON, typed, value

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_SPACES = " \t\r\n"
_MAX_NAME = 256


class DataParser:
    """Splits one answer into its parts.

    White space between the parts is dropped; inside content it stays. A call comes when it is complete (eager: as it
    is written). Text that begins like a call and is none is content; a call that the end of the text cuts off is
    dropped, since running it would be wrong and showing its markup would be, too.
    """

    def __init__(self, reading: Reading, tools: Sequence[Tool], *, reasons: bool, eager: bool) -> None:
        self._reading, self._eager = reading, eager
        functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
        self._schemas = {str(function.get("name")): function.get("parameters") or {} for function in functions}
        self._text = AnswerText()
        self._parts: list[Part] = []
        self._content = _Flow("content", self._parts)
        self._num_calls = 0
        self._run = self._answer(reasons)
        self._over = False

    def push(self, text: str, *, final: bool = False) -> list[Part]:
        """Returns the parts that are certain after `text`. final: nothing follows."""
        self._text.feed(text, final=final)
        if not self._over:
            self._over = next(self._run, True) is True
        parts = joined(self._parts)
        self._parts.clear()
        return parts

    def _answer(self, reasons: bool) -> Wait[None]:
        text, reading = self._text, self._reading
        stop = ""
        if reasons or (yield from self._starts_reasoning()):
            stop = yield from self._reasoning()
        if not stop and "" in reading.openers:
            yield from self._bare_calls()
        while stop or (stop := (yield from text.until(reading.in_content, self._add_content))):
            again = ""
            if stop == reading.think_open and (self._content.is_empty or reading.think_is_special):
                again = yield from self._reasoning()
            elif stop == reading.section_open:
                yield from self._section()
            elif stop in reading.openers:
                yield from self._call(stop)
                if reading.section_open:  # whose opening is missing
                    self._content.add((yield from text.space()))
                    yield from text.next_of(reading.section_end)
                if "" in reading.openers:
                    yield from self._bare_calls()
            elif stop not in reading.dropped:
                self._content.add(stop)
            stop = again
        self._content.end(keep=not self._num_calls)

    def _add_content(self, piece: str) -> None:
        self._content.add(without_controls(piece))

    def _starts_reasoning(self) -> Wait[bool]:
        if not self._reading.think_open:
            return False
        self._content.add((yield from self._text.space()))
        return bool((yield from self._text.next_of(self._reading.think_start)))

    def _reasoning(self) -> Wait[str]:
        """Takes the reasoning and returns "", or the opening of a call that ended it."""
        flow = _Flow("reasoning", self._parts)
        flow.trim()
        flow.add((yield from self._text.space()))
        yield from self._text.next_of(self._reading.think_start)  # again, by the model
        own = self._reading.special
        stop = yield from self._text.until(
            self._reading.in_reasoning, lambda piece: flow.add(without_controls(piece, own))
        )
        flow.end(keep=not stop)
        self._content.trim()
        return "" if stop == self._reading.think_close else stop

    def _section(self) -> Wait[None]:
        """Takes the calls between a section's marks."""
        text, reading, before = self._text, self._reading, self._num_calls
        held = [reading.section_open]
        while True:
            if reading.section_noise:
                stop = yield from text.until(reading.in_section, held.append)
            else:
                held.append((yield from text.space()))
                stop = yield from text.next_of(reading.in_section)
            if not stop and not (yield from text.peek()):  # cut off
                return
            if not stop or stop == reading.section_close:
                if self._num_calls == before and "".join(held[1:]).strip():
                    self._content.add(plain("".join([*held, stop])))
                return
            yield from self._call(stop)
            held = []

    def _bare_calls(self) -> Wait[None]:
        """Takes calls without a mark at their beginning."""
        text = self._text
        while True:
            space = yield from text.space()
            self._content.add(space)
            separator = self._num_calls and (yield from text.next_of(_SEPARATOR))
            if separator:
                space = yield from text.space()
            if (yield from text.peek()) not in tuple(self._reading.bare) or not (yield from self._call("")):
                if separator:
                    self._content.add(separator + space)
                return

    def _call(self, opener: str) -> Wait[bool]:
        """Takes what follows the opening of a call, and returns whether it was one."""
        text = self._text
        text.taken = [opener]
        sink = _Calls(self._parts if self._eager else [], self._schemas, known="" == opener or opener in self._reading.bare)
        try:
            yield from _BODIES[self._reading.content](text, self._reading, sink)
            if not sink.count:
                raise Malformed
        except Unfinished:
            text.take_rest()
            if not sink.count and opener == "":
                self._content.add(plain("".join(text.taken)))
            return False
        except Malformed:
            if not (self._eager and sink.count):
                self._content.add(plain("".join(text.taken)))
                return False
        if not self._eager:
            self._parts += sink.parts
        self._num_calls += sink.count
        return True


def joined(parts: Sequence[Part]) -> list[Part]:
    """Returns the parts with neighbours of one kind as one, but each call for itself."""
    kinds = groupby(parts, lambda part: (part.kind, id(part) if part.kind == "call" else 0))
    return [Part(kind, "".join(part.text for part in same)) for (kind, _), same in kinds]


class _Flow:
    """Text of one kind, whose white space at the end is held back until more comes."""

    def __init__(self, kind: Any, parts: list[Part]) -> None:
        self._kind, self._parts = kind, parts
        self._space: list[str] = []
        self._trim = False
        self.is_empty = True

    def trim(self) -> None:
        """Drops white space before the first text."""
        self._trim = True
        if self.is_empty:
            self._space.clear()

    def add(self, piece: str) -> None:
        """Adds a piece."""
        text = piece.rstrip(_SPACES)
        if text:
            if self.is_empty and self._trim:
                text = text.lstrip(_SPACES)
            self._parts.append(Part(self._kind, "".join([*self._space, text])))
            self._space.clear()
            self.is_empty = False
            piece = piece[len(piece.rstrip(_SPACES)) :]
        if piece and not (self.is_empty and self._trim):
            self._space.append(piece)

    def end(self, *, keep: bool) -> None:
        """Ends the text. keep: with the white space at its end."""
        if keep and self._space:
            self._parts.append(Part(self._kind, "".join(self._space)))
        self._space.clear()


class _Calls:
    """What a body has read: names and arguments, in this order. known: only calls of tools that are offered."""

    def __init__(self, parts: list[Part], schemas: Mapping[str, Any], *, known: bool) -> None:
        self.parts, self._schemas, self._known = parts, schemas, known
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


def _discard(_: str) -> None:
    pass


def _close(text: AnswerText, reading: Reading) -> Wait[None]:
    if reading.close:
        yield from text.space()
        if not (yield from text.next_of(reading.close)) and (yield from text.peek()):
            raise Malformed


def _json_body(text: AnswerText, reading: Reading, calls: _Calls) -> Wait[None]:
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


def _json_call(text: AnswerText, reading: Reading, calls: _Calls) -> Wait[None]:
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
            calls.add("".join(arguments))
        elif key in ("arguments", "parameters") and not arguments:
            yield from _arguments(text, calls.add if name else arguments.append, arguments)
        else:
            yield from value(text, JSON, _discard)
        yield from text.space()
        mark = yield from text.exactly(1)
    if not name:
        raise Malformed
    if not arguments:
        calls.add("{}")


def _joined(text: AnswerText) -> Wait[str]:
    """Takes a quoted text and returns its JSON."""
    yield from text.space()
    if (yield from text.peek()) != '"':
        yield from text.exactly(1)  # raises at the end
        raise Malformed
    pieces: list[str] = []
    yield from value(text, JSON, pieces.append)
    return "".join(pieces)


def _arguments(text: AnswerText, emit: Emit, seen: list[str]) -> Wait[None]:
    """Takes arguments: an object, the text of one, or null. seen: becomes true."""
    char = yield from text.peek()
    if char == "{":
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
    seen.append("")


def _object_body(text: AnswerText, reading: Reading, calls: _Calls) -> Wait[None]:
    """Takes a name and an object."""
    yield from _header(text, reading, calls)
    yield from text.space()
    if (yield from text.peek()) != "{":
        yield from text.exactly(1)
        raise Malformed
    yield from value(text, reading.dialect, calls.add)
    yield from _close(text, reading)


def _header(text: AnswerText, reading: Reading, calls: _Calls) -> Wait[bool]:
    """Takes a name and what is around it, and returns whether that says that there are no arguments."""
    header = yield from text.header(reading.header_end)
    found = reading.header.fullmatch(header.strip())
    if not found:
        raise Malformed
    calls.begin(unescape(found["name"].strip()) if reading.escaped else found["name"].strip())
    if not reading.header_end_stays:
        yield from text.next_of(reading.header_end)
    return bool(found.groupdict().get("empty"))


def _python_body(text: AnswerText, reading: Reading, calls: _Calls) -> Wait[None]:
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


def _tags_body(text: AnswerText, reading: Reading, calls: _Calls) -> Wait[None]:
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
            after = reading.in_tags if stop == reading.value_close else reading.after_call
            if (yield from text.next_of(after, take=False)) or not (yield from text.peek()):
                return "" if stop == reading.value_close else stop, None
            stop += space
        emit(stop)


_SEPARATOR = Stops([";", ","])
_BODIES = {"json": _json_body, "object": _object_body, "tags": _tags_body, "python": _python_body}
