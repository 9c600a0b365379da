"""The parser of all answer formats from YAML files (`formats/`).

One generator reads an answer from beginning to end; it yields when it needs more text.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from moeserve.text.answer_bodies import BODIES, CallSink, ToolSchema
from moeserve.text.answer_format import Part, Tool
from moeserve.text.answer_syntax import PreparedSyntax
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
_DONE = object()  # the result of `next` after the end of a generator


class SyntaxParser:
    """Splits one answer into reasoning, content and tool calls.

    White space between parts is dropped. A call is returned when it is complete. Text that begins
    like a call but is not one becomes content. A call that is cut off by the end of the answer is
    dropped, because neither running it nor showing its markup would be right.
    """

    def __init__(
        self,
        syntax: PreparedSyntax,
        tools: Sequence[Tool],
        *,
        reasons: bool,
        required: bool,
        calls: bool = True,
    ) -> None:
        """Begin an answer.

        Args:
            syntax: The format, prepared for the tokenizer.
            tools: The tools in the request.
            reasons: The answer begins within the reasoning.
            required: The answer must call a tool, so an incomplete mark at its end is not content.
            calls: The request offers tools. Otherwise calls are content.
        """
        self._syntax = syntax
        functions = [
            tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)
        ]
        self._schemas = {
            str(function.get("name")): ToolSchema(function.get("parameters") or {})
            for function in functions
        }
        self._required = required
        self._reads_calls = calls
        self._text = AnswerText(drops_partial_stop=required)
        self._parts: list[Part] = []
        self._content = _Flow("content", self._parts)
        self._num_calls = 0
        self._shown_controls: Collection[str] = ()  # control tokens that stay in content
        self._generator = self._answer(reasons)
        self._has_ended = False

    def push(self, text: str, *, final: bool = False) -> list[Part]:
        if self._text.feed(text, final=final) and not self._has_ended:
            self._has_ended = next(self._generator, _DONE) is _DONE
        parts = joined(self._parts) if len(self._parts) > 1 else self._parts[:]
        self._parts.clear()
        return parts

    def _answer(self, reasons: bool) -> Wait[None]:
        text = self._text
        syntax = self._syntax
        pending_mark = ""  # a mark that was read, and is not handled yet
        if reasons or (yield from self._starts_reasoning()):
            pending_mark = yield from self._reasoning()
        if not pending_mark and "" in syntax.calls.open and self._reads_calls:
            yield from self._bare_calls()
        while True:
            mark = pending_mark
            pending_mark = ""
            if not mark:
                mark = yield from text.read_until(syntax.in_content, self._add_content)
            if not mark:
                break
            if mark == syntax.think.open and (self._content.is_empty or syntax.think_has_special):
                pending_mark = yield from self._reasoning()
            elif mark in (syntax.section.open, *syntax.calls.open):
                yield from self._marked_calls(mark)
            elif mark not in syntax.dropped:
                self._content.add(mark)
        self._content.end(keep=not self._num_calls)

    def _add_content(self, piece: str) -> None:
        self._content.add(without_controls(piece, self._shown_controls))

    def _starts_reasoning(self) -> Wait[bool]:
        if not self._syntax.think.open:
            return False
        self._content.add((yield from self._text.read_space()))
        return bool((yield from self._text.read_stop(self._syntax.think_start)))

    def _reasoning(self) -> Wait[str]:
        """Read the reasoning. Return the opening mark that ended it, "" if it was closed."""
        flow = _Flow("reasoning", self._parts)
        flow.trim()
        flow.add((yield from self._text.read_space()))
        # The prompt may have opened the reasoning, and the model may repeat the mark.
        yield from self._text.read_stop(self._syntax.think_start)
        kept = self._syntax.special  # control tokens in the format's own marks
        mark = yield from self._text.read_until(
            self._syntax.in_reasoning, lambda piece: flow.add(without_controls(piece, kept))
        )
        flow.end(keep=not mark)
        self._content.trim()
        return "" if mark == self._syntax.think.close else mark

    def _marked_calls(self, mark: str) -> Wait[None]:
        """Read the calls that a mark begins."""
        if not self._reads_calls:
            self._content.add(mark)
            self._shown_controls = self._syntax.special  # more marks of the call may follow
        elif mark == self._syntax.section.open:
            yield from self._section()
        else:
            yield from self._call_outside_section(mark)

    def _call_outside_section(self, opening: str) -> Wait[None]:
        yield from self._call(opening)
        if self._syntax.section.open:
            # The model forgot the section's opening mark, so its closing mark may follow.
            self._content.add((yield from self._text.read_space()))
            yield from self._text.read_stop(self._syntax.section_end)
        if "" in self._syntax.calls.open:
            yield from self._bare_calls()

    def _section(self) -> Wait[None]:
        """Read the calls in a section. A section with text, but without calls, is content."""
        text = self._text
        syntax = self._syntax
        num_calls_before = self._num_calls
        opening = syntax.section.open  # "" after the first call
        noise_pieces = list[str]()  # text between the calls
        while True:
            if syntax.section.noise:
                mark = yield from text.read_until(syntax.in_section, noise_pieces.append)
            else:
                noise_pieces.append((yield from text.read_space()))
                mark = yield from text.read_stop(syntax.in_section)
            if not mark:
                at_end = not (yield from text.peek())
                if at_end or text.ends_within(syntax.in_section):
                    text.consume_rest()  # a call that was cut off
                    return
            if not mark or mark == syntax.section.close:
                noise = plain("".join(noise_pieces))
                if self._num_calls == num_calls_before and (noise.strip() or not mark):
                    self._content.add(f"{opening}{noise}{mark}")
                return
            yield from self._call(mark)
            opening = ""
            noise_pieces = []

    def _bare_calls(self) -> Wait[None]:
        """Read calls that begin without a mark."""
        text = self._text
        while True:
            space = yield from text.read_space()
            self._content.add(space)
            before = ""  # text that belongs to the content, if no call follows
            if self._num_calls and (separator := (yield from text.read_stop(_SEPARATOR))):
                before = separator + (yield from text.read_space())
            if (yield from text.peek()) not in self._syntax.bare_chars:
                self._content.add(before)
                return
            if not (yield from self._call("", before)):
                return

    def _call(self, opening: str, before: str = "") -> Wait[bool]:
        """Read the rest of a call, and return whether it was one.

        Args:
            opening: The call's opening mark, "" for a call without one.
            before: The text before the mark. If this is not a call, the text becomes content, too.
        """
        text = self._text
        syntax = self._syntax
        raw = [before + opening]
        text.consumed = raw  # from here on, consumed text is appended to `raw`
        # Text without an opening mark is a call only if it names a tool of the request.
        sink = CallSink(self._schemas, only_offered=not opening)
        try:
            yield from BODIES[syntax.calls.content](text, syntax, sink)
        except Unfinished:
            text.consume_rest()
            # Text without an opening mark may be anything, so it is shown.
            shown = not opening and not self._required
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
            self._shown_controls = syntax.special  # more marks of the call may follow
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
        # The fast path: most pieces end in a visible character.
        if piece[-1:] not in _SPACES and not (self._space or self.is_empty):
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
        """End the text. keep: emit the trailing white space, too."""
        if keep and self._space:
            self._parts.append(Part(self._kind, "".join(self._space)))
        self._space.clear()
