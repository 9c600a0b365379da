"""Structural tags: free text with tags in it whose contents are constrained, as vLLM and XGrammar write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from moeserve.sampling import GrammarSpec
from moeserve.text.json_schema import MAX_REGEX_BYTES, GrammarFault, check_schema, json_of, pointer, schema_text


class StructuralTag:
    """The Lark grammar of structural tags, in XGrammar's form (`format`) or in the older one (`structures`)."""

    def __init__(self, spec: GrammarSpec, special: Mapping[str, int]) -> None:
        self._spec, self._special, self._rules = spec, special, [r"TEXT: /(.|\n)*/"]
        names = sorted(special, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._kinds: dict[str, Callable[[dict[str, Any], str], str]] = {
            "const_string": lambda form, at: self._literal(_field(form, "value", str, at)) or '""',
            "json_schema": self._json_schema,
            "regex": lambda form, at: f"/{_slashed(_field(form, 'pattern', str, at))}/",
            "any_text": lambda form, at: "TEXT",
            "sequence": lambda form, at: " ".join(self._all(form, "elements", at)),
            "or": lambda form, at: f"({' | '.join(self._all(form, 'elements', at))})",
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
        }
        tag = json_of(spec.text)
        if isinstance(tag, dict) and "structures" in tag:
            entries = [(s, pointer("/structures", i)) for i, s in enumerate(_field(tag, "structures", list, ""))]
            tags = [_fields_of(s, at) | {"content": {"type": "json_schema", "json_schema": s.get("schema", {})}}
                    for s, at in entries]  # fmt: skip
            tag = {"format": {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}}
        start = self._any(_field(_fields_of(tag, ""), "format", dict, ""), "/format")
        self.source = "\n".join([f"start: {start}", *self._rules])

    def _any(self, form: Any, at: str) -> str:
        kind = _field(_fields_of(form, at), "type", str, at)
        if kind not in self._kinds:
            raise GrammarFault(f"type must be one of {', '.join(self._kinds)}", at)
        return self._kinds[kind](form, at)

    def _all(self, form: dict[str, Any], name: str, at: str) -> list[str]:
        forms = _field(form, name, list, at)
        return [self._any(inner, pointer(pointer(at, name), i)) for i, inner in enumerate(forms)]

    def _literal(self, text: str) -> str:
        """Returns the Lark of a text in which special tokens are meant."""
        parts, end = [], 0
        for found in self._split.finditer(text):
            parts += [_text(text[end : found.start()]), f"<[{self._special[found[0]]}]>"]
            end = found.end()
        return " ".join(filter(None, [*parts, _text(text[end:])]))

    def _json_schema(self, form: dict[str, Any], at: str) -> str:
        schema, at = form.get("json_schema"), pointer(at, "json_schema")
        check_schema(schema, at)
        return f"%json {schema_text(schema, self._spec)}"

    def _tag(self, form: dict[str, Any], at: str, begun: str = "") -> str:
        """Returns a tag. begun: the part of `begin` that its trigger has matched already."""
        begin, end = self._literal(_field(form, "begin", str, at)[len(begun) :]), _field(form, "end", str, at)
        content = form.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            return f"{begin} {self._until(end, pointer(at, 'end'))}"
        return f"{begin} {self._any(content, pointer(at, 'content'))} {self._literal(end)}"

    def _until(self, text: str, at: str) -> str:
        """Returns free text that ends with the first `text`."""
        first = self._split.search(text)
        if first is None:
            name = f"until_{len(self._rules)}"
            self._rules.append(f"{name}[lazy]: TEXT {self._literal(text)}")
            return name
        if first.start():
            raise GrammarFault(f"a special token ({first[0]}) may only be at the beginning", at)
        return f"TEXT {self._literal(text)}"

    def _triggered_tags(self, form: dict[str, Any], at: str) -> str:
        triggers, tags = _field(form, "triggers", list, at), _field(form, "tags", list, at)
        if not tags or not triggers or not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise GrammarFault("needs tags, and triggers that are not empty", at)
        bodies: dict[str, list[str]] = {}
        for i, tag in enumerate(tags):
            where = pointer(pointer(at, "tags"), i)
            begin = _field(_fields_of(tag, where), "begin", str, where)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise GrammarFault("begin starts with none of the triggers", where)
            bodies.setdefault(trigger, []).append(self._tag(tag, where, trigger))
        heads = {trigger: self._until(trigger, pointer(at, "triggers")) for trigger in bodies}
        tag = " | ".join(f"{heads[trigger]} ({' | '.join(bodies[trigger])})" for trigger in bodies)
        if form.get("stop_after_first"):
            return f"({tag})" if form.get("at_least_one") else f"({tag} | TEXT)"
        return f"({tag}){'+' if form.get('at_least_one') else '*'} TEXT"


def _slashed(pattern: str) -> str:
    if len(pattern.encode()) > MAX_REGEX_BYTES or "\n" in pattern:
        raise GrammarFault(f"a pattern has one line and at most {MAX_REGEX_BYTES:,} bytes")
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", pattern)


def _fields_of(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GrammarFault("must be an object", at)
    return value


def _field(value: dict[str, Any], name: str, kind: type, at: str) -> Any:
    if not isinstance(found := value.get(name), kind):
        what = "a string" if kind is str else "an array" if kind is list else "an object"
        raise GrammarFault(f"{name} must be {what}", at)
    return found


def _text(text: str) -> str:
    return f"/{exactly(text)}/" if text else ""


def exactly(text: str) -> str:
    """Returns the regex of one text, free of signs that mean something in a regex or in Lark."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text)
