"""Grammars of a call's arguments: JSON, tags, Python keyword arguments, or objects with bare keys.

A grammar allows only arguments that the schema allows, but not always all of them: keys are in the
schema's order, and additional properties are not allowed beside named ones. A schema that a format
cannot enforce raises GrammarFault with the location in the schema.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from moeserve.sampling import GrammarSpec
from moeserve.text.answer_syntax import Calls
from moeserve.text.json_schema import GrammarFault, pointer, schema_text
from moeserve.text.lark import Rules
from moeserve.text.schema_alternatives import Alternative, alternatives
from moeserve.text.schema_values import is_valid

_TYPES_BUT_STRING = ["array", "boolean", "null", "number", "object"]  # all types but string
# Keywords of objects and of arrays that the grammars below enforce
_OBJECT_KEYWORDS = {
    "properties", "required", "additionalProperties", "unevaluatedProperties", "minProperties",
    "maxProperties",
}  # fmt: skip
_ARRAY_KEYWORDS = {"items", "minItems", "maxItems"}
_COMMA = '","'
_MAX_ITEMS = 1000  # the most items that a grammar can count
# Arbitrary names of parameters, short enough for the parser's MAX_HEADER_LENGTH
_ANY_KEY_REGEX = r'/[^<>"\s][^<>"\n]{0,99}/'
_ANY_WORD_REGEX = "/[A-Za-z_][A-Za-z0-9_]{0,99}/"
_ANY_BARE_KEY_REGEX = r'/[^:,\[\]{}<"\s][^:,\[\]{}<"\n]{0,99}/'


class ObjectShape(NamedTuple):
    """The objects that an alternative of a schema allows."""

    members: dict[str, Any]  # the schema of each allowed key
    required: set[str]
    # The schema of arbitrary keys, if there are no members; False: none are allowed
    other_schema: Any
    where: str  # JSON pointer

    def pointer_to(self, key: str) -> str:
        """Return the pointer to the schema of a member."""
        return pointer(pointer(self.where, "properties"), key)


class _WrittenMember(NamedTuple):
    """The Lark of a member of an object."""

    lark: str
    is_required: bool


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the Lark of JSON that matches a schema, with at most one space between its tokens.

    With more, a model that is forced to call a tool could write white space forever.
    """
    return f"%json {schema_text(dict(schema), GrammarSpec('json_schema', whitespace_pattern=' '))}"


