"""Loads answer formats from YAML files (`formats/`, plugins), and prepares them for a parser.

The keys of a file are the fields of `Syntax`; docs/tool-calls.md describes them with an example.
"""

import re
from collections.abc import Collection
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from msgspec import Struct

from moeserve.plugins import Registry
from moeserve.text.answer_text import Stops
from moeserve.text.answer_values import JSON, Dialect

FORMATS = Path(__file__).parent / "formats"


class Span(Struct, forbid_unknown_fields=True):
    """Text between two marks."""

    open: str
    close: str
    noise: bool = False  # drop text between the calls inside


class Parameter(Struct, forbid_unknown_fields=True):
    """A parameter between tags: `open`, the text of `header`, `end`, the value, `close`."""

    open: str
    # A regex with the group key, and optionally the group text, which tells whether the value is a
    # text
    header: str
    end: str
    close: str
    write: str  # the text of a parameter, with {key}, {value} and {type}
    write_text: str = ""  # the same for string values, if it differs
    newlines: bool = False  # a newline at each end of the value belongs to the tags
    escaped: bool = False  # keys and names are escaped as in XML


class Calls(Struct, forbid_unknown_fields=True):
    """The syntax of tool calls.

    | content | a call is |
    |---|---|
    | json | an object with name and arguments, or a list of such objects |
    | object | `header` (group name), the mark `arguments`, an object |
    | tags | `header` (a group `empty` means no parameters), the mark `arguments`, parameters |
    | python | a list of calls in Python's syntax |
    """

    open: list[str]  # marks before a call; "" for calls without a mark
    content: Literal["json", "object", "tags", "python"]
    write: str  # the text of a call, with {name}, {index} and {arguments}
    close: str = ""  # mark after a call; may be missing at the end of the answer
    header: str = ""  # a regex
    arguments: str = ""
    bare: str = ""  # possible first characters of calls without a mark
    before: str = ""  # text before the calls in an answer
    between: str = ""  # text between two calls
    after: str = ""  # text after the calls
    id: str = "call_{random:.24}"  # id of a call, in the form that the template expects
    quote: str = ""  # quotation mark of strings, in objects with bare keys
    parameter: Parameter | None = None


class Syntax(Struct, forbid_unknown_fields=True):
    """An answer format, the content of one file."""

    about: str
    # Regexes that must all match the model's chat template. If several formats match, the one with
    # the most regexes is used.
    template: list[str]
    calls: Calls
    reasoning: Span | None = None
    section: Span | None = None  # around the calls
    call_ends_reasoning: bool = False  # a call ends reasoning that was not closed
    dropped: list[str] = []  # marks without meaning
    stop: list[str] = []  # tokens that end an answer


def _read(file: Traversable) -> Syntax:
    return msgspec.convert(yaml.safe_load(file.read_text(encoding="utf-8")), Syntax)


def _misfit(name: str, file: Any) -> str:
    try:
        _read(file)
    except (AttributeError, OSError, ValueError, yaml.YAMLError, msgspec.ValidationError) as error:
        return f"it is not the path of a format's YAML file: {type(error).__name__}: {error}"
    return ""


_FILES = {path.stem: path for path in sorted(FORMATS.glob("*.yaml"))}
# Plugins of "moeserve.answer_formats": paths of YAML files.
ANSWER_FORMATS: Registry[Traversable] = Registry(
    "moeserve.answer_formats", {}, reserved=(*_FILES, "harmony"), misfit=_misfit
)


@cache
def load(name: str) -> Syntax:
    """Return a format's data."""
    return _read(_FILES[name] if name in _FILES else ANSWER_FORMATS[name])


def names() -> tuple[str, ...]:
    """Return the names of all formats from files."""
    return tuple(sorted((*_FILES, *ANSWER_FORMATS)))


_NO_SPAN = Span(open="", close="")
_NO_PARAMETER = Parameter(open="", header="", end="", close="", write="")


class PreparedSyntax:
    """A `Syntax` prepared for parsers: the marks (`Stops`) to search for in each context.

    Parts that the syntax lacks are empty. special: names of the tokenizer's control tokens.
    """

    def __init__(self, syntax: Syntax, special: Collection[str]) -> None:
        self.calls = syntax.calls
        self.dropped = syntax.dropped
        self.bare_chars = frozenset(syntax.calls.bare)  # first characters of calls without a mark
        self.think = syntax.reasoning or _NO_SPAN
        self.section = syntax.section or _NO_SPAN
        self.parameter = syntax.calls.parameter or _NO_PARAMETER
        calls = self.calls
        think = self.think
        section = self.section
        parameter = self.parameter
        marks = [*calls.open, calls.close, calls.arguments, calls.quote, *syntax.dropped]
        marks += [mark for part in (think, section, parameter) for mark in (part.open, part.close)]
        marks.append(parameter.end)
        # The control tokens that occur in marks
        self.special = [name for name in special if any(name in mark for mark in marks)]
        # Then the mark cannot be ordinary text, and begins reasoning anywhere in an answer.
        self.think_has_special = any(name in think.open for name in self.special)
        self.think_start = self._stops(think.open)
        self.section_end = self._stops(section.close)
        answer_marks = [section.open, *calls.open, *syntax.dropped]
        self.in_content = self._stops(think.open, *answer_marks)
        self.in_reasoning = self._stops(
            think.close, *(answer_marks if syntax.call_ends_reasoning else [])
        )
        self.in_section = self._stops(*calls.open, section.close)
        self.call_end = self._stops(calls.close) if calls.close else None
        self.dialect = (
            Dialect(delimiter=self._stops(calls.quote), bare=True) if calls.quote else JSON
        )
        self.header_pattern = re.compile(calls.header, re.DOTALL)
        self.key_pattern = re.compile(parameter.header, re.DOTALL)
        # The mark after the header belongs to the body, so it is not consumed with the header.
        self.header_end_is_body = calls.arguments in ("", "{")
        self.key_end = self._stops(parameter.end)
        # The key must come before any of these.
        self.key_guard = self._stops(parameter.end, parameter.close, parameter.open, calls.close)
        self.in_tags = self._stops(parameter.open, calls.close)
        self.in_value = self._stops(parameter.open, parameter.close, calls.close)
        self.header_end = (
            self._stops(calls.arguments) if calls.arguments or not calls.parameter else self.in_tags
        )

    def _stops(self, *literals: str) -> Stops:
        return Stops(filter(None, literals), self.special)
