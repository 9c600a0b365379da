"""Structural tags: free text with tags in it whose contents are constrained, as vLLM and XGrammar write them.

A literal of a tag that spells a special token means that token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from moeserve.errors import invalid_request
from moeserve.sampling import GrammarSpec
from moeserve.text.json_schema import GrammarFault, check_schema, json_of, schema_text

_Trigger = Annotated[str, Meta(min_length=1)]


class _ConstString(Struct, tag_field="type", tag="const_string"):
    value: str


class _Schema(Struct, tag_field="type", tag="json_schema"):
    json_schema: dict[str, Any] | bool


class _Regex(Struct, tag_field="type", tag="regex"):
    pattern: str


class _AnyText(Struct, tag_field="type", tag="any_text"):
    pass


class _Sequence(Struct, tag_field="type", tag="sequence"):
    elements: list[_Format]


class _Or(Struct, tag_field="type", tag="or"):
    elements: Annotated[list[_Format], Meta(min_length=1)]


class _Tag(Struct, tag_field="type", tag="tag"):
    begin: str
    content: _Format
    end: str


class _TriggeredTags(Struct, tag_field="type", tag="triggered_tags"):
    triggers: list[_Trigger]
    tags: list[_Tag]
    at_least_one: bool = False
    stop_after_first: bool = False


_Format = _ConstString | _Schema | _Regex | _AnyText | _Sequence | _Or | _Tag | _TriggeredTags


class _Structure(Struct):
    begin: str
    schema: dict[str, Any] | bool
    end: str


class _Document(Struct):
    """XGrammar's form is `format`; the older one, structures and triggers, means triggered tags."""

    format: _Format | None = None
    structures: list[_Structure] = []
    triggers: list[_Trigger] = []


class StructuralTag:
    """The Lark grammar (`source`) of a spec of this kind. Raises GrammarFault."""

    def __init__(self, spec: GrammarSpec, special: Mapping[str, int]) -> None:
        self._spec, self._special, self._rules = spec, special, [r"TEXT: /(.|\n)*/"]
        names = sorted(special, key=len, reverse=True)
        self._names = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "((?!))")
        try:
            document = msgspec.convert(json_of(spec.text), _Document)
        except msgspec.ValidationError as error:
            raise GrammarFault(invalid_request(error).message) from error
        tags = [_Tag(old.begin, _Schema(old.schema), old.end) for old in document.structures]
        start = document.format or _TriggeredTags(document.triggers, tags)
        self.source = "\n".join([f"start: {self._any(start)}", *self._rules])

    def _any(self, form: _Format) -> str:
        match form:
            case _ConstString():
                return self._literal(form.value) or '""'
            case _Schema():
                check_schema(form.json_schema)
                return f"%json {schema_text(form.json_schema, self._spec)}"
            case _Regex():
                return regex(form.pattern)
            case _AnyText():
                return "TEXT"
            case _Sequence():
                return " ".join(map(self._any, form.elements)) or '""'
            case _Or():
                return f"({' | '.join(map(self._any, form.elements))})"
            case _Tag():
                return self._tag(form)
            case _TriggeredTags():
                return self._triggered(form)

    def _literal(self, text: str) -> str:
        """Returns the Lark of a text in which special tokens are meant."""
        parts = enumerate(self._names.split(text))  # text, name, text, name, ..., text
        return " ".join(f"<[{self._special[p]}]>" if i % 2 else f"/{exactly(p)}/" for i, p in parts if p)

    def _tag(self, tag: _Tag, begun: str = "") -> str:
        """Returns a tag. begun: the part of `begin` that its trigger has matched already."""
        begin = self._literal(tag.begin[len(begun) :])
        if isinstance(tag.content, _AnyText) and tag.end:
            return f"{begin} {self._until(tag.end)}"
        return f"{begin} {self._any(tag.content)} {self._literal(tag.end)}"

    def _until(self, text: str) -> str:
        """Returns free text that ends with the first `text`."""
        special = self._names.search(text)
        if special is None:
            self._rules.append(f"until_{len(self._rules)}[lazy]: TEXT {self._literal(text)}")
            return f"until_{len(self._rules) - 1}"
        if special.start():
            raise GrammarFault(f"{special[0]} may only be at the beginning of {text!r}")
        return f"TEXT {self._literal(text)}"

    def _triggered(self, form: _TriggeredTags) -> str:
        bodies: dict[str, list[str]] = {}
        for tag in form.tags:
            trigger = next((trigger for trigger in form.triggers if tag.begin.startswith(trigger)), None)
            if trigger is None:
                raise GrammarFault(f"{tag.begin!r} begins with none of the triggers")
            bodies.setdefault(trigger, []).append(self._tag(tag, trigger))
        if not bodies:
            raise GrammarFault("structural tags need `format`, or `structures` and `triggers`")
        tags = " | ".join(f"{self._until(trigger)} ({' | '.join(bodies[trigger])})" for trigger in bodies)
        if form.stop_after_first:
            return f"({tags})" if form.at_least_one else f"({tags} | TEXT)"
        return f"({tags}){'+' if form.at_least_one else '*'} TEXT"


def exactly(text: str) -> str:
    """Returns the regex of one text, free of signs that mean something in a regex or in Lark."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text)


def regex(pattern: str) -> str:
    """Returns the Lark of a regex."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern)}/" if pattern else '""'
