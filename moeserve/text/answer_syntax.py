"""The data of answer formats: files in `formats/`, and what a parser makes of one for one
tokenizer.

The keys are those of `Syntax`; docs/tool-calls.md describes them with an example.
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
    """Text between two marks. noise: calls may have other text around them, which is dropped."""

    open: str
    close: str
    noise: bool = False


class Parameter(Struct, forbid_unknown_fields=True):
    """A parameter between tags: `open`, what `header` matches (groups key and text), `end`, the
    value, `close`.

    newlines: one at each end of the value belongs to the tags. escaped: keys and names are written
    as in XML. write: how a model writes one, with {key}, {value} and {type}; write_text: the same
    for texts, where they differ.
    """

    open: str
    header: str
    end: str
    close: str
    write: str
    write_text: str = ""
    newlines: bool = False
    escaped: bool = False


class Calls(Struct, forbid_unknown_fields=True):
    """The calls of an answer.

    open: marks before a call; "" for calls without one, which begin with the character `bare`.
    content: json, an object with name and arguments, or a list of such; object: `header` (group
    name), the mark `arguments`, then an object; tags: `header` (a group `empty` says that nothing
    follows), the mark `arguments` if there is one, then parameters; python: a list of calls in
    Python's syntax. close: after a call; may be missing at the end of the text where the content
    shows its own end. write: how a model writes one call, with {name}, {index} and {arguments};
    before, between, after: what it writes around them. id: how the template names calls in a
    history. quote: what delimits texts in objects whose keys are bare.
    """

    open: list[str]
    content: Literal["json", "object", "tags", "python"]
    write: str
    close: str = ""
    header: str = ""
    arguments: str = ""
    bare: str = ""
    before: str = ""
    between: str = ""
    after: str = ""
    id: str = "call_{random:.24}"
    quote: str = ""
    parameter: Parameter | None = None


class Syntax(Struct, forbid_unknown_fields=True):
    """One file. template: regexes that the chat template of such a model matches, all of them; the
    format with most of them is picked. stop: tokens that end an answer. dropped: marks that mean
    nothing. call_ends_reasoning: also where the reasoning was not closed."""

    about: str
    template: list[str]
    calls: Calls
    reasoning: Span | None = None
    section: Span | None = None
    call_ends_reasoning: bool = False
    dropped: list[str] = []
    stop: list[str] = []


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
    """Return the names of the formats that are data."""
    return tuple(sorted((*_FILES, *ANSWER_FORMATS)))


_NO_SPAN, _NO_PARAMETER = Span("", ""), Parameter("", "", "", "", "")


class Reading:
    """What a parser needs of a syntax with one tokenizer: its parts, with empty ones for those that
    it lacks, and the marks to look for at each place. special: names of the tokenizer's control
    tokens."""

    def __init__(self, syntax: Syntax, special: Collection[str]) -> None:
        self.calls = syntax.calls
        self.dropped = syntax.dropped
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
        self.special = [name for name in special if any(name in mark for mark in marks)]
        self.think_is_special = any(name in think.open for name in self.special)
        self.think_start, self.section_end = self._stops(think.open), self._stops(section.close)
        outer = [section.open, *calls.open, *syntax.dropped]
        self.in_content = self._stops(think.open, *outer)
        self.in_reasoning = self._stops(think.close, *(outer if syntax.call_ends_reasoning else []))
        self.in_section = self._stops(*calls.open, section.close)
        self.close = self._stops(calls.close) if calls.close else None
        self.dialect = (
            Dialect(delimiter=self._stops(calls.quote), bare=True) if calls.quote else JSON
        )
        self.header, self.key = (
            re.compile(calls.header, re.DOTALL),
            re.compile(parameter.header, re.DOTALL),
        )
        self.header_end_stays = calls.arguments in ("", "{")
        self.key_end = self._stops(parameter.end)
        self.key_guard = self._stops(parameter.end, parameter.close, parameter.open, calls.close)
        self.in_tags = self._stops(parameter.open, calls.close)
        self.in_value = self._stops(parameter.open, parameter.close, calls.close)
        self.header_end = (
            self._stops(calls.arguments) if calls.arguments or not calls.parameter else self.in_tags
        )

    def _stops(self, *literals: str) -> Stops:
        return Stops(filter(None, literals), self.special)
