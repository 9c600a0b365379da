"""Grammars of answers: which tools are called, with which arguments, and what comes after the
reasoning.

A grammar is Lark as llguidance takes it. Marks of a format that are tokens of their own are written
as such.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from moeserve.errors import InvalidRequest
from moeserve.sampling import GrammarSpec
from moeserve.text.answer_format import Tool
from moeserve.text.answer_syntax import Syntax
from moeserve.text.answer_values import types_of
from moeserve.text.grammar_source import lark_of
from moeserve.text.json_schema import GrammarFault, check_schema, schema_text
from moeserve.text.structural_tag import exactly, literal, special_in

_TEXT = r"TEXT: /(.|\n)*/"
_SPACE = r"/[ \n]{0,4}/"
_SLOT = re.compile(r"\{(\w+)\}")
_ANYTHING: dict[str, Any] = {"type": "object"}
_OTHERS = ["array", "boolean", "null", "number", "object"]
_OF_TEXT = (
    "pattern",
    "format",
    "minLength",
    "maxLength",
)  # keywords that are not kept for text without quotes


def is_free(tools: Sequence[Tool], *, required: bool, parallel: bool) -> bool:
    """Returns whether answers need no grammar."""
    return not tools or not (
        required or not parallel or any(_function(tool).get("strict") for tool in tools)
    )


def arguments_schema(tool: Tool, position: int, *, strict: bool) -> dict[str, Any]:
    """Returns the schema that a call's arguments must match. strict: for every tool. Raises
    InvalidRequest.
    """
    function = _function(tool)
    schema = function.get("parameters")
    if not isinstance(schema, dict) or not (strict or function.get("strict")):
        return _ANYTHING
    try:
        check_schema(schema)
    except GrammarFault as fault:
        raise fault.as_request_error(f"tools[{position}].function.parameters") from fault
    return (
        schema if "type" in schema or "anyOf" in schema or "$ref" in schema else schema | _ANYTHING
    )


def json_rule(schema: Mapping[str, Any]) -> str:
    """Returns the Lark of JSON that matches a schema. Between its tokens is one space at most: a
    model that is made to call could otherwise go on with white space for ever."""
    return f"%json {schema_text(dict(schema), GrammarSpec('json_schema', whitespace_pattern=' '))}"


def tool_name(tool: Tool) -> str:
    """Returns the name of a tool."""
    return str(_function(tool).get("name"))


def _function(tool: Tool) -> Mapping[str, Any]:
    found = tool.get("function")
    return found if isinstance(found, Mapping) else {}


class AnswerGrammar:
    """The grammar of one answer. special: the tokenizer's special tokens. opened: it begins inside
    the reasoning.
    """

    def __init__(self, syntax: Syntax, special: Mapping[str, int], *, opened: bool) -> None:
        self._syntax = syntax
        self._calls = syntax.calls
        self._special = special
        self._rules = [_TEXT]
        self._reasoning = self._before_content(opened=opened)

    def around(self, grammar: GrammarSpec) -> GrammarSpec:
        """Returns the grammar of an answer whose content matches `grammar`. Raises GrammarFault."""
        return self._spec(f"{self._reasoning} %lark {{\n{lark_of(grammar, self._special)}\n}}")

    def calls(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> GrammarSpec:
        """Returns the grammar of answers that call tools. Raises InvalidRequest."""
        calls = self._calls
        more = f"({self._literal(calls.between)} call)*" if parallel else ""
        after = self._literal(calls.after)
        schemas = [arguments_schema(tool, i, strict=required) for i, tool in enumerate(tools)]
        bodies = [self._arguments(schema) for schema in schemas]

        def one_of(write: str) -> str:
            """Returns a call of any of the tools."""
            named = zip(map(tool_name, tools), bodies, strict=True)
            return " | ".join(
                self._fill(write, name=self._literal(name), arguments=body) for name, body in named
            )

        whole = f"{self._literal(calls.before)} call {more} {after}"
        if required or calls.bare:
            self._rules.append(f"call: {one_of(calls.write)}")
        if required:
            return self._spec(f"{self._reasoning} {_SPACE} {whole}")
        if calls.bare:
            free = f"/[^ \\n{''.join(map(exactly, calls.bare))}](.|\\n)*/"
            return self._spec(f"{self._reasoning} {_SPACE} ({whole} | {free})?")
        begin = calls.before or calls.write
        section = self._syntax.section
        marks = [section.open, *calls.open] if section else calls.open
        mark = next(mark for mark in marks if begin.startswith(mark))
        if calls.before:
            self._rules.append(f"call: {one_of(calls.write)}")
            group = (
                f"{self._until(mark)} {self._literal(begin.removeprefix(mark))} call {more} {after}"
            )
        else:
            self._rules.append(f"call: {one_of(begin.removeprefix(mark))}")
            group = f"{self._until(mark)} call"
        return self._spec(
            f"{self._reasoning} ({f'({group})* TEXT' if parallel else f'TEXT | {group}'})"
        )

    def _before_content(self, *, opened: bool) -> str:
        span = self._syntax.reasoning
        if span is None or not span.open:
            return ""
        rest = f"{self._until(span.close)} {_SPACE}"
        return rest if opened else f"({_SPACE} {self._literal(span.open)} {rest})?"

    def _arguments(self, schema: dict[str, Any]) -> str:
        """Returns the Lark of a call's arguments."""
        if self._calls.quote:
            return self._bare(schema)
        if self._calls.content not in ("tags", "python"):
            return json_rule(schema)
        shared: dict[str, Any] = {
            key: schema[key] for key in ("$defs", "definitions") if key in schema
        }
        if self._calls.content == "python":
            if _is_open(schema):
                return self._listed(
                    {}, schema, default=f"/[A-Za-z_][A-Za-z0-9_]*/ {self._literal('=')} %json {{}}"
                )
            written = {
                key: f"{self._literal(key + '=')} {json_rule(_within(value, shared))}"
                for key, value in schema["properties"].items()
            }
            return self._listed(written, schema)
        parameter = self._calls.parameter
        assert parameter is not None
        if _is_open(schema):
            json_too = (
                f" | {self._parameter('', {'type': _OTHERS}, shared)}"
                if "{type}" in parameter.write or parameter.write_text
                else ""
            )
            return f"({self._parameter('', {}, shared)}{json_too})*"
        required = schema.get("required") or ()
        written = {
            key: self._parameter(key, value, shared) for key, value in schema["properties"].items()
        }
        return (
            " ".join(text if key in required else f"({text})?" for key, text in written.items())
            or '""'
        )

    def _listed(
        self,
        written: Mapping[str, str],
        schema: Mapping[str, Any],
        default: str = "",
        comma: str = ", ",
    ) -> str:
        """Returns the Lark of a list with commas: what is required comes, in order, the rest may.
        default: of any.
        """
        comma = self._literal(comma)
        if default:
            item = self._rule(default)
            return f"({item} ({comma} {item})*)?"
        required = schema.get("required") or ()
        first = [self._rule(text) for key, text in written.items() if key in required]
        following = starts = ""
        for text in reversed(
            [self._rule(text) for key, text in written.items() if key not in required]
        ):
            starts = self._rule(f"{text} {following}" + (f" | {starts}" if starts else ""))
            following = self._rule(f"({comma} {text})? {following}")
        if first:
            return f" {comma} ".join(first) + f" {following}"
        return f"({starts})?" if starts else '""'

    def _parameter(self, key: str, schema: Any, shared: Mapping[str, Any]) -> str:
        """Returns the Lark of one parameter between tags. key: "" for any."""
        parameter = self._calls.parameter
        assert parameter is not None
        types = types_of(schema)
        is_text = not types or "string" in types
        write = parameter.write_text if parameter.write_text and is_text else parameter.write
        before, after = write.split("{value}")
        name = self._literal(key) if key else '/[^<>"\\n]+/'
        kind = (
            "string"
            if is_text
            else "|".join(sorted({"number" if t == "integer" else t for t in types}))
        )
        head = self._fill(before, key=name, type=f"/{kind}/")
        if not is_text:
            return f"{head} {json_rule(_within(schema, shared))} {self._literal(after)}"
        if texts := _texts(schema):
            return f"{head} ({' | '.join(map(self._literal, texts))}) {self._literal(after)}"
        if kept := [word for word in _OF_TEXT if types == {"string"} and word in schema]:
            what = f"{', '.join(kept)} of {key!r} cannot be enforced: texts have no quotes in this format"
            raise InvalidRequest(what, param="tools", code="invalid_grammar")
        return f"{head} {self._until(after)}"

    def _bare(self, schema: Any) -> str:
        """Returns the Lark of a value whose keys are bare and whose texts are between `quote`."""
        types = types_of(schema)
        quote = self._literal(self._calls.quote)
        if types == {"string"}:
            texts = " | ".join(map(self._literal, _texts(schema)))
            return self._rule(
                f"{quote} ({texts}) {quote}"
                if texts
                else f"{quote} {self._until(self._calls.quote)}"
            )
        if types and types <= {"number", "integer", "boolean", "null"}:
            return self._rule(json_rule(schema))
        if types == {"array"} and isinstance(schema.get("items"), dict):
            item = self._bare(schema["items"])
            return self._rule(f'"[" ({item} ("," {item})*)? "]"')
        if types == {"object"} and not _is_open(schema):
            written = {
                k: f"{self._literal(k + ':')} {self._bare(v)}"
                for k, v in schema["properties"].items()
            }
            return self._rule(f'"{{" {self._listed(written, schema, comma=",")} "}}"')
        if "bare: " not in "\n".join(self._rules):
            text = f"{quote} {self._until(self._calls.quote)}"
            scalar = json_rule({"type": ["number", "boolean", "null"]})
            self._rules += [
                f'bare: bare_object | "[" (bare ("," bare)*)? "]" | {text} | {scalar}',
                'bare_object: "{" (member ("," member)*)? "}"',
                r'member: /[^:,\[\]{}<"\n]+/ ":" bare',
            ]
        return "bare_object" if types == {"object"} else "bare"

    def _fill(self, write: str, **slots: str) -> str:
        """Returns the Lark of what a model writes. slots: Lark of the {slots} in it; an {index} is
        a number.
        """
        parts = _SLOT.split(write)
        slots["index"] = "/[0-9]+/"
        return " ".join(
            slots[part] if i % 2 else self._literal(part) for i, part in enumerate(parts) if part
        )

    def _literal(self, text: str) -> str:
        return literal(text, self._special)

    def _rule(self, body: str) -> str:
        self._rules.append(f"r_{len(self._rules)}: {body}")
        return f"r_{len(self._rules) - 1}"

    def _until(self, mark: str) -> str:
        """Returns the Lark of any text and the mark behind it."""
        if special := special_in(mark, self._special):
            before = mark.partition(special)[0]
            if not before.strip():
                return f"TEXT {self._literal(mark[len(before) :])}"
        name = f"until_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: TEXT {self._literal(mark)}")
        return name

    def _spec(self, start: str) -> GrammarSpec:
        return GrammarSpec("answer", "\n".join([f"start: {start}", *self._rules]))


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Whether a schema does not say which keys there are."""
    properties = schema.get("properties")
    return not isinstance(properties, dict) or (
        not properties and schema.get("additionalProperties") is not False
    )


def _within(schema: Any, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a part with the definitions of the whole."""
    return {**schema, **shared} if isinstance(schema, dict) else {**shared}


def _texts(schema: Any) -> list[str]:
    """Returns the texts that a schema allows, none for any."""
    values = (
        schema.get("enum") or ([schema["const"]] if "const" in schema else [])
        if isinstance(schema, dict)
        else []
    )
    return values if all(isinstance(value, str) for value in values) else []