class Arguments:
    """The grammars of arguments in one format."""

    def __init__(self, calls: Calls, rules: Rules, can_write: Callable[[str], bool]) -> None:
        """Add no rules yet.

        Args:
            calls: The format's calls.
            rules: The rules of the answer, to which this adds its own.
            can_write: Whether the format's parser reads a key as the grammar writes it.
        """
        self._calls = calls
        self._rules = rules
        self._can_write = can_write
        self._root: dict[str, Any] = {}
        self._shared: dict[str, Any] = {}  # definitions for the schemas inside
        self._bare_rules: dict[str, str] = {}  # schema as JSON -> the rule of its values

    def schema_lark(self, schema: dict[str, Any]) -> str:
        """Return the Lark of arguments that match a checked schema. Raise GrammarFault."""
        if not self._calls.quote and self._calls.content not in ("tags", "python"):
            return json_rule(schema)
        self._root = schema
        self._shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        self._bare_rules.clear()
        choices = []
        for alternative in alternatives(schema, schema):
            shape = _object_shape(alternative)
            if shape is None:
                continue
            if self._calls.quote:
                choices.append(self._bare_object(shape))
            elif self._calls.content == "tags":
                choices.append(self._tagged_parameters(shape))
            else:
                choices.append(self._python_keywords(shape))
        return _choice_of(choices, "")

    # ---- parameters between tags

    def _tagged_parameters(self, shape: ObjectShape) -> str | None:
        if not shape.members:
            any_key = self._tagged_parameter(None, shape.other_schema, shape.where)
            return f"({any_key})*" if any_key else '""'
        written = self._write_members(shape, self._tagged_parameter)
        if written is None:
            return None
        texts = [member.lark if member.is_required else f"({member.lark})?" for member in written]
        return " ".join(texts) or '""'

    def _write_members(
        self, shape: ObjectShape, write: Callable[[str, Any, str], str | None]
    ) -> list[_WrittenMember] | None:
        """Return the Lark of each member; None if a required member allows no value.

        write: returns the Lark of a member, from its key, its schema and the pointer to the schema;
        None if the schema allows no value.
        """
        written = []
        for key, schema in shape.members.items():
            if not self._can_write(key):
                raise GrammarFault(
                    f"this model's format of calls cannot write the name {key[:64]!r}",
                    shape.pointer_to(key),
                )
            text = write(key, schema, shape.pointer_to(key))
            if text is not None:
                written.append(_WrittenMember(text, key in shape.required))
            elif key in shape.required:
                return None
        return written

    def _tagged_parameter(self, key: str | None, schema: Any, where: str) -> str | None:
        """Return the Lark of one parameter between tags, None if it allows no value.

        key: None for any key. A format may mark whether a value is a string or JSON, by
        `write_text` or {type}. Otherwise the parser decides by the schema (`answer_values.typed`),
        so any text can be a string.
        """
        parameter = self._calls.parameter
        assert parameter is not None
        marks_strings = bool(parameter.write_text) or "{type}" in parameter.write
        string_choices: list[str] = []
        json_by_type: dict[str, list[str]] = {}  # type, or types with | -> Lark of its values
        allows_any_text = False
        for alternative in alternatives(schema, self._root, where):
            if alternative.kind == "any":
                allows_any_text = True
                json_by_type.setdefault("|".join(_TYPES_BUT_STRING), []).append(
                    json_rule({"type": _TYPES_BUT_STRING})
                )
            elif alternative.kind == "string":
                choices = self._string_choices(alternative)
                allows_any_text |= choices is None
                string_choices += choices or []
            else:
                kind = "number" if alternative.kind == "integer" else alternative.kind
                json_by_type.setdefault(kind, []).append(self._json_value(alternative))
        forms = []
        write_text = parameter.write_text or parameter.write
        if allows_any_text:
            forms.append(self._wrap_in_tags(write_text, key, "string", None))
        elif string_choices:
            forms.append(self._wrap_in_tags(write_text, key, "string", " | ".join(string_choices)))
        if marks_strings or not allows_any_text:
            for kind, bodies in json_by_type.items():
                forms.append(self._wrap_in_tags(parameter.write, key, kind, " | ".join(bodies)))
        if not forms:
            return None
        return forms[0] if len(forms) == 1 else f"({' | '.join(forms)})"

    def _wrap_in_tags(self, write: str, key: str | None, kind: str, body: str | None) -> str:
        """Return the Lark of a parameter. body: its value, None for any text."""
        parameter = self._calls.parameter
        assert parameter is not None
        before, after = write.split("{value}")
        name = _ANY_KEY_REGEX
        if key is not None:
            name = self._rules.plain_literal(escape(key) if parameter.escaped else key)
        head = self._rules.fill(before, key=name, type=f"/{kind}/")
        if body is None:
            return f"{head} {self._rules.text_until(after)}"
        return f"{head} ({body}) {self._rules.literal(after)}"

    def _string_choices(self, alternative: Alternative) -> list[str] | None:
        """Return the Lark of each text that an alternative lists, None if it allows any text."""
        if "enum" not in alternative.schema:
            if alternative.schema:
                raise GrammarFault(
                    f"{', '.join(alternative.schema)} cannot be enforced: texts have no quotes in "
                    "this model's format of calls",
                    alternative.where,
                )
            return None
        calls = self._calls
        marks = [calls.close, calls.quote]
        if calls.parameter is not None:
            marks += [calls.parameter.open, calls.parameter.close]
        literals = []
        for text in alternative.schema["enum"]:
            if any(mark and mark in text for mark in marks):
                raise GrammarFault(
                    f"this model's format of calls cannot write the text {text[:64]!r}",
                    alternative.where,
                )
            if len(alternative.schema) == 1 or is_valid(text, alternative.schema, self._root):
                literals.append(self._rules.plain_literal(text))
        return literals

    def _json_value(self, alternative: Alternative) -> str:
        return json_rule({**alternative.schema, "type": alternative.kind, **self._shared})

    # ---- Python's keywords

    def _python_keywords(self, shape: ObjectShape) -> str | None:
        comma = self._rules.literal(", ")
        if not shape.members:
            if shape.other_schema is False:
                return '""'
            item = self._rules.add_rule(
                f"{_ANY_WORD_REGEX} {self._python_keyword('', shape.other_schema, '')}"
            )
            return f"({item} ({comma} {item})*)?"
        written = self._write_members(shape, self._python_keyword)
        return None if written is None else self._comma_separated(written, comma)

    def _python_keyword(self, key: str, schema: Any, where: str) -> str:
        inner = schema if isinstance(schema, Mapping) else {}
        equals = self._rules.literal(f"{key}=")
        return f"{equals} {json_rule({**inner, **self._shared})}"

    def _comma_separated(self, written: Sequence[_WrittenMember], comma: str) -> str:
        """Return the Lark of a comma-separated list: required members in order, then the others."""
        rules = self._rules
        required = [rules.add_rule(member.lark) for member in written if member.is_required]
        optional = [rules.add_rule(member.lark) for member in written if not member.is_required]
        # Rules for the optional members from one on: after another member, and as the first one.
        following = ""
        starting = ""
        for member in reversed(optional):
            other_starts = f" | {starting}" if starting else ""
            starting = rules.add_rule(f"{member} {following}{other_starts}")
            following = rules.add_rule(f"({comma} {member})? {following}")
        if required:
            return f" {comma} ".join(required) + f" {following}"
        return f"({starting})?" if starting else '""'

    # ---- bare keys, and texts between quotes of the format's own

    def _bare_value(self, schema: Any, where: str) -> str | None:
        """Return the rule of a value, None if there is none."""
        key = json.dumps(schema, sort_keys=True)
        if key in self._bare_rules:
            return self._bare_rules[key]
        # The name is reserved first, because schemas may be recursive.
        name = self._rules.reserve_name()
        self._bare_rules[key] = name
        forms = []
        for alternative in alternatives(schema, self._root, where):
            if (text := self._bare_alternative(alternative)) is not None:
                forms.append(text)
        if not forms:
            del self._bare_rules[key]
            return None
        self._rules.add_named(name, " | ".join(forms))
        return name

    def _bare_alternative(self, alternative: Alternative) -> str | None:
        match alternative.kind:
            case "any":
                return self._bare_anything()
            case "string":
                quote = self._rules.literal(self._calls.quote)
                texts = self._string_choices(alternative)
                if texts is None:
                    return f"{quote} {self._rules.text_until(self._calls.quote)}"
                return f"{quote} ({' | '.join(texts)}) {quote}" if texts else None
            case "array":
                return self._bare_array(alternative)
            case "object":
                shape = _object_shape(alternative)
                return None if shape is None else self._bare_object(shape)
        return self._json_value(alternative)

    def _bare_array(self, alternative: Alternative) -> str | None:
        _check_keywords(alternative, _ARRAY_KEYWORDS)
        min_items = alternative.schema.get("minItems", 0)
        max_items = alternative.schema.get("maxItems")
        if max(min_items, max_items or 0) > _MAX_ITEMS:
            raise GrammarFault(
                f"more than {_MAX_ITEMS:,} items cannot be counted", alternative.where
            )
        item = self._bare_value(
            alternative.schema.get("items", True), pointer(alternative.where, "items")
        )
        if item is None or max_items == 0:
            return None if min_items else '"[" "]"'
        if max_items is not None and max_items < min_items:
            return None
        more = f"({_COMMA} {item})"
        # The items after the first one: those up to minItems, then those up to maxItems
        rest = f"{more}{{{min_items - 1}}}" if min_items > 1 else ""
        if max_items is None:
            rest += f" {more}*"
        else:
            rest += f" {more}{{0,{max_items - max(min_items, 1)}}}"
        return f'"[" {item} {rest} "]"' if min_items else f'"[" ({item} {rest})? "]"'

    def _bare_object(self, shape: ObjectShape) -> str | None:
        if not shape.members:
            value = None
            if shape.other_schema is not False:
                value = self._bare_value(shape.other_schema, shape.where)
            if value is None:
                return '"{" "}"'
            member = self._rules.add_rule(f'{_ANY_BARE_KEY_REGEX} ":" {value}')
            return f'"{{" ({member} ("," {member})*)? "}}"'

        def write(key: str, schema: Any, where: str) -> str | None:
            value = self._bare_value(schema, where)
            return None if value is None else f"{self._rules.plain_literal(key + ':')} {value}"

        written = self._write_members(shape, write)
        return None if written is None else f'"{{" {self._comma_separated(written, _COMMA)} "}}"'

    def _bare_anything(self) -> str:
        if "anything" not in self._bare_rules:
            name = self._rules.reserve_name()
            self._bare_rules["anything"] = name
            quote = self._rules.literal(self._calls.quote)
            member = f'{_ANY_BARE_KEY_REGEX} ":" {name}'
            self._rules.add_named(
                name,
                f'"{{" ({member} ("," {member})*)? "}}" | "[" ({name} ("," {name})*)? "]" | '
                f"{quote} {self._rules.text_until(self._calls.quote)} | "
                f"{json_rule({'type': ['number', 'boolean', 'null']})}",
            )
        return self._bare_rules["anything"]


