"""The fields of a request that constrain the text of its answer, and the one grammar that they mean.

`response_format` is OpenAI's, `structured_outputs` vLLM's, `guided_*` are vLLM's older names. A request has at most one
constraint, whichever fields say it. `strict` of a JSON schema changes nothing: every schema is enforced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from moeserve.errors import InvalidRequest, invalid_request
from moeserve.sampling import GrammarSpec
from moeserve.text.json_schema import BY_NAME, MAX_ENUM, parse_json

Text = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_ENUM)]


class JsonSchema(Struct, forbid_unknown_fields=True):
    """`response_format.json_schema`."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """`response_format`. format, or structures and triggers, are those of structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """`structured_outputs`. The last three are about the JSON in whichever constraint the request has."""

    json: dict[str, Any] | str | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class StructuredFields(Struct):
    """The fields of a request body that are read here."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: str | None = None


FIELDS = StructuredFields.__struct_fields__


def grammar_of(body: Mapping[str, Any]) -> tuple[GrammarSpec, str] | None:
    """Returns the grammar that a request body asks for, and the field that does; None if any text will do.

    Raises InvalidRequest for wrong types, unknown keys, and more than one constraint. The grammar itself is unchecked.
    """
    try:
        fields = msgspec.convert({name: body[name] for name in FIELDS if name in body}, StructuredFields)
    except msgspec.ValidationError as error:
        raise invalid_request(error) from error
    options = fields.structured_outputs or StructuredOutputs()
    asked: dict[str, tuple[str, Any]] = {}  # field -> kind, value
    if fields.response_format is not None:
        asked |= _response_format(fields.response_format)
    for prefix, source in (("structured_outputs.", options), ("guided_", fields)):
        for name in _KINDS:
            if (value := getattr(source, f"{prefix if source is fields else ''}{name}", None)) not in (None, False):
                asked[prefix + name] = (name, value)
    if len(asked) > 1:
        names = " and ".join(sorted(asked))
        raise InvalidRequest(f"{names} contradict each other: a request has one constraint", param=max(asked))
    if fields.structured_outputs is not None and not asked:
        what = ", ".join(_KINDS)
        raise InvalidRequest(f"structured_outputs needs one of {what}", param="structured_outputs")
    if not asked:
        return None
    ((param, (name, value)),) = asked.items()
    kind, text = _KINDS[name](value, param, options.disable_additional_properties is True)
    pattern = options.whitespace_pattern or fields.guided_whitespace_pattern or ""
    return GrammarSpec(kind, text, options.disable_any_whitespace is not True, pattern), param


def _response_format(asked: ResponseFormat) -> dict[str, tuple[str, Any]]:
    given = {name for name in ResponseFormat.__struct_fields__[1:] if getattr(asked, name) is not None}
    allowed = {"json_schema": {"json_schema"}, "structural_tag": {"format", "structures", "triggers"}}
    if surplus := sorted(given - allowed.get(asked.type, set())):
        name = f"response_format.{surplus[0]}"
        raise InvalidRequest(f"{name} does not belong to type {asked.type}", param=name)
    match asked.type:
        case "text":
            return {}
        case "json_object":
            return {"response_format": ("json_object", True)}
        case "json_schema":
            if asked.json_schema is None:
                raise InvalidRequest("response_format.json_schema is required", param="response_format.json_schema")
            return {"response_format.json_schema.schema": ("json", asked.json_schema.schema)}
    return {"response_format": ("structural_tag", {name: getattr(asked, name) for name in given})}


def _json(value: Any, param: str, closed: bool) -> tuple[Any, str]:
    schema = _parsed(value, param)
    return "json_schema", _canonical(_without_additional(schema) if closed else schema, param)


def _grammar(value: str, param: str, closed: bool) -> tuple[Any, str]:
    return ("gbnf" if "::=" in value else "lark"), value


_KINDS: dict[str, Callable[[Any, str, bool], tuple[Any, str]]] = {
    "json": _json,
    "regex": lambda value, param, closed: ("regex", value),
    "choice": lambda value, param, closed: ("choice", _canonical(value, param)),
    "grammar": _grammar,
    "json_object": lambda value, param, closed: ("json_object", ""),
    "structural_tag": lambda value, param, closed: ("structural_tag", _canonical(_parsed(value, param), param)),
}


def _parsed(value: Any, param: str) -> Any:
    """Returns a JSON value that may have come as text."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from error


def _canonical(value: Any, param: str) -> str:
    """Returns JSON in one form for equal values. The order of keys stays, since answers follow it."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from error


def _without_additional(schema: Any, named: bool = False) -> Any:
    """Returns a schema whose objects have only the properties that it names. named: `schema` maps names to schemas."""
    if isinstance(schema, list):
        return [_without_additional(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    data = ("const", "enum", "default", "examples")
    found = {
        key: value if key in data and not named else _without_additional(value, key in BY_NAME and not named)
        for key, value in schema.items()
    }
    if not named and {"properties", "patternProperties"} & found.keys():
        found.setdefault("additionalProperties", False)
    return found
