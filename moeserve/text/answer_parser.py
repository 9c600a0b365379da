"""The parser of all answer formats that are data (`formats/`).

One generator reads an answer from beginning to end; it yields when it needs more text.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from moeserve.text.answer_bodies import BODIES, CallSink, ToolSchema
from moeserve.text.answer_format import Part, Tool
from moeserve.text.answer_syntax import Reading
from moeserve.text.answer_text import (
    AnswerText,
    Malformed,
    Stops,
    Unfinished,
    Wait,
    plain,
    without_controls,
)

_SPACES = " \t\r\n"
_SEPARATOR = Stops([";", ","])


class DataParser:
    """Splits one answer into reasoning, content and tool calls.

    White space between parts is dropped. A call is returned when it is complete. Text that begins
    like a call but is not one becomes content. A call that is cut off by the end of the answer is
    dropped, because neither running it nor showing its markup would be right.
    """

    def __init__(
        self, reading: Reading, tools: Sequence[Tool], *, reasons: bool, required: bool
    ) -> None:
        """Begin an answer.

        Args:
            reading: The format, prepared for the tokenizer.
            tools: The tools in the request.
            reasons: The answer begins within the reasoning.
            required: The answer must call a tool, so an incomplete mark at its end is not content.
        """
        self._reading = reading
        functions = [
            tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)
        ]
        self._schemas = {
            str(function.get("name")): ToolSchema(function.get("parameters") or {})
            for function in functions
        }
        self._required = required
        self._text = AnswerText(drops_partial_stop=required)
        self._parts: list[Part] = []
        self._content = _Flow("content", self._parts)
        self._num_calls = 0
        self._shown_controls: Collection[str] = ()  # control tokens that stay in content
        self._reader = self._answer(reasons)
        self._has_ended = False

    def push(self, text: str, *, final: bool = False) -> list[Part]:
        if self._text.feed(text, final=final) and not self._has_ended:
            self._has_ended = next(self._reader, True) is True
        parts = joined(self._parts) if len(self._parts) > 1 else self._parts[:]
        self._parts.clear()
        return parts

    def _answer(self, reasons: bool) -> Wait[None]:
        text = self._text
        reading = self._reading
        stop = ""
        if reasons or (yield from self._starts_reasoning()):
            stop = yield from self._reasoning()
        if not stop and "" in reading.calls.open:
            yield from self._bare_calls()
        while stop or (stop := (yield from text.read_until(reading.in_content, self._add_content))):
            next_stop = ""  # already read; "" if it follows in the text
            if stop == reading.think.open and (self._content.is_empty or reading.think_has_special):
                next_stop = yield from self._reasoning()
            elif stop == reading.section.open:
                yield from self._section()
            elif stop in reading.calls.open:
                yield from self._call(stop)
                if reading.section.open:  # the section's opening was missing
                    self._content.add((yield from text.read_space()))
                    yield from text.read_stop(reading.section_end)
                if "" in reading.calls.open:
                    yield from self._bare_calls()
            elif stop not in reading.dropped:
                self._content.add(stop)
            stop = next_stop
        self._content.end(keep=not self._num_calls)

    def _add_content(self, piece: str) -> None:
        self._content.add(without_controls(piece, self._shown_controls))

    def _starts_reasoning(self) -> Wait[bool]:
        if not self._reading.think.open:
            return False
        self._content.add((yield from self._text.read_space()))
        return bool((yield from self._text.read_stop(self._reading.think_start)))

    def _reasoning(self) -> Wait[str]:
        """Read the reasoning. Return the opening of a call that ended it, or ""."""
        flow = _Flow("reasoning", self._parts)
        flow.trim()
        flow.add((yield from self._text.read_space()))
        yield from self._text.read_stop(self._reading.think_start)  # again, by the model
        kept = self._reading.special  # control tokens in the format's own marks
        stop = yield from self._text.read_until(
            self._reading.in_reasoning, lambda piece: flow.add(without_controls(piece, kept))
        )
        flow.end(keep=not stop)
        self._content.trim()
        return "" if stop == self._reading.think.close else stop

    def _section(self) -> Wait[None]:
        """Read the calls in a section. A section without calls is content."""
        text = self._text
        reading = self._reading
        num_calls_before = self._num_calls
        opening = reading.section.open  # "" after the first call
        held = list[str]()  # text between the calls
        while True:
            if reading.section.noise:
                stop = yield from text.read_until(reading.in_section, held.append)
            else:
                held.append((yield from text.read_space()))
                stop = yield from text.read_stop(reading.in_section)
            if not stop and (not (yield from text.peek()) or text.ends_within(reading.in_section)):
                text.consume_rest()  # a call that was cut off
                return
            if not stop or stop == reading.section.close:
                noise = plain("".join(held))
                if self._num_calls == num_calls_before and (noise.strip() or not stop):
                    self._content.add(f"{opening}{noise}{stop}")
                return
            yield from self._call(stop)
            opening = ""
            held = []

    def _bare_calls(self) -> Wait[None]:
        """Read calls that begin without a mark."""
        text = self._text
        while True:
            space = yield from text.read_space()
            self._content.add(space)
            before = ""
            if self._num_calls and (separator := (yield from text.read_stop(_SEPARATOR))):
                before = separator + (yield from text.read_space())
            if (yield from text.peek()) not in tuple(self._reading.calls.bare):
                self._content.add(before)
                return
            if not (yield from self._call("", before)):
                return

    def _call(self, opener: str, before: str = "") -> Wait[bool]:
        """Read the rest of a call, and return whether it was one.

        before: text before the opening, which is content, too, if this is not a call.
        """
        text = self._text
        reading = self._reading
        raw = [before + opener]
        text.consumed = raw
        sink = CallSink(self._schemas, only_offered=not opener)
        try:
            yield from BODIES[reading.calls.content](text, reading, sink)
        except Unfinished:
            text.consume_rest()
            # Text without an opening mark may be anything, so it is shown.
            shown = not opener and not self._required
        except Malformed:
            shown = True
        else:
            self._parts += sink.parts
            self._num_calls += sink.num_calls
            return True
        finally:
            text.consumed = None
        if shown:
            self._content.add(plain("".join(raw)))
            self._shown_controls = reading.special  # the rest of its marks may follow
        return False


def joined(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with adjacent ones of the same kind joined, except for calls."""
    kinds = groupby(parts, lambda part: (part.kind, id(part) if part.kind == "call" else 0))
    return [Part(kind, "".join(part.text for part in same)) for (kind, _), same in kinds]


class _Flow:
    """Collects text of one kind, and holds back trailing white space until more text comes."""

    def __init__(self, kind: Any, parts: list[Part]) -> None:
        self._kind = kind
        self._parts = parts
        self._space: list[str] = []
        self._trim = False
        self.is_empty = True

    def trim(self) -> None:
        """Drop leading white space."""
        self._trim = True
        if self.is_empty:
            self._space.clear()

    def add(self, piece: str) -> None:
        if piece[-1:] not in _SPACES and not (self._space or self.is_empty):  # as most are
            self._parts.append(Part(self._kind, piece))
            return
        text = piece.rstrip(_SPACES)
        space = piece[len(text) :]
        if text:
            if self.is_empty and self._trim:
                text = text.lstrip(_SPACES)
            if self._space:
                text = "".join([*self._space, text])
                self._space.clear()
            self._parts.append(Part(self._kind, text))
            self.is_empty = False
        if space and not (self.is_empty and self._trim):
            self._space.append(space)

    def end(self, *, keep: bool) -> None:
        """End the text. keep: keep trailing white space."""
        if keep and self._space:
            self._parts.append(Part(self._kind, "".join(self._space)))
        self._space.clear()