def _object_shape(alternative: Alternative) -> ObjectShape | None:
    """Return the objects that an alternative allows, None if there are none.

    Raise GrammarFault for keywords that cannot be enforced.
    """
    if alternative.kind == "any":
        return ObjectShape({}, set(), True, alternative.where)
    if alternative.kind != "object":
        return None
    schema = alternative.schema
    _check_keywords(alternative, _OBJECT_KEYWORDS)
    properties = schema.get("properties", {})
    required = set(schema.get("required", ()))
    other_schema = schema.get("additionalProperties", True)
    if schema.get("unevaluatedProperties") is False:
        other_schema = False
    members = {key: inner for key, inner in properties.items() if inner is not False}
    members |= {key: other_schema for key in schema.get("required", ()) if key not in properties}
    if any(members.get(key, False) is False for key in required):
        return None
    if schema.get("minProperties", 0) > len(required):
        raise GrammarFault(
            "minProperties cannot be enforced in this model's format of calls", alternative.where
        )
    if (max_properties := schema.get("maxProperties")) is not None:
        if not members and other_schema is not False:
            raise GrammarFault(
                "maxProperties cannot be enforced in this model's format of calls",
                alternative.where,
            )
        if len(required) > max_properties:
            return None
        optional = [key for key in members if key not in required][: max_properties - len(required)]
        members = {key: members[key] for key in members if key in required or key in optional}
    return ObjectShape(members, required, False if members else other_schema, alternative.where)


def _check_keywords(alternative: Alternative, supported: set[str]) -> None:
    if unknown := [key for key in alternative.schema if key not in supported]:
        raise GrammarFault(
            f"{', '.join(unknown)} cannot be enforced in this model's format of calls",
            alternative.where,
        )


def _choice_of(choices: Iterable[str | None], where: str) -> str:
    """Return the Lark of a choice. Raise GrammarFault if there is none."""
    texts = [*dict.fromkeys(text for text in choices if text is not None)]
    if not texts:
        raise GrammarFault("a tool's parameters must be a schema of objects", where)
    return texts[0] if len(texts) == 1 else f"({' | '.join(texts)})"
