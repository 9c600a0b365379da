"""From request fields to one grammar: what each field means, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moeserve.errors import InvalidRequest
from moeserve.sampling import GrammarSpec
from moeserve.server.structured import grammar_of
from moeserve.text.json_schema import MAX_ENUM

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TAG: dict[str, Any] = {"format": {"type": "any_text"}}
OLD_TAG: dict[str, Any] = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize(
    ("body", "spec", "param"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object"), "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            GrammarSpec("json_schema", TEXT),
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "structural_tag"} | TAG},
            GrammarSpec("structural_tag", compact(TAG)),
            "response_format",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarSpec("json_schema", TEXT), "structured_outputs.json"),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            GrammarSpec("json_schema", TEXT),
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"json": "true"}}, GrammarSpec("json_schema", "true"), "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+"), "structured_outputs.regex"),
        (
            {"structured_outputs": {"choice": ["ä", "b"]}},
            GrammarSpec("choice", '["ä","b"]'),
            "structured_outputs.choice",
        ),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            GrammarSpec("gbnf", 'root ::= "a"'),
            "structured_outputs.grammar",
        ),
        (
            {"structured_outputs": {"grammar": 'start: "a"'}},
            GrammarSpec("lark", 'start: "a"'),
            "structured_outputs.grammar",
        ),
        ({"structured_outputs": {"json_object": True}}, GrammarSpec("json_object"), "structured_outputs.json_object"),
        (
            {"structured_outputs": {"structural_tag": compact(TAG)}},
            GrammarSpec("structural_tag", compact(TAG)),
            "structured_outputs.structural_tag",
        ),
        (
            {"structured_outputs": {"structural_tag": OLD_TAG}},
            GrammarSpec("structural_tag", compact(OLD_TAG)),
            "structured_outputs.structural_tag",
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True, "regex": None}},
            GrammarSpec("json_object", any_whitespace=False),
            "structured_outputs.json_object",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}},
            GrammarSpec("json_schema", "{}", whitespace_pattern=" ?"),
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"disable_any_whitespace": True}, "response_format": {"type": "json_object"}},
            GrammarSpec("json_object", any_whitespace=False),
            "response_format",
        ),
        (
            {"response_format": {"type": "text"}, "guided_choice": ["a"]},
            GrammarSpec("choice", '["a"]'),
            "guided_choice",
        ),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " "},
            GrammarSpec("json_schema", TEXT, whitespace_pattern=" "),
            "guided_json",
        ),
        ({"guided_regex": "a", "temperature": 3, "messages": []}, GrammarSpec("regex", "a"), "guided_regex"),
        ({"guided_grammar": 'start: "a"'}, GrammarSpec("lark", 'start: "a"'), "guided_grammar"),
    ],
)
def test_fields(body, spec, param):
    assert grammar_of(body) == (spec, param)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"guided_json": None, "structured_outputs": None},
    ],
)
def test_any_text(body):
    assert grammar_of(body) is None


def test_no_additional_properties():
    schema = {
        "properties": {
            "properties": {"type": "object", "properties": {}, "default": {"properties": {}}},
            "open": {"properties": {"a": {}}, "additionalProperties": True},
            "const": {"patternProperties": {"a": {}}},
        },
        "anyOf": [{"properties": {"x": {"items": {"properties": {}}}}}, {"type": "object"}],
        "const": {"properties": {}},
    }
    spec, _ = grammar_of({"structured_outputs": {"json": schema, "disable_additional_properties": True}})
    assert json.loads(spec.text) == {
        "properties": {
            "properties": {
                "type": "object",
                "properties": {},
                "default": {"properties": {}},
                "additionalProperties": False,
            },
            "open": {"properties": {"a": {}}, "additionalProperties": True},
            "const": {"patternProperties": {"a": {}}, "additionalProperties": False},
        },
        "anyOf": [
            {
                "properties": {"x": {"items": {"properties": {}, "additionalProperties": False}}},
                "additionalProperties": False,
            },
            {"type": "object"},
        ],
        "const": {"properties": {}},
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"response_format": {}}, "response_format.type", "is required"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
        ({"response_format": {"type": "json_object", "extra": 1}}, "response_format", "extra"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}},
            "response_format.json_schema",
            "does not belong",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
            "is required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "is required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
            "response_format.json_schema.schema",
            "must be an object",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": "yes"}}},
            "response_format.json_schema.strict",
            "true or false",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs", "needs one of"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "needs one of"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "jsn"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"structured_outputs": {"json": '{"minimum": Infinity}'}}, "structured_outputs.json", "Infinity"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json", "deeply"),
        ({"structured_outputs": {"json": {"minimum": 1e999}}}, "structured_outputs.json", "not JSON"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "must be"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "length"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "length"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]", "string"),
        ({"structured_outputs": {"choice": ["a"] * (MAX_ENUM + 1)}}, "structured_outputs.choice", "length"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "true or false"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.regex", "contradict"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format", "contradict"),
        ({"structured_outputs": {"json": {}}, "guided_json": {}}, "structured_outputs.json", "contradict"),
        ({"guided_choice": "a"}, "guided_choice", "must be an array"),
        ({"guided_regex": 1}, "guided_regex", "must be a string"),
    ],
)
def test_refusals(body, param, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        grammar_of(body)
    assert caught.value.param == param
