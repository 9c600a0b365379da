"""From request fields to one grammar: their meanings, rejections, and what reaches the engine."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest

from moeserve.errors import InvalidRequest
from moeserve.frontend.grammars import GrammarAdmission
from moeserve.messages import Submit
from moeserve.sampling import MAX_CHOICES, GrammarSpec, SamplingParams, StructuredOutputsParams
from moeserve.server.dialects.completions import CompletionRequest
from moeserve.server.requests import decode
from moeserve.text.structured_outputs import grammar_of

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TAG: dict[str, Any] = {
    "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}],
    "triggers": ["<a"],
}


def asked(body: dict[str, Any]) -> tuple[GrammarSpec, str] | None:
    request = decode({"prompt": "x"} | body, CompletionRequest).request
    constraint = request.constraint()
    if constraint is None:
        return None
    return grammar_of(constraint.params, constraint.field), constraint.field


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize(
    ("body", "spec", "param"),
    [
        (
            {"response_format": {"type": "json_object"}},
            GrammarSpec("json_object"),
            "response_format",
        ),
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
        (
            {"structured_outputs": {"json": SCHEMA}},
            GrammarSpec("json_schema", TEXT),
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            GrammarSpec("json_schema", TEXT),
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json": "true"}},
            GrammarSpec("json_schema", "true"),
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"regex": "a+"}},
            GrammarSpec("regex", "a+"),
            "structured_outputs.regex",
        ),
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
        (
            {"structured_outputs": {"json_object": True}},
            GrammarSpec("json_object"),
            "structured_outputs.json_object",
        ),
        (
            {"structured_outputs": {"structural_tag": compact(TAG)}},
            GrammarSpec("structural_tag", compact(TAG)),
            "structured_outputs.structural_tag",
        ),
        (
            {"structured_outputs": {"structural_tag": TAG}},
            GrammarSpec("structural_tag", compact(TAG)),
            "structured_outputs.structural_tag",
        ),
        (
            {
                "structured_outputs": {
                    "json_object": True,
                    "disable_any_whitespace": True,
                    "regex": None,
                }
            },
            GrammarSpec("json_object", any_whitespace=False),
            "structured_outputs.json_object",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}},
            GrammarSpec("json_schema", "{}", whitespace_pattern=" ?"),
            "structured_outputs.json",
        ),
        (
            {
                "structured_outputs": {"disable_any_whitespace": True},
                "response_format": {"type": "json_object"},
            },
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
        ({"guided_regex": "a", "temperature": 1}, GrammarSpec("regex", "a"), "guided_regex"),
        ({"guided_grammar": 'start: "a"'}, GrammarSpec("lark", 'start: "a"'), "guided_grammar"),
    ],
)
def test_fields(body, spec, param):
    assert asked(body) == (spec, param)


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
    assert asked(body) is None


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"response_format": {}}, "response_format.type", "is required"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
        ({"response_format": {"type": "json_object", "extra": 1}}, "response_format", "extra"),
        (
            {
                "response_format": {
                    "type": "json_object",
                    "json_schema": {"name": "x", "schema": {}},
                }
            },
            "response_format.json_schema",
            "does not belong",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "is required",
        ),
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
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": []},
                }
            },
            "response_format.json_schema.schema",
            "must be an object",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {}, "strict": "yes"},
                }
            },
            "response_format.json_schema.strict",
            "true or false",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
        (
            {"structured_outputs": {"disable_any_whitespace": True}},
            "structured_outputs",
            "needs one of",
        ),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "needs one of"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "jsn"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        (
            {"structured_outputs": {"json": '{"minimum": Infinity}'}},
            "structured_outputs.json",
            "Infinity",
        ),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json", "deeply"),
        (
            {"structured_outputs": {"json": {"minimum": 1e999}}},
            "structured_outputs.json",
            "not JSON",
        ),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "must be"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "length"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "length"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]", "string"),
        (
            {"structured_outputs": {"choice": ["a"] * (MAX_CHOICES + 1)}},
            "structured_outputs.choice",
            "length",
        ),
        (
            {"structured_outputs": {"json_object": 1}},
            "structured_outputs.json_object",
            "true or false",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.regex",
            "contradict",
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "response_format",
            "contradict",
        ),
        (
            {"structured_outputs": {"json": {}}, "guided_json": {}},
            "structured_outputs.json",
            "contradict",
        ),
        ({"guided_choice": "a"}, "guided_choice", "must be an array"),
        ({"guided_regex": 1}, "guided_regex", "must be a string"),
    ],
)
def test_refusals(body, param, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        asked(body)
    assert caught.value.param == param


# ---- through a server
# ---------------------------------------------------------------------------------------

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PROMPTS: dict[str, Any] = {
    CHAT: {
        "model": "org/tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 3,
    },
    COMPLETIONS: {"model": "org/tiny", "prompt": ["a", "b"], "max_tokens": 3},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_engine_gets_the_grammar(live, path):
    for stream in (False, True):
        body = PROMPTS[path] | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        }
        if stream:
            await live.events(path, body | {"n": 2})
        else:
            status, _, _ = await live.post(path, body | {"n": 2})
            assert status == 200
        submitted = [msg for msg in live.engine.told if isinstance(msg, Submit)]
        assert len(submitted) == (4 if path == COMPLETIONS else 2)
        assert {msg.sampling.grammar for msg in submitted} == {GrammarSpec("json_schema", TEXT)}
        live.engine.told.clear()
    await live.post(path, PROMPTS[path])
    assert live.engine.told[0].sampling.grammar is None


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_grammar": 'start: "a'}, "guided_grammar", "guided_grammar"),
        (
            {"structured_outputs": {"choice": ["a"], "regex": "a"}},
            "structured_outputs.regex",
            "contradict",
        ),
        (
            {"guided_json": {"properties": {"a": {"items": {"not": {}}}}}},
            "guided_json",
            "at /properties/a/items: ",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"enum": []}},
                }
            },
            "response_format.json_schema.schema",
            "Unsatisfiable",
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
            "response_format",
            "structures",
        ),
    ],
)
async def test_a_bad_grammar_is_a_400_with_its_place(live, body, param, message):
    for path in (CHAT, COMPLETIONS):
        status, answer, _ = await live.post(path, PROMPTS[path] | body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert message in answer["error"]["message"]
    assert live.engine.told == []


async def test_hostile_grammars_do_not_hold_up_others(live):
    """Each takes the checker's whole time limit.

    The event loop and requests with known grammars are served meanwhile.
    """
    known = PROMPTS[CHAT] | {"guided_choice": ["a"]}
    assert (await live.post(CHAT, known))[0] == 200
    hostile = [
        {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(num)]}
        for num in (60, 61)
    ]
    slow = asyncio.gather(
        *(live.post(CHAT, PROMPTS[CHAT] | {"guided_json": schema}) for schema in hostile)
    )
    await asyncio.sleep(0.05)
    answered = 0
    while not slow.done():
        assert (await live.post(CHAT, known))[0] == 200
        answered += 1
    assert answered > 5  # one or two where a check holds up the loop
    for status, answer, _ in await slow:
        assert status == 400
        assert re.search("too long|too large", answer["error"]["message"])


async def test_a_server_without_a_tokenizer_or_an_end_token(live):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    live.front._grammars = GrammarAdmission(None)
    with pytest.raises(InvalidRequest, match="needs a tokenizer"):
        await live.front.generate([1], params)
    live.front._grammars = GrammarAdmission(live.engine.tokenizer)
    live.front.ready = msgspec.structs.replace(live.front.ready, eos_token_ids=())
    with pytest.raises(InvalidRequest, match="eos_token_id"):
        await live.front.generate([1], params)
    with pytest.raises(InvalidRequest, match="must be StructuredOutputsParams"):
        await live.front.generate([1], SamplingParams(structured_outputs={"regex": "a"}))
