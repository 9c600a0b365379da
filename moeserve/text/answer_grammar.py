"""Builds the grammars of answers: reasoning, then tool calls or constrained content.

Grammars are in llguidance's Lark. Marks of a format that are special tokens must be written as
these tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from moeserve.sampling import GrammarSpec
from moeserve.text.answer_arguments import Arguments
from moeserve.text.answer_format import Tool, ToolFault
from moeserve.text.answer_syntax import Syntax
from moeserve.text.grammar_source import lark_of
from moeserve.text.json_schema import GrammarFault, checked_schema
from moeserve.text.lark import SLOT, Rules, exactly

_SPACE = r"/[ \n]{0,4}/"
_ANYTHING: dict[str, Any] = {"type": "object"}


def is_free(tools: Sequence[Tool], *, required: bool, parallel: bool) -> bool:
    """Return whether answers need no grammar."""
    if not tools:
        return True
    is_strict = any(_function(tool).get("strict") for tool in tools)
    return parallel and not required and not is_strict


def arguments_schema(tool: Tool, *, strict: bool) -> dict[str, Any]:
    """Return the schema for the arguments of a call, which allows objects only.

    strict: use the tool's schema even if the tool is not `strict`. Raise ToolFault.
    """
    function = _function(tool)
    schema = function.get("parameters")
    if not isinstance(schema, Mapping):
        return _ANYTHING
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise ToolFault(tool, "parameters", "must be a schema of objects (type: object)", "/type")
    if not (strict or function.get("strict")):
        return _ANYTHING
    try:
        checked: dict[str, Any] = checked_schema(schema)
    except GrammarFault as fault:
        raise ToolFault(tool, "parameters", fault.message, fault.where) from fault
    return checked | _ANYTHING


def schemas_of(tools: Sequence[Tool], *, required: bool) -> list[tuple[GrammarSpec, Tool]]:
    """Return the schemas that constrain calls, each as a separate grammar.

    They serve to find the tool whose schema does not compile.
    """
    specs = []
    for tool in tools:
        schema = arguments_schema(tool, strict=required)
        if schema is not _ANYTHING:
            specs.append((GrammarSpec("json_schema", json.dumps(schema)), tool))
    return specs


def tool_name(tool: Tool) -> str:
    """Return the name of a tool."""
    return str(_function(tool).get("name"))


def _function(tool: Tool) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}


class AnswerGrammar:
    """The grammar of one answer."""

    def __init__(
        self,
        syntax: Syntax,
        special: Mapping[str, int],
        can_write: Callable[[str], bool],
        *,
        opened: bool,
    ) -> None:
        """Begin a grammar.

        Args:
            syntax: The format.
            special: The tokenizer's special tokens.
            can_write: Tells whether the format's parser correctly reads a key.
            opened: The answer begins within the reasoning.
        """
        self._syntax = syntax
        self._calls = syntax.calls
        self._special = special
        self._rules = Rules(special)
        self._arguments = Arguments(syntax.calls, self._rules, can_write)
        self._reasoning = self._before_content(opened=opened)

    def around(self, grammar: GrammarSpec) -> GrammarSpec:
        """Return the grammar of an answer whose content matches `grammar`. Raise GrammarFault."""
        content = f"%lark {{\n{lark_of(grammar, self._special)}\n}}"
        return self._rules.grammar_spec(f"{self._reasoning} {content}")

    def calls(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> GrammarSpec:
        """Return the grammar of answers that call tools. Raise GrammarFault or ToolFault."""
        calls = self._calls
        literal = self._rules.literal
        more = f"({literal(calls.between)} call)*" if parallel else ""
        after = literal(calls.after)
        bodies = [(self._name(tool), self._body(tool, strict=required)) for tool in tools]

        def one_of(write: str) -> str:
            return " | ".join(
                self._rules.fill(write, name=name, arguments=body) for name, body in bodies
            )

        whole = f"{literal(calls.before)} call {more} {after}"
        if required or calls.bare:
            self._rules.add_named("call", one_of(calls.write))
        if required:
            return self._rules.grammar_spec(f"{self._reasoning} {_SPACE} {whole}")
        if calls.bare:
            # Calls have no mark before them, so free text begins with another character.
            free = f"/[^ \\n{''.join(map(exactly, calls.bare))}](.|\\n)*/"
            return self._rules.grammar_spec(f"{self._reasoning} {_SPACE} ({whole} | {free})?")
        # Free text ends at the mark before the calls, or before a call.
        begin = calls.before or calls.write
        section = self._syntax.section
        marks = [section.open, *calls.open] if section else calls.open
        mark = next(mark for mark in marks if begin.startswith(mark))
        rest = begin.removeprefix(mark)
        until = self._rules.text_until(mark)
        if calls.before:
            self._rules.add_named("call", one_of(calls.write))
            group = f"{until} {literal(rest)} call {more} {after}"
        else:
            self._rules.add_named("call", one_of(rest))
            group = f"{until} call"
        answers = f"({group})* TEXT" if parallel else f"TEXT | {group}"
        return self._rules.grammar_spec(f"{self._reasoning} ({answers})")

    def _before_content(self, *, opened: bool) -> str:
        span = self._syntax.reasoning
        if span is None or not span.open:
            return ""
        rest = f"{self._rules.text_until(span.close)} {_SPACE}"
        return rest if opened else f"({_SPACE} {self._rules.literal(span.open)} {rest})?"

    def _name(self, tool: Tool) -> str:
        return self._rules.plain_literal(written_name(self._syntax, tool_name(tool)))

    def _body(self, tool: Tool, *, strict: bool) -> str:
        schema = arguments_schema(tool, strict=strict)
        try:
            return self._arguments.schema_lark(schema)
        except GrammarFault as fault:
            raise ToolFault(tool, "parameters", fault.message, fault.where) from fault


def written_name(syntax: Syntax, name: str) -> str:
    """Return a tool's name, escaped for the format."""
    if syntax.calls.content == "json":
        return json.dumps(name, ensure_ascii=False)[1:-1]
    parameter = syntax.calls.parameter
    return escape(name) if parameter is not None and parameter.escaped else name


def written_call(syntax: Syntax, name: str, key: str | None, mark: Callable[[str], str]) -> str:
    """Return a call as the grammar allows it, with the argument `key` of value 1.

    key: None for a call without arguments. mark: marks the special tokens in texts of the format.
    """
    calls = syntax.calls
    if key is None:
        arguments = "" if calls.content in ("tags", "python") else "{}"
    elif calls.content == "tags":
        parameter = calls.parameter
        assert parameter is not None
        shown = escape(key) if parameter.escaped else key
        slots = {"key": shown, "value": "1", "type": "number"}
        arguments = _filled(parameter.write, mark, slots)
    elif calls.content == "python":
        arguments = f"{key}=1"
    elif calls.quote:
        arguments = f"{{{key}:1}}"
    else:
        arguments = json.dumps({key: 1})
    slots = {"name": written_name(syntax, name), "arguments": arguments, "index": "0"}
    return mark(calls.before) + _filled(calls.write, mark, slots) + mark(calls.after)


def _filled(write: str, mark: Callable[[str], str], slots: Mapping[str, str]) -> str:
    """Return a format's text with its {slots} filled."""
    parts = enumerate(SLOT.split(write))  # text, name of a slot, text, ..., text
    return "".join(slots[part] if i % 2 else mark(part) for i, part in parts)
