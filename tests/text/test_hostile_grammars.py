"""Hostile grammars are rejected in bounded time, and what is kept of grammars stays bounded."""

from __future__ import annotations

import gc
import json
import random
import sys
import time

import numpy as np
import pytest
from llguidance import LLParserLimits

from moeserve.errors import InvalidRequest, RequestFailed
from moeserve.sampling import GrammarSpec, StructuredOutputsParams
from moeserve.text import grammar, grammar_check
from moeserve.text.grammar_check import GrammarChecker
from moeserve.text.grammar_limits import MAX_JSON_BYTES
from moeserve.text.json_schema import MAX_ENUM
from moeserve.text.structured_outputs import grammar_of
from tests.text.grammar_case import Case
from tests.text.schemas import closed


def deep(inner: str, depth: int) -> str:
    return '{"items":' * depth + inner + "}" * depth


HOSTILE = {
    "reference to another document": (
        "json_schema",
        {"$ref": "https://example.com/a.json"},
        "only references",
    ),
    "missing reference": (
        "json_schema",
        closed(a={"$ref": "#/$defs/b"}),
        "at /properties/a: .*does not exist",
    ),
    "reference to itself": ("json_schema", {"$ref": "#"}, "no text"),
    "circle of references": (
        "json_schema",
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "no text",
    ),
    "chain of references": (
        "json_schema",
        {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(4000)} | {"4000": {}},
        },
        "too deeply",
    ),
    "deep": ("json_schema", deep("{}", 70), "deeper than"),
    "very deep": ("json_schema", deep("{}", 5000), "deeply"),
    "one megabyte": ("json_schema", {"enum": ["x" * 1000] * 1000}, "bytes"),
    "many values": ("json_schema", {"enum": [[1] * 2000] * 15}, "20,000 values"),
    "large enum": (
        "json_schema",
        closed(**{"a/~b": {"enum": list(range(MAX_ENUM + 1))}}),
        "at /properties/a~1~0b/enum: 5,001 values",
    ),
    "crossed patterns": (
        "json_schema",
        {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(60)]},
        "too long|too large",
    ),
    "exponential unions": (
        "json_schema",
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(3)]} for i in range(80)]},
        "too large|too long",
    ),
    "thousands of optional properties": (
        "json_schema",
        closed(tuple(map(str, range(3000))), **{str(i): {} for i in range(3000)}),
        "too long|too many",
    ),
    "not a schema": ("json_schema", [1], "object or a boolean"),
    "no JSON": ("json_schema", "{", "not JSON"),
    "NaN": ("json_schema", '{"minimum": NaN}', "NaN"),
    "wrong type": ("json_schema", closed(a={"type": "strng"}), "at /properties/a: .*strng"),
    "wrong properties": ("json_schema", {"properties": []}, "properties must be an object"),
    "unsupported": (
        "json_schema",
        closed(a={"type": "array", "items": {"not": {}}}),
        'at /properties/a/items: .*"not"',
    ),
    "unsupported in a union": (
        "json_schema",
        {"anyOf": [{"type": "null"}, {"if": {}, "then": {}}]},
        'at /anyOf/1: .*"if"',
    ),
    "unique items": ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
    "overlapping oneOf": (
        "json_schema",
        closed(a={"oneOf": [{"type": "string"}, {"minLength": 3}]}),
        "at /properties/a: .*anyOf",
    ),
    "bad pattern": (
        "json_schema",
        closed(a={"type": "string", "pattern": "("}),
        "at /properties/a: .*unclosed",
    ),
    "look-ahead": ("json_schema", {"type": "string", "pattern": "(?=a)"}, "look-around"),
    "long pattern": (
        "json_schema",
        {"type": "string", "pattern": "a" * 10_000},
        "at /pattern: .*8,192",
    ),
    "nothing fits": ("json_schema", {"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
    "no values": ("json_schema", {"enum": []}, "empty"),
    "false": ("json_schema", False, "empty"),
    "smuggled options": ("json_schema", {"x-guidance": {"lenient": True}, "not": {}}, "not"),
    "error beside another": (
        "json_schema",
        {"anyOf": [{"anyOf": [{"type": "null"}] * 3}, {"not": {}}, {"$ref": "#/anyOf/1"}]},
        'at /anyOf/1: .*"not"',
    ),
    "long fractions": (
        "json_schema",
        closed(a={"const": [0.9020643004116283]}),
        "at /properties/a/const/0: .*15 digits",
    ),
    "large integers": (
        "json_schema",
        closed(a={"enum": [1, 10**20]}),
        "at /properties/a/enum/1: values of 64 bits",
    ),
    "names that could repeat": (
        "json_schema",
        {"items": {"required": ["a"], "minProperties": 3}},
        "at /items: minProperties",
    ),
    "invalid regex": ("regex", "a(b", "unclosed"),
    "back-reference": ("regex", r"(a)\1", "backreferences"),
    "nested parentheses": ("regex", "(" * 4000 + "a" + ")" * 4000, "nest"),
    "long regex": ("regex", "a" * 10_000, "8,192"),
    "no grammar": ("lark", "what is this", "Expected|expected"),
    "unknown rule": ("lark", "start: x", "unknown name"),
    "unknown special token": ("lark", "start: <nothing>", "unknown special token: .<nothing>."),
    "endless rule": ("lark", "start: start", "no text"),
    "chain of rules": (
        "lark",
        "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(2400)) + '\na2400: "a"',
        "too deeply",
    ),
    "deep parentheses": ("lark", "start: " + "(" * 3000 + '"a"' + ")" * 3000, "deep"),
    "options in a grammar": (
        "lark",
        '%llguidance {"no_forcing": false}\nstart: "a"',
        "%llguidance",
    ),
    "no root": ("gbnf", 'x ::= "a"', "root|start"),
    "deep GBNF": ("gbnf", "root ::= " + "(" * 9000 + '"a"' + ")" * 9000, "deep"),
    "broken GBNF": ("gbnf", 'root ::= "a', "GBNF"),
    "large grammar": ("lark", 'start: "a"\n' * 9000, "32,768"),
    "tag without trigger": (
        "structural_tag",
        {"structures": [{"begin": "x", "schema": {}, "end": ""}], "triggers": ["y"]},
        "'x' begins with none",
    ),
    "another format of tags": ("structural_tag", {"format": {"type": "x"}}, "format"),
    "no tags": ("structural_tag", {}, "structures is required"),
    "tags in a bad schema": (
        "structural_tag",
        {
            "structures": [{"begin": "x", "schema": {"$ref": "http://x"}, "end": ""}],
            "triggers": ["x"],
        },
        "only references",
    ),
    "a special token within a trigger": (
        "structural_tag",
        {
            "structures": [{"begin": "x<|im_start|>", "schema": {}, "end": ""}],
            "triggers": ["x<|im_start|>"],
        },
        "only be at the beginning",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_in_time(checker, name):
    kind, text, message = HOSTILE[name]
    spec = GrammarSpec(kind, text if isinstance(text, str) else json.dumps(text))
    started = time.thread_time()
    with pytest.raises(InvalidRequest, match=f"^field(?s:.)*({message})") as caught:
        checker.check(spec, "field")
    assert caught.value.param == "field"
    assert len(caught.value.message) < 900
    assert time.thread_time() - started < 0.5  # the sandbox has 0.4 s of CPU time, besides
    started = time.perf_counter()
    with pytest.raises(InvalidRequest):
        checker.check(spec, "again")
    assert time.perf_counter() - started < 0.1
    checker.check(GrammarSpec("json_object"), "x")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(.*a){20}x"),
        ("regex", "((a{0,100}){0,100}){0,100}"),
        ("regex", "(x+x+)+y"),
        ("regex", r"[^\n]*(a|b){0,20}[ab]{500}"),
        ("json_schema", '{"type": "string", "maxLength": 2147483647}'),
        ("json_schema", '{"type": "string", "pattern": "(a|aa)*(b|bb)*(.*a.{30})"}'),
        ("json_schema", '{"type": "array", "items": {}, "minItems": 1000000000}'),
        ("lark", 'start: T\nT: (("a" "b"){3000}){3000}'),
        ("lark", "start: /b+/ /b+/"),
        (
            "lark",
            (
                'start: r0\nr0: (r2 T2)? | ("a" r0){2000} T1\nr2: (T1){2000}\nT1: "bc" ("bc")*\n'
                'T2: "<" | ("<" | "a")+'
            ),
        ),
        ("json_schema", json.dumps(closed(a={"$ref": "#"}))),
        ("lark", "start: s\ns: s s | s s s | /a|b/ | start"),
    ],
)
def test_explosive_grammars_stay_small(bytes_case, checker, kind, text):
    spec = GrammarSpec(kind, text)
    rng = random.Random(0)
    checker.check(spec, "x")
    matcher = bytes_case.grammars.matcher(spec)
    started = time.thread_time()
    for _ in range(60):
        matcher.accept([rng.choice(bytes_case.allowed(matcher))])
        if matcher.is_done:
            break
    assert time.thread_time() - started < 1


def test_a_dead_sandbox_starts_again(byte_level):
    checker = GrammarChecker(byte_level, 1000, [0])
    process = checker._sandboxes._processes[0]
    for choice in ("a", "b"):
        checker.check(GrammarSpec("choice", json.dumps([choice])), "x")
        process._process.kill()
        process._process.wait()
    checker.close()
    checker.close()


def test_verdicts_are_kept(byte_level, monkeypatch):
    monkeypatch.setattr(grammar_check, "MAX_VERDICTS", 2)
    checker = GrammarChecker(byte_level, 1000, [0])
    compiled = []
    monkeypatch.setattr(checker, "_compile", lambda spec, _: compiled.append(spec.text) or "")
    for text in "aabacab":
        checker.check(GrammarSpec("regex", text), "x")
    assert compiled == ["a", "b", "c", "a", "b"]
    checker.close()


def test_verdicts_keep_no_text(checker):
    texts = [
        "(" * 4000 + "x" * 5_000_000,
        '{"a": "' + "x" * 200_000,
        '{"a": NaN, "b": "' + "y" * 10**5 + '"}',
    ]
    for text in texts:
        spec = GrammarSpec("json_schema", text)
        before = sys.getrefcount(text)
        with pytest.raises(InvalidRequest) as caught:
            checker.check(spec, "x")
        assert len(caught.value.message) < 1100
        del caught
        gc.collect()
        assert sys.getrefcount(text) == before
    assert max(map(len, checker._verdicts)) == 32


def test_over_long_constraints_are_refused_before_they_become_a_grammar():
    for params in (
        StructuredOutputsParams(json={"a": "x" * MAX_JSON_BYTES}),
        StructuredOutputsParams(
            json=json.dumps("\U0001f600" * (MAX_JSON_BYTES // 4), ensure_ascii=False)
        ),
        StructuredOutputsParams(regex="x" * 10_000),
        StructuredOutputsParams(grammar="x" * 40_000),
        StructuredOutputsParams(choice=["x" * MAX_JSON_BYTES]),
        StructuredOutputsParams(json_object=True, whitespace_pattern="x" * 10_000),
    ):
        with pytest.raises(InvalidRequest, match=r"field: .*(at most|longer than)"):
            grammar_of(params, "field")


def test_one_request_cannot_exhaust_a_grammar_for_others(byte_level, monkeypatch):
    monkeypatch.setattr(
        grammar, "limits", lambda: LLParserLimits(max_lexer_states=600, verbose_errors=False)
    )
    case = Case(byte_level, "<|im_end|>")
    spec = GrammarSpec("regex", r"(.|\n)*a(.|\n){14}b")
    rng = random.Random(0)
    failed = 0
    a = case.ids("a")[0]
    x = case.ids("x")[0]
    for _ in range(6):  # each learns states of its own
        matcher = case.grammars.matcher(spec)
        try:
            for _ in range(200):
                case.allowed(matcher)
                matcher.accept([rng.choice([a, x])])
        except RequestFailed as error:
            failed += "too many states" in str(error)
        fresh = case.grammars.matcher(spec, [a, x])
        assert case.end not in case.allowed(fresh)
        bitmask_RW = np.zeros((1, case.grammars.mask_words), np.int32)
        assert len(case.grammars.fill_all([(matcher, 0, [])], bitmask_RW)) <= 1
    assert failed


def test_compiled_grammars_are_kept_within_bounds(byte_level, monkeypatch):
    monkeypatch.setattr(grammar, "MAX_CACHED", 3)
    grammars = Case(byte_level, "<|im_end|>").grammars
    for text in ["a", "b", "c", "a", "d"]:
        grammars.matcher(GrammarSpec("regex", text))
    assert [spec.text for spec in grammars._cached] == ["c", "a", "d"]
